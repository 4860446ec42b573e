"""TTT attention: causal attention over the step-0 keys, plus the row's own key of each later step.

In plain torch, for one document, all rows active and one key/value head a query head:

    scores = cat([(q @ base_key.T * scale).masked_fill(above the diagonal, -inf)] +
                 [(q * step_key).sum(-1, keepdim=True) * scale for step_key in step_keys], -1)
    out = softmax(scores)[:, :T] @ base_value + sum of softmax(scores)[:, T + j] * step_values[j]

The base block is what every fused attention kernel computes; a diagonal block is one dot product a row. So nothing is
concatenated: both are merged through the log-sum-exp, out = sum_i exp(lse_i - lse) * out_i, lse = log sum_i exp(lse_i),
and one layout of calls, or one mask, serves all K steps.

Only active rows have queries: a row that counts at no step gives its step-0 key and value and nothing else. For a run
of active rows that is attention to the keys before it and causal attention within it, so a long prompt with a short
answer costs answer x context, not context squared.

Backends:
    fused   fused kernels for the base block (`base_block`; `attention_plan` decides on the calls), merged in one kernel
            a step and direction (`diagonal_merge`). What training runs. Gradients by hand: the base block's backward
            gets the merged output and log-sum-exp.
    flex    flex_attention for the base block, the same merge under autograd: about twice the time of fused on Hopper,
            for devices and torch builds without its kernels, and to compare with. No backward on the CPU.
    eager   the dense reference, O(A * T) memory.

Shapes: T tokens, A active rows, H query heads, G key/value heads, Dh head dim.
"""

# mypy: allow-untyped-calls
# (torch.autograd.Function.apply has no annotations)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import reference
from kernels.attention_plan import cached_runs, num_active_rows
from kernels.base_block import base_block_backward, base_block_forward, base_block_kernel, plan_base_block
from kernels.diagonal_merge import MergeDiagonals, merge, merge_backward

ATTENTION_BACKENDS = ("fused", "flex", "eager")


def choose_attention_backend(
    requested: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, training: bool
) -> tuple[str, str]:
    """Resolve "auto", or check a named backend, and say why: (name, why), why for a log line.

    Raises ValueError for an unknown name, or a backend that cannot run there.
    """
    device = torch.device(device)
    if requested == "auto":
        return "fused", base_block_kernel(device, dtype, head_dim)[1]
    if requested not in ATTENTION_BACKENDS:
        raise ValueError(f"attention backend {requested!r} is unknown: use auto, {', '.join(ATTENTION_BACKENDS)}")
    if requested == "flex" and training:
        _check_flex_trains_on(device)
    return requested, "asked for"


def ttt_attention(
    query: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    step_keys: Sequence[Tensor] = (),
    step_values: Sequence[Tensor] = (),
    *,
    document_lengths: Sequence[int],
    query_runs: Sequence[tuple[int, int]] | None = None,
    scale: float | None = None,
    backend: str = "fused",
) -> Tensor:
    """Attention of one TTT step over packed documents.

    Row p attends to the base rows of its own document up to and including p, and to its own row of every later step.

    Args:
        query: [A, H, Dh] of step k; positions (RoPE) already applied, as in all keys.
        base_key, base_value: [T, G, Dh] of step 0, H a multiple of G.
        step_keys, step_values: k tensors [A, G, Dh] each, those of steps 1 .. k.
        document_lengths: tokens of each document, in order; sum T. Zeros are allowed.
        query_runs: the active rows, as ascending ranges (start, end) of [0, T), none empty, each inside one document.
            Query i is the i-th row of the ranges in order; A is the sum of their lengths. All T rows when None.
        scale: of the scores; 1 / sqrt(Dh) when None.
        backend: "fused", "flex" or "eager" (module docstring).

    Returns: [A, H, Dh], contiguous, in the inputs' dtype (one for all). Any strides; A = 0 and T = 0 are allowed.
    Differentiable once in every tensor.
    Raises: ValueError if shapes, dtypes, devices, lengths or runs do not fit, for an unknown backend, and for flex on
        the CPU with inputs that require gradients.
    """
    lengths = tuple(int(length) for length in document_lengths)
    runs = None if query_runs is None else tuple((int(start), int(end)) for start, end in query_runs)
    _check_inputs(query, base_key, base_value, step_keys, step_values, lengths, runs)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if backend == "fused":
        out: Tensor = _FusedTTTAttention.apply(
            lengths, runs, scale, len(step_keys), query, base_key, base_value, *step_keys, *step_values
        )
        return out
    if backend == "flex":
        return _flex(query, base_key, base_value, step_keys, step_values, lengths, runs, scale)
    if backend == "eager":
        return reference.ttt_attention(
            query, base_key, base_value, step_keys, step_values,
            document_lengths=lengths, query_runs=runs, scale=scale,
        )  # fmt: skip
    raise ValueError(f"attention backend {backend!r} is unknown: use {', '.join(ATTENTION_BACKENDS)}")


