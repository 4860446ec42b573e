"""What every store must do, as one suite inherited by each kind of place: local disk and memory."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

import numpy as np
import pytest

from storage.errors import StoreError
from storage.location import locate
from storage.reader import StoreReader
from storage.schema import StoreStatistics
from storage.writer import StoreWriter


class StoreContract:
    """Subclasses give the fixture `url`: a new, empty place."""

    @pytest.mark.parametrize("codec", ["lossless", "raw"])
    def test_samples_come_back_bit_for_bit(self, url, codec, make_spec, make_sample, assert_same):
        # Red when a row, dtype or bit changes: lengths below, at and above chunk (4) and shard (8).
        spec = make_spec(codec=codec)
        samples = [make_sample(f"s{length}", length) for length in (1, 3, 4, 5, 8, 9, 16, 41)]
        with StoreWriter(url, spec) as writer:
            for sample in samples:
                writer.write(sample)
        reader = StoreReader(url, spec)
        assert reader.sample_ids() == {sample.sample_id for sample in samples}
        for sample in reversed(samples):
            assert_same(reader.read(sample.sample_id), sample)

    def test_a_sample_is_visible_once_write_returns(self, url, make_spec, make_sample, assert_same):
        # Red when a commit waits for close(), or when an open reader changes under its user.
        writer = StoreWriter(url, make_spec())
        before = StoreReader(url, make_spec())
        writer.write(make_sample("a", 5))
        assert before.sample_ids() == frozenset()
        assert_same(StoreReader(url, make_spec()).read("a"), make_sample("a", 5))

    def test_the_same_sample_again_is_nothing_to_do(self, url, make_spec, make_sample, assert_same):
        # Red when a second write stores anything, or replaces what was committed (other states, same tokens).
        first = make_sample("a", 9)
        again = dataclasses.replace(first, target_lse=first.target_lse + 1)
        with StoreWriter(url, make_spec()) as writer:
            writer.write(first)
            writer.write(again)
        before = StoreReader(url, make_spec()).statistics()
        with StoreWriter(url, make_spec()) as writer:
            assert writer.committed() == {"a"}
            writer.write(again)
        assert StoreReader(url, make_spec()).statistics() == before
        assert_same(StoreReader(url, make_spec()).read("a"), first)

    def test_other_tokens_under_a_committed_id_are_refused(self, url, make_spec, make_sample):
        # Red when an id that is not the hash of its tokens silently gives the wrong states.
        sample = make_sample("a", 9)
        writer = StoreWriter(url, make_spec())
        writer.write(sample)
        with pytest.raises(StoreError, match="sample a is committed with other loss_mask"):
            writer.write(dataclasses.replace(sample, loss_mask=~sample.loss_mask))

    def test_two_writers_at_once_do_not_touch_each_other(self, url, make_spec, make_sample, assert_same):
        # Red when writers share arrays or index files; "both" is written by both and must read as one of them.
        one, two = StoreWriter(url, make_spec()), StoreWriter(url, make_spec())
        for i in range(5):
            one.write(make_sample(f"one{i}", 3 + i))
            two.write(make_sample(f"two{i}", 9 - i))
        one.write(make_sample("both", 7))
        two.write(make_sample("both", 7))
        one.close()
        two.close()
        reader = StoreReader(url, make_spec())
        assert len(reader.sample_ids()) == 11
        for i in range(5):
            assert_same(reader.read(f"one{i}"), make_sample(f"one{i}", 3 + i))
            assert_same(reader.read(f"two{i}"), make_sample(f"two{i}", 9 - i))
        assert_same(reader.read("both"), make_sample("both", 7))

    def test_arrays_and_index_grow(self, url, make_spec, make_sample, assert_same, monkeypatch):
        # Red when rows past the first capacity, or entries past the first index file, are lost.
        monkeypatch.setattr("storage.writer._GROW_SHARDS", 2)
        monkeypatch.setattr("storage.index.ENTRIES_PER_FILE", 3)
        with StoreWriter(url, make_spec()) as writer:
            for i in range(8):
                writer.write(make_sample(f"s{i}", 1 + 5 * i))
        reader = StoreReader(url, make_spec())
        for i in range(8):
            assert_same(reader.read(f"s{i}"), make_sample(f"s{i}", 1 + 5 * i))
        assert len(locate(url).child("0123abcd").child("index").names()) == 3

    def test_statistics_add_up(self, url, make_spec, make_sample):
        # Red when padding counts as data, or when stored_bytes is anything but the size of the files.
        spec = make_spec()
        with StoreWriter(url, spec) as writer:
            assert StoreReader(url, spec).statistics().num_samples == 0
            for length in (1, 9, 20):
                writer.write(make_sample(f"s{length}", length))
        raw = 30 * (4 * 8 * 2 + 4 + 1 + 4 + 4)
        stored = self.walked_bytes(url, spec.fingerprint)
        assert StoreReader(url, spec).statistics() == StoreStatistics(3, 30, stored, raw)

    def test_an_unknown_sample_is_named(self, url, make_spec):
        # Red when a missing sample is a KeyError or empty data.
        StoreWriter(url, make_spec()).close()
        with pytest.raises(StoreError, match=r"sample nowhere is not in store .* capture it first"):
            StoreReader(url, make_spec()).read("nowhere")

    def test_another_spec_is_refused_with_both_values(self, url, make_spec):
        # Red when a field is not compared, or the message does not say which and how.
        StoreWriter(url, make_spec()).close()
        other = make_spec(target="other/target", hidden_size=16, aux_layer_ids=(0, 3, 5))
        for opened in (StoreReader, StoreWriter):
            with pytest.raises(StoreError) as refused:
                opened(url, other)
            message = str(refused.value)
            assert "target is 'tiny/target' there, 'other/target' here" in message
            assert "hidden_size is 8 there, 16 here" in message
            assert "aux_layer_ids is (1, 3, 5) there, (0, 3, 5) here" in message
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
            reader = StoreReader(url, make_spec(fingerprint=fingerprint))
            assert_same(reader.read("same"), make_sample("same", 6, seed=seed))

    def test_bad_samples_are_refused_and_the_writer_goes_on(self, url, make_spec, make_sample, assert_same):
        # Red when a wrong shape, dtype or value is stored, when the message does not name sample and field, or
        # when a refusal leaves anything that reads as data.
        good = make_sample("good", 9)
        nan, inf = good.aux_hidden.copy(), good.last_hidden.copy()
        nan[4, 1, 2], inf[8, 0] = 0x7FC1, 0xFF80
        lse = good.target_lse.copy()
        lse[3] = np.nan
        bad = {
            "aux_hidden holds NaN or Inf in 1 of 9 tokens, the first at token 4": {"aux_hidden": nan},
            "last_hidden holds NaN or Inf in 1 of 9 tokens, the first at token 8": {"last_hidden": inf},
            "target_lse holds NaN or Inf": {"target_lse": lse},
            r"aux_hidden is uint16 \[9, 2, 8\]": {"aux_hidden": good.aux_hidden[:, :2]},
            r"last_hidden is float16 \[9, 8\]": {"last_hidden": good.last_hidden.view(np.float16)},
            r"loss_mask is bool \[8\]": {"loss_mask": good.loss_mask[:8]},
            "token_ids is int64": {"token_ids": good.token_ids.astype(np.int64)},
            "token_ids spans .* has 50 entries": {"token_ids": good.token_ids + np.int32(50)},
            "target_argmax spans -1": {"target_argmax": np.full(9, -1, np.int32)},
            "has no tokens": {name: getattr(good, name)[:0] for name in self.array_fields},
        }
        with StoreWriter(url, make_spec()) as writer:
            for number, (message, changes) in enumerate(bad.items()):
                with pytest.raises(StoreError, match=f"sample bad{number}:? {message}"):
                    writer.write(dataclasses.replace(good, sample_id=f"bad{number}", **changes))
            with pytest.raises(StoreError, match=r"sample id '\.\./up' must be"):
                writer.write(dataclasses.replace(good, sample_id="../up"))
            writer.write(good)
        reader = StoreReader(url, make_spec())
        assert reader.sample_ids() == {"good"}
        assert_same(reader.read("good"), good)
        with pytest.raises(StoreError, match="writer is closed"):
            writer.write(make_sample("late", 2))

    array_fields = ("token_ids", "loss_mask", "aux_hidden", "last_hidden", "target_argmax", "target_lse")


class TestLocalStore(StoreContract):
    """The contract on a local folder that does not exist yet."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/deep/store"

    def walked_bytes(self, url: str, fingerprint: str) -> int:
        root = Path(url.removeprefix("file://"), fingerprint)
        return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


class TestMemoryStore(StoreContract):
    """The contract in fsspec's memory, shared by URL within the process."""

    @pytest.fixture
    def url(self) -> str:
        return f"memory://stores/{uuid.uuid4().hex}"

    def walked_bytes(self, url: str, fingerprint: str) -> int:
        from fsspec.implementations.memory import MemoryFileSystem

        prefix = f"/{url.removeprefix('memory://')}/{fingerprint}/"
        return sum(len(file.getvalue()) for name, file in MemoryFileSystem.store.items() if name.startswith(prefix))
