"""The base block's calls of cuDNN and flash attention on CUDA; which calls there are is `attention_plan`'s.

    forward(call, ..)    one segment: the outputs of the call's rows, and their log-sum-exps
    backward(call, ..)   one segment: the gradients of the call's queries; those of keys and values go to add_keys

What cuDNN refuses goes to flash, and is logged once a reason. Rows are gathered or copied only where a call's rows are
no range of the tensor's: several spans, dummy rows that no other row can stand for, a square past the last key.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.attention_plan import CudnnCall, FlashCall, Placement, Rows, Segment, Span, flash_calls

logger = logging.getLogger(__name__)

AddKeys = Callable[[Rows, Tensor, Tensor], None]
"""Takes key rows and the gradients of their keys and values."""


def forward(call: CudnnCall | FlashCall, query: Tensor, key: Tensor, value: Tensor, scale: float) -> list[Segment]:
    """query [A, H, Dh], key and value [T, G, Dh], fp16 or bf16. One segment; several where flash stands in."""
    if isinstance(call, FlashCall):
        return [_flash_forward(call, query, key, value, scale)]
    shape = _shape(call, query, key)
    if shape not in _refused:
        try:
            return [_cudnn_forward(call, query, key, value, scale)]
        except RuntimeError as error:
            _note_refusal(shape, error)
    return [_flash_forward(c, query, key, value, scale) for c in _instead(call.spans, query.device)]


def backward(
    call: CudnnCall | FlashCall,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    add_keys: AddKeys,
) -> list[Segment]:
    """grad_out, query and the merged out [A, H, Dh]; the merged lse [H, A] float32."""
    arguments = (grad_out, query, key, value, out, lse, scale)
    if isinstance(call, FlashCall):
        return [_flash_backward(call, *arguments, add_keys)]
    shape = _shape(call, query, key)
    if shape not in _refused:
        try:
            segment, of_keys = _cudnn_backward(call, *arguments)
        except RuntimeError as error:
            _note_refusal(shape, error)
        else:
            for rows, grad_key, grad_value in of_keys:
                add_keys(rows, grad_key, grad_value)
            return [segment]
    return [_flash_backward(c, *arguments, add_keys) for c in _instead(call.spans, query.device)]


@functools.lru_cache(maxsize=16)
def _instead(spans: tuple[Span, ...], device: torch.device) -> tuple[FlashCall, ...]:
    with torch.inference_mode(False):
        return tuple(flash_calls(spans, device))


# Shapes that cuDNN refused, forward or backward: asking again would cost a search for a plan a call.
_refused: set[tuple[object, ...]] = set()


def _shape(call: CudnnCall, query: Tensor, key: Tensor) -> tuple[object, ...]:
    return call.batch, call.size, call.num_prefix, query.shape[1:], key.shape[1], query.dtype, query.device


def _note_refusal(shape: tuple[object, ...], error: RuntimeError) -> None:
    """Raises what is no refusal of cuDNN's: no memory, or a device that failed."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        raise error
    _refused.add(shape)
    _log_refusal_once(str(error).partition("\n")[0])


@functools.cache
def _log_refusal_once(why: str) -> None:
    logger.warning("cuDNN refuses a base block, flash attention computes it, in twice the time: %s", why)


# --- rows of a call -------------------------------------------------------------------------------------------------


def _take(rows: Tensor, index: Rows) -> Tensor:
    return rows[index] if isinstance(index, slice) else rows.index_select(0, index)


def _take_columns(rows: Tensor, index: Rows) -> Tensor:
    return rows[:, index] if isinstance(index, slice) else rows.index_select(1, index)


def _place_lse(lse: Tensor, placement: Placement) -> Tensor:
    """[H, A] -> [H, N] contiguous, +inf at dummies: there p = exp(score - lse) = 0, and nothing gets a gradient."""
    of_rows = _take_columns(lse, placement.rows)
    if not placement.has_dummies:
        return of_rows.contiguous()
    placed = lse.new_full((lse.shape[0], placement.num_rows), float("inf"))
    placed[:, placement.local] = of_rows
    return placed


