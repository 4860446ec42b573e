"""Joins the parts of a row's softmax: the base block's one or two, and the diagonal block of each later step.

    lse = log sum_i exp(lse_i);  out = sum_i exp(lse_i - lse) * out_i

over the base block's parts (out_i, lse_i) and, for step j, lse_j = scale * q . key_j, out_j = value_j. In the backward
a diagonal block is one more key of the softmax: p = exp(lse_j - lse), ds = p * (grad_out . value_j - grad_out . out).

On CUDA these are two Triton kernels (`diagonal_merge_triton`); the plain torch here serves the CPU and float64, and
holds several [A, H, Dh] tensors in float32.

Shapes: A active rows, H query heads, G key/value heads, Dh head dim; rows [A, heads, Dh], log-sum-exps [H, A].
"""

# mypy: allow-untyped-calls
# (torch.autograd.Function.apply has no annotations)
from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.attention_plan import Rows, Segment
from kernels.reference import accumulation_dtype

logger = logging.getLogger(__name__)


def merge_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """What computes the merge there: "triton" or "torch"."""
    if device.type != "cuda" or dtype == torch.float64:
        return "torch"
    if importlib.util.find_spec("triton") is None:
        _log_without_triton()
        return "torch"
    return "triton"


@functools.cache
def _log_without_triton() -> None:
    logger.warning("diagonal blocks in plain torch, in several passes over memory: triton is not installed")


