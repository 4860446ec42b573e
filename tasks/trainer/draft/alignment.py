"""Which row reads which token at which TTT step, which rows count, and which need computing at all.

One document, tokens x[0..T-1]; row p at TTT step k:

    token input    x[p+1+k]  (its frozen embedding; teacher forced)
    soft target    softmax(head(last_hidden[p+1+k])) over the draft vocabulary
    predicts       x[p+2+k]
    counts when    x[p+1] .. x[p+2+k] exist, lie in the same document and are all supervised

                 row p=0    p=1    p=2    p=3          (tokens a b c d e f)
    step 0 reads   b         c      d      e     predicts  c  d  e  f
    step 1 reads   c         d      e      .               d  e  f  .

The rows that any step reads as soft targets are the *target rows*: those of step 0, for the later steps read some of
the same. Nothing else of the target's last state is captured, stored or projected.

A row that counts at one step is *active*. A row that counts at none serves the others through its step-0 key and value
only, so queries, output projection, MLP, later steps and head can leave it out: the loss and all gradients are the
same. Everything here is made on the host from masks, before any forward, so that no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Inactive rows between two active runs of one document, or between a run and an end of its document, that are computed
# none the less. A run costs attention a launch or two a step, and a document without gaps needs no gathering at all;
# 32 rows cost next to nothing. (An answer's last two rows never count: they predict nothing.)
JOIN_ROWS = 32


@dataclass(frozen=True, slots=True)
class Alignment:
    """Where each row of a packed batch reads at each TTT step.

    positions int64 [T]: row within its document. shifted int64 [K, T]: row of x[p+1+k], which is the token input and
    the row of the soft target; clamped to the document's last row where it would leave it (such rows never count).
    counts bool [K, T]: the rows that count at each step; those of step k + 1 are among those of step k.
    """

    positions: Tensor
    shifted: Tensor
    counts: Tensor


def align(loss_mask: Tensor, document_lengths: Sequence[int], ttt_steps: int) -> Alignment:
    """The alignment of a packed batch. loss_mask bool [T]; the lengths sum to T. Works on the mask's device."""
    device = loss_mask.device
    lengths = torch.tensor(document_lengths, dtype=torch.int64)
    ends = lengths.cumsum(0)
    assert int(lengths.sum()) == loss_mask.shape[0], "document lengths must sum to the number of rows"
    last_row = torch.repeat_interleave(ends - 1, lengths).to(device)
    start = torch.repeat_interleave(ends - lengths, lengths).to(device)
    rows = torch.arange(loss_mask.shape[0], device=device)
    # First row at or after p that is not supervised or lies past the document: the supervised run from p ends there.
    breaks = torch.where(loss_mask, last_row + 1, rows)
    run_end = torch.minimum(breaks.flip(0).cummin(0).values.flip(0), last_row + 1)
    steps = torch.arange(ttt_steps, device=device)[:, None]
    next_row = torch.minimum(rows + 1, last_row)
    run_after = torch.where(rows < last_row, run_end[next_row] - (rows + 1), 0)
    return Alignment(
        positions=rows - start,
        shifted=torch.minimum(rows + 1 + steps, last_row),
        counts=run_after >= steps + 2,
    )


def count_rows(loss_mask: Tensor, document_lengths: Sequence[int], ttt_steps: int) -> Tensor:
    """N_k, int64 [K]: rows that count at each step. Known from masks alone, before any forward."""
    return align(loss_mask, document_lengths, ttt_steps).counts.sum(1)


def target_rows(loss_mask: Tensor, document_lengths: Sequence[int]) -> Tensor:
    """int64 [R], ascending, on the host: the rows q whose distribution is a soft target of some step; R is N_0.

    q is not its document's first row, and x[q] and x[q+1] are supervised and of one document.
    """
    return align(loss_mask, document_lengths, 1).counts[0].nonzero().flatten() + 1


def active_runs(
    counts: Tensor, document_lengths: Sequence[int], *, join: int = JOIN_ROWS
) -> tuple[tuple[int, int], ...]:
    """The row ranges to compute: ascending [start, end), each inside one document, all rows with counts[0] in them.

    counts bool [K, T] on the host. Runs of one document with at most `join` rows between them become one, and so do a
    run and either end of its document.
    """
    runs: list[tuple[int, int]] = []
    first_row = 0
    for length, rows in zip(document_lengths, counts[0].split(list(document_lengths)), strict=True):
        bounds = torch.nn.functional.pad(rows.to(torch.int8), (1, 1)).diff().nonzero().flatten().tolist()
        of_document: list[tuple[int, int]] = []
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            start, end = 0 if start <= join else start, length if length - end <= join else end
            if of_document and start - of_document[-1][1] <= join:
                start, _ = of_document.pop()
            of_document.append((start, end))
        runs += [(first_row + start, first_row + end) for start, end in of_document]
        first_row += length
    return tuple(runs)


def moved(index: Tensor, device: torch.device) -> Tensor:
    """An index made here, on the training device; the host does not wait for what that has queued."""
    # Of pageable memory a copy would.
    return (index.pin_memory() if device.type == "cuda" else index).to(device, non_blocking=True)
