"""Writing samples: encoded, compressed and put by background threads, committed in the order in which they came.

`write` queues a sample and returns, so that the target's next forward runs meanwhile; it waits only while more than
`max_pending_bytes` are under way. Order is everything: a sample's shards first (put whole, made durable), then its
line in the index. A kill in between leaves rows that no index entry names: not data, only bytes. What is committed is
never touched again, so an error costs the samples after it and nothing else.

All samples that are ready when the index is written share one write of it, and their files' fsyncs run side by side:
a sample of 150 tokens (D = 576) takes 7 ms on two cores, most of it encoding, instead of the 27 ms that a commit of its
own took. The price: `write` returning says nothing about durability; `flush` and `close` do.

A lossy encoding needs statistics. A writer takes those of a segment that is committed already, or holds its first
samples back until `calibration_tokens` are there; a flush calibrates with what there is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

import google_crc32c
import numpy as np
import numpy.typing as npt

from storage.byte_gate import ByteGate
from storage.claims import Claims
from storage.commit import CommitQueue, WrittenSample
from storage.drift import Drift
from storage.encoding import encode_sample
from storage.errors import StoreError, one_line
from storage.index import STATES_FOLDER, IndexEntry, SegmentIndex, read_index, read_spec
from storage.location import Location, locate
from storage.quantise import Statistics, calibrate
from storage.schema import Sample, StoreSpec, require_same_spec
from storage.segment import NewSegment, OpenSegment, shard_layouts, stored_bytes, write_group
from storage.shard import ShardLayout
from storage.validate import validate_sample

logger = logging.getLogger(__name__)

CALIBRATION_TOKENS = 16_384
# Rows, uncompressed, of the shards that are compressed or on their way: two of 4,096 tokens of D = 4,096.
_SHARD_BYTES = 256 << 20
_REMOTE_UPLOADS = 16
_LOCAL_UPLOADS = 8


class StoreWriter:
    """Writes samples of one spec into the store at a URL.

    For one thread; several writers on one store, each its own, are fine. A sample's arrays must not be changed after
    `write`. Use it as a context manager, or `close` it: what is queued is lost otherwise.
    """

    def __init__(
        self,
        url: str,
        spec: StoreSpec,
        *,
        max_pending_bytes: int = 512 << 20,
        byte_budget: int | None = None,
        workers: int = 2,
        calibration_tokens: int = CALIBRATION_TOKENS,
    ) -> None:
        """Open the store, making it if need be, and read which samples it holds.

        max_pending_bytes: bytes of samples that may wait for their commit; one sample may always. byte_budget: bytes
        that the store's samples may take, those of others that are there already included. workers: threads that
        compress.

        StoreError: a URL not served, a stored spec that differs, a damaged index, a place that cannot be written.
        """
        self._spec = spec
        self._folder = locate(url).child(spec.fingerprint)
        self._max_pending_bytes = max_pending_bytes
        self._byte_budget = byte_budget
        self._calibration_tokens = calibration_tokens
        _open_or_make(self._folder, spec, url)
        self._layouts = shard_layouts(spec)
        self._entries = read_index(self._folder)
        self._stored_bytes = sum(stored_bytes(entry, self._layouts) for entry in self._entries.values())

        self._lock = threading.Lock()
        self._full = byte_budget is not None and self._stored_bytes >= byte_budget
        self._closed = False
        self._drift = Drift(spec)
        self._segment: NewSegment | None = None
        self._claims: Claims | None = None

        self._encoders = ThreadPoolExecutor(workers, thread_name_prefix="store-encode")
        self._compressing = threading.Semaphore(workers)
        self._shards = ByteGate(_SHARD_BYTES)
        uploads = _REMOTE_UPLOADS if self._folder.is_remote else _LOCAL_UPLOADS
        self._uploads = ThreadPoolExecutor(uploads, thread_name_prefix="store-put")
        self._queue = CommitQueue(self._entries, where=self._folder.url, executor=self._uploads)
        self._statistics = self._statistics_of_others() if spec.encoding.needs_statistics else None
        # Samples held back until there are statistics; None once nothing has to wait for them.
        self._held: list[Sample] | None = [] if spec.encoding.needs_statistics and self._statistics is None else None

    @property
    def spec(self) -> StoreSpec:
        """The spec that the store was opened with."""
        return self._spec

    @property
    def statistics(self) -> Statistics | None:
        """What samples are coded with, frozen; None while it is being calibrated, and for a lossless encoding."""
        return self._statistics

    @property
    def full(self) -> bool:
        """Whether the byte budget is used up: no sample is taken any more."""
        return self._full

    @property
    def stored_bytes(self) -> int:
        """Bytes of the shards of all committed samples and of those being put; without metadata and index."""
        return self._stored_bytes

    @property
    def escaped_share(self) -> float:
        """Share of the last samples' values that lie outside the codes' range, sinks apart: how far states drifted."""
        return self._drift.share

    def committed(self) -> frozenset[str]:
        """Ids of the samples that were committed when the store was opened, and of those committed since."""
        return self._queue.committed()

    def committed_by_now(self) -> frozenset[str]:
        """Ids of every committed sample, whoever committed it: the index is read anew. StoreError if it is damaged."""
        return self._queue.committed() | read_index(self._folder).keys()

    def claim(self, sample_ids: Iterable[str]) -> list[str]:
        """Of `sample_ids`, in order, those that no other living writer is about to capture; others will skip them.

        Advisory: it saves work and protects nothing. Takes the place of the claim before, but for samples that were
        written and are not committed yet; `close` gives it up. What others have committed is not looked at: ask
        `committed_by_now` afterwards, and no sample of theirs is missed.
        StoreError if the store cannot be written.
        """
        if self._claims is None:
            self._claims = Claims(self._folder, writer=NewSegment.new_name())
        try:
            return self._claims.claim(sample_ids, under_way=self._queue.under_way())
        except OSError as error:
            raise StoreError(f"store {self._folder.url} cannot be written: {one_line(error)}") from error

    def write(self, sample: Sample) -> bool:
        """Queue one sample; False if it is not taken because the byte budget is used up.

        A sample that is committed or queued already is nothing to do. One that turns out not to fit the budget is left
        out, and so is every later one: `committed` tells, after a flush.

        StoreError: a shape, dtype or value that the spec does not allow, or other tokens under the same id: the writer
        can go on with the next sample. Or what went wrong with an earlier sample (a full disk, a server that is
        gone): the writer is then of no more use; what is committed is good, and a new writer can go on from it.
        """
        if self._closed:
            raise StoreError(f"sample {sample.sample_id}: the store writer is closed; open a new one")
        self._queue.raise_failure()
        validate_sample(sample, self._spec)
        tokens_crc32c = tokens_checksum(sample)
        if self._has_already(sample.sample_id, tokens_crc32c):
            return True
        size = _bytes_of(sample)
        if self._held and not self._queue.fits(size, max_bytes=self._max_pending_bytes):
            self._calibrate()
        if self._full:
            return False
        self._queue.reserve(sample.sample_id, size, tokens_crc32c=tokens_crc32c, max_bytes=self._max_pending_bytes)
        if self._claims is not None:
            self._claims.renew()
        if self._held is None:
            self._submit(sample)
            return True
        self._held.append(sample)
        if sum(held.token_ids.size for held in self._held) >= self._calibration_tokens:
            self._calibrate()
        return True

    def flush(self) -> None:
        """Return once every sample taken is committed and durable. StoreError: as `write`."""
        self._queue.raise_failure()
        if self._held:
            self._calibrate()
        self._queue.wait()
        self._queue.raise_failure()

    def close(self) -> None:
        """Flush, cut the arrays to their exact length, give up claims. Closing twice is nothing to do.

        StoreError: as `write`; the writer is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
            if self._segment is not None:
                self._segment.trim()
        except OSError as error:
            raise StoreError(f"store {self._folder.url} cannot be closed: {one_line(error)}") from error
        finally:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            # Whatever stopped the caller, samples that were computed are worth their commit. Those still held back are
            # dropped: the statistics of too few of them would stay with the store.
            self._closed = True
            self._queue.wait()
            self._stop()

    def _has_already(self, sample_id: str, tokens_crc32c: int) -> bool:
        """States may differ between devices; tokens and mask may not, as the sample's id is their hash."""
        before = self._queue.tokens_crc32c(sample_id)
        if before is not None and before != tokens_crc32c:
            raise StoreError(
                f"sample {sample_id} is committed with other tokens or another loss mask; a sample id must be the hash "
                "of both"
            )
        return before is not None

    def _statistics_of_others(self) -> Statistics | None:
        one_of_each = {entry.segment: entry.sample_id for entry in self._entries.values()}
        for name, sample_id in sorted(one_of_each.items()):
            try:
                opened = OpenSegment(self._folder, name, self._spec, self._layouts, self._uploads, sample_id=sample_id)
                return opened.statistics
            except StoreError as error:
                logger.warning("the statistics of segment %s are not used: %s", name, error)
        return None

    def _calibrate(self) -> None:
        assert self._held
        held, self._held = self._held, None
        self._statistics = calibrate(held, self._spec)
        for sample in held:
            self._submit(sample)

    def _submit(self, sample: Sample) -> None:
        if self._segment is None:
            try:
                self._segment = NewSegment(self._folder, self._spec, self._layouts, self._statistics)
            except OSError as error:
                failure = StoreError(f"store {self._folder.url} cannot be written: {one_line(error)}")
                self._queue.fail(failure)
                raise failure from error
            index = SegmentIndex(self._folder, segment=self._segment.name)
            self._queue.open_segment(self._segment.location, index)
        self._queue.add(sample.sample_id, _bytes_of(sample), self._encoders, partial(self._encode, sample))

    def _encode(self, sample: Sample) -> WrittenSample | None:
        """Encode one sample and put its shards; None if the byte budget does not hold it."""
        assert self._segment is not None
        arrays = encode_sample(sample, self._spec, self._statistics)
        self._drift.add(arrays, num_tokens=sample.token_ids.size)
        places = self._segment.reserve({name: len(rows) for name, rows in arrays.items()})
        work: list[tuple[str, str, Future[bytes | None]]] = []
        for name, rows in arrays.items():
            layout = self._layouts[name]
            per_shard = layout.array.shard_rows
            first = places[layout.array.axis][0] // per_shard
            for shard in range(layout.num_shards(len(rows))):
                key = layout.shard_key(first + shard)
                part = rows[shard * per_shard : (shard + 1) * per_shard]
                work.append((name, key, self._uploads.submit(self._put, key, layout, part)))
        tables: dict[str, bytes] = dict.fromkeys(arrays, b"")
        for name, _, put in work:
            tables[name] += put.result() or b""
        if any(put.result() is None for _, _, put in work):
            self._take_back([(name, key) for name, key, put in work if put.result() is not None], tables)
            return None
        entry = IndexEntry(
            sample_id=sample.sample_id,
            segment=self._segment.name,
            rows=places,
            chunks=tables,
            tokens_crc32c=tokens_checksum(sample),
            statistics_digest=self._segment.statistics_digest,
        )
        return WrittenSample(entry, [key for _, key, _ in work])

    def _put(self, key: str, layout: ShardLayout, rows: npt.NDArray[Any]) -> bytes | None:
        """Compress one shard and put it; its chunk table, or None if the byte budget does not hold it.

        Shard by shard, so that never more than a few are held compressed beside the sample.
        """
        with self._shards.hold(rows.nbytes):
            return self._put_held(key, layout, rows)

    def _put_held(self, key: str, layout: ShardLayout, rows: npt.NDArray[Any]) -> bytes | None:
        assert self._segment is not None
        with self._compressing:
            parts, table = layout.encode(rows)
        num_bytes = sum(map(len, parts))
        with self._lock:
            if self._full or (self._byte_budget is not None and self._stored_bytes + num_bytes > self._byte_budget):
                self._full = True
                return None
            self._stored_bytes += num_bytes
        self._segment.location.write_bytes(key, *parts, durable=False)
        return table.astype("<u4").tobytes()

    def _take_back(self, put: list[tuple[str, str]], tables: Mapping[str, bytes]) -> None:
        """Delete the shards of a sample that the byte budget does not hold whole. tables: those of `put` alone."""
        assert self._segment is not None
        for _, key in put:
            self._segment.location.delete(key)
        chunks = sum(int(np.frombuffer(table, "<u4")[1::2].sum(dtype=np.int64)) for table in tables.values())
        with self._lock:
            self._stored_bytes -= chunks + sum(self._layouts[name].index_bytes for name, _ in put)

    def _stop(self) -> None:
        self._encoders.shutdown(wait=True, cancel_futures=True)
        self._queue.close()
        self._uploads.shutdown(wait=True, cancel_futures=True)
        if self._claims is not None:
            try:
                self._claims.release()
            except OSError as error:
                logger.warning("claims in %s are left to expire: %s", self._folder.url, one_line(error))


def tokens_checksum(sample: Sample) -> int:
    """CRC-32C of token_ids as int32 little-endian, then loss_mask as bytes: what `IndexEntry.tokens_crc32c` is."""
    crc = google_crc32c.value(sample.token_ids.astype("<i4").tobytes())
    checksum: int = google_crc32c.extend(crc, sample.loss_mask.astype(np.uint8).tobytes())
    return checksum


def _bytes_of(sample: Sample) -> int:
    arrays = [sample.token_ids, sample.loss_mask, sample.aux_hidden, sample.target_argmax, sample.target_lse]
    if sample.last_hidden is not None:
        arrays.append(sample.last_hidden)
    if sample.top_k is not None:
        arrays += [sample.top_k.ids, sample.top_k.log_probabilities]
    return sum(array.nbytes for array in arrays)


def _open_or_make(folder: Location, spec: StoreSpec, url: str) -> None:
    states = folder.child(STATES_FOLDER)
    try:
        if read_spec(states) is None:
            write_group(states, spec)
            states.make_folders_durable()
    except OSError as error:
        raise StoreError(f"store {url} cannot be written: {one_line(error)}") from error
    stored = read_spec(states)
    assert stored is not None
    require_same_spec(stored, spec, where=f"store {states.url}")
