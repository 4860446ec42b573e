"""Context parallelism: several ranks share one pack, each computes rows of its own.

    one document, 2 ranks    [ 0 | 1 | 1 | 0 ]      pieces dealt out there and back: who has early rows, with few keys
                                                    before them, has late ones, too

Of a TTT step only attention looks at other rows, and of these at their step-0 keys and values alone. So a rank fuses,
projects, attends, computes the MLP and the head for its own rows; the step-0 keys and values of all rows are gathered
once a layer, used by all K steps, and their gradients, summed over the steps, go back to the owners once. Everything
else is local: a diagonal block is the row's own, token ids and masks of the whole pack are on every rank, and the soft
targets that the later steps read past a piece's end come with the batch (`Part.stop`).

The price against a ring that passes blocks on: every rank holds the keys and values of the whole pack and their
gradients, 4 G Dh elements a token (8 KB with 8 heads of 128 in bfloat16, and for moments as much again). A ring would
move them K times, forward and backward, and compute each causal block in a call of its own; here a run of rows is one
call, and a layer two collectives.

Shapes: T tokens of the pack, L own rows, G key/value heads, Dh head dim.
"""

# mypy: allow-untyped-calls
# (torch.autograd.Function.apply has no annotations)
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tasks.trainer.draft.alignment import Alignment, active_runs, align, moved

# torch 2.13 renames it, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

Ranges = tuple[tuple[int, int], ...]
"""Ascending row ranges [start, end), none empty, no two of one document next to each other."""

# Costs in pairs of a query and a key, for the draft of an 8B target: a row's fc and keys take as many multiply-adds as
# 8,192 of them, and a TTT step of an active row (projections, MLP, head) 5 times that.
_ROW_PAIRS = 8192
_STEP_ROWS = 5
# A document of less than this part of a rank's share stays whole: where it goes evens out what cutting leaves.
_WHOLE_PART = 8
# A rank may have so much more to compute than the mean.
_EVEN_COST = 1.03


@dataclass(frozen=True, slots=True)
class Part:
    """A range of own rows, in one document."""

    document: int
    """The document's number in the pack."""
    start: int
    """First row, counted from the document's first."""
    end: int
    """One past the last row."""
    stop: int
    """One past the last token that the rows read: TTT step k reads x[p+1+k] and predicts the next."""


@dataclass(frozen=True, slots=True)
class ContextShare:
    """Which rows of one pack each rank of a context group owns, and which rank this is."""

    rows: tuple[Ranges, ...]
    """Of each rank; together every row once."""
    rank: int
    ttt_steps: int

    @property
    def own(self) -> Ranges:
        """This rank's."""
        return self.rows[self.rank]

    @property
    def own_rows(self) -> Tensor:
        """int64 [L], ascending."""
        return indices(self.own)

    def parts(self, document_lengths: Sequence[int]) -> list[Part]:
        """The own ranges by document. A rank without rows has one part without rows: states of some shape."""
        bounds = list(pairwise(accumulate(document_lengths, initial=0)))
        found, number = [], 0
        for start, end in self.own or ((0, 0),):
            while bounds[number][1] <= start:
                number += 1
            first, last = bounds[number]
            assert end <= last, "a range of own rows crosses a document's end"
            stop = min(end + self.ttt_steps + 1, last)
            found.append(Part(number, start - first, end - first, stop - first))
        return found


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a run's packs are shared."""

    rank: int
    num_ranks: int
    ttt_steps: int

    def of(self, loss_mask: Tensor, document_lengths: Sequence[int]) -> ContextShare:
        """This rank's share of a pack. loss_mask bool [T] on the host."""
        rows = split_pack(loss_mask, document_lengths, ttt_steps=self.ttt_steps, num_ranks=self.num_ranks)
        return ContextShare(rows, self.rank, self.ttt_steps)


def indices(ranges: Iterable[tuple[int, int]]) -> Tensor:
    """The rows of ranges, one after another: int64, on the host."""
    return torch.cat([torch.arange(0), *(torch.arange(start, end) for start, end in ranges)])


