"""Sources of batches: the same numbers whichever way the states came, read ahead and measured."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from storage.encoding import round_trip
from storage.presets import PRESETS, Encoding
from storage.reader import StoreReader
from storage.schema import StoreSpec
from storage.writer import StoreWriter
from tasks.trainer.capture import capture_samples, to_stored
from tasks.trainer.data.prepared import PreparedSample, sample_id
from tasks.trainer.draft.alignment import target_rows
from tasks.trainer.errors import InputError
from tasks.trainer.target import Target, TopTokens
from tasks.trainer.train.batches import Batch
from tasks.trainer.train.sources import FillingSource, OnlineSource, StoreSource, ahead

ENCODINGS: dict[str, Encoding] = {
    **{name: preset for name, preset in PRESETS.items() if name not in ("small", "tiny")},
    # The presets' k is more than the tiny target's vocabulary.
    "small": dataclasses.replace(PRESETS["small"], top_k=64),
    "tiny": dataclasses.replace(PRESETS["tiny"], top_k=16),
    "aux exact": Encoding(aux_step=None, last="hidden", last_step=0.1),
    "last exact": Encoding(aux_step=0.1, last="hidden"),
    "raw": Encoding(aux_step=None, last="hidden", codec="raw", level=0),
}


def samples(lengths: list[int]) -> list[PreparedSample]:
    generator = np.random.default_rng(0)
    made = []
    for length in lengths:
        ids = generator.integers(0, 300, length, dtype=np.int32)
        # A prompt, an answer, a user's turn of one token, an answer; the shortest has no target row.
        mask = (np.arange(length) >= length // 3) & (np.arange(length) != length // 2)
        made.append(PreparedSample(sample_id(ids, mask), ids, mask))
    return made


DOCUMENTS = samples([5, 90, 12, 2, 33, 64])
PACKS = [DOCUMENTS[:3], DOCUMENTS[3:5], DOCUMENTS[5:]]


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return Target.load(str(target_folder), dtype="bfloat16")


def spec_of(target: Target, encoding: Encoding) -> StoreSpec:
    return StoreSpec(
        fingerprint="f" * 24, target="tiny", aux_layer_ids=target.aux_layer_ids, hidden_size=32, vocab_size=300,
        encoding=encoding, chunk_tokens=16, shard_tokens=32,
    )  # fmt: skip


def fill(url: str, target: Target, encoding: Encoding, documents: list[PreparedSample]) -> None:
    with StoreWriter(url, spec_of(target, encoding)) as writer:
        for sample in documents:
            writer.write(to_stored(sample, capture_samples(target, [sample], top_k=encoding.top_k)[0]))


def assert_same(found: Batch, expected: Batch) -> None:
    for name in Batch.__slots__:
        first, second = getattr(found, name), getattr(expected, name)
        if isinstance(first, TopTokens):
            assert torch.equal(first.ids, second.ids)
            assert torch.equal(first.log_probabilities, second.log_probabilities)
        elif isinstance(first, torch.Tensor):
            assert first.dtype == second.dtype, name
            # Bits, so that a zero's sign counts.
            view = torch.int16 if first.dtype == torch.bfloat16 else first.dtype
            assert torch.equal(first.view(view), second.view(view)), name
        else:
            assert first == second, name


def test_online_batches_are_the_documents_one_after_another(target: Target) -> None:
    """Red when documents are batched together in the target, or target rows are not those of the pack's mask."""
    batches = list(OnlineSource(target).batches(PACKS))
    assert [batch.document_lengths for batch in batches] == [(5, 90, 12), (2, 33), (64,)]
    for pack, batch in zip(PACKS, batches, strict=True):
        assert torch.equal(batch.target_rows, target_rows(batch.loss_mask, batch.document_lengths))
        alone = capture_samples(target, pack)
        assert torch.equal(batch.aux_hidden, torch.cat([states.aux_hidden for states in alone]))
        assert batch.last_hidden is not None
        assert torch.equal(batch.last_hidden, torch.cat([states.last_hidden for states in alone]))  # type: ignore[misc]
        assert len(batch.target_rows) == len(batch.target_argmax) == len(batch.target_lse) == len(batch.last_hidden)


