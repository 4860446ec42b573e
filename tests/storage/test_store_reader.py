"""The reader beside its contract: how many requests it makes, how far ahead it reads, what many threads get."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from storage.cache import ShardCache, cache_key
from storage.encoding import PRESETS
from storage.errors import DamageError, StoreError
from storage.location import Location
from storage.reader import StoreReader
from storage.schema import StoreSpec
from storage.segment import shard_keys, shard_layouts
from storage.writer import StoreWriter


@pytest.fixture
def requests(monkeypatch) -> list[tuple[str, int | None, int | None]]:
    """Every shard request: its name and the range that was asked for."""
    made: list[tuple[str, int | None, int | None]] = []
    read_bytes = Location.read_bytes

    def recording(self: Location, name: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        if "/c." in name and start is not None:
            made.append((name.split("/", 1)[1], start, stop))
        return read_bytes(self, name, start, stop)

    monkeypatch.setattr(Location, "read_bytes", recording)
    return made


@pytest.mark.parametrize("preset", PRESETS)
def test_a_sample_of_16k_tokens_is_ten_requests(preset, make_spec, make_sample, requests):
    # Red when shards, or what lies beside the codes, cost more round trips: 40 ms each from an object store.
    spec = make_spec(preset=preset, chunk_tokens=512, shard_tokens=4096)
    sample = make_sample("a", 16_384, spec)
    with StoreWriter(f"memory://requests/{preset}", spec) as writer:
        writer.write(sample)
    requests.clear()
    with StoreReader(f"memory://requests/{preset}", spec) as reader:
        reader.read_encoded("a")
    assert len(requests) <= 10
    assert len({name for name, _, _ in requests}) == len(requests)


def test_a_window_fetches_the_chunks_it_needs(make_spec, make_sample, requests):
    # Red when a random crop costs the whole sample, or more than one request a shard.
    spec = make_spec(preset="near", hidden_size=64, chunk_tokens=64, shard_tokens=1024)
    with StoreWriter("memory://requests/window", spec) as writer:
        writer.write(make_sample("a", 2000, spec))
    requests.clear()
    with StoreReader("memory://requests/window", spec) as reader:
        reader.read_window("a", 1000, 1100)
        fetched = sum(stop - start for _, start, stop in requests if start is not None and stop is not None)
        names = [name for name, _, _ in requests]
        assert len(names) == len(set(names))
        assert sum(name.startswith("aux_codes") for name in names) == 2
        requests.clear()
        reader.read_encoded("a")
    assert fetched < 0.5 * sum(stop - start for _, start, stop in requests if start is not None and stop is not None)


def test_prefetch_reads_ahead_within_its_bytes_and_in_order(tmp_path, make_spec, make_sample, monkeypatch):
    # Red when reading ahead knows no bound, does not happen, or loses the order; one that is too large still comes.
    spec = make_spec()
    names = [f"s{i}" for i in range(30)]
    with StoreWriter(str(tmp_path), spec) as writer:
        for i, name in enumerate(names):
            writer.write(make_sample(name, 100 if i == 3 else 10, spec))
    started: list[str] = []
    read_window = StoreReader.read_window

    def recording(self: StoreReader, sample_id: str, start: int = 0, stop: int | None = None) -> object:
        started.append(sample_id)
        return read_window(self, sample_id, start, stop)

    monkeypatch.setattr(StoreReader, "read_window", recording)
    with StoreReader(str(tmp_path), spec) as reader:
        one = reader._num_bytes("s0", 0, None)
        got = []
        for encoded in reader.prefetch([(name, 0, None) for name in names], max_bytes=4 * one):
            got.append(encoded.sample_id)
            assert len(started) <= len(got) + 4
        assert got == names
        started.clear()
        ahead = reader.prefetch([(name, 0, None) for name in names], max_bytes=1 << 30)
        next(ahead)
        ahead.close()
        assert len(started) > 1
        assert list(reader.prefetch([])) == []


def test_an_error_comes_in_its_samples_turn(tmp_path, make_spec, make_sample):
    # Red when one damaged sample hides those before it, or is passed over.
    spec = make_spec()
    with StoreWriter(str(tmp_path), spec) as writer:
        for name in ("a", "b", "c"):
            writer.write(make_sample(name, 9, spec))
    with StoreReader(str(tmp_path), spec) as reader:
        entry = reader.entries["b"]
    first, _ = shard_keys(entry, shard_layouts(spec)["aux_planes"])
    (tmp_path / spec.fingerprint / "states" / entry.segment / first).unlink()
    with StoreReader(str(tmp_path), spec) as reader:
        ahead = reader.prefetch([(name, 0, None) for name in ("a", "b", "c")])
        assert next(ahead).sample_id == "a"
        with pytest.raises(DamageError, match="sample b: aux_planes is damaged") as damage:
            next(ahead)
        assert (damage.value.sample_id, damage.value.array) == ("b", "aux_planes")
        assert damage.value.shard.endswith(first)
        with pytest.raises(StoreError, match="sample nowhere is not in store"):
            list(reader.prefetch([("nowhere", 0, None)]))


def test_closing_a_reader_frees_whoever_waits_for_it(tmp_path, make_spec, make_sample, monkeypatch):
    # Red when a thread that waits for a cancelled request waits for ever, and the process with it.
    spec = make_spec()
    with StoreWriter(str(tmp_path), spec) as writer:
        for i in range(20):
            writer.write(make_sample(f"s{i}", 30, spec))
    read_bytes = Location.read_bytes
    gate = threading.Event()

    def slow(self: Location, name: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        if "/c." in name and start is not None:
            gate.wait(30)
        return read_bytes(self, name, start, stop)

    monkeypatch.setattr(Location, "read_bytes", slow)
    before = set(threading.enumerate())
    reader = StoreReader(str(tmp_path), spec, max_requests=2)
    ahead = reader.prefetch([(f"s{i}", 0, None) for i in range(20)])
    errors: list[StoreError] = []

    def wait() -> None:
        try:
            list(ahead)
        except StoreError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(0.2)
    reader.close()
    gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
    assert [str(error) for error in errors] == ["the store reader was closed while it read"]


def test_one_reader_serves_many_threads(tmp_path, make_spec, make_sample, assert_same):
    # Red when threads share a buffer.
    spec = make_spec()
    with StoreWriter(str(tmp_path), spec) as writer:
        for i in range(10):
            writer.write(make_sample(f"s{i}", 20 + i, spec))
    with StoreReader(str(tmp_path), spec, max_requests=3) as reader, ThreadPoolExecutor(8) as threads:
        for number, sample in enumerate(threads.map(lambda i: reader.read(f"s{i % 10}"), range(80))):
            assert_same(sample, make_sample(f"s{number % 10}", 20 + number % 10, spec))


class TestCache:
    """A remote store's shards, kept on the local disk."""

    spec = StoreSpec("f", "t", (0, 1, 2), 64, 50, encoding=PRESETS["lossless"], chunk_tokens=32, shard_tokens=64)

    @pytest.fixture
    def url(self, s3, make_sample) -> str:
        url: str = s3.new_url()
        with StoreWriter(url, self.spec) as writer:
            for i in range(6):
                writer.write(make_sample(f"s{i}", 60, self.spec))
        return url

    def read_all(self, url: str, cache: ShardCache, s3, make_sample, assert_same) -> int:
        """Shard requests that reading all samples makes."""
        faults = s3.set()
        with StoreReader(url, self.spec, cache=cache) as reader:
            for i in range(6):
                assert_same(reader.read(f"s{i}"), make_sample(f"s{i}", 60, self.spec))
        return sum("/c." in line for line in faults.requests)

    def test_what_fits_is_fetched_once(self, url, s3, make_sample, assert_same, tmp_path):
        # Red when a second epoch, or the next process, goes to the network again.
        assert self.read_all(url, ShardCache(tmp_path / "c", 1 << 30), s3, make_sample, assert_same) == 18
        cache = ShardCache(tmp_path / "c", 1 << 30)
        assert self.read_all(url, cache, s3, make_sample, assert_same) == 0
        assert (cache.counts.hits, cache.counts.misses) == (18, 0)

    def test_a_full_cache_keeps_what_it_has(self, url, s3, make_sample, assert_same, tmp_path):
        # Red when the budget is passed, or what is kept gives way to what comes: in epochs that hits nothing.
        whole = ShardCache(tmp_path / "whole", 1 << 30)
        self.read_all(url, whole, s3, make_sample, assert_same)
        budget = whole.counts.num_bytes // 2
        half = ShardCache(tmp_path / "half", budget)
        assert self.read_all(url, half, s3, make_sample, assert_same) == 18
        missed = self.read_all(url, half, s3, make_sample, assert_same)
        assert 0 < missed < 18
        assert self.read_all(url, half, s3, make_sample, assert_same) == missed
        kept = sum(path.stat().st_size for path in (tmp_path / "half").rglob("*") if path.is_file())
        assert kept == half.counts.num_bytes <= budget

    def test_damaged_files_are_dropped_and_fetched_again(self, url, s3, make_sample, assert_same, tmp_path, caplog):
        # Red when a damaged copy gives wrong data, an error, or stays.
        cache = ShardCache(tmp_path, 1 << 30)
        self.read_all(url, cache, s3, make_sample, assert_same)
        files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        flipped = bytearray(files[0].read_bytes())
        flipped[7] ^= 4
        files[0].write_bytes(flipped)
        files[1].write_bytes(files[1].read_bytes()[:-9])
        files[2].write_bytes(b"")
        files[3].write_bytes(files[4].read_bytes())  # sound, but another shard
        files[5].unlink()
        caplog.set_level(logging.WARNING)
        assert self.read_all(url, cache, s3, make_sample, assert_same) == 5
        assert sum("is damaged; it is deleted and fetched again" in r.getMessage() for r in caplog.records) == 4
        assert cache.counts.dropped == 4
        assert self.read_all(url, cache, s3, make_sample, assert_same) == 0

    def test_a_shard_of_another_time_or_place_is_another_key(self):
        # Red when a store that was written anew is read from the old copy.
        table = np.array([[1, 10]], np.uint32).tobytes()
        keys = {
            cache_key("s3://b/x", table),
            cache_key("s3://b/y", table),
            cache_key("s3://b/x", np.array([[2, 10]], np.uint32).tobytes()),
        }
        assert len(keys) == 3

    def test_a_folder_that_cannot_be_made_is_one_line(self, tmp_path):
        # Red when a file in the way is a bare OSError.
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match=r"cache folder .*file/cache cannot be used: Not a directory"):
            ShardCache(tmp_path / "file" / "cache", 100)

    def test_a_disk_that_refuses_costs_only_the_copy(self, url, s3, make_sample, assert_same, tmp_path, monkeypatch):
        # Red when a full cache disk stops the training.
        cache = ShardCache(tmp_path, 1 << 30)
        write_bytes = Location.write_bytes

        def full(self: Location, name: str, *parts: bytes, durable: bool = True) -> None:
            if self.is_local:
                raise OSError(28, "No space left on device")
            write_bytes(self, name, *parts, durable=durable)

        monkeypatch.setattr(Location, "write_bytes", full)
        assert self.read_all(url, cache, s3, make_sample, assert_same) == 18
        assert cache.counts.num_bytes == 0
