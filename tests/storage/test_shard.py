"""Shards against zarr: it reads ours, we read its, and a chunk that is not the one in the table is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from storage.codecs import ChunkCodec
from storage.schema import ArraySchema
from storage.shard import ShardLayout, checksum

SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((3, 5), (1, 5)), ((4,), (1,)), ((2, 6), (1, 3)), ((7,), (7,))]
DTYPES = {"raw": "int8", "zstd": "uint8", "blosc": "uint16"}


def schema(codec: str, row_shape: tuple[int, ...], chunk_row_shape: tuple[int, ...], **changes: Any) -> ArraySchema:
    values: dict[str, Any] = {
        "name": "states", "dtype": DTYPES[codec], "axis": "tokens", "row_shape": row_shape,
        "chunk_row_shape": chunk_row_shape, "chunk_rows": 4, "shard_rows": 12, "fill_value": 100, "meaning": "a test",
        "codec": ChunkCodec(codec, 0 if codec == "raw" else 1),
    }  # fmt: skip
    return ArraySchema(**{**values, **changes})


def rows_of(array: ArraySchema, num_rows: int) -> np.ndarray:
    return np.random.default_rng(num_rows).integers(0, 99, (num_rows, *array.row_shape)).astype(array.dtype)


def shards_and_table(layout: ShardLayout, rows: np.ndarray) -> tuple[list[bytes], np.ndarray]:
    size = layout.array.shard_rows
    encoded = [layout.encode(rows[start : start + size]) for start in range(0, len(rows), size)]
    return [b"".join(parts) for parts, _ in encoded], np.concatenate([table for _, table in encoded])


def read(layout: ShardLayout, shards: list[bytes], table: np.ndarray, rows: int, start: int, stop: int) -> np.ndarray:
    out = np.empty((stop - start, *layout.array.row_shape), layout.array.dtype)
    for piece in layout.pieces(table, rows, start, stop):
        content = memoryview(shards[piece.shard])
        layout.check_whole(content, piece)
        layout.decode(content, piece, out, start)
        again = np.empty_like(out)
        layout.decode_range(content[piece.byte_start : piece.byte_stop], piece, again, start)
    return out


@pytest.mark.parametrize("codec", DTYPES)
@pytest.mark.parametrize(("row_shape", "chunk_row_shape"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 4, 12, 29])
def test_zarr_reads_what_we_compose(tmp_path, codec, row_shape, chunk_row_shape, num_rows):
    # Red when a byte of the layout is not Zarr's: index, order, checksum, fill value, metadata.
    layout = ShardLayout(schema(codec, row_shape, chunk_row_shape))
    rows = rows_of(layout.array, num_rows)
    shards, table = shards_and_table(layout, rows)
    assert len(shards) == layout.num_shards(num_rows)
    assert len(table) == layout.num_chunks(num_rows)
    (tmp_path / "states").mkdir()
    for number, shard in enumerate(shards):
        (tmp_path / layout.shard_key(number)).write_bytes(shard)
    document = {**layout.document, "shape": [num_rows + 5, *row_shape]}
    (tmp_path / "states" / "zarr.json").write_text(json.dumps(document))
    found = zarr.open_array(LocalStore(tmp_path), path="states", mode="r")
    assert np.array_equal(found[:num_rows], rows)
    assert (found[num_rows:] == 100).all()
    assert found.attrs["meaning"] == "a test"
    for start, stop in {(0, num_rows), (num_rows // 2, num_rows), (num_rows // 3, num_rows // 3 + 1)}:
        assert np.array_equal(read(layout, shards, table, num_rows, start, stop), rows[start:stop])


@pytest.mark.parametrize("codec", DTYPES)
@pytest.mark.parametrize(("row_shape", "chunk_row_shape"), SHAPES)
def test_we_read_what_zarr_composes(tmp_path, codec, row_shape, chunk_row_shape):
    # Red when we can read our own dialect only. zarr writes chunks in an order of its own, which its index tells.
    layout = ShardLayout(schema(codec, row_shape, chunk_row_shape))
    rows = rows_of(layout.array, 12)
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "zarr.json").write_text(json.dumps({**layout.document, "shape": [12, *row_shape]}))
    zarr.open_array(LocalStore(tmp_path), path="states", mode="r+")[:] = rows
    shard = (tmp_path / layout.shard_key(0)).read_bytes()
    index = shard[: layout.index_bytes]
    assert checksum(index[:-4]) == int.from_bytes(index[-4:], "little")
    places = np.frombuffer(index[:-4], "<u8").reshape(-1, 2).astype(np.int64)
    chunks = [shard[offset : offset + length] for offset, length in places]
    ours = layout.index(np.array([(0, len(chunk)) for chunk in chunks], np.uint32)) + b"".join(chunks)
    table = np.array([(checksum(chunk[:-4]), len(chunk)) for chunk in chunks], np.uint32)
    assert np.array_equal(read(layout, [ours], table, 12, 0, 12), rows)


@pytest.mark.parametrize("codec", DTYPES)
def test_every_changed_byte_is_refused(codec):
    # Red when a byte of a shard, its index included, is covered by no check.
    layout = ShardLayout(schema(codec, (3, 5), (1, 5)))
    rows = rows_of(layout.array, 9)
    [shard], table = shards_and_table(layout, rows)
    for position in range(len(shard)):
        damaged = bytearray(shard)
        damaged[position] ^= 1
        with pytest.raises(ValueError, match=r"another checksum|its own index"):
            read(layout, [bytes(damaged)], table, 9, 0, 9)
    for length in (0, 1, layout.index_bytes, len(shard) - 1):
        with pytest.raises(ValueError, match="bytes where"):
            read(layout, [shard[:length]], table, 9, 0, 9)


def test_a_sound_shard_of_another_sample_is_refused():
    # Red when only the shard's own checksums are trusted: this is what a swap or a stale copy looks like.
    layout = ShardLayout(schema("raw", (4,), (4,)))
    rows = rows_of(layout.array, 9)
    _, table = shards_and_table(layout, rows)
    [other], _ = shards_and_table(layout, rows + np.int8(1))
    with pytest.raises(ValueError, match="chunk 0 has another checksum"):
        read(layout, [other], table, 9, 0, 9)


def test_a_window_is_one_range_a_shard_and_no_more():
    # Red when chunks outside of a window are fetched, or one shard needs two requests.
    layout = ShardLayout(schema("raw", (3, 5), (1, 5)))
    _, table = shards_and_table(layout, rows_of(layout.array, 29))
    chunk = 4 * 5 + 4
    pieces = list(layout.pieces(table, 29, 5, 14))
    assert [(piece.shard, piece.low, piece.high) for piece in pieces] == [(0, 3, 9), (1, 0, 3)]
    assert [piece.byte_stop - piece.byte_start for piece in pieces] == [6 * chunk, 3 * chunk]
    assert pieces[0].byte_start == layout.index_bytes + 3 * chunk
    assert pieces[0].size == layout.index_bytes + 9 * chunk
    assert list(layout.pieces(table, 29, 7, 7)) == []


def test_the_chunks_past_a_short_sample_take_no_room():
    # Red when absent chunks are stored: a sample of 100 tokens in a shard of 4,096 would cost forty times its size.
    layout = ShardLayout(schema("raw", (4,), (4,), chunk_rows=4, shard_rows=400))
    [shard], table = shards_and_table(layout, rows_of(layout.array, 5))
    assert len(table) == 2
    assert len(shard) == layout.index_bytes + 2 * (16 + 4)
    assert layout.index_bytes == 16 * 100 + 4
