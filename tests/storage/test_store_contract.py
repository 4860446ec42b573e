"""What every store must do, as one suite inherited by each kind of place: local disk, memory, a real S3 server."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

import numpy as np
import pytest

from storage.encoding import round_trip
from storage.errors import StoreError
from storage.index import read_index
from storage.location import locate
from storage.presets import PRESETS
from storage.quantise import dequantise
from storage.reader import StoreReader
from storage.schema import Sample, StoreSpec, StoreStatistics, raw_bytes, target_rows
from storage.writer import StoreWriter


def write_all(url: str, spec: StoreSpec, samples: list[Sample]) -> list[Sample]:
    """Write and close; gives the samples as they are to come back."""
    with StoreWriter(url, spec) as writer:
        for sample in samples:
            assert writer.write(sample)
        writer.flush()
        return [round_trip(sample, spec, writer.statistics) for sample in samples]


class StoreContract:
    """Subclasses give the fixture `url`: a new, empty place."""

    @pytest.mark.parametrize("preset", PRESETS)
    def test_samples_come_back(self, url, preset, make_spec, make_sample, assert_same):
        # Red when a row, dtype or bit changes: lengths below, at and above chunk (4) and shard (8); lossless as they
        # were, the others as the encoding's own round trip says.
        spec = make_spec(preset=preset)
        samples = [make_sample(f"s{length}", length, spec) for length in (1, 3, 4, 5, 8, 9, 16, 41)]
        expected = write_all(url, spec, samples)
        with StoreReader(url, spec) as reader:
            assert reader.sample_ids() == {sample.sample_id for sample in samples}
            for sample, want in reversed(list(zip(samples, expected, strict=True))):
                assert_same(reader.read(sample.sample_id), want)
                if spec.encoding.lossless:
                    assert_same(reader.read(sample.sample_id), sample)

    def test_a_sample_is_visible_once_flushed(self, url, make_spec, make_sample, assert_same):
        # Red when a commit waits for close(), or when an open reader changes under its user.
        with StoreWriter(url, make_spec()) as writer, StoreReader(url, make_spec()) as before:
            writer.write(make_sample("a", 5))
            writer.flush()
            assert writer.committed() == {"a"}
            assert before.sample_ids() == frozenset()
            with StoreReader(url, make_spec()) as reader:
                assert_same(reader.read("a"), make_sample("a", 5))

    def test_the_same_sample_again_is_nothing_to_do(self, url, make_spec, make_sample, assert_same):
        # Red when a second write stores anything, or replaces what was committed (other states, same tokens).
        first = make_sample("a", 9)
        again = dataclasses.replace(first, target_lse=first.target_lse + 1)
        with StoreWriter(url, make_spec()) as writer:
            assert writer.write(first)
            assert writer.write(again)
            writer.flush()
            assert writer.write(again)
        before = locate(url).sizes()
        with StoreWriter(url, make_spec()) as writer:
            assert writer.committed() == {"a"}
            assert writer.write(again)
        assert locate(url).sizes() == before
        with StoreReader(url, make_spec()) as reader:
            assert_same(reader.read("a"), first)

    def test_other_tokens_under_a_known_id_are_refused(self, url, make_spec, make_sample):
        # Red when an id that is not the hash of its tokens silently gives the wrong states, committed or queued.
        sample = make_sample("a", 9)
        other = dataclasses.replace(sample, token_ids=sample.token_ids[::-1].copy())
        with StoreWriter(url, make_spec()) as writer:
            writer.write(sample)
            with pytest.raises(StoreError, match="sample a is committed with other tokens or another loss mask"):
                writer.write(other)
            writer.flush()
            with pytest.raises(StoreError, match="sample a is committed with other tokens or another loss mask"):
                writer.write(other)

    @pytest.mark.parametrize("preset", ["lossless", "near"])
    def test_two_writers_at_once_do_not_touch_each_other(self, url, preset, make_spec, make_sample, assert_same):
        # Red when writers share arrays, statistics or index files; "both" is written by both and must read as one's.
        spec = make_spec(preset=preset)
        one, two = StoreWriter(url, spec), StoreWriter(url, spec)
        want = {}
        for writer, name in ((one, "one"), (two, "two")):
            samples = [make_sample(f"{name}{i}", 3 + i, spec) for i in range(5)] + [make_sample("both", 7, spec)]
            for sample in samples:
                writer.write(sample)
            writer.flush()
            want |= {sample.sample_id: round_trip(sample, spec, writer.statistics) for sample in samples[:5]}
        one.close()
        two.close()
        with StoreReader(url, spec) as reader:
            assert reader.sample_ids() == {*want, "both"}
            for sample_id, sample in want.items():
                assert_same(reader.read(sample_id), sample)
            assert np.array_equal(reader.read("both").token_ids, make_sample("both", 7, spec).token_ids)

    def test_a_later_writer_takes_the_statistics_that_are_there(self, url, make_spec, make_sample):
        # Red when each writer calibrates anew: one store's samples would be coded in as many ways as it had writers.
        spec = make_spec(preset="near")
        write_all(url, spec, [make_sample("a", 20, spec)])
        with StoreWriter(url, spec) as writer:
            assert writer.statistics is not None
            writer.write(make_sample("b", 30, spec))
        assert len({entry.segment for entry in read_index(locate(url).child(spec.fingerprint)).values()}) == 2
        assert len({entry.statistics_digest for entry in read_index(locate(url).child(spec.fingerprint)).values()}) == 1

    def test_arrays_and_index_grow(self, url, make_spec, make_sample, assert_same, monkeypatch):
        # Red when rows past the first capacity, or entries past the first index file, are lost.
        monkeypatch.setattr("storage.segment._FIRST_SHARDS", 2)
        monkeypatch.setattr("storage.index.ENTRIES_PER_FILE", 3)
        samples = [make_sample(f"s{i}", 1 + 5 * i) for i in range(8)]
        write_all(url, make_spec(), samples)
        with StoreReader(url, make_spec()) as reader:
            for sample in samples:
                assert_same(reader.read(sample.sample_id), sample)
        assert len(locate(url).child("0123abcd").child("index").names()) == 3

    @pytest.mark.parametrize("preset", PRESETS)
    def test_a_window_is_the_same_part_of_the_whole(self, url, preset, make_spec, make_sample):
        # Red when a window's states, targets or exceptions are another's: every start and stop around chunk and shard.
        spec = make_spec(preset=preset)
        [whole] = write_all(url, spec, [make_sample("a", 21, spec)])
        windows = [(0, 21), (0, 1), (3, 4), (3, 9), (4, 8), (7, 17), (8, 21), (20, 21), (1, 20)]
        with StoreReader(url, spec) as reader:
            ahead = list(reader.prefetch([("a", *window) for window in windows]))
            for (start, stop), got in zip(windows, ahead, strict=True):
                assert (got.start, got.stop) == (start, stop)
                assert np.array_equal(got.token_ids, whole.token_ids[start:stop])
                assert np.array_equal(got.loss_mask, whole.loss_mask[start:stop])
                assert np.array_equal(dequantise(got.aux), whole.aux_hidden[start:stop].reshape(stop - start, -1))
                own = np.isin(target_rows(whole.loss_mask), target_rows(whole.loss_mask[start:stop]) + start)
                assert np.array_equal(got.target_argmax, whole.target_argmax[own])
                assert np.array_equal(got.target_lse, whole.target_lse[own])
                if whole.last_hidden is not None:
                    assert np.array_equal(dequantise(got.last), whole.last_hidden[own])
                else:
                    assert np.array_equal(got.last.ids, whole.top_k.ids[own])
            with pytest.raises(StoreError, match="sample a: window 5 to 22 is not within its 21 tokens"):
                reader.read_window("a", 5, 22)

    def test_statistics_add_up(self, url, make_spec, make_sample):
        # Red when padding counts as data, or when stored_bytes is anything but the size of the samples' shards.
        spec = make_spec()
        with StoreWriter(url, spec), StoreReader(url, spec) as reader:
            assert reader.statistics() == StoreStatistics(0, 0, 0, 0, 0)
        samples = [make_sample(f"s{length}", length) for length in (1, 9, 20)]
        write_all(url, spec, samples)
        num_targets = sum(len(target_rows(sample.loss_mask)) for sample in samples)
        shards = sum(size for name, size in locate(url).sizes().items() if "/c." in name)
        raw = raw_bytes(spec, num_tokens=30, num_targets=num_targets)
        with StoreReader(url, spec) as reader, StoreWriter(url, spec) as writer:
            assert reader.statistics() == StoreStatistics(3, 30, shards, raw, num_targets)
            assert writer.stored_bytes == shards

    def test_one_fingerprint_needs_no_spec(self, url, make_spec, make_sample, assert_same):
        # Red when a store cannot be opened by what it says of itself, or a choice is made for the user.
        with pytest.raises(StoreError, match="there is no store of hidden states at"):
            StoreReader(url)
        write_all(url, make_spec(preset="near"), [make_sample("a", 9, make_spec(preset="near"))])
        with StoreReader(url) as reader:
            assert reader.spec == make_spec(preset="near")
        write_all(url, make_spec(fingerprint="ffff"), [make_sample("a", 9)])
        with pytest.raises(StoreError, match=r"holds 2 fingerprints .*0123abcd, ffff.*: name one"):
            StoreReader(url)
        with StoreReader(url, fingerprint="ffff") as reader:
            assert_same(reader.read("a"), make_sample("a", 9))

    def test_an_unknown_sample_is_named(self, url, make_spec):
        # Red when a missing sample is a KeyError or empty data.
        StoreWriter(url, make_spec()).close()
        with (
            StoreReader(url, make_spec()) as reader,
            pytest.raises(StoreError, match=r"sample nowhere is not in store .* capture it first"),
        ):
            reader.read("nowhere")

    def test_another_spec_is_refused_with_both_values(self, url, make_spec):
        # Red when a field is not compared, or the message does not say which and how.
        StoreWriter(url, make_spec()).close()
        other = make_spec(target="other/target", hidden_size=16, aux_layer_ids=(0, 3, 5), preset="near")
        for opened in (StoreReader, StoreWriter):
            with pytest.raises(StoreError) as refused:
                opened(url, other)
            message = str(refused.value)
            assert "target is 'tiny/target' there, 'other/target' here" in message
            assert "hidden_size is 8 there, 16 here" in message
            assert "aux_layer_ids is (1, 3, 5) there, (0, 3, 5) here" in message
            assert "aux_step is None there, 0.1 here" in message
            assert "vocab_size" not in message
            assert "\n" not in message

    def test_another_fingerprint_says_what_the_store_holds(self, url, make_spec, make_sample):
        # Red when "captured from another target or other layers" cannot be told from the message.
        with pytest.raises(StoreError, match="it holds nothing: capture first"):
            StoreReader(url, make_spec())
        StoreWriter(url, make_spec()).close()
        with pytest.raises(StoreError) as refused:
            StoreReader(url, make_spec(fingerprint="ffff", aux_layer_ids=(2, 4, 6)))
        assert "ffff (tiny/target, layers 2/4/6); it holds 0123abcd (tiny/target, layers 1/3/5)" in str(refused.value)

    def test_fingerprints_live_side_by_side(self, url, make_spec, make_sample, assert_same):
        # Red when one fingerprint's samples show up under, or overwrite, another's.
        for fingerprint, seed in (("aaaa", 1), ("bbbb", 2)):
            with StoreWriter(url, make_spec(fingerprint=fingerprint)) as writer:
                assert writer.committed() == frozenset()
                writer.write(make_sample("same", 6, seed=seed))
        for fingerprint, seed in (("aaaa", 1), ("bbbb", 2)):
            with StoreReader(url, make_spec(fingerprint=fingerprint)) as reader:
                assert_same(reader.read("same"), make_sample("same", 6, seed=seed))

    def test_bad_samples_are_refused_and_the_writer_goes_on(self, url, make_spec, make_sample, assert_same):
        # Red when a refused sample leaves anything that reads as data, or spoils the writer for the next.
        good = make_sample("good", 9)
        nan = good.aux_hidden.copy()
        nan[4, 1, 2] = 0x7FC1
        with StoreWriter(url, make_spec()) as writer:
            with pytest.raises(StoreError, match=r"sample bad: aux_hidden holds NaN or Inf in 1 rows of 9 tokens"):
                writer.write(dataclasses.replace(good, sample_id="bad", aux_hidden=nan))
            with pytest.raises(StoreError, match=r"sample id '\.\./up' must be"):
                writer.write(dataclasses.replace(good, sample_id="../up"))
            writer.write(good)
        with StoreReader(url, make_spec()) as reader:
            assert reader.sample_ids() == {"good"}
            assert_same(reader.read("good"), good)
        with pytest.raises(StoreError, match="writer is closed"):
            writer.write(make_sample("late", 2))


class TestLocalStore(StoreContract):
    """The contract on a local folder that does not exist yet."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/deep/store"


class TestMemoryStore(StoreContract):
    """The contract in fsspec's memory, shared by URL within the process."""

    @pytest.fixture
    def url(self) -> str:
        return f"memory://stores/{uuid.uuid4().hex}"


class TestS3Store(StoreContract):
    """The contract on a real S3 server."""

    @pytest.fixture
    def url(self, s3) -> str:
        return s3.new_url()
