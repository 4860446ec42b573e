"""The base block: causal attention of the active rows to the step-0 keys of their documents, with its log-sum-exp.

Ways to compute it, by device and dtype (`base_block_kernel` chooses):

    cpu_flash    torch's fused CPU kernel, one or two calls a run; any float dtype
    cudnn        cuDNN for large squares, flash for the rest (`attention_plan`): fp16 and bf16, from Hopper on
    flash        flash attention with cumulative lengths: fp16 and bf16 on other CUDA devices
    row_blocks   plain matrix products over blocks of query rows; exact, any device, dtype and head dim; slower

A row gets one part (causal), or two over disjoint keys (the causal square, all keys before it); `diagonal_merge` joins
them. The backward takes the output and log-sum-exp *after* the merge. A flash backward recomputes
p = exp(score - lse) and ds = p * (dp - sum(grad_out * out)); with the merged pair both are the part's exact share, so
no kernel of our own is needed, and one kernel's backward may follow another's forward.

Layouts: rows [.., heads, Dh] with a last-dim stride of 1; log-sum-exp [H, A], natural logarithm, float32 (float64 for
float64). A active rows, T tokens, both at least 1 here; documents have at least one token: the caller drops others.
"""

# mypy: allow-untyped-calls
# (torch.backends has no annotations)
from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import base_block_cuda
from kernels.attention_plan import (
    CudnnCall,
    FlashCall,
    Rows,
    Run,
    Segment,
    cached_runs,
    keys_are_shared,
    num_active_rows,
    plan_calls,
)
from kernels.reference import accumulation_dtype

logger = logging.getLogger(__name__)

# Scores that row_blocks holds at once: 256 MiB in float32.
_MAX_SCORES = 2**26
# torch's flash attention takes head dims up to this, in multiples of 8, from compute capability 8.0 on. cuDNN's
# backward takes the same from 9.0 on (64, 96, 128, 192 and 256 were tried).
_MAX_FLASH_HEAD_DIM = 256


def base_block_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """The kernel ("cpu_flash", "cudnn", "flash" or "row_blocks") for these inputs, and why, as one phrase."""
    if device.type == "cpu":
        return "cpu_flash", "fused CPU flash attention"
    if device.type != "cuda":
        return "row_blocks", f"no fused kernel that returns its log-sum-exp on device {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "row_blocks", f"flash attention takes fp16 and bf16, not {dtype}"
    if head_dim % 8 or head_dim > _MAX_FLASH_HEAD_DIM:
        return "row_blocks", f"flash attention takes head dims 8, 16, .. {_MAX_FLASH_HEAD_DIM}, not {head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "row_blocks", f"flash attention needs compute capability 8.0, {device} has less"
    flash = "flash attention with cumulative lengths"
    if capability < (9, 0):
        return "flash", f"{flash}: cuDNN's is faster from compute capability 9.0 on, {device} has less"
    if not torch.backends.cuda.cudnn_sdp_enabled() or not torch.backends.cudnn.is_available():
        return "flash", f"{flash}: cuDNN attention is switched off (torch.backends.cuda.enable_cudnn_sdp)"
    if torch.are_deterministic_algorithms_enabled():
        return "flash", f"{flash}: cuDNN's backward is not deterministic"
    return "cudnn", f"cuDNN for large spans, {flash} for the rest"


@functools.cache
def _log_fallback_once(why: str) -> None:
    logger.warning("base block in plain matrix products (exact, slower than a fused kernel): %s", why)


@dataclass(frozen=True, slots=True)
class BasePlan:
    """How the base block of one layout is computed; the same for all K steps, forward and backward."""

    kernel: str
    runs: tuple[Run, ...]
    calls: tuple[CudnnCall | FlashCall, ...]
    """Of the kernels "cudnn" and "flash"; empty for the others, which loop over the runs."""
    shared_keys: bool
    """Whether the gradient of some base key is a sum over runs."""

    @property
    def num_active(self) -> int:
        return num_active_rows(self.runs)


def plan_base_block(
    document_lengths: tuple[int, ...],
    query_runs: tuple[tuple[int, int], ...] | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
) -> BasePlan:
    """The plan for these inputs; num_heads: of queries. `row_blocks` is logged once a reason."""
    kernel, why = base_block_kernel(device, dtype, head_dim)
    if kernel == "row_blocks":
        _log_fallback_once(why)
    return _cached_plan(document_lengths, query_runs, device, kernel, num_heads * head_dim)


@functools.lru_cache(maxsize=16)
def _cached_plan(
    document_lengths: tuple[int, ...],
    query_runs: tuple[tuple[int, int], ...] | None,
    device: torch.device,
    kernel: str,
    width: int,
) -> BasePlan:
    """Cached, or each of the K steps would copy the index tensors from the host."""
    runs = cached_runs(document_lengths, query_runs)
    calls: tuple[CudnnCall | FlashCall, ...] = ()
    if kernel in ("cudnn", "flash"):
        with torch.inference_mode(False):  # inference tensors in the cache could not be used in a later training step
            calls = tuple(plan_calls(runs, sum(document_lengths), device, kernel == "cudnn", width=width))
    return BasePlan(kernel, runs, calls, keys_are_shared(runs))


