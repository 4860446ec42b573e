"""Packs: every sample once an epoch, and the same order always."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from tasks.trainer.train.batches import Packs, Position

LENGTHS = [5, 90, 12, 40, 33, 64, 64, 7, 200, 20]


def test_every_sample_once_an_epoch_within_the_pack() -> None:
    """Red when a sample is lost or doubled, a pack overflows, or a long document shares its pack."""
    packs = Packs(LENGTHS, pack_tokens=100, seed=3)
    for epoch in range(4):
        made = packs.epoch(epoch)
        assert sorted(number for pack in made for number in pack) == list(range(len(LENGTHS)))
        for pack in made:
            assert sum(LENGTHS[number] for number in pack) <= 100 or len(pack) == 1
    assert packs.epoch(0) == packs.epoch(0)
    assert packs.epoch(0) != packs.epoch(1), "epochs are shuffled"


def test_packs_follow_from_seed_and_epoch_alone() -> None:
    """Red when an epoch's packs depend on what was read before, on the number of readers, or not on the seed."""
    packs = Packs(LENGTHS, pack_tokens=100, seed=3)
    later = packs.epoch(5)
    packs.epoch(0)
    readers = [packs.read_from(Position(4, 0)), packs.read_from(Position())]
    for _ in range(20):
        for reader in readers:
            next(reader)
    assert packs.epoch(5) == later == Packs(np.array(LENGTHS), pack_tokens=100, seed=3).epoch(5)
    assert Packs(LENGTHS, pack_tokens=100, seed=4).epoch(5) != later


def test_a_set_smaller_than_a_pack_is_one_pack_an_epoch() -> None:
    """Red when a small set is dropped, filled up with repeats, or its epochs do not end."""
    packs = Packs([5, 9, 12], pack_tokens=100, seed=0)
    taken = list(islice(packs.read_from(Position()), 4))
    assert [sorted(pack) for pack, _ in taken] == [[0, 1, 2]] * 4
    assert [position for _, position in taken] == [Position(epoch, 0) for epoch in (1, 2, 3, 4)]


@pytest.mark.parametrize("taken", [0, 1, 5, 17])
def test_reading_continues_at_any_position(taken: int) -> None:
    """Red when a resumed run repeats or skips a pack, also over the end of an epoch."""
    packs = Packs(LENGTHS, pack_tokens=100, seed=3)
    whole = list(islice(packs.read_from(Position()), 30))
    position = whole[taken - 1][1] if taken else Position()
    assert list(islice(packs.read_from(position), 30 - taken)) == whole[taken:]