def split_pack(
    loss_mask: Tensor, document_lengths: Sequence[int], *, ttt_steps: int, num_ranks: int
) -> tuple[Ranges, ...]:
    """The rows of each rank, balanced by what they cost: a pure function of the masks, in integers, so that all ranks
    come to the same.

    loss_mask bool [T] on the host. A document that weighs little stays whole, on the rank that has the least to do;
    others are cut into 2 * num_ranks pieces. A pack of fewer documents than ranks, none long enough to be cut, leaves
    ranks without rows.
    """
    counts = align(loss_mask, document_lengths, ttt_steps).counts
    active = torch.zeros(loss_mask.shape[0], dtype=torch.int64)
    active[indices(active_runs(counts, document_lengths))] = 1
    bounds = list(pairwise(accumulate(document_lengths, initial=0)))
    costs = [_costs(active[start:end], ttt_steps) for start, end in bounds]
    totals = [int(cost.sum()) for cost in costs]
    load = [0] * num_ranks
    owned: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    whole = []
    least = 2 * num_ranks * (ttt_steps + 1)
    for (start, end), cost, total in zip(bounds, costs, totals, strict=True):
        if end - start < least or total * num_ranks * _WHOLE_PART <= sum(totals):
            whole.append((total, start, end))
            continue
        for rank, pieces in enumerate(_deal(active[start:end], cost, num_ranks, ttt_steps)):
            load[rank] += sum(int(cost[first:last].sum()) for first, last in pieces)
            owned[rank] += [(start + first, start + last) for first, last in pieces]
    for total, start, end in sorted(whole, key=lambda document: (-document[0], document[1])):
        rank = min(range(num_ranks), key=lambda number: (load[number], number))
        load[rank] += total
        owned[rank].append((start, end))
    return tuple(_joined(sorted(ranges), {start for start, _ in bounds}) for ranges in owned)


def _costs(active: Tensor, ttt_steps: int) -> Tensor:
    """What the rows of one document cost, int64 [T]."""
    return _linear_costs(active, ttt_steps) + ttt_steps * active * torch.arange(1, active.shape[0] + 1)


def _linear_costs(active: Tensor, ttt_steps: int) -> Tensor:
    """All but attention, which is about what the rows take in memory, too."""
    return _ROW_PAIRS * (1 + _STEP_ROWS * ttt_steps * active)


def _deal(active: Tensor, cost: Tensor, num_ranks: int, ttt_steps: int) -> list[list[tuple[int, int]]]:
    """Each rank's two pieces of one document.

    Pieces of one linear cost give memory evenly, and attention, too, where active rows lie evenly. Where they do not (a
    long prompt, a short answer), pieces are of one cost in all.
    """
    for evenly in (_linear_costs(active, ttt_steps), cost):
        pieces = list(pairwise(_cut(evenly, 2 * num_ranks, min_rows=ttt_steps + 1)))
        dealt = [[pieces[rank], pieces[-1 - rank]] for rank in range(num_ranks)]
        totals = [sum(int(cost[first:last].sum()) for first, last in of_rank) for of_rank in dealt]
        if max(totals) * num_ranks <= _EVEN_COST * sum(totals):
            break
    return dealt


