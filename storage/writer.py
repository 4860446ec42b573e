"""Writing samples: encoded, compressed and put by background threads, committed in the order in which they came.

`write` queues a sample and returns, so that the target's next forward runs meanwhile; it waits only while more than
`max_pending_bytes` are under way. Order is everything: a sample's shards first (put whole, made durable), then its
line in the index. A kill in between leaves rows that no index entry names: not data, only bytes. What is committed is
never touched again, so an error costs the samples after it and nothing else.

All samples that are ready when the index is written share one write of it: their files' fsyncs run side by side, and
a short sample costs 1 ms instead of the 27 ms that a commit of its own took. The price: `write` returning says nothing
about durability; `flush` and `close` do.

A lossy encoding needs statistics. A writer takes those of a segment that is committed already, or holds its first
samples back until `calibration_tokens` are there; a flush calibrates with what there is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import google_crc32c
import numpy as np
import numpy.typing as npt

from storage.claims import Claims
from storage.drift import Drift
from storage.encoding import encode_sample
from storage.errors import StoreError, one_line
from storage.index import STATES_FOLDER, IndexEntry, SegmentIndex, read_index, read_spec
from storage.location import Location, locate
from storage.quantise import Statistics, calibrate
from storage.schema import Sample, StoreSpec, require_same_spec
from storage.validate import validate_sample
from storage.segment import NewSegment, OpenSegment, shard_layouts, stored_bytes, write_group
from storage.shard import ShardLayout

logger = logging.getLogger(__name__)

CALIBRATION_TOKENS = 16_384
_REMOTE_UPLOADS = 16
_LOCAL_UPLOADS = 8
# More lines than an index file holds would write it twice.
_GROUP = 128


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

        self._changed = threading.Condition()
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._queued: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._full = byte_budget is not None and self._stored_bytes >= byte_budget
        self._closed = False
        self._drift = Drift(spec)
        self._segment: NewSegment | None = None
        self._index: SegmentIndex | None = None
        self._claims: Claims | None = None

        self._encoders = ThreadPoolExecutor(workers, thread_name_prefix="store-encode")
        self._compressors = ThreadPoolExecutor(workers, thread_name_prefix="store-compress")
        uploads = _REMOTE_UPLOADS if self._folder.is_remote else _LOCAL_UPLOADS
        self._uploads = ThreadPoolExecutor(uploads, thread_name_prefix="store-put")
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="store-commit")
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
        with self._changed:
            return frozenset(self._entries)

    def claim(self, sample_ids: Iterable[str]) -> list[str]:
        """Of `sample_ids`, in order, those that no other living writer is about to capture; others will skip them.

        Advisory: it saves work and protects nothing. Takes the place of the claim before; `close` gives it up.
        StoreError if the store cannot be written.
        """
        if self._claims is None:
            self._claims = Claims(self._folder, writer=NewSegment.new_name())
        try:
            return self._claims.claim(sample_ids)
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
        self._raise_failure()
        validate_sample(sample, self._spec)
        tokens_crc32c = tokens_checksum(sample)
        if self._has_already(sample.sample_id, tokens_crc32c):
            return True
        size = _bytes_of(sample)
        if self._held and self._pending_bytes + size > self._max_pending_bytes:
            self._calibrate()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or not self._pending_bytes
                    or self._pending_bytes + size <= self._max_pending_bytes
                )
            )
            self._raise_failure()
            if self._full:
                return False
            self._pending_bytes += size
            self._queued[sample.sample_id] = tokens_crc32c
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
        self._raise_failure()
        if self._held:
            self._calibrate()
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._pending)
        self._raise_failure()

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
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None or not self._pending)
            self._stop()

    def _has_already(self, sample_id: str, tokens_crc32c: int) -> bool:
        """States may differ between devices; tokens and mask may not, as the sample's id is their hash."""
        with self._changed:
            entry = self._entries.get(sample_id)
            before = self._queued.get(sample_id) if entry is None else entry.tokens_crc32c
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
                self._fail(failure)
                raise failure from error
            self._index = SegmentIndex(self._folder, segment=self._segment.name)
        future = self._encoders.submit(self._encode, sample)
        with self._changed:
            self._pending.append(_Pending(sample.sample_id, _bytes_of(sample), future))
        future.add_done_callback(lambda _: self._committer.submit(self._advance).add_done_callback(self._notice))

    def _encode(self, sample: Sample) -> _Written | None:
        """Encode one sample and put its shards; None if the byte budget does not hold it."""
        assert self._segment is not None
        arrays = encode_sample(sample, self._spec, self._statistics)
        self._drift.add(arrays, num_tokens=sample.token_ids.size)
        places = self._segment.reserve({name: len(rows) for name, rows in arrays.items()})
        work: list[tuple[str, str, Future[tuple[list[bytes], npt.NDArray[np.uint32]]]]] = []
        for name, rows in arrays.items():
            layout = self._layouts[name]
            per_shard = layout.array.shard_rows
            first = places[layout.array.axis][0] // per_shard
            for shard in range(layout.num_shards(len(rows))):
                part = rows[shard * per_shard : (shard + 1) * per_shard]
                work.append((name, layout.shard_key(first + shard), self._compressors.submit(layout.encode, part)))
        num_bytes = sum(len(part) for _, _, shard in work for part in shard.result()[0])
        with self._changed:
            if self._full or (self._byte_budget is not None and self._stored_bytes + num_bytes > self._byte_budget):
                self._full = True
                return None
            self._stored_bytes += num_bytes
        put = self._segment.location.write_bytes
        for upload in [self._uploads.submit(put, key, *shard.result()[0], durable=False) for _, key, shard in work]:
            upload.result()
        tables: dict[str, bytes] = dict.fromkeys(arrays, b"")
        for name, _, shard in work:
            tables[name] += shard.result()[1].astype("<u4").tobytes()
        entry = IndexEntry(
            sample_id=sample.sample_id,
            segment=self._segment.name,
            rows=places,
            chunks=tables,
            tokens_crc32c=tokens_checksum(sample),
            statistics_digest=self._segment.statistics_digest,
        )
        return _Written(entry, [key for _, key, _ in work])

    def _advance(self) -> None:
        """Commit every sample that is ready and has none before it that is not. On the committer's one thread."""
        group: list[_Pending] = []
        with self._changed:
            ready = 0
            while ready < min(len(self._pending), _GROUP) and self._pending[ready].future.done():
                ready += 1
            if self._failure is None:
                group = [self._pending[i] for i in range(ready)]
        failure = next((item for item in group if item.future.exception() is not None), None)
        if failure is not None:
            group = group[: group.index(failure)]
        written = [item.future.result() for item in group]
        committed = [item for item in written if item is not None]
        if committed:
            assert self._segment is not None
            assert self._index is not None
            try:
                self._segment.location.make_durable((key for item in committed for key in item.keys), self._uploads)
                self._index.commit([item.entry for item in committed])
            except OSError as error:
                self._fail(StoreError(self._cannot_write(group[0].sample_id, error)))
                return
        with self._changed:
            for item in committed:
                self._entries[item.entry.sample_id] = item.entry
            for _ in group:
                done = self._pending.popleft()
                self._pending_bytes -= done.size
                del self._queued[done.sample_id]
            self._changed.notify_all()
        if failure is not None:
            error = failure.future.exception()
            assert error is not None
            if isinstance(error, OSError):
                error = StoreError(self._cannot_write(failure.sample_id, error))
            self._fail(error)

    def _cannot_write(self, sample_id: str, error: OSError) -> str:
        return (
            f"sample {sample_id} cannot be written to {self._folder.url}: {one_line(error)}; all committed before it is "
            "good, and a new capture goes on from there"
        )

    def _notice(self, advanced: Future[None]) -> None:
        error = advanced.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _stop(self) -> None:
        for executor in (self._encoders, self._compressors, self._committer, self._uploads):
            executor.shutdown(wait=True, cancel_futures=True)
        if self._claims is not None:
            try:
                self._claims.release()
            except OSError as error:
                logger.warning("claims in %s are left to expire: %s", self._folder.url, one_line(error))


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A sample on its way."""

    sample_id: str
    size: int
    future: Future[_Written | None]


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """A sample whose shards are put, not yet committed."""

    entry: IndexEntry
    keys: list[str]


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
