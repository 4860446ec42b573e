"""TTT attention: causal attention over the step-0 keys, plus the row's own key of each later step.

In plain torch, for one document and one key/value head a query head:

    scores = cat([(q @ base_key.T * scale).masked_fill(above the diagonal, -inf)] +
                 [(q * step_key).sum(-1, keepdim=True) * scale for step_key in step_keys], -1)
    out = softmax(scores)[:, :T] @ base_value + sum of softmax(scores)[:, T + j] * step_values[j]

The base block is what every fused attention kernel computes; a diagonal block is one dot product a row. So nothing is
concatenated: both are merged through the log-sum-exp, out = sum_i exp(lse_i - lse) * out_i, lse = log sum_i exp(lse_i),
and one document-causal mask serves all K steps.

Backends:
    fused   a fused kernel for the base block (`base_block`), diagonal terms elementwise. What training runs.
    flex    flex_attention for the base block, merged by autograd, which keeps float32 copies for the backward: slower
            and larger than fused, here to compare with. No backward on the CPU.
    eager   the dense reference, O(T^2) memory.

A row's shapes: T tokens, H query heads, G key/value heads, Dh head dim.
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
from kernels.base_block import base_block_backward, base_block_forward, base_block_kernel

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
    scale: float | None = None,
    backend: str = "fused",
) -> Tensor:
    """Attention of one TTT step over packed documents.

    Row p attends to the base rows of its own document up to and including p, and to its own row of every later step.

    Args:
        query: [T, H, Dh] of step k; positions (RoPE) already applied, as in all keys.
        base_key, base_value: [T, G, Dh] of step 0, H a multiple of G.
        step_keys, step_values: k tensors [T, G, Dh] each, those of steps 1 .. k.
        document_lengths: tokens of each document, in order; sum T. Zeros are allowed.
        scale: of the scores; 1 / sqrt(Dh) when None.
        backend: "fused", "flex" or "eager" (module docstring).

    Returns: [T, H, Dh], contiguous, in the inputs' dtype (one for all). Any strides; T = 0 is allowed.
    Differentiable once in every tensor.
    Raises: ValueError if shapes, dtypes, devices or lengths do not fit, for an unknown backend, and for flex on the CPU
        with inputs that require gradients.
    """
    _check_inputs(query, base_key, base_value, step_keys, step_values, document_lengths)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if backend == "fused":
        lengths = tuple(int(length) for length in document_lengths if length)
        out: Tensor = _FusedTTTAttention.apply(
            lengths, scale, len(step_keys), query, base_key, base_value, *step_keys, *step_values
        )
        return out
    if backend == "flex":
        lengths = tuple(int(length) for length in document_lengths if length)
        return _flex(query, base_key, base_value, step_keys, step_values, lengths, scale)
    if backend == "eager":
        return reference.ttt_attention(
            query, base_key, base_value, step_keys, step_values, document_lengths=document_lengths, scale=scale
        )
    raise ValueError(f"attention backend {backend!r} is unknown: use {', '.join(ATTENTION_BACKENDS)}")


def _check_inputs(
    query: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    document_lengths: Sequence[int],
) -> None:
    if query.dim() != 3 or 0 in query.shape[1:]:
        raise ValueError(f"query must be [T, H, Dh] with H and Dh positive, got {tuple(query.shape)}")
    num_tokens, num_heads, head_dim = query.shape
    if len(step_keys) != len(step_values):
        raise ValueError(f"{len(step_keys)} step_keys but {len(step_values)} step_values: pass one of each a step")
    shape = base_key.shape
    if base_key.dim() != 3 or shape[0] != num_tokens or shape[2] != head_dim or shape[1] == 0:
        raise ValueError(f"base_key must be [{num_tokens}, G, {head_dim}] like query, got {tuple(shape)}")
    if num_heads % shape[1]:
        raise ValueError(f"{num_heads} query heads must be a multiple of {shape[1]} key/value heads")
    named = [("base_value", base_value)]
    named += [(f"step_keys[{step}]", key) for step, key in enumerate(step_keys)]
    named += [(f"step_values[{step}]", value) for step, value in enumerate(step_values)]
    for name, rows in named:
        if rows.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)} like base_key, got {tuple(rows.shape)}")
    for name, rows in [("base_key", base_key), *named]:
        if rows.dtype != query.dtype or rows.device != query.device:
            raise ValueError(
                f"{name} is {rows.dtype} on {rows.device}, query {query.dtype} on {query.device}: convert one of them"
            )
    if not query.is_floating_point():
        raise ValueError(f"query must be of a float dtype, got {query.dtype}")
    if any(length < 0 for length in document_lengths):
        raise ValueError(f"document_lengths must not be negative, got {min(document_lengths)}")
    if sum(document_lengths) != num_tokens:
        raise ValueError(f"document_lengths sum to {sum(document_lengths)}, but query has {num_tokens} rows")


def _check_flex_trains_on(device: torch.device) -> None:
    if device.type == "cpu":
        raise ValueError("attention backend 'flex' has no backward on the CPU: use 'fused'")


# --- fused -------------------------------------------------------------------------------------------------------
# Diagonal terms are elementwise, on rows grouped as [T, G, R, Dh] (R = H / G query heads share a key), in float32
# (float64 for float64).


def _unit_stride(rows: Tensor) -> Tensor:
    """The fused kernels are silently wrong for other last-dim strides, or refuse them."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _grouped(rows: Tensor, num_groups: int) -> Tensor:  # [T, H, Dh] -> [T, G, R, Dh]
    return rows.reshape(rows.shape[0], num_groups, rows.shape[1] // num_groups, rows.shape[2])


def _diagonal_scores(grouped_query: Tensor, key: Tensor, scale: float) -> Tensor:
    """[T, H] from the query [T, G, R, Dh], already in the accumulation dtype, and a step's key [T, G, Dh]."""
    return (grouped_query * key.to(grouped_query.dtype)[:, :, None]).sum(-1).flatten(1) * scale


class _FusedTTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, document_lengths: tuple[int, ...], scale: float, num_steps: int, *tensors: Tensor) -> Tensor:
        query, base_key, base_value, *step_rows = (_unit_stride(rows) for rows in tensors)
        step_keys, step_values = step_rows[:num_steps], step_rows[num_steps:]
        out, lse, state = base_block_forward(query, base_key, base_value, document_lengths, scale)
        if num_steps:
            dtype, num_groups = reference.accumulation_dtype(query.dtype), base_key.shape[1]
            q = _grouped(query, num_groups).to(dtype)
            scores = [_diagonal_scores(q, key, scale) for key in step_keys]
            base_lse = lse.t()
            merged_lse = torch.stack([base_lse, *scores]).logsumexp(dim=0)
            merged = _grouped(out, num_groups).to(dtype) * _per_row(base_lse - merged_lse, num_groups)
            for score, value in zip(scores, step_values, strict=True):
                merged.addcmul_(_per_row(score - merged_lse, num_groups), value.to(dtype)[:, :, None])
            out, lse = merged.flatten(1, 2).to(query.dtype), merged_lse.t()
        ctx.save_for_backward(query, base_key, base_value, out, lse.contiguous(), *step_rows, *state)
        ctx.document_lengths, ctx.scale, ctx.num_steps = document_lengths, scale, num_steps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        query, base_key, base_value, out, lse, *rest = ctx.saved_tensors
        num_steps, scale = ctx.num_steps, ctx.scale
        step_keys, step_values = rest[:num_steps], rest[num_steps : 2 * num_steps]
        state = tuple(rest[2 * num_steps :])
        grad_out = grad_out.contiguous()
        grad_query, grad_base_key, grad_base_value = base_block_backward(
            grad_out, query, base_key, base_value, out, lse, state, ctx.document_lengths, scale
        )
        if not num_steps:
            return None, None, None, grad_query, grad_base_key, grad_base_value
        # A diagonal block's share is that of one more key: p = exp(score - lse), ds = p * (dp - sum(grad_out * out)).
        dtype, num_groups = reference.accumulation_dtype(query.dtype), base_key.shape[1]
        q, grad = _grouped(query, num_groups).to(dtype), _grouped(grad_out, num_groups).to(dtype)
        delta = (grad * _grouped(out, num_groups)).sum(-1, keepdim=True)
        grad_q = _grouped(grad_query, num_groups).to(dtype)
        merged_lse = lse.t()
        grad_keys, grad_values = [], []
        for key, value in zip(step_keys, step_values, strict=True):
            probability = _per_row(_diagonal_scores(q, key, scale) - merged_lse, num_groups)
            grad_probability = (grad * value.to(dtype)[:, :, None]).sum(-1, keepdim=True)
            grad_score = probability * (grad_probability - delta) * scale
            grad_q = grad_q + grad_score * key.to(dtype)[:, :, None]
            grad_keys.append((grad_score * q).sum(2).to(key.dtype))
            grad_values.append((probability * grad).sum(2).to(value.dtype))
        grad_query = grad_q.flatten(1, 2).to(query.dtype)
        return None, None, None, grad_query, grad_base_key, grad_base_value, *grad_keys, *grad_values


