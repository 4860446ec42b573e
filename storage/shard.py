"""Shards: several compressed chunks in one file or object, as Zarr's sharding codec lays them out.

zarr can read and write such shards itself, and a test holds both against each other. We compose and parse them here
because four things are out of its reach: a shard is put whole, so a background thread may upload it and nobody ever
sees half of one; chunks are decoded straight into the destination; the chunks of a window are fetched by ranges that
the sample's index entry gives, without asking the shard first; and each chunk is held against the checksum in that
entry. zarr alone cannot tell a shard from another sample's, an older one or a swapped one: those are sound by
themselves.

    shard := index, chunk, chunk, ...                    the chunks in C order of their place, nothing in between
    index := (offset, length) uint64 little-endian a place, 2^64-1 twice where there is no chunk; then CRC-32C of it
    chunk := the codec's bytes, then CRC-32C of them     little-endian

A sample starts on a shard boundary, so its chunks have one numbering: chunk `block * width + column`, where a block is
`chunk_rows` rows and `width` chunks lie side by side in a row (the three layers, say). `ChunkTable` holds CRC and
length of each in that order: 8 bytes a chunk, from which every byte range and every shard's index follow.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import zarr
from zarr.storage import MemoryStore

from storage.errors import one_line
from storage.schema import ArraySchema

ChunkTable = npt.NDArray[np.uint32]
"""uint32 [chunks, 2]: CRC-32C and length in bytes of each encoded chunk, the length with the CRC's own 4 bytes."""

_ABSENT = np.uint64(2**64 - 1)
_CRC_BYTES = 4
_scratch = threading.local()