def _check_inputs(
    query: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    document_lengths: tuple[int, ...],
    query_runs: tuple[tuple[int, int], ...] | None,
) -> None:
    if query.dim() != 3 or 0 in query.shape[1:]:
        raise ValueError(f"query must be [A, H, Dh] with H and Dh positive, got {tuple(query.shape)}")
    num_rows, num_heads, head_dim = query.shape
    if len(step_keys) != len(step_values):
        raise ValueError(f"{len(step_keys)} step_keys but {len(step_values)} step_values: pass one of each a step")
    if any(length < 0 for length in document_lengths):
        raise ValueError(f"document_lengths must not be negative, got {min(document_lengths)}")
    num_tokens, shape = sum(document_lengths), base_key.shape
    if base_key.dim() != 3 or shape[2] != head_dim or shape[1] == 0:
        raise ValueError(f"base_key must be [T, G, {head_dim}] with query's head dim, got {tuple(shape)}")
    if shape[0] != num_tokens:
        raise ValueError(f"document_lengths sum to {num_tokens}, but base_key has {shape[0]} rows")
    if num_heads % shape[1]:
        raise ValueError(f"{num_heads} query heads must be a multiple of {shape[1]} key/value heads")
    num_active = num_active_rows(cached_runs(document_lengths, query_runs))
    if num_rows != num_active:
        counted = "document_lengths" if query_runs is None else "the lengths of query_runs"
        raise ValueError(f"{counted} sum to {num_active}, but query has {num_rows} rows")
    step_shape = (num_rows, *shape[1:])
    named = [("base_value", base_value, tuple(shape))]
    named += [(f"step_keys[{step}]", key, step_shape) for step, key in enumerate(step_keys)]
    named += [(f"step_values[{step}]", value, step_shape) for step, value in enumerate(step_values)]
    for name, rows, expected in named:
        if rows.shape != expected:
            raise ValueError(f"{name} must be {expected} like base_key, got {tuple(rows.shape)}")
    for name, rows, _ in [("base_key", base_key, shape), *named]:
        if rows.dtype != query.dtype or rows.device != query.device:
            raise ValueError(
                f"{name} is {rows.dtype} on {rows.device}, query {query.dtype} on {query.device}: convert one of them"
            )
    if not query.is_floating_point():
        raise ValueError(f"query must be of a float dtype, got {query.dtype}")


def _check_flex_trains_on(device: torch.device) -> None:
    if device.type == "cpu":
        raise ValueError("attention backend 'flex' has no backward on the CPU: use 'fused'")


def _loadable(rows: Tensor) -> Tensor:
    """Rows as the kernels load them: they are silently wrong for other last-dim strides, or refuse them; on CUDA they
    load 16 bytes at a time."""
    if rows.stride(-1) != 1:
        return rows.contiguous()
    if rows.device.type == "cuda":
        offsets = (rows.data_ptr(), *(stride * rows.element_size() for stride in rows.stride()[:-1]))
        if any(offset % 16 for offset in offsets):
            return rows.clone(memory_format=torch.contiguous_format)
    return rows


class _FusedTTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        document_lengths: tuple[int, ...],
        query_runs: tuple[tuple[int, int], ...] | None,
        scale: float,
        num_steps: int,
        *tensors: Tensor,
    ) -> Tensor:
        query, base_key, base_value, *step_rows = (_loadable(rows) for rows in tensors)
        keys, values = step_rows[:num_steps], step_rows[num_steps:]
        plan = plan_base_block(document_lengths, query_runs, query.device, query.dtype, query.shape[-1], query.shape[1])
        if plan.num_active:
            segments = base_block_forward(query, base_key, base_value, plan, scale)
            out, lse = merge(segments, query, keys, values, scale)
        else:  # the CPU kernel kills the process without rows, the others refuse it
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            lse = query.new_empty(query.shape[1], 0, dtype=torch.float32)
        ctx.save_for_backward(query, base_key, base_value, out, lse, *step_rows)
        ctx.plan, ctx.scale, ctx.num_steps = plan, scale, num_steps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        query, base_key, base_value, out, lse, *step_rows = ctx.saved_tensors
        keys, values = step_rows[: ctx.num_steps], step_rows[ctx.num_steps :]
        if not ctx.plan.num_active:
            return None, None, None, None, *map(torch.zeros_like, (query, base_key, base_value, *step_rows))
        grad_out = _loadable(grad_out.contiguous())
        segments, grad_base_key, grad_base_value = base_block_backward(
            grad_out, query, base_key, base_value, out, lse, ctx.plan, ctx.scale
        )
        grad_query, grad_keys, grad_values = merge_backward(
            segments, grad_out, query, out, lse, keys, values, ctx.scale
        )
        return None, None, None, None, grad_query, grad_base_key, grad_base_value, *grad_keys, *grad_values


def _flex(
    query: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    document_lengths: tuple[int, ...],
    query_runs: tuple[tuple[int, int], ...] | None,
    scale: float,
) -> Tensor:
    tensors = (query, base_key, base_value, *step_keys, *step_values)
    if torch.is_grad_enabled() and any(rows.requires_grad for rows in tensors):
        _check_flex_trains_on(query.device)
    else:  # flex_attention refuses such inputs on the CPU even where gradients are off
        tensors = tuple(rows.detach() for rows in tensors)
    if query.shape[0] == 0:  # no blocks to build a mask from; the reference keeps the result on the graph
        query, base_key, base_value, *step_rows = tensors
        return reference.ttt_attention(
            query, base_key, base_value, step_rows[: len(step_keys)], step_rows[len(step_keys) :],
            document_lengths=document_lengths, query_runs=query_runs, scale=scale,
        )  # fmt: skip
    # Loaded only here: it brings in the compiler's front end.
    from kernels.flex_base_block import flex_base_block

    query, base_key, base_value, *step_rows = (_loadable(rows) for rows in tensors)
    base_out, base_lse = flex_base_block(query, base_key, base_value, document_lengths, query_runs, scale)
    if not step_keys:
        return base_out.contiguous()
    out: Tensor = MergeDiagonals.apply(scale, len(step_keys), base_out, base_lse, query, *step_rows)
    return out
