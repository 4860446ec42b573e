"""One optimizer step over the ranks: whose packs are whose, in which round, and what all must know before the first.

A step's packs are the same whatever the number of ranks, and every rank works out alike who takes which. The counts of
rows need the masks only; they are summed over the ranks before the first forward, for that is what lets a loss compute
its gradient there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tasks.trainer.config import Train
from tasks.trainer.data.prepared import PreparedData, PreparedSample
from tasks.trainer.draft.alignment import count_rows
from tasks.trainer.stop import stop
from tasks.trainer.train.batches import Packs, Position
from tasks.trainer.train.packing import deal_packs
from tasks.trainer.train.parallel import Layout, meet, sum_on_host


class Samples(Protocol):
    """Samples by number."""

    def __getitem__(self, number: int, /) -> PreparedSample: ...


def count_step_rows(data: Samples, packs: Sequence[Sequence[int]], ttt_steps: int) -> Tensor:
    """N_k of packs, int64 [K]. It needs the masks only, so it is known before the first forward."""
    rows = torch.zeros(ttt_steps, dtype=torch.int64)
    for pack in packs:
        masks = [torch.from_numpy(data[number].loss_mask.copy()) for number in pack]
        rows += count_rows(torch.cat(masks), [len(mask) for mask in masks], ttt_steps)
    return rows


def agree(layout: Layout, rows: Tensor, *, step: int) -> tuple[Tensor, bool]:
    """N_k over all ranks, int64 [K], and whether to stop before this step: whether SIGTERM came to one of several."""
    if layout.context_rank:
        rows = torch.zeros_like(rows)  # its packs are those of its group's first rank
    asked = torch.tensor([int(stop.asked)])
    total = sum_on_host(layout, torch.cat([rows, asked]), f"the start of step {step}")
    return total[:-1], bool(total[-1])


def rounds_of(
    dealt: Sequence[Sequence[int]], layout: Layout, *, step: int, idle: Callable[[], object] | None = None
) -> Iterator[bool]:
    """This rank's passes of a step: whether each is its last. The ranks meet before every round.

    A rank with fewer packs than others sits out the first rounds: its last pass, which may sum gradients with theirs,
    is in the last one. idle: what it does in the first ones.
    """
    rounds = max(map(len, dealt))
    for left in range(rounds, 0, -1):
        meet(layout, f"pack {rounds - left + 1} of step {step}")
        if left <= len(dealt[layout.data_rank]):
            yield left == 1
        elif idle is not None:
            idle()


def weights_of_rows(rows: Tensor, decay: float) -> list[float]:
    """decay^k / K / N_k for each TTT step, N_k over all packs of one optimizer step; 0 for a step without rows."""
    return [decay**k / len(rows) / int(n) if n else 0.0 for k, n in enumerate(rows)]


def row_weights(data: PreparedData, group: Sequence[Sequence[int]], ttt_steps: int, decay: float) -> list[float]:
    """The weights of one rank's step on these packs."""
    return weights_of_rows(count_step_rows(data, group, ttt_steps), decay)


def next_group(packs: Iterator[tuple[list[int], Position]], size: int) -> tuple[list[list[int]], Position]:
    """The packs of one optimizer step and the position after them."""
    taken = [next(packs) for _ in range(size)]
    return [pack for pack, _ in taken], taken[-1][1]


def own_packs(
    order: Packs,
    position: Position,
    data: PreparedData,
    settings: Train,
    layout: Layout,
    *,
    num_steps: int,
    together: bool,
) -> Iterator[list[PreparedSample]]:
    """This rank's packs of the coming steps, in the order in which it takes them. together: empty ones in the rounds
    that it has none for."""
    packs = order.read_from(position)
    for _ in range(num_steps):
        group, _ = next_group(packs, settings.grad_accumulation)
        dealt = deal_packs(group, data.lengths, num_ranks=layout.data_size)
        own = dealt[layout.data_rank]
        if together:
            yield from ([] for _ in range(max(map(len, dealt)) - len(own)))
        for number in own:
            yield [data[sample] for sample in group[number]]
