"""A local copy of remote shards: what fits its budget stays, and nothing is ever thrown out to make room.

Training reads every sample once an epoch. Under least-recently-used each shard is thrown out just before it is wanted
again, and a cache of half the store hits nothing; one that keeps what it has hits half. So once the budget is used up
nothing new enters, until files are deleted by hand (any of them, at any time).

zarr's CacheStore (zarr.experimental) was considered: it evicts least-recently-used, forgets on a restart how large it
is and which files it holds, keeps byte ranges in memory only, does not verify what it reads back, and works inside
zarr's event loop, which our reads do not pass through. fsspec's caches expire by age and know no budget.

A file's name is the hash of the shard's URL and of the checksums that the index wants in it, so that a shard of another
time or place is another file; its content is the shard and a CRC-32C. Several processes may share one folder.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from storage.errors import StoreError, one_line
from storage.location import Location
from storage.shard import checksum

logger = logging.getLogger(__name__)

_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What a cache did since it was opened."""

    hits: int
    """Shards read from it."""
    misses: int
    """Shards it did not hold."""
    dropped: int
    """Files thrown away because their content was damaged."""
    num_bytes: int
    """Bytes of its files now."""


@dataclass(slots=True, eq=False)
class ShardCache:
    """A folder of shards, for any number of readers. Thread-safe. StoreError if the folder cannot be made."""

    folder: Path
    """Where; made if need be."""
    budget: int
    """Bytes that its files may take."""
    _location: Location = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _num_bytes: int = field(init=False, default=0)
    _counts: dict[str, int] = field(init=False, default_factory=lambda: dict.fromkeys(("hits", "misses", "dropped"), 0))

    def __post_init__(self) -> None:
        self._location = Location(str(self.folder), "file", str(self.folder))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._num_bytes = self._location.total_bytes()
        except OSError as error:
            raise StoreError(f"cache folder {self.folder} cannot be used: {one_line(error)}") from error

    @property
    def counts(self) -> CacheCounts:
        """What it did so far."""
        with self._lock:
            return CacheCounts(**self._counts, num_bytes=self._num_bytes)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a shard of so many bytes would still enter."""
        with self._lock:
            return self._num_bytes + num_bytes + _CRC_BYTES <= self.budget

    def read(self, key: str) -> memoryview | None:
        """The shard kept under `key`; None if there is none. A damaged file is deleted, logged, and None."""
        content = self._location.read_bytes(_path(key))
        if content is None:
            self._count("misses")
            return None
        shard = memoryview(content)[:-_CRC_BYTES]
        if memoryview(content)[-_CRC_BYTES:] != _checksum(shard):
            self.drop(key)
            return None
        self._count("hits")
        return shard

    def put(self, key: str, shard: bytes | memoryview) -> None:
        """Keep a shard if the budget allows. A disk that refuses it is logged, and costs only the copy."""
        size = len(shard) + _CRC_BYTES
        with self._lock:
            if self._num_bytes + size > self.budget:
                return
            self._num_bytes += size
        try:
            # Not durable: after a power cut the checksum tells.
            self._location.write_bytes(_path(key), bytes(shard), _checksum(shard), durable=False)
        except OSError as error:
            logger.warning("cache folder %s does not take a shard: %s", self.folder, one_line(error))
            with self._lock:
                self._num_bytes -= size

    def drop(self, key: str) -> None:
        """Delete a file whose content turned out to be damaged."""
        path = self.folder / _path(key)
        logger.warning("cached shard %s is damaged; it is deleted and fetched again", path)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return  # another reader was faster
        with self._lock:
            self._num_bytes -= size
        self._count("dropped")

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def cache_key(url: str, table: bytes) -> str:
    """Key of the shard at `url` whose chunks are those of `table` (storage.shard.ChunkTable)."""
    return hashlib.sha256(url.encode() + b"\0" + table).hexdigest()


def _path(key: str) -> str:
    # 256 folders: a cache may hold a million files.
    return f"{key[:2]}/{key[2:42]}"


def _checksum(shard: bytes | memoryview) -> bytes:
    return checksum(shard).to_bytes(_CRC_BYTES, "little")
