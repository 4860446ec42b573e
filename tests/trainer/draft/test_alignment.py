"""Active runs: everything that counts is in them, and not more than was asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

from storage import schema
from tasks.trainer.draft.alignment import active_runs, align, target_rows
from tests.trainer.draft.conftest import masked


def runs_of(mask: torch.Tensor, lengths: tuple[int, ...], join: int, ttt_steps: int = 3) -> tuple[tuple[int, int], ...]:
    return active_runs(align(mask, lengths, ttt_steps).counts, lengths, join=join)


def test_an_answer_after_a_prompt() -> None:
    """Red when a run starts a row late: the row before the first supervised token predicts the second one."""
    mask = masked((False, 10), (True, 6))
    assert runs_of(mask, (16,), 0) == ((9, 14),)
    assert runs_of(mask, (16,), 2) == ((9, 16),), "the last two rows are joined to the document's end"
    assert runs_of(mask, (16,), 9) == ((0, 16),), "and the first rows to its start"


def test_runs_stay_in_their_documents() -> None:
    """Red when joining crosses a document's bound, or an empty document shifts those after it."""
    mask = masked((True, 4), (True, 5), (False, 3))
    assert runs_of(mask, (4, 0, 5, 3), 100) == ((0, 4), (4, 9))


def test_nothing_supervised() -> None:
    """Red when no rows at all is a special case somewhere."""
    assert runs_of(masked((False, 9)), (4, 5), 100) == ()
    assert runs_of(masked((True, 1), (False, 1), (True, 1)), (3,), 100) == (), "single tokens train nothing"


@pytest.mark.parametrize("ttt_steps", [1, 2, 7])
def test_target_rows_are_what_the_steps_read(ttt_steps: int) -> None:
    """Red when a row that a step reads as soft target is not captured, one is captured for nothing, or the store keeps
    other rows than training reads."""
    generator = torch.Generator().manual_seed(ttt_steps)
    for _ in range(100):
        lengths = torch.randint(0, 12, (4,), generator=generator).tolist()
        mask = torch.rand(sum(lengths), generator=generator) < 0.7
        alignment = align(mask, lengths, ttt_steps)
        read = {int(row) for shifted, counts in zip(alignment.shifted, alignment.counts, strict=True)
                for row in shifted[counts]}  # fmt: skip
        rows = target_rows(mask, lengths)
        assert rows.tolist() == sorted(read)
        starts = itertools.accumulate(lengths, initial=0)
        parts = zip(starts, mask.split(lengths), strict=False)
        stored = [start + schema.target_rows(part.numpy()) for start, part in parts]
        assert rows.tolist() == [int(row) for part in stored for row in part]


@pytest.mark.parametrize("join", [0, 1, 4, 50])
def test_random_masks(join: int) -> None:
    """Red when a row that counts is left out, runs overlap or touch, or a gap over `join` is filled."""
    generator = torch.Generator().manual_seed(join)
    for _ in range(50):
        lengths = torch.randint(0, 20, (5,), generator=generator).tolist()
        mask = torch.rand(sum(lengths), generator=generator) < 0.7
        counts = align(mask, lengths, 2).counts
        runs = active_runs(counts, lengths, join=join)
        covered = torch.zeros(sum(lengths), dtype=torch.int64)
        for start, end in runs:
            assert start < end
            covered[start:end] += 1
        assert bool((covered[counts[0]] == 1).all())
        assert int(covered.max() if len(covered) else 0) <= 1
        idle, bound = 0, 0
        for length in lengths:
            inside = [(start, end) for start, end in runs if bound <= start < bound + length]
            assert all(end <= bound + length for _, end in inside)
            assert all(b[0] - a[1] > join for a, b in itertools.pairwise(inside))
            bound += length
        # What is computed without counting lies in gaps of at most `join` rows.
        for row in ((covered == 1) & ~counts[0]).tolist():
            idle = idle + 1 if row else 0
            assert idle <= 2 * join, "two documents' ends may touch"