class ShardLayout:
    """How the rows of one array become shards, and what their bytes must be."""

    def __init__(self, array: ArraySchema) -> None:
        self.array = array
        self.document = _zarr_document(array)
        """The array's zarr.json for no rows."""
        self._dtype = np.dtype(array.dtype)
        grid = [row // chunk for row, chunk in zip(array.row_shape, array.chunk_row_shape, strict=True)]
        self.width = math.prod(grid)
        """Chunks side by side in a row."""
        self.blocks_per_shard = array.shard_rows // array.chunk_rows
        self._columns = [
            tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, array.chunk_row_shape, strict=True))
            for place in np.ndindex(*grid)
        ]
        self.index_bytes = 16 * self.blocks_per_shard * self.width + _CRC_BYTES

    def num_chunks(self, rows: int) -> int:
        """Chunks of a sample of so many rows."""
        return -(-rows // self.array.chunk_rows) * self.width

    def num_shards(self, rows: int) -> int:
        """Shards of a sample of so many rows."""
        return -(-rows // self.array.shard_rows)

    def shard_key(self, shard: int) -> str:
        """Key of shard number `shard` inside its segment: flat, so one folder an array and one folder to fsync."""
        return f"{self.array.name}/c.{shard}{'.0' * len(self.array.row_shape)}"

    def encode(self, rows: npt.NDArray[Any]) -> tuple[list[bytes], ChunkTable]:
        """Up to one shard's rows -> the parts of the shard, in order, and its chunks' table."""
        assert 0 < len(rows) <= self.array.shard_rows
        assert rows.dtype == self._dtype
        chunk_rows = self.array.chunk_rows
        chunks: list[bytes] = []
        table = np.empty((self.num_chunks(len(rows)), 2), np.uint32)
        for block in range(0, len(rows), chunk_rows):
            part = rows[block : block + chunk_rows]
            for column in self._columns:
                chunk = part[(slice(None), *column)]
                if len(part) < chunk_rows:
                    # Zarr knows whole chunks only. What is past the sample's end is fill value, which costs next to
                    # nothing once compressed.
                    padded = np.full((chunk_rows, *chunk.shape[1:]), self.array.fill_value, self._dtype)
                    padded[: len(chunk)] = chunk
                    chunk = padded
                payload = self.array.codec.encode(np.ascontiguousarray(chunk))
                crc = google_crc32c.value(payload)
                table[len(chunks)] = crc, len(payload) + _CRC_BYTES
                chunks.append(payload + crc.to_bytes(_CRC_BYTES, "little"))
        return [self.index(table), *chunks], table

    def index(self, table: ChunkTable) -> bytes:
        """The index of a shard that holds the chunks of `table`."""
        places = np.full((self.blocks_per_shard * self.width, 2), _ABSENT, "<u8")
        lengths = table[:, 1].astype(np.uint64)
        places[: len(table), 0] = self.index_bytes + np.cumsum(lengths) - lengths
        places[: len(table), 1] = lengths
        content = places.tobytes()
        crc: int = google_crc32c.value(content)
        return content + crc.to_bytes(_CRC_BYTES, "little")

    def pieces(self, table: ChunkTable, rows: int, start: int, stop: int) -> Iterator[ShardPiece]:
        """What to fetch for rows `start` to `stop` of a sample of `rows` rows: one byte range a shard."""
        if start >= stop:
            return
        chunk_rows, blocks_per_shard = self.array.chunk_rows, self.blocks_per_shard
        last_block = -(-stop // chunk_rows)
        for shard in range(start // self.array.shard_rows, self.num_shards(stop)):
            in_shard = table[shard * blocks_per_shard * self.width : (shard + 1) * blocks_per_shard * self.width]
            ends = self.index_bytes + np.cumsum(in_shard[:, 1], dtype=np.int64)
            first = max(start // chunk_rows, shard * blocks_per_shard)
            last = min(last_block, (shard + 1) * blocks_per_shard)
            low, high = ((block - shard * blocks_per_shard) * self.width for block in (first, last))
            yield ShardPiece(
                shard=shard,
                table=in_shard,
                low=low,
                high=high,
                first_block=first,
                byte_start=int(ends[low - 1]) if low else self.index_bytes,
                byte_stop=int(ends[high - 1]),
                size=int(ends[-1]),
            )

    def check_whole(self, content: memoryview, piece: ShardPiece) -> None:
        """ValueError if the size of a whole shard, or the index that it carries for zarr, is not what was written."""
        if len(content) != piece.size:
            raise ValueError(f"it has {len(content):,} bytes where {piece.size:,} were written")
        if content[: self.index_bytes] != self.index(piece.table):
            raise ValueError("its own index differs from what was written")

    def decode(self, content: memoryview, piece: ShardPiece, out: npt.NDArray[Any], start: int) -> None:
        """Decode the chunks of `piece` from a whole shard into `out`, whose first row is row `start` of the sample.

        ValueError says which chunk is not what the index entry says.
        """
        self.decode_range(content[piece.byte_start : piece.byte_stop], piece, out, start)

    def decode_range(self, content: memoryview, piece: ShardPiece, out: npt.NDArray[Any], start: int) -> None:
        """As `decode`, from bytes `byte_start` to `byte_stop` of the shard alone."""
        if len(content) != piece.byte_stop - piece.byte_start:
            raise ValueError(f"a range of it gave {len(content):,} of {piece.byte_stop - piece.byte_start:,} bytes")
        end = 0
        for number, (crc, length) in enumerate(piece.table[piece.low : piece.high].tolist()):
            encoded = content[end : end + length]
            end += length
            payload = encoded[:-_CRC_BYTES]
            if checksum(payload) != crc or encoded[-_CRC_BYTES:] != crc.to_bytes(_CRC_BYTES, "little"):
                raise ValueError(f"chunk {piece.low + number} has another checksum")
            block, column = divmod(number, self.width)
            self._place(payload, piece.first_block + block, self._columns[column], out, start)

    def _place(
        self, payload: memoryview, block: int, column: tuple[slice, ...], out: npt.NDArray[Any], start: int
    ) -> None:
        chunk_rows = self.array.chunk_rows
        row = block * chunk_rows - start
        first, last = max(row, 0), min(row + chunk_rows, len(out))
        place = out[(slice(first, last), *column)]
        if last - first == chunk_rows and place.flags.c_contiguous:
            self._decode(payload, place)
            return
        whole = _scratch_array((chunk_rows, *self.array.chunk_row_shape), self._dtype)
        self._decode(payload, whole)
        place[...] = whole[first - row : last - row]

    def _decode(self, payload: memoryview, out: npt.NDArray[Any]) -> None:
        try:
            self.array.codec.decode(payload, out)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"a chunk cannot be decoded: {one_line(error)}") from error


@dataclass(frozen=True, slots=True, eq=False)
class ShardPiece:
    """The part of one shard that a read needs."""

    shard: int
    """Number of the shard within the sample."""
    table: ChunkTable
    """All chunks of the shard."""
    low: int
    """First chunk that is needed, by its place in `table`."""
    high: int
    """After the last chunk that is needed."""
    first_block: int
    """Block of chunk `low`, within the sample."""
    byte_start: int
    """Where chunk `low` starts in the shard."""
    byte_stop: int
    """Where chunk `high` - 1 ends."""
    size: int
    """Bytes of the whole shard."""


def checksum(content: bytes | memoryview) -> int:
    """CRC-32C, without a copy: google_crc32c takes no memoryview, but numpy's view of one."""
    crc: int = google_crc32c.value(np.frombuffer(content, np.uint8))
    return crc


def _scratch_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A buffer of this thread's own, used again from chunk to chunk: a fresh one would be paged in each time."""
    size = math.prod(shape) * dtype.itemsize
    buffer: npt.NDArray[np.uint8] | None = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.nbytes < size:
        buffer = np.empty(size, np.uint8)
        _scratch.buffer = buffer
    return buffer[:size].view(dtype).reshape(shape)


def _zarr_document(array: ArraySchema) -> dict[str, Any]:
    """What zarr itself writes as the array's metadata: the one description of its codecs, ours included."""
    store = MemoryStore()
    zarr.create_array(
        store,
        name=array.name,
        shape=(0, *array.row_shape),
        dtype=array.dtype,
        chunks=(array.chunk_rows, *array.chunk_row_shape),
        # The index at the shard's start: caching file systems fail on a read from the end.
        shards={"shape": (array.shard_rows, *array.row_shape), "index_location": "start"},
        filters=None,
        serializer=array.codec.zarr_serializer(),
        compressors=array.codec.zarr_compressors(itemsize=np.dtype(array.dtype).itemsize),
        fill_value=array.fill_value,
        attributes={"meaning": array.meaning},
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    document: dict[str, Any] = json.loads(store._store_dict[f"{array.name}/zarr.json"].to_bytes())
    return document
