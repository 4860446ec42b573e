"""The base block through flex_attention, with a document-causal BlockMask built from the document boundaries.

`create_block_mask` evaluates the mask on all T x T pairs (100 GB at 49K tokens, as users of other trainers report).
Document-causal masks need no evaluation: the key blocks that a block of query rows touches are one range, and which of
them are full follows from where its documents begin and end. The tables are [T/128, T/128] int32.

On CUDA flex_attention is compiled, once for all lengths. Without compilation, on the CPU, it holds all T x T scores and
has no backward: good for checking, not for training.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK_SIZE = 128


@functools.lru_cache(maxsize=8)
def document_causal_block_mask(document_lengths: tuple[int, ...], device: torch.device) -> BlockMask:
    """The mask "same document, and not after the query's row". One serves all TTT steps, hence the cache.

    document_lengths: positive, at least one. Time and memory: the (T / 128) squared entries of the block tables.
    """
    bounds = list(itertools.accumulate(document_lengths, initial=0))
    num_tokens = bounds[-1]
    num_blocks = -(-num_tokens // BLOCK_SIZE)

    # Query block i, whose first row lies in the document [start, end):
    #
    #   key blocks   0 .. first-1   first ..  full-1   full .. i-1   i      i+1 ..
    #                outside        begins before      full          the    after the
    #                the document   the document       blocks        edge   queries
    #
    # No block between first and i is empty, because the first row attends to all of start .. its own row. Those from
    # `full` on are full if all the rows belong to that one document; else only later documents' rows are masked
    # out of them and none is full (full = i). A ragged last block is never full: its missing rows attend to nothing.
    first_blocks, full_blocks = [], []
    for block in range(num_blocks):
        first_row, end_row = block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE
        document = bisect_right(bounds, first_row) - 1
        start, end = bounds[document], bounds[document + 1]
        first_blocks.append(start // BLOCK_SIZE)
        full_blocks.append(-(-start // BLOCK_SIZE) if end_row <= end else block)

    with torch.inference_mode(False):  # an inference tensor in the cache could not be saved for a later backward
        index = torch.arange(num_blocks, dtype=torch.int32, device=device)
        first = torch.tensor(first_blocks, dtype=torch.int32, device=device)
        full = torch.minimum(torch.tensor(full_blocks, dtype=torch.int32, device=device), index)
        # Partial blocks, ascending: first .. full-1, then i. Full blocks: full .. i-1.
        num_before_full = full - first
        entry = index[None, :]
        partial_indices = torch.where(entry < num_before_full[:, None], first[:, None] + entry, index[:, None])
        full_indices = (full[:, None] + entry).clamp(max=num_blocks - 1)
        document_start = torch.repeat_interleave(
            torch.tensor(bounds[:-1], device=device), torch.tensor(document_lengths, device=device)
        )

        def attends(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (column <= row) & (column >= document_start[row])

        return BlockMask.from_kv_blocks(
            (num_before_full + 1)[None, None],
            partial_indices[None, None].contiguous(),
            (index - full)[None, None],
            full_indices[None, None].contiguous(),
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=attends,
            seq_lengths=(num_tokens, num_tokens),
        )


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    # dynamic: or every new length would compile anew.
    return torch.compile(flex_attention, dynamic=True)


def flex_base_block(
    query: Tensor, key: Tensor, value: Tensor, document_lengths: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the base keys: query [T, H, Dh], key and value [T, G, Dh], T >= 1, document_lengths positive.

    Returns out [T, H, Dh] and its log-sum-exp [T, H] (natural logarithm), both differentiable on CUDA.
    """
    block_mask = document_causal_block_mask(document_lengths, query.device)
    attend: Any = _compiled_flex_attention() if query.device.type != "cpu" else flex_attention
    with warnings.catch_warnings():  # that it is not compiled on the CPU is our choice
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, aux = attend(
            *(rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value)),
            block_mask=block_mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    return out.squeeze(0).transpose(0, 1), aux.lse.squeeze(0).transpose(0, 1)
