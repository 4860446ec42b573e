"""Packs and batches: every sample once an epoch, the same order always, the same numbers from both sources."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from storage.reader import StoreReader
from storage.schema import StoreSpec
from storage.writer import StoreWriter
from tasks.trainer.capture import to_stored
from tasks.trainer.data.prepared import PreparedSample, sample_id
from tasks.trainer.target import Target
from tasks.trainer.train.batches import Batch, OnlineSource, Packs, Position, StoreSource, assemble

LENGTHS = [5, 90, 12, 40, 33, 64, 64, 7, 200, 20]


def samples(lengths: list[int]) -> list[PreparedSample]:
    generator = np.random.default_rng(0)
    made = []
    for length in lengths:
        ids = generator.integers(0, 300, length, dtype=np.int32)
        mask = np.arange(length) >= length // 3
        made.append(PreparedSample(sample_id(ids, mask), ids, mask))
    return made


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


@pytest.mark.parametrize("taken", [0, 1, 5, 17])
def test_reading_continues_at_any_position(taken: int) -> None:
    """Red when a resumed run repeats or skips a pack, also over the end of an epoch."""
    packs = Packs(LENGTHS, pack_tokens=100, seed=3)
    whole = list(islice(packs.read_from(Position()), 30))
    position = whole[taken - 1][1] if taken else Position()
    assert list(islice(packs.read_from(position), 30 - taken)) == whole[taken:]


def test_both_sources_give_the_same_batch_bit_for_bit(target_folder: Path, tmp_path: Path) -> None:
    """Red when a store changes one bit of what the target computed, or packs documents in another order."""
    target = Target.load(str(target_folder), dtype="bfloat16")
    documents = samples([5, 90, 12])
    spec = StoreSpec(
        fingerprint="f" * 24, target="tiny", aux_layer_ids=target.aux_layer_ids, hidden_size=32, vocab_size=300,
        codec="lossless",
    )  # fmt: skip
    with StoreWriter(str(tmp_path / "store"), spec) as writer:
        for sample in documents:
            ids = torch.from_numpy(sample.token_ids.astype(np.int64))
            writer.write(to_stored(sample, target.capture(ids, sample_id=sample.sample_id)))
    online = assemble(documents, OnlineSource(target))
    offline = assemble(documents, StoreSource(StoreReader(str(tmp_path / "store"), spec)))
    assert online.document_lengths == offline.document_lengths == (5, 90, 12)
    for name in Batch.__slots__:
        first, second = getattr(online, name), getattr(offline, name)
        if isinstance(first, torch.Tensor):
            assert first.dtype == second.dtype, name
            assert torch.equal(first, second), name
