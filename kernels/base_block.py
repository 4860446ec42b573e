"""The base block: document-causal attention that hands out its log-sum-exp, and a backward that takes one.

Three ways to compute it, by device and dtype (`base_block_kernel` chooses):

    cpu_flash    torch's fused CPU kernel, one call a document; any float dtype
    cuda_flash   flash attention with cumulative lengths, one call for all documents; fp16 and bf16
    row_blocks   plain matrix products over blocks of query rows; exact, any device, dtype and head dim; slower

The backward takes the output and log-sum-exp *after* the merge with the diagonal blocks (`ttt_attention`). A flash
backward recomputes p = exp(score - lse) and ds = p * (dp - sum(grad_out * out)); with the merged pair both are the
base block's exact share, so no kernel of our own is needed.

Layouts: rows [T, heads, Dh] with a last-dim stride of 1; log-sum-exp [H, T], natural logarithm, float32 (float64
for float64). Documents have at least one token here: the caller drops empty ones.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.reference import accumulation_dtype

logger = logging.getLogger(__name__)

# Scores that row_blocks holds at once: 256 MiB in float32.
_MAX_SCORES = 2**26
# torch's flash attention takes head dims up to this, in multiples of 8, from compute capability 8.0 on.
_MAX_FLASH_HEAD_DIM = 256


def base_block_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """The kernel ("cpu_flash", "cuda_flash" or "row_blocks") for these inputs, and why, as one phrase."""
    if device.type == "cpu":
        return "cpu_flash", "fused CPU flash attention"
    if device.type != "cuda":
        return "row_blocks", f"no fused kernel that returns its log-sum-exp on device {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "row_blocks", f"flash attention takes fp16 and bf16, not {dtype}"
    if head_dim % 8 or head_dim > _MAX_FLASH_HEAD_DIM:
        return "row_blocks", f"flash attention takes head dims 8, 16, .. {_MAX_FLASH_HEAD_DIM}, not {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "row_blocks", f"flash attention needs compute capability 8.0, {device} has less"
    return "cuda_flash", "flash attention with cumulative lengths"


@functools.cache
def _log_fallback_once(why: str) -> None:
    logger.warning("base block in plain matrix products (exact, slower than a fused kernel): %s", why)


def base_block_forward(
    query: Tensor, key: Tensor, value: Tensor, document_lengths: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Attend to the base keys.

    query [T, H, Dh]; key, value [T, G, Dh]. Returns out [T, H, Dh], lse [H, T], and what the backward needs of the
    kernel's own state. `row_blocks` is logged once a reason.
    """
    if query.shape[0] == 0:  # the CPU kernel kills the process at T = 0, flash refuses it
        return torch.empty_like(query), query.new_empty(query.shape[1], 0, dtype=accumulation_dtype(query.dtype)), ()
    kernel, why = base_block_kernel(query.device, query.dtype, query.shape[-1])
    if kernel == "cpu_flash":
        return *_cpu_flash_forward(query, key, value, document_lengths, scale), ()
    if kernel == "cuda_flash":
        return _cuda_flash_forward(query, key, value, document_lengths, scale)
    _log_fallback_once(why)
    return *_row_blocks_forward(query, key, value, document_lengths, scale), ()


def base_block_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    merged_out: Tensor,
    merged_lse: Tensor,
    state: tuple[Tensor, ...],
    document_lengths: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (query, key, value) of the base block's share.

    grad_out and merged_out [T, H, Dh] contiguous; merged_lse [H, T] contiguous; state from the forward.
    """
    if query.shape[0] == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    arguments = (grad_out, query, key, value, merged_out, merged_lse)
    kernel, _ = base_block_kernel(query.device, query.dtype, query.shape[-1])
    if kernel == "cpu_flash":
        return _cpu_flash_backward(*arguments, document_lengths, scale)
    if kernel == "cuda_flash":
        return _cuda_flash_backward(*arguments, state, document_lengths, scale)
    return _row_blocks_backward(*arguments, document_lengths, scale)


def _documents(document_lengths: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(itertools.accumulate(document_lengths, initial=0))


# --- torch's CPU kernel ------------------------------------------------------------------------------------------
# It has no variable lengths (hence the loop), is silently wrong for a last-dim stride other than 1, and reads past
# the end when H is no multiple of G: ttt_attention checks both before it comes here.


def _batched(rows: Tensor) -> Tensor:  # [t, heads, Dh] -> [1, heads, t, Dh], a view
    return rows.transpose(0, 1).unsqueeze(0)


def _unbatched(rows: Tensor) -> Tensor:
    return rows.squeeze(0).transpose(0, 1)


def _cpu_flash_forward(
    query: Tensor, key: Tensor, value: Tensor, document_lengths: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor]:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=accumulation_dtype(query.dtype))
    for start, end in _documents(document_lengths):
        out_document, lse_document = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_batched(rows[start:end]) for rows in (query, key, value)), 0.0, True, scale=scale
        )
        out[start:end] = _unbatched(out_document)
        lse[:, start:end] = lse_document.squeeze(0)
    return out, lse


def _cpu_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    document_lengths: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # In bf16 and fp16 this kernel sums the gradients of key and value over blocks of queries in that dtype: three times
    # the error of the plain formula. So the backward runs in float32 there, a document at a time.
    dtype = accumulation_dtype(query.dtype)
    gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    for start, end in _documents(document_lengths):
        of_document = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_batched(rows[start:end].to(dtype)) for rows in (grad_out, query, key, value, out)),
            lse[:, start:end].contiguous().unsqueeze(0),
            0.0,
            True,
            scale=scale,
        )
        for gradient, rows in zip(gradients, of_document, strict=True):
            gradient[start:end] = _unbatched(rows)
    return gradients


# --- flash attention on CUDA -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _cumulative_lengths(document_lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [documents + 1] on the device; cached, or each of the K steps would copy it from the host."""
    with torch.inference_mode(False):  # an inference tensor in the cache could not be saved for a later backward
        bounds = list(itertools.accumulate(document_lengths, initial=0))
        return torch.tensor(bounds, dtype=torch.int32, device=device)


