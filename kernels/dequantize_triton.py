"""The kernel of `dequantize`: a program takes a few rows of one block of channels, whose scale and offset it keeps.

It is bound by memory: one byte read and two written an element. Product and sum must round apart, so the launch turns
the compiler's fusion of them off. Rows are addressed in 64 bits. This module imports triton; its caller imports it only
when it runs.
"""

# mypy: allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (triton has no annotations, and its kernels take pointers, which have no type here)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# 16 codes a thread are one 16-byte load.
_BLOCK, _NUM_WARPS, _ROWS = 2048, 4, 8


@triton.jit
def _dequantize_kernel(codes_pointer, scale_pointer, offset_pointer, out_pointer, num_rows, num_channels,
                       codes_stride, out_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out = bfloat16(codes * scale + offset) for ROWS rows and BLOCK channels."""
    channels = tl.cast(tl.program_id(1), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < num_channels
    scale = tl.load(scale_pointer + channels, mask=inside, other=0.0)
    offset = tl.load(offset_pointer + channels, mask=inside, other=0.0)
    first = tl.program_id(0) * ROWS
    for number in range(first, tl.minimum(first + ROWS, num_rows)):
        row = tl.cast(number, tl.int64)
        codes = tl.load(codes_pointer + row * codes_stride + channels, mask=inside, other=0)
        pattern = (codes.to(tl.float32) * scale + offset).to(tl.uint32, bitcast=True)
        # To nearest, ties to even, by hand: triton's interpreter truncates. Nothing here can be NaN.
        rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        tl.store(out_pointer + row * out_stride + channels, rounded.to(tl.int16), mask=inside)


def dequantize_codes(codes: Tensor, scale: Tensor, offset: Tensor, out: Tensor) -> None:
    """Everything but the exceptions; arguments as `kernels.dequantize.dequantize`, checked there."""
    num_rows, num_channels = codes.shape
    block = min(triton.next_power_of_2(num_channels), _BLOCK)
    grid = (triton.cdiv(num_rows, _ROWS), triton.cdiv(num_channels, block))
    with torch.cuda.device_of(codes):
        _dequantize_kernel[grid](
            codes,
            scale,
            offset,
            out.view(torch.int16),
            num_rows,
            num_channels,
            codes.stride(0),
            out.stride(0),
            ROWS=_ROWS,
            BLOCK=block,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