class KeyGradients:
    """The gradients of the base keys and values, [T, G, Dh] each, gathered from the calls.

    Where runs share keys, their contributions are summed in float32, and else written once.
    """

    def __init__(self, key: Tensor, value: Tensor, shared: bool) -> None:
        self._key, self._value, self._shared = key, value, shared
        self._sums: tuple[Tensor, Tensor] | None = None

    def add(self, rows: Rows, grad_key: Tensor, grad_value: Tensor) -> None:
        if self._sums is None:
            num_keys = self._key.shape[0]
            if not self._shared and isinstance(rows, slice) and (rows.start, rows.stop) == (0, num_keys):
                self._sums = grad_key, grad_value
                return
            self._sums = self._zeros(self._key), self._zeros(self._value)
        for total, rows_gradient in zip(self._sums, (grad_key, grad_value), strict=True):
            if not self._shared:
                total[rows] = rows_gradient.to(total.dtype)
            elif isinstance(rows, slice):
                total[rows] += rows_gradient
            else:
                total.index_add_(0, rows, rows_gradient.to(total.dtype))

    def _zeros(self, rows: Tensor) -> Tensor:
        dtype = accumulation_dtype(rows.dtype) if self._shared else rows.dtype
        return torch.zeros(rows.shape, dtype=dtype, device=rows.device)

    def result(self) -> tuple[Tensor, Tensor]:
        key, value = self._sums or (torch.zeros_like(self._key), torch.zeros_like(self._value))
        return key.to(self._key.dtype), value.to(self._value.dtype)


def base_block_forward(query: Tensor, key: Tensor, value: Tensor, plan: BasePlan, scale: float) -> list[Segment]:
    """Attend to the base keys: query [A, H, Dh]; key, value [T, G, Dh]. The segments cover each active row once."""
    if plan.kernel == "cpu_flash":
        return [_cpu_flash_forward(query, key, value, plan.runs, scale)]
    if plan.kernel == "row_blocks":
        return [_row_blocks_forward(query, key, value, plan.runs, scale)]
    return [segment for call in plan.calls for segment in base_block_cuda.forward(call, query, key, value, scale)]


def base_block_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    merged_out: Tensor,
    merged_lse: Tensor,
    plan: BasePlan,
    scale: float,
) -> tuple[list[Segment], Tensor, Tensor]:
    """The base block's share of the gradients: of the query as segments, of key and value.

    grad_out and merged_out [A, H, Dh] contiguous; merged_lse [H, A] contiguous.
    """
    arguments = (grad_out, query, key, value, merged_out, merged_lse)
    gradients = KeyGradients(key, value, plan.shared_keys)
    if plan.kernel == "cpu_flash":
        segments = [_cpu_flash_backward(*arguments, plan.runs, scale, gradients)]
    elif plan.kernel == "row_blocks":
        segments = [_row_blocks_backward(*arguments, plan.runs, scale, gradients)]
    else:
        segments = [
            segment
            for call in plan.calls
            for segment in base_block_cuda.backward(call, *arguments, scale, gradients.add)
        ]
    return segments, *gradients.result()


def _everything(num_rows: int, parts: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Segment:
    return Segment(slice(0, num_rows), slice(0, num_rows), parts, lses)


# --- torch's CPU kernel ------------------------------------------------------------------------------------------
# It has no variable lengths (hence the loop), is silently wrong for a last-dim stride other than 1, reads past the end
# when H is no multiple of G, and kills the process without rows: ttt_attention checks all before it comes here. Its
# causal mask is aligned top-left, hence the second call for a run that does not begin its document.


def _batched(rows: Tensor) -> Tensor:  # [t, heads, Dh] -> [1, heads, t, Dh], a view
    return rows.transpose(0, 1).unsqueeze(0)


def _unbatched(rows: Tensor) -> Tensor:
    return rows.squeeze(0).transpose(0, 1)


def _run_parts(runs: tuple[Run, ...]) -> Iterator[tuple[int, slice, slice, bool]]:
    """(part, active rows, key rows, causal) of each call."""
    for run in runs:
        active = slice(run.first, run.first + run.num_rows)
        yield 0, active, slice(run.start, run.end), True
        if run.start > run.document:
            yield 1, active, slice(run.document, run.start), False


def _cpu_flash_forward(query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float) -> Segment:
    num_rows, num_heads, _ = query.shape
    num_parts = 1 + any(run.start > run.document for run in runs)
    # Zeros and -inf: the second part of a row that has none.
    outs = [torch.zeros(query.shape, dtype=query.dtype, device=query.device) for _ in range(num_parts)]
    dtype = accumulation_dtype(query.dtype)
    lses = [query.new_full((num_heads, num_rows), float("-inf"), dtype=dtype) for _ in range(num_parts)]
    for part, active, keys, causal in _run_parts(runs):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _batched(query[active]), _batched(key[keys]), _batched(value[keys]), 0.0, causal, scale=scale
        )
        outs[part][active] = _unbatched(out)
        lses[part][:, active] = lse.squeeze(0)
    return _everything(num_rows, tuple(outs), tuple(lses))