def merge(
    segments: Sequence[Segment], query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Merge the base block with the diagonal blocks of all later steps.

    segments: the base block's, together each row once; a part's storage may be reused. query [A, H, Dh]; keys, values
    k tensors [A, G, Dh] each, last-dim stride 1. Returns out [A, H, Dh], lse [H, A] (float32, float64 for float64).
    """
    part = _whole_part(segments)
    if part is not None and not keys and len(segments[0].parts) == 1:
        return part, segments[0].lses[0].contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if part is None else part
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=accumulation_dtype(query.dtype))
    if merge_kernel(query.device, query.dtype) == "triton":
        from kernels import diagonal_merge_triton

        keys, values = _one_layout(keys), _one_layout(values)
        for segment in segments:
            diagonal_merge_triton.merge_forward(segment, query, keys, values, scale, out, lse)
    else:
        for segment in segments:
            _merge_segment(segment, query, keys, values, scale, out, lse)
    return out, lse


def merge_backward(
    segments: Sequence[Segment],
    grad_out: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the query (base block and diagonal blocks together) and of each step's key and value.

    segments: the base block's gradients of the query. grad_out, out [A, H, Dh] and lse [H, A] contiguous, as merged.
    """
    part = _whole_part(segments)
    if part is not None and not keys and len(segments[0].parts) == 1:
        return part.to(query.dtype), [], []
    if part is None or part.dtype != query.dtype:
        grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    else:
        grad_query = part
    grad_keys, grad_values = _empty_like(keys), _empty_like(values)
    if merge_kernel(query.device, query.dtype) == "triton":
        from kernels import diagonal_merge_triton

        keys, values = _one_layout(keys), _one_layout(values)
        for segment in segments:
            diagonal_merge_triton.merge_backward(
                segment, grad_out, query, out, lse, keys, values, scale, grad_query, grad_keys, grad_values
            )
    else:
        for segment in segments:
            rows = segment.rows
            parts = [of_query[segment.part_rows] for of_query in segment.parts]
            arguments = (grad_out[rows], query[rows], out[rows], lse[:, rows], _at(keys, rows), _at(values, rows))
            of_query, of_keys, of_values = _diagonal_gradients(*arguments, scale)
            grad_query[rows] = sum(parts, start=of_query.flatten(1, 2)).to(query.dtype)
            for gradient, of_step in zip([*grad_keys, *grad_values], [*of_keys, *of_values], strict=True):
                gradient[rows] = of_step.to(gradient.dtype)
    return grad_query, grad_keys, grad_values


class MergeDiagonals(torch.autograd.Function):
    """out = merge of one base part with the diagonal blocks, differentiable in all: for a base block under autograd.

    apply(scale, k, base_out [A, H, Dh], base_lse [H, A], query, *keys, *values), last-dim strides 1, A and k positive.
    """

    @staticmethod
    def forward(
        ctx: Any, scale: float, num_steps: int, base_out: Tensor, base_lse: Tensor, query: Tensor, *step_rows: Tensor
    ) -> Tensor:
        keys, values = step_rows[:num_steps], step_rows[num_steps:]
        base_out, base_lse = base_out.contiguous(), base_lse.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty_like(base_lse)
        everything = slice(0, query.shape[0])
        segment = Segment(everything, everything, (base_out,), (base_lse,))
        if merge_kernel(query.device, query.dtype) == "triton":
            from kernels import diagonal_merge_triton

            diagonal_merge_triton.merge_forward(segment, query, _one_layout(keys), _one_layout(values), scale, out, lse)
        else:
            _merge_segment(segment, query, keys, values, scale, out, lse)
        ctx.save_for_backward(base_out, base_lse, query, out, lse, *step_rows)
        ctx.scale, ctx.num_steps = scale, num_steps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        base_out, base_lse, query, out, lse, *step_rows = ctx.saved_tensors
        keys, values, scale = step_rows[: ctx.num_steps], step_rows[ctx.num_steps :], ctx.scale
        grad_out = grad_out.contiguous()
        if merge_kernel(query.device, query.dtype) == "triton":
            from kernels import diagonal_merge_triton

            everything = slice(0, query.shape[0])
            grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            grad_base, grad_base_lse = torch.empty_like(base_out), torch.empty_like(base_lse)
            grad_keys, grad_values = _empty_like(keys), _empty_like(values)
            diagonal_merge_triton.merge_backward(
                Segment(everything, everything, (base_out,), ()),
                grad_out, query, out, lse, _one_layout(keys), _one_layout(values), scale,
                grad_query, grad_keys, grad_values,
                base_lse=base_lse, grad_base=grad_base, grad_base_lse=grad_base_lse,
            )  # fmt: skip
            return None, None, grad_base, grad_base_lse, grad_query, *grad_keys, *grad_values
        of_query, of_keys, of_values = _diagonal_gradients(grad_out, query, out, lse, keys, values, scale)
        share = (base_lse - lse).exp().t()[..., None]
        grad = grad_out.to(share.dtype)
        grad_base_lse = (share * (grad * (base_out.to(share.dtype) - out)).sum(-1, keepdim=True)).squeeze(-1).t()
        return (
            None,
            None,
            (share * grad).to(base_out.dtype),
            grad_base_lse,
            of_query.flatten(1, 2).to(query.dtype),
            *(rows.to(query.dtype) for rows in of_keys),
            *(rows.to(query.dtype) for rows in of_values),
        )


def _whole_part(segments: Sequence[Segment]) -> Tensor | None:
    """The first part, if it holds all active rows in order: then results may be written over it."""
    if len(segments) > 1 or isinstance(segments[0].rows, Tensor) or isinstance(segments[0].part_rows, Tensor):
        return None
    # Detached, it is no view to autograd: an output that is one would take its grad_fn from what it is a view of.
    return segments[0].parts[0][segments[0].part_rows].detach()


def _one_layout(rows: Sequence[Tensor]) -> list[Tensor]:
    """The kernels take one pair of strides for all steps."""
    if all(step.stride() == rows[0].stride() for step in rows):
        return list(rows)
    return [step.contiguous() for step in rows]


def _empty_like(rows: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(step.shape, dtype=step.dtype, device=step.device) for step in rows]


def _at(steps: Sequence[Tensor], rows: Rows) -> list[Tensor]:
    return [step[rows] for step in steps]


# --- plain torch ----------------------------------------------------------------------------------------------------
# Rows grouped as [n, G, R, Dh] (R = H / G query heads share a key), in float32 (float64 for float64).


def _grouped(rows: Tensor, num_groups: int) -> Tensor:  # [n, H, Dh] -> [n, G, R, Dh]
    return rows.reshape(rows.shape[0], num_groups, -1, rows.shape[2])


def _per_head(factor: Tensor, num_groups: int) -> Tensor:  # [n, H] -> [n, G, R, 1]
    return factor.reshape(factor.shape[0], num_groups, -1, 1)


def _score(grouped_query: Tensor, key: Tensor, scale: float) -> Tensor:
    """[n, H] from the query [n, G, R, Dh], already in the accumulation dtype, and a step's key [n, G, Dh]."""
    return (grouped_query * key.to(grouped_query.dtype)[:, :, None]).sum(-1).flatten(1) * scale


def _merge_segment(
    segment: Segment,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    dtype, rows = accumulation_dtype(query.dtype), segment.rows
    num_groups = keys[0].shape[1] if keys else 1
    q = _grouped(query[rows], num_groups).to(dtype)
    lses = [part_lse.t() for part_lse in segment.lses] + [_score(q, key[rows], scale) for key in keys]
    merged_lse = torch.stack(lses).logsumexp(dim=0)
    shares = [_per_head((part_lse - merged_lse).exp(), num_groups) for part_lse in lses]
    merged = torch.zeros_like(q)
    for share, part in zip(shares, segment.parts, strict=False):
        merged.addcmul_(share, _grouped(part[segment.part_rows], num_groups).to(dtype))
    for share, value in zip(shares[len(segment.parts) :], values, strict=True):
        merged.addcmul_(share, value[rows].to(dtype)[:, :, None])
    out[rows] = merged.flatten(1, 2).to(out.dtype)
    lse[:, rows] = merged_lse.t()


def _diagonal_gradients(
    grad_out: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The diagonal blocks' gradients of query [n, G, R, Dh] and of each key and value, in the accumulation dtype."""
    dtype = accumulation_dtype(query.dtype)
    num_groups = keys[0].shape[1] if keys else 1
    q, grad = _grouped(query, num_groups).to(dtype), _grouped(grad_out, num_groups).to(dtype)
    delta = (grad * _grouped(out, num_groups)).sum(-1, keepdim=True)
    grad_query = torch.zeros_like(q)
    grad_keys, grad_values = [], []
    for key, value in zip(keys, values, strict=True):
        probability = _per_head((_score(q, key, scale) - lse.t()).exp(), num_groups)
        grad_probability = (grad * value.to(dtype)[:, :, None]).sum(-1, keepdim=True)
        grad_score = probability * (grad_probability - delta) * scale
        grad_query.addcmul_(grad_score, key.to(dtype)[:, :, None])
        grad_keys.append((grad_score * q).sum(2))
        grad_values.append((probability * grad).sum(2))
    return grad_query, grad_keys, grad_values
