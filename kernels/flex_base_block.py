"""The base block through flex_attention, with a BlockMask built from the document boundaries and the active rows.

`create_block_mask` evaluates the mask on all A x T pairs (100 GB at 49K tokens, as users of other trainers report).
These masks need no evaluation: the keys that a block of query rows attends to are one range a document in it, and
which key blocks are full follows from the first and last of its rows. The tables are [A/128, T/128] int32, four of
them: 16 MiB at 128K tokens; building them takes a few vector operations, whatever the number of documents or runs.

On CUDA flex_attention is compiled for all lengths at once, in a few variants: all rows active, some, and no more than
one block of them (the compiler takes equal sizes for one, and a size of 1 for a constant), each for one run of rows
and for several. Without compilation, on the CPU, it holds all A x T scores and has no backward: good for checking, not
for training.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kernels.attention_plan import cached_runs

BLOCK_SIZE = 128


@functools.lru_cache(maxsize=8)
def document_causal_block_mask(
    document_lengths: tuple[int, ...], query_runs: tuple[tuple[int, int], ...] | None, device: torch.device
) -> BlockMask:
    """The mask "same document, and not after the query's row" of the active rows. One serves all TTT steps.

    document_lengths and query_runs as `ttt_attention` takes them, at least one active row. Time and memory: the
    (A / 128) * (T / 128) entries of the block tables.
    """
    with torch.inference_mode(False):  # an inference tensor in the cache could not be saved for a later backward
        position, document_start = (rows.to(device) for rows in _rows(document_lengths, query_runs))
        num_rows, num_tokens = position.shape[0], sum(document_lengths)
        tables = _block_tables(position, document_start, num_tokens)
        # Longer than A, so that the compiler does not take the length of these for that of the queries: it would
        # compile anew once they differ.
        position, document_start = (
            torch.nn.functional.pad(rows, (0, -num_rows % BLOCK_SIZE + BLOCK_SIZE // 2))
            for rows in (position, document_start)
        )

        def attends(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (column <= position[row]) & (column >= document_start[row])

        return BlockMask.from_kv_blocks(
            tables[0][None, None],
            tables[1][None, None],
            tables[2][None, None],
            tables[3][None, None],
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=attends,
            seq_lengths=(num_rows, num_tokens),
        )


def _rows(document_lengths: tuple[int, ...], query_runs: tuple[tuple[int, int], ...] | None) -> tuple[Tensor, Tensor]:
    """The active rows, and the first row of the document of each: int64 [A] on the CPU."""
    runs = cached_runs(document_lengths, query_runs)
    table = torch.tensor([(run.start - run.first, run.num_rows, run.document) for run in runs])
    shift, num_rows, document = table.unbind(1)
    position = torch.arange(int(num_rows.sum())) + torch.repeat_interleave(shift, num_rows)
    return position, torch.repeat_interleave(document, num_rows)


def _block_tables(position: Tensor, document_start: Tensor, num_tokens: int) -> tuple[Tensor, ...]:
    """(partial counts, partial key blocks, full counts, full key blocks) of each block of query rows, int32.

    A row attends to the keys document_start .. position. The rows of one document in a block have one first key and
    ascending positions, so together they attend to what the last of them does: one range of keys. A key block is full
    when it lies in the range of the first row, and the rows have one document (rows and keys past the end, in a last
    block, are the kernel's to leave out).

        query block of one document        ......[ first .. | full | full | .. partial .. ]
        of two documents                   ..[ range of one ]....[ range of the other ]
    """
    num_rows, device = position.shape[0], position.device
    num_query_blocks, num_key_blocks = -(-num_rows // BLOCK_SIZE), -(-num_tokens // BLOCK_SIZE)
    row = torch.arange(num_rows, device=device)
    query_block = row // BLOCK_SIZE
    # The last row of every document in every block; each is one range of key blocks, first .. last. Ranges that share
    # a key block count it twice, hence "> 0". All rows take part, the others with a weight of 0: no shape here depends
    # on the values, which the host would have to wait for.
    follows = torch.ones(num_rows, dtype=torch.bool, device=device)
    follows[:-1] = (query_block[1:] != query_block[:-1]) | (document_start[1:] != document_start[:-1])
    weight = follows.to(torch.int32)
    edges = torch.zeros(num_query_blocks * (num_key_blocks + 1), dtype=torch.int32, device=device)
    row_of_edges = query_block * (num_key_blocks + 1)
    edges.index_add_(0, row_of_edges + document_start // BLOCK_SIZE, weight)
    edges.index_add_(0, row_of_edges + position // BLOCK_SIZE + 1, -weight)
    attended = edges.view(num_query_blocks, -1).cumsum(1, dtype=torch.int32)[:, :-1] > 0

    first_row = torch.arange(num_query_blocks, device=device) * BLOCK_SIZE
    last_row = (first_row + BLOCK_SIZE - 1).clamp(max=num_rows - 1)
    one_document = document_start[first_row] == document_start[last_row]
    first_full = -(-document_start[first_row] // BLOCK_SIZE)
    end_full = torch.where(one_document, (position[first_row] + 1) // BLOCK_SIZE, 0)
    key_block = torch.arange(num_key_blocks, device=device)
    full = (key_block >= first_full[:, None]) & (key_block < end_full[:, None])
    return *_ordered(attended & ~full), *_ordered(full)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(how many, which first) of each row of a bool table, int32; the chosen in ascending order, then the others."""
    indices = torch.argsort((~chosen).to(torch.uint8), dim=1, stable=True)
    return chosen.sum(1, dtype=torch.int32), indices.to(torch.int32)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    # dynamic: or every new length would compile anew.
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _kernel_options(device: torch.device, one_run: bool) -> dict[str, bool]:
    """Hints, worth a tenth of the time together on an H200. one_run: one run of active rows, of one document."""
    if device.type != "cuda":
        return {}
    # Hopper's copy engine. Of one run, the partial blocks and the full blocks of a row or column of the mask are each
    # one range, so that the kernel need not look the next one up.
    return {"USE_TMA": torch.cuda.get_device_capability(device)[0] >= 9, "BLOCKS_ARE_CONTIGUOUS": one_run}


def flex_base_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_lengths: tuple[int, ...],
    query_runs: tuple[tuple[int, int], ...] | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend to the base keys: query [A, H, Dh], key and value [T, G, Dh], A >= 1.

    Returns out [A, H, Dh] and its log-sum-exp [H, A] (natural logarithm), both differentiable on CUDA.
    """
    block_mask = document_causal_block_mask(document_lengths, query_runs, query.device)
    attend: Any = _compiled_flex_attention() if query.device.type != "cpu" else flex_attention
    with warnings.catch_warnings():  # that it is not compiled on the CPU is our choice
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, aux = attend(
            *(rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value)),
            block_mask=block_mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
            kernel_options=_kernel_options(query.device, len(cached_runs(document_lengths, query_runs)) == 1),
        )
    return out.squeeze(0).transpose(0, 1), aux.lse.squeeze(0)
