"""The writer beside its contract: queue, bounds, order, budget, calibration, drift, claims, and what errors leave."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from storage.claims import CLAIM_SECONDS
from storage.errors import StoreError
from storage.index import SegmentIndex
from storage.location import Location
from storage.reader import StoreReader
from storage.writer import StoreWriter


def ids_in(url: object, spec: object) -> set[str]:
    with StoreReader(str(url), spec) as reader:
        return set(reader.sample_ids())


def test_write_returns_before_the_sample_is_stored_and_waits_only_when_too_much_is_pending(
    tmp_path, make_spec, make_sample, monkeypatch
):
    # Red when the caller's thread does the work, when pending bytes know no bound, or when one large sample can never
    # enter. Puts stand still until the gate opens.
    gate = threading.Event()
    put = Location.write_bytes

    def waiting(self: Location, name: str, *parts: bytes, durable: bool = True) -> None:
        if "/c." in name:
            assert gate.wait(30)
        put(self, name, *parts, durable=durable)

    monkeypatch.setattr(Location, "write_bytes", waiting)
    one = sum(array.nbytes for array in (make_sample("a", 40).aux_hidden, make_sample("a", 40).token_ids))
    with StoreWriter(str(tmp_path), make_spec(), max_pending_bytes=3 * one) as writer:
        for name in ("a", "b"):
            assert writer.write(make_sample(name, 40))
        assert writer.committed() == frozenset()
        third = threading.Thread(target=writer.write, args=(make_sample("c", 60),))
        third.start()
        third.join(0.3)
        assert third.is_alive()
        gate.set()
        third.join(30)
        assert not third.is_alive()
        assert writer.write(make_sample("larger-than-the-bound", 400))
    assert ids_in(tmp_path, make_spec()) == {"a", "b", "c", "larger-than-the-bound"}


def test_samples_commit_in_the_order_of_writing(tmp_path, make_spec, make_sample, monkeypatch):
    # Red when a short sample overtakes a long one, or when each takes an index write of its own.
    commits: list[list[str]] = []
    commit = SegmentIndex.commit

    def recording(self: SegmentIndex, entries: list) -> None:
        commits.append([entry.sample_id for entry in entries])
        commit(self, entries)

    monkeypatch.setattr(SegmentIndex, "commit", recording)
    names = [f"s{i}" for i in range(60)]
    with StoreWriter(str(tmp_path), make_spec(), workers=4) as writer:
        for i, name in enumerate(names):
            writer.write(make_sample(name, 200 if i % 7 == 0 else 2))
    assert [name for group in commits for name in group] == names
    assert len(commits) < len(names)


def test_all_is_on_the_disk_before_the_index_says_so(tmp_path, make_spec, make_sample, monkeypatch):
    # Red when a file that a committed sample needs, or the folder that names it, was not fsynced before the index
    # entry was put under its name: a power cut could then leave a committed sample without its data.
    synced: set[int] = set()
    fsync, write_bytes = os.fsync, Location.write_bytes
    commits = 0

    def recording_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checking_write(self: Location, name: str, *parts: bytes, durable: bool = True) -> None:
        nonlocal commits
        if name.endswith(".jsonl"):
            commits += 1
            for path in Path(tmp_path, "store").rglob("*"):
                if path.name not in (name, "index"):
                    assert path.stat().st_ino in synced, f"{path} was not fsynced"
        write_bytes(self, name, *parts, durable=durable)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Location, "write_bytes", checking_write)
    monkeypatch.setattr("storage.segment._FIRST_SHARDS", 2)
    with StoreWriter(f"{tmp_path}/store", make_spec(preset="near")) as writer:
        for length in (3, 20, 9):
            writer.write(make_sample(f"s{length}", length))
            writer.flush()
    assert commits == 3


@pytest.mark.parametrize("where", ["shard", "fsync", "index"])
def test_a_full_disk_costs_the_samples_after_it_and_nothing_else(
    tmp_path, make_spec, make_sample, assert_same, monkeypatch, where
):
    # Red when an error is lost, names no sample, hides what was committed, or leaves something that reads as data; or
    # when a new writer cannot go on.
    writer = StoreWriter(str(tmp_path), make_spec())
    writer.write(make_sample("a", 9))
    writer.flush()
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        put, sync = Location.write_bytes, Location.make_durable

        def write_bytes(self: Location, name: str, *parts: bytes, durable: bool = True) -> None:
            if (where == "shard" and "last_planes/c." in name) or (where == "index" and name.endswith(".jsonl")):
                raise full
            put(self, name, *parts, durable=durable)

        def make_durable(self: Location, names: object, executor: object) -> None:
            if where == "fsync":
                raise full
            sync(self, names, executor)

        patch.setattr(Location, "write_bytes", write_bytes)
        patch.setattr(Location, "make_durable", make_durable)
        writer.write(make_sample("b", 9))
        with pytest.raises(StoreError, match=r"sample b cannot be written to .*: No space left on device; all .* good"):
            writer.flush()
    for refused in (lambda: writer.write(make_sample("c", 2)), writer.flush, writer.close):
        with pytest.raises(StoreError, match="sample b cannot be written"):
            refused()
    writer.close()  # twice is nothing to do
    assert ids_in(tmp_path, make_spec()) == {"a"}
    with StoreWriter(str(tmp_path), make_spec()) as again:
        assert again.committed() == {"a"}
        for name in ("b", "c"):
            again.write(make_sample(name, 9))
    with StoreReader(str(tmp_path), make_spec()) as reader:
        for name in ("a", "b", "c"):
            assert_same(reader.read(name), make_sample(name, 9))


def test_a_bug_in_the_background_is_not_swallowed(tmp_path, make_spec, make_sample, monkeypatch):
    # Red when an exception nobody thought of leaves flush() waiting, or a sample missing without a word.
    monkeypatch.setattr("storage.writer.encode_sample", lambda *arguments: 1 / 0)
    with StoreWriter(str(tmp_path), make_spec()) as writer:
        writer.write(make_sample("a", 9))
        with pytest.raises(ZeroDivisionError):
            writer.flush()
        with pytest.raises(ZeroDivisionError):
            writer.close()


def test_what_stops_the_caller_does_not_lose_what_was_queued(tmp_path, make_spec, make_sample):
    # Red when SIGTERM or an error of the target's throws away samples that were computed already.
    def stopped() -> None:
        with StoreWriter(str(tmp_path), make_spec()) as writer:
            for i in range(5):
                writer.write(make_sample(f"s{i}", 9))
            raise SystemExit(75)

    with pytest.raises(SystemExit):
        stopped()
    assert ids_in(tmp_path, make_spec()) == {f"s{i}" for i in range(5)}


def test_the_byte_budget_is_kept(tmp_path, make_spec, make_sample):
    # Red when the store grows past its budget, when a writer stops before it is used up, or when what others stored
    # does not count.
    with StoreWriter(str(tmp_path), make_spec()) as writer:
        writer.write(make_sample("first", 16))
    one = writer.stored_bytes
    with StoreWriter(str(tmp_path), make_spec(), byte_budget=int(3.5 * one), max_pending_bytes=1) as writer:
        assert not writer.full
        taken = [writer.write(make_sample(f"s{i}", 16)) for i in range(6)]
        writer.flush()
        assert writer.full
        assert not writer.write(make_sample("late", 16))
        assert writer.write(make_sample("first", 16))  # it is there
    assert taken[:2] == [True, True]
    assert not taken[-1]
    assert writer.committed() == {"first", "s0", "s1"}
    shards = sum(path.stat().st_size for path in tmp_path.rglob("c.*"))
    assert writer.stored_bytes == shards <= 3.5 * one  # what did not fit leaves nothing behind
    assert ids_in(tmp_path, make_spec()) == {"first", "s0", "s1"}
    with StoreWriter(str(tmp_path), make_spec(), byte_budget=one) as writer:
        assert writer.full


def test_samples_wait_for_enough_tokens_to_calibrate_on(tmp_path, make_spec, make_sample):
    # Red when statistics come from the first sample alone, change once frozen, or keep the last samples from a store
    # that never gets enough.
    spec = make_spec(preset="near")
    with StoreWriter(str(tmp_path / "a"), spec, calibration_tokens=50) as writer:
        for i in range(4):
            writer.write(make_sample(f"s{i}", 12, spec))
            assert writer.statistics is None
        writer.write(make_sample("s4", 12, spec))
        statistics = writer.statistics
        assert statistics is not None
        assert statistics.calibration_tokens == 60
        writer.write(make_sample("s5", 12, spec))
        assert writer.statistics is statistics
    with StoreWriter(str(tmp_path / "b"), spec) as writer:
        writer.write(make_sample("s0", 12, spec))
        writer.flush()
        assert writer.statistics is not None
        assert writer.committed() == {"s0"}
    bound = 3 * make_sample("s0", 12, spec).aux_hidden.nbytes
    with StoreWriter(str(tmp_path / "c"), spec, max_pending_bytes=bound) as writer:
        for i in range(5):
            writer.write(make_sample(f"s{i}", 12, spec))  # would wait for itself without end
        assert writer.statistics is not None


def test_a_stopped_writer_does_not_calibrate_on_too_little(tmp_path, make_spec, make_sample):
    # Red when a run that fails on its second sample leaves statistics of one in a store that will be used for years.
    spec = make_spec(preset="near")

    def stopped() -> None:
        with StoreWriter(str(tmp_path), spec) as writer:
            writer.write(make_sample("a", 12, spec))
            raise SystemExit(75)

    with pytest.raises(SystemExit):
        stopped()
    assert ids_in(tmp_path, spec) == set()


@pytest.mark.parametrize("growth", [9, 30])
def test_drift_is_reported_once_with_what_to_do(tmp_path, make_spec, make_sample, caplog, growth):
    # Red when states that left the calibrated range fill the store with exceptions and nobody says so: values that
    # escape their codes (x 9), or tokens that all look like sinks (x 30). A sample's first token is no drift.
    spec = make_spec(preset="near", hidden_size=64)
    caplog.set_level(logging.WARNING)
    with StoreWriter(str(tmp_path), spec, calibration_tokens=40) as writer:
        for i in range(20):
            sample = make_sample(f"s{i}", 40, spec)
            sample.aux_hidden[0] = 0x46C3  # 24,960, as massive first tokens are
            writer.write(sample)
            writer.flush()
        assert writer.escaped_share < 0.005
        assert not caplog.records
        for i in range(60):
            sample = make_sample(f"late{i}", 40, spec)
            grown = (sample.aux_hidden[:, :, ::8].astype(np.uint32) << 16).view(np.float32) * growth
            sample.aux_hidden[:, :, ::8] = (grown.view(np.uint32) >> 16).astype(np.uint16)
            writer.write(sample)
        writer.flush()
        assert writer.escaped_share > 0.01
    [record] = [record for record in caplog.records if "calibrated statistics" in record.getMessage()]
    assert "capture such samples into another store URL" in record.getMessage()


def test_claims_keep_two_writers_apart_and_expire(tmp_path, make_spec, monkeypatch):
    # Red when a living writer's samples are handed out again, a dead one's never, or its own claim hides its own.
    names = [f"s{i}" for i in range(6)]
    with StoreWriter(str(tmp_path), make_spec()) as one, StoreWriter(str(tmp_path), make_spec()) as two:
        assert one.claim(names[:4]) == names[:4]
        assert two.claim(names) == names[4:]
        assert one.claim(names) == names[:4]
        assert two.claim([]) == []
        assert one.claim(names) == names
        with monkeypatch.context() as patch:
            now = time.time()
            patch.setattr("storage.claims.time.time", lambda: now + CLAIM_SECONDS + 1)
            assert two.claim(names) == names
        assert len(list(tmp_path.glob("*/claims/*.json"))) == 2
    assert list(tmp_path.glob("*/claims/*.json")) == []


def test_a_claim_lasts_until_its_samples_are_committed(tmp_path, make_spec, make_sample):
    # Red when the next claim gives up samples that are captured but not committed: another writer captures them again.
    spec = make_spec(preset="near")
    first, names = make_sample("a", 20, spec), ["a", "b", "c"]
    with StoreWriter(str(tmp_path), spec, calibration_tokens=10**9) as one, StoreWriter(str(tmp_path), spec) as two:
        assert one.claim(["a", "b"]) == ["a", "b"]
        one.write(first)  # held back: there are no statistics yet
        assert one.claim(["c"]) == ["c"]
        assert two.claim(names) == ["b"], "what was claimed and not captured is given up, the rest is not"
        assert two.committed_by_now() == set()
        one.flush()
        assert two.committed_by_now() == {"a"}
        assert two.committed() == set()
        one.claim([])
        assert two.claim(names) == names


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ("{", ["a", "b"]),
        ('{"time": 1e99, "sample_ids": 3}', ["a", "b"]),
        ('{"time": NOW, "sample_ids": ["a"]}', ["b"]),
        ('{"time": NOW, "sample_ids": ["a"], "host": "elsewhere", "pid": DEAD}', ["b"]),
        ('{"time": NOW, "sample_ids": ["a"], "host": "HERE", "pid": 123456789012345678901234567890}', ["b"]),
        ('{"time": NOW, "sample_ids": ["a"], "host": "HERE", "pid": DEAD}', ["a", "b"]),
    ],
)
def test_claims_of_damaged_files_and_dead_writers_do_not_count(tmp_path, make_spec, content, left):
    # Red when an advisory file can stop a capture, or a killed capture waits ten minutes for itself.
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    content = content.replace("NOW", str(time.time())).replace("HERE", socket.gethostname())
    with StoreWriter(str(tmp_path), make_spec()) as writer:
        (tmp_path / "0123abcd" / "claims").mkdir()
        (tmp_path / "0123abcd" / "claims" / "000.json").write_text(content.replace("DEAD", str(dead.pid)))
        assert writer.claim(["a", "b"]) == left


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, make_spec):
    # Red when a file in the way (this test may run as root, whom permissions do not stop) is a bare OSError.
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"store .*file/store cannot be written: Not a directory"):
        StoreWriter(f"{tmp_path}/file/store", make_spec())
    assert (tmp_path / "file").read_text() == "in the way"


def test_no_thread_outlives_the_writer(tmp_path, make_spec, make_sample):
    # Red when close() leaves workers behind: a run opens many writers.
    before = threading.active_count()
    with StoreWriter(str(tmp_path), make_spec()) as writer:
        writer.write(make_sample("a", 9))
    assert threading.active_count() == before
