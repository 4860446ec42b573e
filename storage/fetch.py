"""Fetching rows of a sample: one request a shard, every chunk held against the index entry, many at once.

A request gets the whole shard when most of it is needed, and a range of it otherwise; either way the index entry says
where, so no request is spent on finding out. Threads do the waiting and the decoding both: zstd, blosc and CRC-32C
release Python's lock, and a thread that decodes its own shard needs no hand-over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.byte_gate import ByteGate
from storage.cache import ShardCache, cache_key
from storage.errors import DamageError, StoreError, one_line
from storage.index import STATES_FOLDER, IndexEntry
from storage.location import Location
from storage.shard import ShardLayout, ShardPiece

logger = logging.getLogger(__name__)

CLOSED = "the store reader was closed while it read"
# A request costs a round trip, 40 ms at 25 MB/s a connection: a megabyte. Past half of a shard the rest comes along.
_WHOLE_SHARE = 0.5
# Compressed bytes under way at once: ten times what 40 ms of 400 MB/s need, and a third of a long lossless sample.
_BYTES_UNDER_WAY = 160 << 20


class Fetcher:
    """Reads rows of committed samples. Thread-safe, but not to be called from its own threads."""

    def __init__(
        self, folder: Location, layouts: Mapping[str, ShardLayout], *, cache: ShardCache | None, max_requests: int
    ) -> None:
        """folder: the fingerprint's. max_requests: requests under way at once, and threads that decode."""
        self._states = folder.child(STATES_FOLDER)
        self._layouts = layouts
        self._cache = cache
        self._under_way = ByteGate(_BYTES_UNDER_WAY)
        # A disk answers at once: more threads than cores to decode would only hold memory.
        threads = max_requests if folder.is_remote else min(max_requests, 2 * (os.cpu_count() or 1))
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="store-get")
        """Where the requests run."""

    def start(self, entry: IndexEntry, array: str, start: int, stop: int) -> Rows:
        """Begin to read rows `start` to `stop` of one array of a sample."""
        layout = self._layouts[array]
        num_rows = entry.rows[layout.array.axis][1]
        try:
            table = entry.table(array)
            if len(table) != layout.num_chunks(num_rows):
                raise ValueError(f"{len(table)} chunks where {layout.num_chunks(num_rows)} are due")
        except (KeyError, ValueError) as error:
            raise DamageError(
                entry.sample_id, array, f"index/{entry.segment}", f"is wrong: {one_line(error)}"
            ) from error
        out = np.empty((max(stop - start, 0), *layout.array.row_shape), layout.array.dtype)
        pieces = layout.pieces(table, num_rows, start, stop)
        try:
            return Rows(out, [self.executor.submit(self._get, entry, layout, piece, out, start) for piece in pieces])
        except RuntimeError as error:  # what an executor that was shut down says
            raise StoreError(CLOSED) from error

    def num_bytes(self, entry: IndexEntry, array: str, start: int, stop: int) -> int:
        """Memory that reading these rows takes, while it lasts: what is fetched, and the rows."""
        layout = self._layouts[array]
        pieces = layout.pieces(entry.table(array), entry.rows[layout.array.axis][1], start, stop)
        return sum(piece.size for piece in pieces) + max(stop - start, 0) * layout.array.row_bytes

    def close(self) -> None:
        """Stop the threads."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    def _get(
        self, entry: IndexEntry, layout: ShardLayout, piece: ShardPiece, out: npt.NDArray[Any], start: int
    ) -> None:
        with self._under_way.hold(piece.size):
            self._get_now(entry, layout, piece, out, start)

    def _get_now(
        self, entry: IndexEntry, layout: ShardLayout, piece: ShardPiece, out: npt.NDArray[Any], start: int
    ) -> None:
        first_row = entry.rows[layout.array.axis][0]
        name = f"{entry.segment}/{layout.shard_key(first_row // layout.array.shard_rows + piece.shard)}"
        key = ""
        if self._cache is not None and self._states.is_remote:
            key = cache_key(f"{self._states.url}/{name}", piece.table.tobytes())
            cached = self._cache.read(key)
            if cached is not None:
                try:
                    layout.decode(cached, piece, out, start)
                    return
                except ValueError:
                    self._cache.drop(key)
        all_chunks = piece.high - piece.low == len(piece.table)
        is_whole = all_chunks or piece.byte_stop - piece.byte_start >= _WHOLE_SHARE * piece.size
        if key and self._cache is not None and self._cache.has_room(piece.size):
            is_whole = True
        where = f"{STATES_FOLDER}/{name}"
        try:
            if is_whole:
                # One byte more than is due: a file that grew is not what was written either.
                content = self._states.read_bytes(name, 0, piece.size + 1)
            else:
                content = self._states.read_bytes(name, piece.byte_start, piece.byte_stop)
        except OSError as error:
            raise StoreError(
                f"sample {entry.sample_id}: {layout.array.name} cannot be read: {where}: {one_line(error)}"
            ) from error
        if content is None:
            raise DamageError(entry.sample_id, layout.array.name, where, "is missing")
        try:
            if is_whole:
                layout.check_whole(memoryview(content), piece)
                layout.decode(memoryview(content), piece, out, start)
            else:
                layout.decode_range(memoryview(content), piece, out, start)
        except ValueError as error:
            raise DamageError(entry.sample_id, layout.array.name, where, f"is not what was written: {error}") from error
        if key and is_whole and self._cache is not None:
            self._cache.put(key, content)


class Rows:
    """Rows that are being read."""

    def __init__(self, out: npt.NDArray[Any], requests: list[Future[None]]) -> None:
        self._out = out
        self._requests = requests

    def result(self) -> npt.NDArray[Any]:
        """All of them. DamageError for what is not as it was written; StoreError for what cannot be read."""
        # Not concurrent.futures.wait: it waits for ever for a request that the closing of the reader cancelled.
        try:
            for request in self._requests:
                request.result()
        except CancelledError as error:
            raise StoreError(CLOSED) from error
        return self._out
