"""Causal attention of documents that lie one after the other, forward only: what a frozen target needs.

No mask and no padding: on CUDA one flash call with cumulative lengths, elsewhere SDPA on each document. Each document
gives what it would give alone, in the same order of sums on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_HEAD_DIM = 256


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, *, document_lengths: Sequence[int], scale: float | None = None
) -> Tensor:
    """Attention of each row to the rows of its document up to itself.

    query [T, H, Dh], key and value [T, G, Dh], H a multiple of G; document_lengths: rows of each document, together T.
    scale: of the scores, Dh ** -0.5 when None. Returns [T, H, Dh] in the dtype of query. Raises ValueError when the
    lengths are not those of the rows.

    Equals, with `same[i, j]` telling that rows i and j are of one document:

        scores = (query @ key.T * scale).masked_fill(~same | (j > i), -inf)
        scores.softmax(-1) @ value
    """
    num_rows, num_heads, head_dim = query.shape
    if sum(document_lengths) != num_rows or min(document_lengths, default=0) < 0:
        raise ValueError(f"document_lengths={list(document_lengths)} are not those of {num_rows} rows")
    if query.device.type == "cuda" and query.dtype in _FLASH_DTYPES and head_dim <= _FLASH_HEAD_DIM:
        bounds = torch.tensor([0, *document_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        bounds = bounds.pin_memory().to(query.device, non_blocking=True)
        longest = max(document_lengths, default=0)
        # A head dimension's stride of 1 is all that flash asks for.
        flash = torch.ops.aten._flash_attention_forward
        out: Tensor = flash(query, key, value, bounds, bounds, longest, longest, 0.0, True, False, scale=scale)[0]
        return out
    enable_gqa = key.shape[1] != num_heads
    rows = (states.transpose(0, 1)[None] for states in (query, key, value))
    documents = zip(*(torch.split(states, list(document_lengths), 2) for states in rows), strict=True)
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        for q, k, v in documents
        if q.shape[2]
    ]
    return torch.cat(parts, 2)[0].transpose(0, 1) if parts else torch.empty_like(query)
