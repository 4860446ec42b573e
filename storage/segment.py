"""A segment: the arrays of one writer, and the statistics that their codes are coded with.

Each writer that writes at all makes a segment of its own, under a name nobody else has. So nothing that was committed
is ever opened for writing again, by this process or by another, and two first writers may calibrate at once without
breaking each other. The price: a few small metadata objects a writer, and the rows a kill leaves behind.

Arrays say a length that is at least what was written, and are cut to their exact one by `trim`: to say each new length
would put every array's zarr.json again for each sample. After a kill an array may thus be up to twice as long as its
data; the index is the truth on what exists.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from storage.errors import DamageError, StoreError, one_line
from storage.index import STATES_FOLDER, IndexEntry, read_spec
from storage.location import Location
from storage.quantise import Statistics
from storage.schema import Axis, StoreSpec, array_schemas, attributes_of, require_same_spec
from storage.seal import sealed, unsealed
from storage.shard import ShardLayout

_FIRST_SHARDS = 64
_CRC_BYTES = 4


def shard_layouts(spec: StoreSpec) -> dict[str, ShardLayout]:
    """The layout of each array, by name, in the order of `array_schemas`."""
    return {array.name: ShardLayout(array) for array in array_schemas(spec)}


def alignments(layouts: Mapping[str, ShardLayout]) -> dict[Axis, int]:
    """Rows to which the start of a sample is rounded up, by axis: a shard's of every array on it."""
    rows: dict[Axis, int] = {}
    for layout in layouts.values():
        rows[layout.array.axis] = math.lcm(rows.get(layout.array.axis, 1), layout.array.shard_rows)
    return rows


class NewSegment:
    """A writer's own segment, made on construction. `reserve` is for one thread; the rest for any."""

    def __init__(
        self, folder: Location, spec: StoreSpec, layouts: Mapping[str, ShardLayout], statistics: Statistics | None
    ) -> None:
        """Write metadata and statistics, durably. OSError if refused. folder: the fingerprint's."""
        self.name = self.new_name()
        self.location = folder.child(STATES_FOLDER).child(self.name)
        self.statistics_digest = statistics_digest(statistics)
        self._layouts = layouts
        self._alignments = alignments(layouts)
        self._lock = threading.Lock()
        self._ends: dict[Axis, int] = dict.fromkeys(self._alignments, 0)
        self._lengths: dict[Axis, int] = dict(self._ends)
        self._capacities = {axis: _FIRST_SHARDS * rows for axis, rows in self._alignments.items()}
        write_group(self.location, spec)
        for name, values in ({} if statistics is None else statistics.arrays()).items():
            self._write_statistics_array(name, values)
        self._write_lengths(self._capacities)
        self.location.make_folders_durable()

    @staticmethod
    def new_name() -> str:
        """A name that no other writer has: the time sorts them for people, the random part keeps them apart."""
        return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:12]}"

    def reserve(self, rows: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """First row and number of rows on each axis for a sample of so many; never given out again. OSError if refused.

        rows: number of rows by array.
        """
        sizes = {layout.array.axis: rows[name] for name, layout in self._layouts.items()}
        with self._lock:
            places: dict[str, tuple[int, int]] = {axis: (self._ends[axis], size) for axis, size in sizes.items()}
            for axis, size in sizes.items():
                if size:
                    self._lengths[axis] = self._ends[axis] + size
                self._ends[axis] += -(-size // self._alignments[axis]) * self._alignments[axis]
            grown = {axis: end for axis, end in self._ends.items() if end > self._capacities[axis]}
            if grown:
                self._capacities.update({axis: 2 * end for axis, end in grown.items()})
                self._write_lengths(self._capacities)
        return places

    def trim(self) -> None:
        """Cut the arrays to what was reserved. OSError if refused."""
        with self._lock:
            self._write_lengths(self._lengths)

    def _write_lengths(self, lengths: Mapping[Any, int]) -> None:
        for name, layout in self._layouts.items():
            document = {**layout.document, "shape": [lengths[layout.array.axis], *layout.array.row_shape]}
            self.location.write_bytes(f"{name}/zarr.json", sealed(document))

    def _write_statistics_array(self, name: str, values: npt.NDArray[Any]) -> None:
        little = values.astype(values.dtype.newbyteorder("<"))
        content = little.tobytes()
        document = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(values.shape),
            "data_type": values.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(n, 1) for n in values.shape]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "attributes": {"meaning": "statistics that this segment's codes are coded with"},
            "storage_transformers": [],
        }
        self.location.write_bytes(f"{name}/zarr.json", sealed(document))
        crc: int = google_crc32c.value(content)
        self.location.write_bytes(f"{name}/{_whole_chunk(values.ndim)}", content, crc.to_bytes(_CRC_BYTES, "little"))