def _cuda_flash_forward(
    query: Tensor, key: Tensor, value: Tensor, document_lengths: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    bounds, longest = _cumulative_lengths(document_lengths, query.device), max(document_lengths)
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )
    return out, lse, (rng_state, unused)


def _cuda_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    state: tuple[Tensor, ...],
    document_lengths: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    bounds, longest = _cumulative_lengths(document_lengths, query.device), max(document_lengths)
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        grad_out, query, key, value, out, lse, bounds, bounds, longest, longest, 0.0, True, *state, scale=scale
    )
    return grad_query, grad_key, grad_value


# --- plain matrix products, a block of query rows at a time --------------------------------------------------------


def _row_blocks(num_heads: int, document_lengths: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """(query rows, key rows) of each block; the keys are those that the block's last row attends to."""
    for start, end in _documents(document_lengths):
        block = max(1, _MAX_SCORES // (num_heads * (end - start)))
        for first in range(start, end, block):
            last = min(first + block, end)
            yield slice(first, last), slice(start, last)


def _row_block_scores(query: Tensor, key: Tensor, rows: slice, keys: slice, scale: float) -> Tensor:
    """Masked scores [G, R, c, t] of query rows [c, G, R, Dh] and key rows [t, G, Dh]."""
    scores = torch.einsum("cgrd,tgd->grct", query, key) * scale
    row = torch.arange(rows.start, rows.stop, device=query.device)
    column = torch.arange(keys.start, keys.stop, device=query.device)
    return scores.masked_fill(column > row[:, None], float("-inf"))


def _row_blocks_forward(
    query: Tensor, key: Tensor, value: Tensor, document_lengths: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(query.dtype)
    num_tokens, num_heads, head_dim = query.shape
    grouped = query.view(num_tokens, key.shape[1], -1, head_dim)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = query.new_empty(num_heads, num_tokens, dtype=dtype)
    for rows, keys in _row_blocks(num_heads, document_lengths):
        scores = _row_block_scores(grouped[rows].to(dtype), key[keys].to(dtype), rows, keys, scale)
        block_lse = scores.logsumexp(dim=-1)
        probabilities = (scores - block_lse[..., None]).exp()
        lse[:, rows] = block_lse.flatten(0, 1)
        out[rows] = torch.einsum("grct,tgd->cgrd", probabilities, value[keys].to(dtype)).flatten(1, 2).to(out.dtype)
    return out, lse


def _row_blocks_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    document_lengths: tuple[int, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(query.dtype)
    num_heads, head_dim = query.shape[1:]
    num_groups = key.shape[1]

    def grouped(rows: Tensor) -> Tensor:  # [c, H, Dh] -> [c, G, R, Dh]
        return rows.reshape(rows.shape[0], num_groups, -1, head_dim).to(dtype)

    grad_query = torch.empty(query.shape, dtype=dtype, device=query.device)
    grad_key, grad_value = (torch.zeros(rows.shape, dtype=dtype, device=rows.device) for rows in (key, value))
    for rows, keys in _row_blocks(num_heads, document_lengths):
        q, k, v, grad = grouped(query[rows]), key[keys].to(dtype), value[keys].to(dtype), grouped(grad_out[rows])
        block_lse = lse[:, rows].reshape(num_groups, -1, rows.stop - rows.start, 1)
        probabilities = (_row_block_scores(q, k, rows, keys, scale) - block_lse).exp()
        delta = (grad * grouped(out[rows])).sum(-1).permute(1, 2, 0)[..., None]
        grad_probabilities = torch.einsum("cgrd,tgd->grct", grad, v)
        grad_scores = probabilities * (grad_probabilities - delta) * scale
        grad_query[rows] = torch.einsum("grct,tgd->cgrd", grad_scores, k).flatten(1, 2)
        grad_key[keys] += torch.einsum("grct,cgrd->tgd", grad_scores, q)
        grad_value[keys] += torch.einsum("grct,cgrd->tgd", probabilities, grad)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