def _segment(placement: Placement, parts: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Segment:
    return Segment(placement.rows, placement.local, parts, tuple(_take_columns(lse, placement.local) for lse in lses))


# --- flash ----------------------------------------------------------------------------------------------------------


@functools.cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """The state of the random numbers, which is not read without dropout."""
    with torch.inference_mode(False):
        return torch.zeros(2, dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)


def _flash_forward(call: FlashCall, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Segment:
    bounds = (call.query_bounds, call.key_bounds, call.max_query, call.max_key)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        _take(query, call.queries.source), _take(key, call.keys), _take(value, call.keys), *bounds, 0.0, True, False,
        scale=scale,
    )  # fmt: skip
    return _segment(call.queries, (out,), (lse,))


def _flash_backward(
    call: FlashCall,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    add_keys: AddKeys,
) -> Segment:
    source = call.queries.source
    bounds = (call.query_bounds, call.key_bounds, call.max_query, call.max_key)
    seed, offset = _no_dropout(query.device)
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        _take(grad_out, source), _take(query, source), _take(key, call.keys), _take(value, call.keys),
        _take(out, source), _place_lse(lse, call.queries), *bounds, 0.0, True,
        seed.view(torch.uint64), offset.view(torch.uint64), scale=scale,
    )  # fmt: skip
    add_keys(call.keys, grad_key, grad_value)
    return _segment(call.queries, (grad_query,), ())


# --- cuDNN ----------------------------------------------------------------------------------------------------------


def _batched(rows: Tensor, batch: int) -> Tensor:  # [B * S, heads, Dh] -> [B, heads, S, Dh], a view
    return rows.view(batch, -1, *rows.shape[1:]).transpose(1, 2)


def _unbatched(rows: Tensor) -> Tensor:
    # The kernels return the layout of their input, [B, S, heads, Dh] in memory: nothing is copied.
    return rows.transpose(1, 2).flatten(0, 1).contiguous()


def _cudnn_parts(call: CudnnCall, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """(keys, values, causal) of the square, then of the keys before it."""
    parts = [(_take(key, call.keys.source), _take(value, call.keys.source), True)]
    if call.prefix is not None:
        parts.append((_take(key, call.prefix), _take(value, call.prefix), False))
    return parts


def _cudnn_forward(call: CudnnCall, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Segment:
    queries = _batched(_take(query, call.queries.source), call.batch)
    outs, lses = [], []
    for keys, values, causal in _cudnn_parts(call, key, value):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, _batched(keys, call.batch), _batched(values, call.batch), None, True, 0.0, causal, False,
            scale=scale,
        )  # fmt: skip
        outs.append(_unbatched(out))
        lses.append(lse.squeeze(-1).transpose(0, 1).flatten(1))  # [B, H, S, 1] -> [H, B * S]
    return _segment(call.queries, tuple(outs), tuple(lses))


def _cudnn_backward(
    call: CudnnCall,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Segment, list[tuple[Rows, Tensor, Tensor]]]:
    source, batch = call.queries.source, call.batch
    grads, queries, outs = (_batched(_take(rows, source), batch) for rows in (grad_out, query, out))
    placed = _place_lse(lse, call.queries)
    lses = placed.view(placed.shape[0], batch, -1).transpose(0, 1).contiguous().unsqueeze(-1)  # [B, H, S, 1]
    seed, offset = _no_dropout(query.device)
    of_queries, of_keys = [], []
    for keys, values, causal in _cudnn_parts(call, key, value):
        grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grads, queries, _batched(keys, batch), _batched(values, batch), outs, lses, seed[0], offset, None,
            None, None, call.size, keys.shape[0] // batch, 0.0, causal, scale=scale,
        )  # fmt: skip
        of_queries.append(_unbatched(grad_query))
        grad_key, grad_value = _unbatched(grad_key), _unbatched(grad_value)
        if causal:
            local = call.keys.local
            of_keys.append((call.keys.rows, _take(grad_key, local), _take(grad_value, local)))
        else:
            assert call.prefix is not None
            of_keys.append((call.prefix, grad_key, grad_value))
    return _segment(call.queries, tuple(of_queries), ()), of_keys