def _cut(cost: Tensor, num_pieces: int, *, min_rows: int) -> list[int]:
    """num_pieces + 1 bounds of pieces of about one cost, each of min_rows at least.

    A rank's soft targets reach ttt_steps rows past its pieces, which must not run into the rank's next piece. Bounds of
    long pieces are multiples of what the attention kernels compute at once (kernels/attention_plan.py).
    """
    length, summed = cost.shape[0], cost.cumsum(0)
    due = torch.searchsorted(summed, int(summed[-1]) * torch.arange(1, num_pieces) // num_pieces)
    shortest = int(torch.cat([torch.tensor([0]), due, torch.tensor([length])]).diff().min())
    grain = next((grain for grain in (512, 128) if shortest >= 16 * grain), 1)
    bounds = (due.add(grain // 2) // grain * grain).tolist()
    least = -(-min_rows // grain) * grain
    for number in range(len(bounds)):
        bounds[number] = max(bounds[number], least + (bounds[number - 1] if number else 0))
    for number in reversed(range(len(bounds))):
        after = bounds[number + 1] if number + 1 < len(bounds) else length
        bounds[number] = min(bounds[number], after - least)
    return [0, *bounds, length]


def _joined(ranges: Sequence[tuple[int, int]], document_starts: set[int]) -> Ranges:
    """Pieces of one document next to each other as one range."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start and start not in document_starts:
            start, _ = joined.pop()
        joined.append((start, end))
    return tuple(joined)


def own_rows_only(
    alignment: Alignment, document_lengths: Sequence[int], own: Ranges
) -> tuple[Alignment, tuple[tuple[int, int], ...]]:
    """The alignment in which own rows alone count, and the row ranges to compute: `active_runs` of the own ranges."""
    is_own = torch.zeros(alignment.counts.shape[1], dtype=torch.bool)
    is_own[indices(own)] = True
    counts = alignment.counts & is_own
    cuts = {*accumulate(document_lengths, initial=0), *(row for between in own for row in between)}
    pieces = [end - start for start, end in pairwise(sorted(cuts))]
    return replace(alignment, counts=counts), active_runs(counts, pieces)


class KeyExchange:
    """Gathers step-0 keys and values of a pack over the ranks of a context group, and brings their gradients back."""

    def __init__(self, share: ContextShare, group: dist.ProcessGroup, device: torch.device) -> None:
        assert dist.get_world_size(group) == len(share.rows), "a pack is shared by its context group, no other ranks"
        assert dist.get_rank(group) == share.rank
        self.group, self.rank = group, share.rank
        self.num_rows = [sum(end - start for start, end in ranges) for ranges in share.rows]
        by_rank = torch.cat([indices(ranges) for ranges in share.rows])
        most = max(self.num_rows)
        # Where each row of the pack lies among the keys that were gathered: the ranks' one after another, each filled
        # up to the longest and followed by its values.
        places = torch.cat([torch.arange(rows) + 2 * most * rank for rank, rows in enumerate(self.num_rows)])
        self.key_places = torch.empty_like(by_rank).scatter_(0, by_rank, places)
        self.key_places = moved(self.key_places, device)
        self.value_places = self.key_places + most
        self.rows_of_ranks = moved(by_rank, device).split(self.num_rows)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key, value [L, G, Dh] of own rows -> [T, G, Dh] each, contiguous. Every rank of the group calls it, also one
        without rows, and their backwards, as often and in the same order."""
        gathered: tuple[Tensor, Tensor] = _Gather.apply(self, key, value)
        return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: KeyExchange, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        num_ranks, most = len(exchange.num_rows), max(exchange.num_rows)
        own = key.new_zeros(2, most, *key.shape[1:])
        own[0, : key.shape[0]] = key
        own[1, : value.shape[0]] = value
        gathered = key.new_empty(num_ranks, *own.shape)
        _all_gather(_as_bytes(gathered), _as_bytes(own), group=exchange.group)
        rows = gathered.flatten(0, 2)
        return rows.index_select(0, exchange.key_places), rows.index_select(0, exchange.value_places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> tuple[Any, ...]:
        exchange: KeyExchange = ctx.exchange
        num_ranks, num_rows = len(exchange.num_rows), exchange.num_rows[exchange.rank]
        head_shape = grad_key.shape[1:]
        sent = grad_key.new_empty(2 * grad_key.shape[0], *head_shape)
        pieces = sent.split([rows for rows in exchange.num_rows for _ in range(2)])
        for rank, rows in enumerate(exchange.rows_of_ranks):
            torch.index_select(grad_key, 0, rows, out=pieces[2 * rank])
            torch.index_select(grad_value, 0, rows, out=pieces[2 * rank + 1])
        received = grad_key.new_empty(num_ranks, 2, num_rows, *head_shape)
        row_bytes = head_shape.numel() * sent.element_size()
        dist.all_to_all_single(
            _as_bytes(received),
            _as_bytes(sent),
            output_split_sizes=[2 * num_rows * row_bytes] * num_ranks,
            input_split_sizes=[2 * rows * row_bytes for rows in exchange.num_rows],
            group=exchange.group,
        )
        # Not a reduce-scatter, which would round each partial sum to bfloat16: a sum here is one in float32, rounded.
        of_key, of_value = received.sum(0)
        return None, of_key, of_value


def _as_bytes(rows: Tensor) -> Tensor:
    """Flat uint8: rows are only moved, and gloo does not know bfloat16."""
    return rows.flatten().view(torch.uint8)