@pytest.mark.parametrize("name", ["lossless", "raw"])
def test_a_lossless_store_gives_the_online_batches_bit_for_bit(name: str, target: Target, tmp_path: Path) -> None:
    """Red when a store changes one bit of what the target computed, or packs documents in another order."""
    url = str(tmp_path / "store")
    fill(url, target, ENCODINGS[name], DOCUMENTS)
    source = StoreSource(StoreReader(url, spec_of(target, ENCODINGS[name])), prefetch_bytes=1)
    for online, offline in zip(OnlineSource(target).batches(PACKS), source.batches(PACKS), strict=True):
        assert_same(offline, online)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_batch_holds_what_the_reader_decodes(name: str, target: Target, tmp_path: Path) -> None:
    """Red when codes of several documents, or of several segments with statistics of their own, are dequantised with
    another document's constants or exceptions."""
    url, spec = str(tmp_path / "store"), spec_of(target, ENCODINGS[name])
    fill(url, target, ENCODINGS[name], DOCUMENTS[:2])
    fill(str(tmp_path / "other"), target, ENCODINGS[name], DOCUMENTS[2:])
    # A second first writer: its segment comes with its own statistics.
    for folder in ("index", "states"):
        for part in (tmp_path / "other" / spec.fingerprint / folder).iterdir():
            if not (tmp_path / "store" / spec.fingerprint / folder / part.name).exists():
                part.rename(tmp_path / "store" / spec.fingerprint / folder / part.name)
    reader = StoreReader(url, spec)
    assert len({entry.segment for entry in reader.entries.values()}) == 2
    for pack, batch in zip(PACKS, StoreSource(reader).batches(PACKS), strict=True):
        read = [reader.read(sample.sample_id) for sample in pack]
        aux = np.concatenate([sample.aux_hidden.reshape(-1, 96) for sample in read])
        assert np.array_equal(batch.aux_hidden.view(torch.int16).numpy().view(np.uint16), aux)
        if batch.top_k is None:
            assert batch.last_hidden is not None
            last = np.concatenate([sample.last_hidden for sample in read if sample.last_hidden is not None])
            assert np.array_equal(batch.last_hidden.view(torch.int16).numpy().view(np.uint16), last)
        else:
            tops = [sample.top_k for sample in read if sample.top_k is not None]
            assert np.array_equal(batch.top_k.ids, np.concatenate([top.ids for top in tops]))
            expected = np.concatenate([top.log_probabilities for top in tops])
            assert np.array_equal(batch.top_k.log_probabilities, expected)
        assert batch.target_argmax.tolist() == [int(token) for sample in read for token in sample.target_argmax]


@pytest.mark.parametrize("name", ENCODINGS)
def test_filling_a_store_gives_what_the_full_store_gives(name: str, target: Target, tmp_path: Path) -> None:
    """Red when it shows in a batch whether a sample came from the target or from the store: first epoch, second epoch,
    a second run, or one that only reads."""
    url, spec = str(tmp_path / "store"), spec_of(target, ENCODINGS[name])
    epochs = []
    with StoreWriter(url, spec, calibration_tokens=20) as writer:
        source = FillingSource(target, writer, url=url)
        source.calibrate(DOCUMENTS)
        for _ in range(2):
            epochs.append(list(source.batches(PACKS)))
            writer.flush()
        assert source.captured_samples == len(DOCUMENTS), "each sample goes through the target once"
        source.close()
    with StoreWriter(url, spec) as writer:
        again = FillingSource(target, writer, url=url)
        again.calibrate(DOCUMENTS)
        epochs.append(list(again.batches(PACKS)))
        assert again.captured_samples == 0
        again.close()
    epochs.append(list(StoreSource(StoreReader(url, spec)).batches(PACKS)))
    for epoch in epochs[1:]:
        for found, expected in zip(epoch, epochs[0], strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("name", ["lossless", "near", "tiny"])
def test_a_used_up_budget_changes_no_number(name: str, target: Target, tmp_path: Path) -> None:
    """Red when samples past the budget are trained on in another form than those within it, or the store grows on."""
    url, spec = str(tmp_path / "store"), spec_of(target, ENCODINGS[name])
    fill(str(tmp_path / "whole"), target, ENCODINGS[name], DOCUMENTS)
    expected = list(StoreSource(StoreReader(str(tmp_path / "whole"), spec)).batches(PACKS))
    budget = StoreReader(str(tmp_path / "whole"), spec).statistics().stored_bytes // 2
    with StoreWriter(url, spec, byte_budget=budget) as writer:
        source = FillingSource(target, writer, url=url)
        source.calibrate(DOCUMENTS)
        for _ in range(2):
            for found, batch in zip(source.batches(PACKS), expected, strict=True):
                assert_same(found, batch)
            writer.flush()
        assert writer.full
        source.close()
    reader = StoreReader(url, spec)
    assert 0 < len(reader.sample_ids()) < len(DOCUMENTS)
    assert reader.statistics().stored_bytes <= budget
    assert len(DOCUMENTS) < source.captured_samples


def test_lossy_filling_trains_on_the_round_trip(target: Target, tmp_path: Path) -> None:
    """Red when a lossy store's first epoch trains on the target's own states, which no later epoch would see."""
    url, spec = str(tmp_path / "store"), spec_of(target, ENCODINGS["compact"])
    with StoreWriter(url, spec) as writer:
        source = FillingSource(target, writer, url=url)
        source.calibrate(DOCUMENTS)
        batch = next(source.batches(PACKS))
        statistics = writer.statistics
        source.close()
    trips = [round_trip(to_stored(s, capture_samples(target, [s])[0]), spec, statistics) for s in PACKS[0]]
    aux = np.concatenate([trip.aux_hidden.reshape(-1, 96) for trip in trips])
    assert np.array_equal(batch.aux_hidden.view(torch.int16).numpy().view(np.uint16), aux)
    exact = next(OnlineSource(target).batches(PACKS))
    assert not torch.equal(batch.aux_hidden, exact.aux_hidden)


def test_fewer_bytes_move_than_bfloat16_has(target: Target, tmp_path: Path) -> None:
    """Red when values travel instead of codes, or the counters count something else."""
    moved = {}
    for name in ("lossless", "near"):
        url = str(tmp_path / name)
        fill(url, target, ENCODINGS[name], DOCUMENTS)
        source = StoreSource(StoreReader(url, spec_of(target, ENCODINGS[name])))
        batches = list(source.batches(PACKS))
        states = sum(b.aux_hidden.nbytes + b.last_hidden.nbytes for b in batches if b.last_hidden is not None)
        assert source.traffic.h2d_bytes_bf16 == states
        moved[name] = source.traffic.h2d_bytes
        small = sum(4 * b.token_ids.numel() + b.target_argmax.nbytes + b.target_lse.nbytes for b in batches)
        if name == "lossless":
            assert moved[name] == states + small
    # Scale, offset and exceptions weigh more in 206 tokens than in a real pack.
    assert moved["near"] < 0.75 * moved["lossless"]


def test_a_store_with_other_tokens_is_refused(target: Target, tmp_path: Path) -> None:
    """Red when states of other tokens are trained on because their id matches."""
    url = str(tmp_path / "store")
    other = dataclasses.replace(DOCUMENTS[1], token_ids=DOCUMENTS[1].token_ids[::-1].copy())
    fill(url, target, ENCODINGS["near"], [other])
    source = StoreSource(StoreReader(url, spec_of(target, ENCODINGS["near"])))
    with pytest.raises(InputError, match=f"sample {other.sample_id}: the store holds other tokens"):
        next(source.batches([[DOCUMENTS[1]]]))


def test_ahead_keeps_order_prepares_one_and_forwards_errors() -> None:
    """Red when items are made in the consumer's thread, more than one ahead, or a thread's error is lost."""
    made: list[tuple[int, str]] = []

    def items() -> Iterator[int]:
        for number in range(5):
            made.append((number, threading.current_thread().name))
            yield number
        raise InputError("the sixth")

    coming = ahead(items())
    assert next(coming) == 0
    assert next(coming) == 1
    assert [next(coming) for _ in range(3)] == [2, 3, 4]
    with pytest.raises(InputError, match="the sixth"):
        next(coming)
    assert [number for number, _ in made] == list(range(5))
    assert all(name.startswith("ahead") for _, name in made)


def test_closing_ahead_stops_what_makes_the_items() -> None:
    """Red when a run that ends early leaves its thread running or its reader open."""
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.append(True)

    before = threading.active_count()
    coming = ahead(items())
    next(coming)
    coming.close()
    assert closed == [True]
    assert threading.active_count() == before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENCODINGS)
