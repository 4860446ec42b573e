"""Reading samples back: committed ones only, every byte of them held against the index.

Each chunk carries a CRC-32C of its own, which zarr too would verify; the sample's index entry repeats it, and with it
finds what is sound by itself but not this sample's: a swapped, stale or foreign shard. A missing one, which zarr reads
as fill values, is an error here. There is no way to read without.

`read` gives bfloat16; `read_window` and `prefetch` give codes, which a GPU dequantises (kernels.dequantize).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from storage.cache import ShardCache
from storage.encoding import EncodedSample, decode_sample, encoded_states
from storage.errors import DamageError, StoreError
from storage.fetch import CLOSED, Fetcher
from storage.index import STATES_FOLDER, IndexEntry, read_index, read_spec, stored_fingerprints
from storage.location import Location, locate
from storage.schema import (
    LOSS_MASK,
    Sample,
    StoreSpec,
    StoreStatistics,
    raw_bytes,
    require_same_spec,
    target_window,
)
from storage.segment import OpenSegment, shard_layouts, stored_bytes

_LISTED_FINGERPRINTS = 8
PREFETCH_BYTES = 1 << 30


class StoreReader:
    """The samples of one spec that were committed in the store at a URL when it was opened. Thread-safe."""

    def __init__(
        self,
        url: str,
        spec: StoreSpec | None = None,
        *,
        fingerprint: str | None = None,
        cache: ShardCache | None = None,
        max_requests: int = 16,
    ) -> None:
        """Read the index.

        spec: what the states must be; None takes what the store says under `fingerprint`, which may be left out when
        the store holds one only. cache: for shards of a remote store. max_requests: requests at once.

        StoreError: a URL not served, a fingerprint the store does not hold (the message lists those it does), a stored
        spec that differs, a damaged index.
        """
        root = locate(url)
        wanted = spec.fingerprint if spec is not None else fingerprint or _only_fingerprint(root)
        self._folder = root.child(wanted)
        self._states = self._folder.child(STATES_FOLDER)
        stored = read_spec(self._states)
        if stored is None:
            raise StoreError(_not_held(root, wanted if spec is None else _describe(spec)))
        if spec is not None:
            require_same_spec(stored, spec, where=f"store {self._states.url}")
        elif stored.fingerprint != wanted:
            raise StoreError(f"store {self._states.url} says that it is of fingerprint {stored.fingerprint}")
        self._spec = stored
        self._layouts = shard_layouts(stored)
        self._entries = read_index(self._folder)
        self._segments: dict[str, OpenSegment] = {}
        self._opening = threading.Lock()
        self._fetcher = Fetcher(self._folder, self._layouts, cache=cache, max_requests=max_requests)
        self._samples = ThreadPoolExecutor(max_requests, thread_name_prefix="store-read")

    @property
    def spec(self) -> StoreSpec:
        """The spec of the store."""
        return self._spec

    @property
    def entries(self) -> Mapping[str, IndexEntry]:
        """The index entry of each committed sample, by id."""
        return self._entries

    def sample_ids(self) -> frozenset[str]:
        """Ids of the committed samples."""
        return frozenset(self._entries)

    def read(self, sample_id: str) -> Sample:
        """One sample, bfloat16, verified. DamageError names the sample, the array, the shard and what is wrong."""
        entry = self._entry(sample_id)
        segment = self._segment(entry)
        arrays = self._arrays(entry, 0, entry.num_tokens)
        return decode_sample(
            arrays, sample_id=sample_id, spec=self._spec, statistics=segment.statistics, overwrite=True
        )

    def read_encoded(self, sample_id: str) -> EncodedSample:
        """One sample, its states in stored form, verified. Errors as `read`."""
        return self.read_window(sample_id)

    def read_window(self, sample_id: str, start: int = 0, stop: int | None = None) -> EncodedSample:
        """Tokens `start` to `stop` of a sample, states in stored form, verified; chunks outside are not fetched.

        Errors as `read`; StoreError for a window that does not lie within the sample.
        """
        entry = self._entry(sample_id)
        segment = self._segment(entry)
        stop = entry.num_tokens if stop is None else stop
        if not 0 <= start < stop <= entry.num_tokens:
            raise StoreError(
                f"sample {sample_id}: window {start} to {stop} is not within its {entry.num_tokens} tokens"
            )
        return encoded_states(
            self._arrays(entry, start, stop),
            sample_id=sample_id,
            spec=self._spec,
            statistics=segment.statistics,
            start=start,
            stop=stop,
            overwrite=True,
        )

    def prefetch(
        self, windows: Iterable[tuple[str, int, int | None]], *, max_bytes: int = PREFETCH_BYTES
    ) -> Iterator[EncodedSample]:
        """What `read_window` gives for each (sample_id, start, stop), in order, read ahead by background threads.

        max_bytes: memory for what is read ahead, the sample under way included; one is always under way. `windows` is
        read as far ahead as that, on the caller's thread. An error is raised in its sample's turn.
        """
        waiting = iter(windows)
        ahead: deque[tuple[int, Future[EncodedSample]]] = deque()
        held = 0
        following = next(waiting, None)
        try:
            while following is not None or ahead:
                while following is not None:
                    size = self._num_bytes(*following)
                    if ahead and held + size > max_bytes:
                        break
                    ahead.append((size, self._samples.submit(self.read_window, *following)))
                    held += size
                    following = next(waiting, None)
                size, reading = ahead.popleft()
                try:
                    encoded = reading.result()
                except CancelledError as error:
                    raise StoreError(CLOSED) from error
                yield encoded
                del encoded  # or it would be held while the next one is read
                # Only now: while the caller works with a sample, it counts.
                held -= size
        finally:
            for _, reading in ahead:
                reading.cancel()

    def statistics(self) -> StoreStatistics:
        """What the committed samples are and take, from the index alone: no file is looked at."""
        entries = self._entries.values()
        num_tokens = sum(entry.num_tokens for entry in entries)
        num_targets = sum(entry.num_targets for entry in entries)
        return StoreStatistics(
            num_samples=len(self._entries),
            num_tokens=num_tokens,
            num_targets=num_targets,
            stored_bytes=sum(stored_bytes(entry, self._layouts) for entry in entries),
            raw_bytes=raw_bytes(self._spec, num_tokens=num_tokens, num_targets=num_targets),
        )

    def close(self) -> None:
        """Stop the background threads; what they were reading is dropped."""
        self._samples.shutdown(wait=False, cancel_futures=True)
        self._fetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entry(self, sample_id: str) -> IndexEntry:
        entry = self._entries.get(sample_id)
        if entry is None:
            raise StoreError(f"sample {sample_id} is not in store {self._folder.url}; capture it first")
        return entry

    def _segment(self, entry: IndexEntry) -> OpenSegment:
        """What belongs to the sample's segment, read and checked once."""
        with self._opening:
            segment = self._segments.get(entry.segment)
            if segment is None:
                segment = OpenSegment(
                    self._folder,
                    entry.segment,
                    self._spec,
                    self._layouts,
                    self._fetcher.executor,
                    sample_id=entry.sample_id,
                )
                self._segments[entry.segment] = segment
        if segment.statistics_digest != entry.statistics_digest:
            where = f"{STATES_FOLDER}/{entry.segment}"
            raise DamageError(entry.sample_id, "statistics", where, "holds others than the sample is coded with")
        return segment

    def _arrays(self, entry: IndexEntry, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
        """The arrays that `encoded_states` wants for a window. Which target rows lie in it, the loss mask tells."""
        is_whole = (start, stop) == (0, entry.num_tokens)
        reading = {}
        later = []
        for name, layout in self._layouts.items():
            axis = layout.array.axis
            num_rows = entry.rows[axis][1]
            if is_whole or axis == "exceptions" or name == "tokens":
                reading[name] = self._fetcher.start(entry, name, 0, num_rows)
            elif axis == "tokens":
                reading[name] = self._fetcher.start(entry, name, start, stop)
            else:
                later.append(name)
        if later:
            mask = reading["tokens"].result()[:, LOSS_MASK] != 0
            first, last = target_window(mask, start, stop)
            for name in later:
                reading[name] = self._fetcher.start(entry, name, first, last)
        return {name: reading[name].result() for name in self._layouts}

    def _num_bytes(self, sample_id: str, start: int, stop: int | None) -> int:
        """Memory for a window: all of the target rows, as its own are not known yet."""
        entry = self._entry(sample_id)
        stop = entry.num_tokens if stop is None else stop
        total = 0
        for name, layout in self._layouts.items():
            window = layout.array.axis == "tokens" and name != "tokens"
            low, high = (start, stop) if window else (0, entry.rows[layout.array.axis][1])
            total += self._fetcher.num_bytes(entry, name, low, high)
        return total


def _only_fingerprint(root: Location) -> str:
    found = stored_fingerprints(root)
    if len(found) == 1:
        return found[0]
    if not found:
        raise StoreError(f"there is no store of hidden states at {root.url}")
    raise StoreError(
        f"store {root.url} holds {len(found)} fingerprints ({', '.join(found[:_LISTED_FINGERPRINTS])}): name one"
    )


def _not_held(root: Location, wanted: str) -> str:
    held = []
    for fingerprint in stored_fingerprints(root):
        try:
            spec = read_spec(root.child(fingerprint).child(STATES_FOLDER))
        except StoreError:
            held.append(f"{fingerprint} (its attributes are damaged)")
            continue
        if spec is not None:
            held.append(_describe(spec))
    more = f" and {len(held) - _LISTED_FINGERPRINTS} more" if len(held) > _LISTED_FINGERPRINTS else ""
    return (
        f"store {root.url} holds no states of {wanted}; it holds "
        f"{', '.join(held[:_LISTED_FINGERPRINTS]) or 'nothing'}{more}: "
        "capture first, or choose the target and layers that were captured"
    )


def _describe(spec: StoreSpec) -> str:
    return f"{spec.fingerprint} ({spec.target}, layers {'/'.join(map(str, spec.aux_layer_ids))})"
