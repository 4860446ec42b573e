"""Which rank owns which rows of a pack: all of them once, each of about one cost, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tasks.trainer.draft.alignment import align, count_rows, target_rows
from tasks.trainer.draft.context import Ranges, Sharing, indices, own_rows_only, split_pack
from tasks.trainer.train.batches import rows_of_parts
from tests.trainer.draft.conftest import masked

K = 7


def random_pack(seed: int, documents: int, longest: int) -> tuple[Tensor, list[int]]:
    """Documents of log-uniform lengths, with a prompt and turns."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(longest ** float(torch.rand((), generator=generator))) for _ in range(documents)]
    turns = torch.rand(sum(lengths) // 37 + 1, generator=generator) < 0.4
    return turns.repeat_interleave(37)[: sum(lengths)], lengths


PACKS: dict[str, tuple[Tensor, Sequence[int]]] = {
    "one long": (masked((True, 32768)), (32768,)),
    "a short answer": (masked((False, 30000), (True, 2768)), (32768,)),
    "turns": (torch.tensor([False, True]).repeat_interleave(700).repeat(20), (28000,)),
    "a long one and short ones": (masked((True, 20000 + 64 * 200)), (20000, *(200,) * 64)),
    "short ones": (masked((True, 12000)), (100,) * 120),
    "like long ones": (masked((True, 24000)), (8000,) * 3),
    **{f"random {seed}": random_pack(seed, 30, 9000) for seed in range(4)},
}
TINY: dict[str, tuple[Tensor, Sequence[int]]] = {
    "one token": (masked((True, 1)), (1,)),
    "shorter than the pieces": (masked((True, 31)), (31,)),
    "just long enough": (masked((True, 32)), (32,)),
    "all answers at one end": (masked((False, 100), (True, 12)), (112,)),
    "nothing counts": (masked((False, 90)), (40, 50)),
    **{f"random {seed}": random_pack(seed, 9, 90) for seed in range(20, 30)},
}


def step_cost(ranges: Ranges, mask: Tensor, lengths: Sequence[int]) -> float:
    """Multiply-adds of a rank's forward, for the draft of an 8B target: D 4096, 8 key heads of 128, MLP 12288, a
    vocabulary of 32,000. fc, keys and values of all rows; projections, MLP, head and attention of those that count."""
    counts = align(mask, lengths, K)
    own = torch.zeros(len(mask), dtype=torch.bool)
    own[indices(ranges)] = True
    rows = float(own.sum()) * (3 * 4096 * 4096 + 2 * 8192 * 1024)
    active = own & counts.counts[0]
    steps = float(active.sum()) * K * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288 + 4096 * 32000)
    return rows + steps + float((counts.positions[active] + 1).sum()) * K * 2 * 4096


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("name", [*PACKS, *(f"tiny: {name}" for name in TINY)])
def test_every_row_is_owned_once(name: str, num_ranks: int) -> None:
    """Red when a row is lost or owned twice, a range leaves its document, or a rank's soft targets are named twice or
    do not hold one that its rows read."""
    mask, lengths = TINY[name[6:]] if name.startswith("tiny: ") else PACKS[name]
    shares = [Sharing(rank, num_ranks, K).of(mask, lengths) for rank in range(num_ranks)]
    assert len({share.rows for share in shares}) == 1
    owned = torch.cat([share.own_rows for share in shares])
    assert torch.equal(owned.sort().values, torch.arange(len(mask)))
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    counted = torch.zeros(K, dtype=torch.int64)
    for share in shares:
        for start, end in share.own:
            assert any(first <= start < end <= last for first, last in pairwise(starts)), "one document a range"
        parts = share.parts(lengths)
        rows = rows_of_parts(mask, lengths, parts)
        assert torch.equal(rows, rows.unique()), "ascending, each once"
        assert torch.isin(rows, target_rows(mask, lengths)).all()
        alignment, runs = own_rows_only(align(mask, lengths, K), lengths, share.own)
        read = torch.cat([alignment.shifted[k, alignment.counts[k]] for k in range(K)])
        assert torch.isin(read, rows).all()
        assert len(rows) <= int(alignment.counts[0].sum()) + K * len(parts), "and hardly more"
        assert torch.isin(indices(runs), share.own_rows).all()
        counted += alignment.counts.sum(1)
    assert torch.equal(counted, count_rows(mask, lengths, K))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", PACKS)
def test_ranks_have_about_as_much_to_do(name: str, num_ranks: int) -> None:
    """Red when a rank gets 8% more to compute than the mean: the others would wait for it in every step. Pieces of as
    many rows, one a rank, would give the last of four 1.2 times the mean, and 3.5 times where a short answer ends."""
    mask, lengths = PACKS[name]
    costs = [step_cost(own, mask, lengths) for own in split_pack(mask, lengths, ttt_steps=K, num_ranks=num_ranks)]
    assert max(costs) <= 1.08 * sum(costs) / num_ranks, [cost / sum(costs) * num_ranks for cost in costs]


def test_a_long_document_takes_as_much_memory_on_each_rank() -> None:
    """Red when late rows, whose attention is dear, lie on one rank: the other would hold the activations of twice as
    many rows, and two ranks would not train twice the context."""
    rows = [len(indices(own)) for own in split_pack(masked((True, 262144)), (262144,), ttt_steps=K, num_ranks=2)]
    assert max(rows) <= 1.1 * sum(rows) / 2, rows


def test_long_pieces_begin_where_attention_computes_squares() -> None:
    """Red when every rank's attention would compute dummy rows at the ends of its pieces."""
    (first, second), (middle,) = split_pack(masked((True, 65536)), (65536,), ttt_steps=K, num_ranks=2)
    assert [row % 512 for row in (*first, *second, *middle)] == [0] * 6