class OpenSegment:
    """What a reader needs of a segment beside its shards, checked once."""

    def __init__(
        self,
        folder: Location,
        name: str,
        spec: StoreSpec,
        layouts: Mapping[str, ShardLayout],
        executor: Executor,
        *,
        sample_id: str,
    ) -> None:
        """folder: the fingerprint's. sample_id: the sample for whose sake it is opened, for errors.

        DamageError says what is missing, damaged or another's; StoreError what cannot be read.
        """
        self.location = folder.child(STATES_FOLDER).child(name)
        self._name = name
        self._sample_id = sample_id
        try:
            stored = read_spec(self.location)
            if stored is None:
                raise self._damage("metadata", "", "is missing")
            # Checked for each segment: two first writers of other specs may have raced for the group above.
            require_same_spec(stored, spec, where="segment")
        except DamageError:
            raise
        except StoreError as error:
            raise self._damage("metadata", "zarr.json", f"is not what was written: {error}") from error
        names = list(layouts)
        # Ours are read by what the spec says; these are for whoever reads them with zarr.
        for array, document in zip(names, executor.map(self._document, names), strict=True):
            schema = layouts[array].array
            if document["data_type"] != schema.dtype or document["shape"][1:] != list(schema.row_shape):
                raise self._damage(array, f"{array}/zarr.json", "describes another array")
        self.statistics: Statistics | None = None
        if spec.encoding.needs_statistics:
            names = list(Statistics.array_names(spec))
            arrays = dict(zip(names, executor.map(self._statistics_array, names), strict=True))
            try:
                self.statistics = Statistics.of_arrays(arrays, spec)
            except StoreError as error:
                raise self._damage("statistics", "", f"holds wrong ones: {error}") from error
        self.statistics_digest = statistics_digest(self.statistics)

    def _document(self, array: str) -> dict[str, Any]:
        """An array's zarr.json."""
        key = f"{array}/zarr.json"
        content = self._read(key)
        try:
            return unsealed(content)
        except ValueError as error:
            raise self._damage(array, key, f"is not what was written: {one_line(error)}") from error

    def _statistics_array(self, name: str) -> npt.NDArray[Any]:
        document = self._document(name)
        try:
            shape, dtype = tuple(document["shape"]), np.dtype(document["data_type"])
            key = f"{name}/{_whole_chunk(len(shape))}"
            content = self._read(key)
            crc: int = google_crc32c.value(content[:-_CRC_BYTES])
            if content[-_CRC_BYTES:] != crc.to_bytes(_CRC_BYTES, "little"):
                raise self._damage("statistics", key, "has another checksum")
            little = np.frombuffer(content[:-_CRC_BYTES], dtype.newbyteorder("<"))
            return little.reshape(shape).astype(dtype)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, StoreError):
                raise
            raise self._damage("statistics", f"{name}/zarr.json", f"is wrong: {one_line(error)}") from error

    def _read(self, key: str) -> bytes:
        try:
            content = self.location.read_bytes(key)
        except OSError as error:
            raise StoreError(
                f"sample {self._sample_id}: {self.location.url}/{key} cannot be read: {one_line(error)}"
            ) from error
        if content is None:
            raise self._damage("metadata", key, "is missing")
        return content

    def _damage(self, array: str, key: str, what: str) -> DamageError:
        return DamageError(self._sample_id, array, f"{STATES_FOLDER}/{self._name}/{key}".rstrip("/"), what)


def stored_bytes(entry: IndexEntry, layouts: Mapping[str, ShardLayout]) -> int:
    """Bytes of all shards of one sample."""
    return sum(shard_bytes(entry, layout) for layout in layouts.values())


def shard_bytes(entry: IndexEntry, layout: ShardLayout) -> int:
    """Bytes of one array's shards of one sample, their indexes included."""
    rows = entry.rows[layout.array.axis][1]
    return entry.chunk_bytes(layout.array.name) + layout.num_shards(rows) * layout.index_bytes


def shard_keys(entry: IndexEntry, layout: ShardLayout) -> list[str]:
    """Keys, inside the segment, of one array's shards of one sample."""
    start, rows = entry.rows[layout.array.axis]
    first = start // layout.array.shard_rows
    return [layout.shard_key(first + shard) for shard in range(layout.num_shards(rows))]


def statistics_digest(statistics: Statistics | None) -> str:
    """SHA-256 of the statistics, their first 32 hex digits; empty for none. Every index entry repeats it."""
    if statistics is None:
        return ""
    hashed = hashlib.sha256()
    for name, values in sorted(statistics.arrays().items()):
        hashed.update(name.encode())
        hashed.update(values.astype(values.dtype.newbyteorder("<")).tobytes())
    return hashed.hexdigest()[:32]


def write_group(location: Location, spec: StoreSpec) -> None:
    """A Zarr v3 group is this one document. Zarr's own way would not fsync it, nor let two writers race to it."""
    document = {"zarr_format": 3, "node_type": "group", "attributes": attributes_of(spec)}
    location.write_bytes("zarr.json", sealed(document))


def _whole_chunk(num_axes: int) -> str:
    return ".".join(["c", *["0"] * num_axes])
