"""Reading samples back: committed ones only, each verified twice.

zarr verifies each chunk and shard index by its CRC-32C, which finds flipped bits and truncated shards; but a missing
shard reads as fill values without an error. So the rows of each array are checked once more, against the checksums in
the sample's index entry (zlib's CRC-32, ~3 GB/s: about what decompression costs). There is no way to read without.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from storage.errors import StoreError, one_line
from storage.index import STATES_FOLDER, IndexEntry, read_index, read_spec, stored_fingerprints
from storage.location import Location, locate
from storage.schema import (
    ArraySchema,
    Sample,
    StoreSpec,
    StoreStatistics,
    array_schemas,
    raw_bytes,
    require_same_spec,
)
from storage.writer import shard_name

_LISTED_FINGERPRINTS = 8
# What zarr, numcodecs and the file system raise on damaged files (zarr's own errors are ValueErrors or KeyErrors).
_DAMAGE = (OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError)


class StoreReader:
    """The samples of one spec that were committed in the store at a URL when it was opened."""

    def __init__(self, url: str, spec: StoreSpec) -> None:
        """Read the index.

        StoreError: a URL not served, a fingerprint the store does not hold (the message lists those it does), a stored
        spec that differs, a damaged index.
        """
        self._spec = spec
        root = locate(url)
        self._folder = root.child(spec.fingerprint)
        self._states = self._folder.child(STATES_FOLDER)
        stored = read_spec(self._states)
        if stored is None:
            raise StoreError(_not_held(root, spec))
        require_same_spec(stored, spec, where=f"store {self._states.url}")
        self._entries = read_index(self._folder, spec)
        self._segments: dict[str, dict[str, Any]] = {}

    @property
    def spec(self) -> StoreSpec:
        """The spec that the store was opened with."""
        return self._spec

    def sample_ids(self) -> frozenset[str]:
        """Ids of the committed samples."""
        return frozenset(self._entries)

    def read(self, sample_id: str) -> Sample:
        """One sample, verified. StoreError names the sample, the array and what is wrong."""
        entry = self._entries.get(sample_id)
        if entry is None:
            raise StoreError(f"sample {sample_id} is not in store {self._folder.url}; capture it first")
        segment = self._open_segment(entry)
        rows: dict[str, npt.NDArray[Any]] = {}
        for array, checksum in zip(array_schemas(self._spec), entry.checksums, strict=True):
            rows[array.name] = self._read_rows(segment[array.name], array, entry, checksum)
        return Sample(sample_id=sample_id, **rows)

    def statistics(self) -> StoreStatistics:
        """Counts from the index, and the bytes that the files really take (walks all of them). OSError if refused."""
        num_tokens = sum(entry.num_tokens for entry in self._entries.values())
        return StoreStatistics(
            num_samples=len(self._entries),
            num_tokens=num_tokens,
            stored_bytes=self._folder.total_bytes(),
            raw_bytes=raw_bytes(self._spec, num_tokens=num_tokens, num_targets=0),
        )

    def _open_segment(self, entry: IndexEntry) -> dict[str, Any]:
        """The segment's arrays, opened once. Its own attributes are checked too: two first writers may have raced."""
        if entry.segment not in self._segments:
            location = self._states.child(entry.segment)
            stored = read_spec(location)
            if stored is None:
                raise self._damaged(entry, "metadata", f"segment {location.url} is missing")
            require_same_spec(stored, self._spec, where=f"sample {entry.sample_id}: segment {location.url}")
            arrays: dict[str, Any] = {}
            for array in array_schemas(self._spec):
                try:
                    store = location.zarr_store(read_only=True)
                    arrays[array.name] = zarr.open_array(store, path=array.name, mode="r", zarr_format=3)
                except _DAMAGE as error:
                    raise self._damaged(entry, array.name, f"its metadata: {one_line(error)}") from error
            self._segments[entry.segment] = arrays
        return self._segments[entry.segment]

    def _read_rows(self, source: Any, array: ArraySchema, entry: IndexEntry, checksum: int) -> npt.NDArray[Any]:
        try:
            values = np.asarray(source[entry.start_token : entry.start_token + entry.num_tokens])
        except _DAMAGE as error:
            raise self._damaged(entry, array.name, one_line(error)) from error
        want = (entry.num_tokens, *array.row_shape)
        if values.shape != want or values.dtype != np.dtype(array.dtype):
            found = f"{values.dtype} {list(values.shape)} where {array.dtype} {list(want)} was written"
            raise self._damaged(entry, array.name, found)
        if zlib.crc32(np.ascontiguousarray(values).data) != checksum:
            raise self._damaged(entry, array.name, self._why_wrong(array, entry))
        return values

    def _why_wrong(self, array: ArraySchema, entry: IndexEntry) -> str:
        first = entry.start_token // self._spec.shard_tokens
        last = (entry.start_token + entry.num_tokens - 1) // self._spec.shard_tokens
        names = [shard_name(array.name, shard, 1 + len(array.row_shape)) for shard in range(first, last + 1)]
        segment = self._states.child(entry.segment)
        missing = [name for name in names if not segment.exists(name)]
        return f"shard {missing[0]} is missing" if missing else "its checksum differs from the index"

    def _damaged(self, entry: IndexEntry, array: str, what: str) -> StoreError:
        return StoreError(
            f"sample {entry.sample_id}: {array} is damaged in segment {entry.segment}: {what}. "
            f"To capture that segment again, delete {self._folder.url}/index/{entry.segment}.*.jsonl"
        )


def _not_held(root: Location, wanted: StoreSpec) -> str:
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
        f"store {root.url} holds no states of {_describe(wanted)}; it holds "
        f"{', '.join(held[:_LISTED_FINGERPRINTS]) or 'nothing'}{more}: "
        "capture first, or choose the target and layers that were captured"
    )


def _describe(spec: StoreSpec) -> str:
    return f"{spec.fingerprint} ({spec.target}, layers {'/'.join(map(str, spec.aux_layer_ids))})"
