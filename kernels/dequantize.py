"""Codes of hidden states back to bfloat16, straight into the draft's input.

    out = (codes.float() * scale + offset).to(torch.bfloat16)      # two roundings in float32, then one to bfloat16
    out.view(torch.int16).view(-1)[exception_at] = exception_bits

A code travels as one byte, a value as two: codes are copied to the device and become values there. Every backend must
give the same bits, because a run that reads a store on a CPU and one that reads it on a GPU train on the same numbers.
So product and sum are rounded apart, although a fused multiply-add would be free and more exact.

Backends ("auto": triton on CUDA):
    torch    plain torch, a block of rows at a time, so that the float32 values stay in a CPU's cache.
    triton   one kernel (`dequantize_triton`).
Both write the exceptions with one indexed copy.

Shapes: N rows, C channels, E exceptions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.soft_target_loss import LOSS_BACKENDS, triton_obstacle

__all__ = ["dequantize"]

# Elements of a block on the CPU: 128 KB in float32, within a core's second-level cache, and torch does not split so few
# over threads, which would wait for each other in every pass (2.6 GB/s of bfloat16 on one thread, less on two).
_BLOCK_ELEMENTS = 32768


def dequantize(
    codes: Tensor,
    scale: Tensor,
    offset: Tensor,
    exception_at: Tensor,
    exception_bits: Tensor,
    *,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Values of quantised rows.

    Args:
        codes: int8 [N, C], any row stride; the channels of a row lie side by side.
        scale, offset: float32 [C].
        exception_at: int64 [E], flat positions in [N, C], each once: values that no code can give.
        exception_bits: int16 or uint16 [E], their bfloat16 bits.
        out: bfloat16 [N, C] to write into, any row stride (a slice of a batch, say).
        backend: "auto", "triton" or "torch".

    Returns: out, or a new tensor. A code of a row that holds an exception is read and its value written over.

    Raises: ValueError if shapes, dtypes or devices do not fit, triton cannot run, or a position lies outside (looked at
        where it costs no synchronisation: on the CPU).
    """
    if backend not in ("auto", *LOSS_BACKENDS):
        raise ValueError(f"dequantize backend {backend!r} is unknown: use auto, {', '.join(LOSS_BACKENDS)}")
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device) if out is None else out
    _check(codes, scale, offset, exception_at, exception_bits, out)
    if codes.numel() == 0:
        return out
    obstacle = triton_obstacle(codes.device)
    if backend == "triton" and obstacle:
        raise ValueError(f"dequantize backend 'triton' cannot run: {obstacle}; use 'torch'")
    if backend == "triton" or (backend == "auto" and codes.device.type == "cuda" and not obstacle):
        # Loaded only here: the other backend works where triton is not installed.
        from kernels.dequantize_triton import dequantize_codes

        dequantize_codes(codes, scale, offset, out)
    else:
        _dequantize_blocks(codes, scale, offset, out)
    if exception_at.numel():
        bits = exception_bits.view(torch.int16)
        num_channels = codes.shape[1]
        if out.is_contiguous():
            out.view(torch.int16).view(-1).index_copy_(0, exception_at, bits)
        else:
            rows = torch.div(exception_at, num_channels, rounding_mode="floor")
            out.view(torch.int16).index_put_((rows, exception_at - rows * num_channels), bits)
    return out


def _dequantize_blocks(codes: Tensor, scale: Tensor, offset: Tensor, out: Tensor) -> None:
    num_rows, num_channels = codes.shape
    block = max(1, _BLOCK_ELEMENTS // num_channels)
    values = torch.empty(min(block, num_rows), num_channels, dtype=torch.float32, device=codes.device)
    for start in range(0, num_rows, block):
        rows = codes[start : start + block]
        part = values[: rows.shape[0]]
        part.copy_(rows)
        # Not addcmul: it may fuse product and sum.
        part.mul_(scale)
        part.add_(offset)
        out[start : start + block].copy_(part)


def _check(
    codes: Tensor, scale: Tensor, offset: Tensor, exception_at: Tensor, exception_bits: Tensor, out: Tensor
) -> None:
    if codes.dim() != 2 or codes.dtype != torch.int8:
        raise ValueError(f"codes must be int8 [N, C], got {codes.dtype} {list(codes.shape)}")
    num_channels = codes.shape[1]
    if codes.numel() and num_channels > 1 and codes.stride(1) != 1:
        raise ValueError(f"codes must have stride 1 along the channels, got {codes.stride(1)}: pass codes.contiguous()")
    for name, vector in (("scale", scale), ("offset", offset)):
        if vector.shape != (num_channels,) or vector.dtype != torch.float32 or not vector.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32 [{num_channels}], got {vector.dtype} {list(vector.shape)}"
            )
    if exception_at.dim() != 1 or exception_at.dtype != torch.int64:
        raise ValueError(f"exception_at must be int64 [E], got {exception_at.dtype} {list(exception_at.shape)}")
    if exception_bits.shape != exception_at.shape or exception_bits.dtype not in (torch.int16, torch.uint16):
        raise ValueError(
            f"exception_bits must be int16 or uint16 [{exception_at.shape[0]}], got {exception_bits.dtype} "
            f"{list(exception_bits.shape)}"
        )
    if out.shape != codes.shape or out.dtype != torch.bfloat16:
        raise ValueError(f"out must be bfloat16 {list(codes.shape)} like codes, got {out.dtype} {list(out.shape)}")
    if out.numel() and num_channels > 1 and out.stride(1) != 1:
        raise ValueError(f"out must have stride 1 along the channels, got {out.stride(1)}")
    tensors = {"scale": scale, "offset": offset, "exception_at": exception_at, "exception_bits": exception_bits}
    for name, tensor in (tensors | {"out": out}).items():
        if tensor.device != codes.device:
            raise ValueError(f"{name} is on {tensor.device}, codes on {codes.device}: move one of them")
    if exception_at.device.type == "cpu" and exception_at.numel():
        lowest, highest = int(exception_at.min()), int(exception_at.max())
        if lowest < 0 or highest >= codes.numel():
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"exception_at holds {wrong}: codes has elements 0 .. {codes.numel() - 1}")