def _cpu_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: tuple[Run, ...],
    scale: float,
    gradients: KeyGradients,
) -> Segment:
    # In bf16 and fp16 this kernel sums the gradients of key and value over blocks of queries in that dtype: three times
    # the error of the plain formula. So the backward runs in float32 there, a part at a time.
    dtype = accumulation_dtype(query.dtype)
    grad_query = torch.zeros(query.shape, dtype=dtype, device=query.device)
    for _, active, keys, causal in _run_parts(runs):
        of_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _batched(grad_out[active].to(dtype)),
            _batched(query[active].to(dtype)),
            _batched(key[keys].to(dtype)),
            _batched(value[keys].to(dtype)),
            _batched(out[active].to(dtype)),
            lse[:, active].contiguous().unsqueeze(0),
            0.0,
            causal,
            scale=scale,
        )
        of_query, of_key, of_value = (_unbatched(rows) for rows in of_part)
        grad_query[active] += of_query
        gradients.add(keys, of_key, of_value)
    return _everything(query.shape[0], (grad_query,), ())


# --- plain matrix products, a block of query rows at a time --------------------------------------------------------


def _row_blocks(num_heads: int, runs: tuple[Run, ...]) -> Iterator[tuple[slice, slice]]:
    """(active rows, key rows) of each block; the keys are those that the block's last row attends to."""
    for run in runs:
        block = max(1, _MAX_SCORES // (num_heads * (run.end - run.document)))
        for first in range(run.start, run.end, block):
            last = min(first + block, run.end)
            active = run.first + first - run.start
            yield slice(active, active + last - first), slice(run.document, last)


def _row_block_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Masked scores [G, R, c, t] of query rows [c, G, R, Dh], the last of the key rows [t, G, Dh]."""
    scores = torch.einsum("cgrd,tgd->grct", query, key) * scale
    num_rows, num_keys = scores.shape[2:]
    row = torch.arange(num_keys - num_rows, num_keys, device=query.device)
    column = torch.arange(num_keys, device=query.device)
    return scores.masked_fill(column > row[:, None], float("-inf"))


def _row_blocks_forward(query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...], scale: float) -> Segment:
    dtype = accumulation_dtype(query.dtype)
    num_rows, num_heads, head_dim = query.shape
    grouped = query.reshape(num_rows, key.shape[1], -1, head_dim)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = query.new_empty(num_heads, num_rows, dtype=dtype)
    for active, keys in _row_blocks(num_heads, runs):
        scores = _row_block_scores(grouped[active].to(dtype), key[keys].to(dtype), scale)
        block_lse = scores.logsumexp(dim=-1)
        probabilities = (scores - block_lse[..., None]).exp()
        lse[:, active] = block_lse.flatten(0, 1)
        out[active] = torch.einsum("grct,tgd->cgrd", probabilities, value[keys].to(dtype)).flatten(1, 2).to(out.dtype)
    return _everything(num_rows, (out,), (lse,))


def _row_blocks_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: tuple[Run, ...],
    scale: float,
    gradients: KeyGradients,
) -> Segment:
    dtype = accumulation_dtype(query.dtype)
    num_heads, head_dim = query.shape[1:]
    num_groups = key.shape[1]

    def grouped(rows: Tensor) -> Tensor:  # [c, H, Dh] -> [c, G, R, Dh]
        return rows.reshape(rows.shape[0], num_groups, -1, head_dim).to(dtype)

    grad_query = torch.empty(query.shape, dtype=dtype, device=query.device)
    grad_key, grad_value = (torch.zeros(rows.shape, dtype=dtype, device=rows.device) for rows in (key, value))
    for active, keys in _row_blocks(num_heads, runs):
        q, k, v, grad = grouped(query[active]), key[keys].to(dtype), value[keys].to(dtype), grouped(grad_out[active])
        block_lse = lse[:, active].reshape(num_groups, -1, active.stop - active.start, 1)
        probabilities = (_row_block_scores(q, k, scale) - block_lse).exp()
        delta = (grad * grouped(out[active])).sum(-1).permute(1, 2, 0)[..., None]
        grad_probabilities = torch.einsum("cgrd,tgd->grct", grad, v)
        grad_scores = probabilities * (grad_probabilities - delta) * scale
        grad_query[active] = torch.einsum("grct,tgd->cgrd", grad_scores, k).flatten(1, 2)
        grad_key[keys] += torch.einsum("grct,cgrd->tgd", grad_scores, q)
        grad_value[keys] += torch.einsum("grct,cgrd->tgd", probabilities, grad)
    gradients.add(slice(0, key.shape[0]), grad_key, grad_value)
    return _everything(query.shape[0], (grad_query,), ())