def test_the_gpus_batches_are_the_cpus(name: str, target: Target, tmp_path: Path) -> None:
    """Red when codes are read before their copy has arrived, memory is given away while a step reads it, or the GPU
    dequantises to other bits."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, none is available")
    url, spec = str(tmp_path / "store"), spec_of(target, ENCODINGS[name])
    fill(url, target, ENCODINGS[name], DOCUMENTS)
    packs = [PACKS[number % 3] for number in range(60)]
    source = StoreSource(StoreReader(url, spec), device="cuda")
    expected = list(StoreSource(StoreReader(url, spec)).batches(PACKS))
    for number, batch in enumerate(source.batches(packs)):
        torch.empty(1 << 24, device="cuda").fill_(number)  # work on the step's stream, in memory given back before
        assert batch.aux_hidden.device.type == "cuda"
        assert_same(batch.to("cpu"), expected[number % 3])
    assert source.traffic.device_wait_s >= 0
    with StoreWriter(str(tmp_path / "filled"), spec, calibration_tokens=20) as writer:
        filling = FillingSource(target, writer, url=str(tmp_path / "filled"), device="cuda")
        filling.calibrate(DOCUMENTS)
        first = [batch.to("cpu") for batch in filling.batches(PACKS)]
        writer.flush()
        for found, batch in zip(filling.batches(PACKS), first, strict=True):
            assert_same(found.to("cpu"), batch)
        filling.close()


@pytest.mark.gpu
def test_the_online_source_runs_ahead_on_the_gpu(target_folder: Path) -> None:
    """Red when a batch made in the thread is read before the target has finished it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, none is available")
    target = Target.load(str(target_folder), dtype="bfloat16", device="cuda")
    packs = [PACKS[number % 3] for number in range(30)]
    alone = [capture_samples(target, pack) for pack in PACKS]
    for number, batch in enumerate(OnlineSource(target, device="cuda").batches(packs)):
        assert torch.equal(batch.aux_hidden, torch.cat([states.aux_hidden for states in alone[number % 3]]))