def _per_row(log_share: Tensor, num_groups: int) -> Tensor:
    """exp of [T, H], as a factor [T, G, R, 1] of grouped rows."""
    num_tokens, num_heads = log_share.shape
    return log_share.exp().reshape(num_tokens, num_groups, num_heads // num_groups, 1)


# --- flex --------------------------------------------------------------------------------------------------------


def _flex(
    query: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    step_keys: Sequence[Tensor],
    step_values: Sequence[Tensor],
    document_lengths: tuple[int, ...],
    scale: float,
) -> Tensor:
    tensors = (query, base_key, base_value, *step_keys, *step_values)
    if torch.is_grad_enabled() and any(rows.requires_grad for rows in tensors):
        _check_flex_trains_on(query.device)
    else:  # flex_attention refuses such inputs on the CPU even where gradients are off
        tensors = tuple(rows.detach() for rows in tensors)
    query, base_key, base_value, *step_rows = tensors
    step_keys, step_values = step_rows[: len(step_keys)], step_rows[len(step_keys) :]
    if query.shape[0] == 0:  # no blocks to build a mask from
        return reference.ttt_attention(
            query, base_key, base_value, step_keys, step_values, document_lengths=document_lengths, scale=scale
        )
    # Loaded only here: it brings in the compiler's front end.
    from kernels.flex_base_block import flex_base_block

    base_out, base_lse = flex_base_block(query, base_key, base_value, document_lengths, scale)
    if not step_keys:
        return base_out.contiguous()
    dtype, num_groups = reference.accumulation_dtype(query.dtype), base_key.shape[1]
    q = _grouped(query, num_groups).to(dtype)
    scores = [_diagonal_scores(q, key, scale) for key in step_keys]
    lse = torch.stack([base_lse, *scores]).logsumexp(dim=0)
    merged = _grouped(base_out, num_groups).to(dtype) * _per_row(base_lse - lse, num_groups)
    for score, value in zip(scores, step_values, strict=True):
        merged = merged + _per_row(score - lse, num_groups) * value.to(dtype)[:, :, None]
    return merged.flatten(1, 2).to(query.dtype)
