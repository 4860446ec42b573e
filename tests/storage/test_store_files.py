"""What lies on the disk, seen without the reader: plain Zarr arrays with their meaning, made durable in order."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import zarr

from storage.errors import StoreError
from storage.location import Location
from storage.reader import StoreReader
from storage.schema import StoreSpec
from storage.writer import StoreWriter


def test_plain_zarr_opens_the_arrays_and_finds_their_meaning(tmp_path, make_spec, make_sample):
    # Red when the format cannot be read without this package: names, shapes, bits, attributes, positions. That
    # zarr walks the whole group without a warning (warnings are errors here) is part of it.
    samples = [make_sample("first", 11), make_sample("second", 3)]
    with StoreWriter(str(tmp_path), make_spec()) as writer:
        for sample in samples:
            writer.write(sample)
    group = zarr.open_group(tmp_path / "0123abcd" / "states", mode="r")
    assert group.attrs["format"] == "eyas.hidden_states"
    assert group.attrs["format_version"] == 1
    assert group.attrs["spec"]["aux_layer_ids"] == [1, 3, 5]
    assert "bfloat16" in group.attrs["meaning"]["aux_hidden"]
    assert len(group.members(max_depth=None)) == 1 + 6
    [(name, segment)] = group.groups()
    lines = (tmp_path / "0123abcd" / "index" / f"{name}.000000.jsonl").read_text().splitlines()
    entries = [json.loads(line)["entry"] for line in lines]
    assert [(entry["sample_id"], entry["start_token"], entry["num_tokens"]) for entry in entries] == [
        ("first", 0, 11),
        ("second", 16, 3),  # the next shard boundary
    ]
    assert segment["aux_hidden"].shape == (19, 3, 8)  # cut by close()
    for entry, sample in zip(entries, samples, strict=True):
        rows = slice(entry["start_token"], entry["start_token"] + entry["num_tokens"])
        for array in ("aux_hidden", "last_hidden", "token_ids", "loss_mask", "target_argmax", "target_lse"):
            assert segment[array].attrs["meaning"] == group.attrs["meaning"][array]
            assert np.array_equal(segment[array][rows], getattr(sample, array)), array
    # Rows between samples were never written: they show as NaN patterns, not as states of zeros.
    assert (segment["last_hidden"][11:16] == 0xFFFF).all()
    metadata = json.loads((tmp_path / "0123abcd" / "states" / name / "aux_hidden" / "zarr.json").read_text())
    sharding = metadata["codecs"][0]["configuration"]
    assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == [8, 3, 8]
    assert sharding["chunk_shape"] == [4, 1, 8]
    assert sharding["index_location"] == "start"
    assert sharding["codecs"][-1]["name"] == "crc32c"
    blosc = sharding["codecs"][1]["configuration"]
    assert (blosc["cname"], blosc["clevel"], blosc["shuffle"], blosc["blocksize"]) == ("zstd", 1, "shuffle", 1 << 20)


def test_a_short_sample_takes_no_room_for_the_rest_of_its_shard(tmp_path, make_sample):
    # Red when unwritten chunks of a shard are stored: a sample of 100 tokens in a shard of 2,048 would take 10 times
    # its raw size uncompressed. Here one chunk of 128 tokens an array, plus the shards' indexes.
    spec = StoreSpec("f", "t", (0, 1, 2), 64, 50, codec="raw", chunk_tokens=128, shard_tokens=2048)
    with StoreWriter(str(tmp_path), spec) as writer:
        writer.write(make_sample("a", 100, spec))
    shards = sum(path.stat().st_size for path in tmp_path.rglob("c.*"))
    one_chunk = 128 * (4 * 64 * 2 + 13)
    indexes_and_checksums = (3 + 5) * (16 * 16 + 4) + 8 * 4
    assert one_chunk < shards <= one_chunk + indexes_and_checksums


def test_a_mask_without_supervised_tokens_still_has_its_shard(tmp_path, make_spec, make_sample):
    # Red when zarr skips chunks that equal the fill value: the fsync of the missing shard would fail the commit.
    sample = make_sample("a", 9)
    sample.loss_mask[:] = False
    with StoreWriter(str(tmp_path), make_spec()) as writer:
        writer.write(sample)
    assert not StoreReader(str(tmp_path), make_spec()).read("a").loss_mask.any()


def test_all_is_on_the_disk_before_the_index_says_so(tmp_path, make_spec, make_sample, monkeypatch):
    # Red when a file that a committed sample needs, or the folder that names it, was not fsynced before the index
    # entry was put under its name: a power cut could then leave a committed sample without its data.
    synced: set[int] = set()
    fsync, write_bytes = os.fsync, Location.write_bytes
    commits = 0

    def recording_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checking_write(self: Location, name: str, content: bytes) -> None:
        nonlocal commits
        if name.endswith(".jsonl"):
            commits += 1
            for path in Path(tmp_path, "store").rglob("*"):
                if path.name not in (name, "index"):
                    assert path.stat().st_ino in synced, f"{path} was not fsynced"
        write_bytes(self, name, content)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Location, "write_bytes", checking_write)
    monkeypatch.setattr("storage.writer._GROW_SHARDS", 2)
    with StoreWriter(f"{tmp_path}/store", make_spec()) as writer:
        for length in (3, 20, 9):
            writer.write(make_sample(f"s{length}", length))
    assert commits == 3


def test_a_failed_write_is_not_committed_and_its_rows_are_not_used_again(
    tmp_path, make_spec, make_sample, assert_same, monkeypatch
):
    # Red when a full disk is anything but a StoreError with the sample's id, when the failed sample becomes
    # visible, or when the next sample is merged into the failed one's shards.
    writer = StoreWriter(str(tmp_path), make_spec())
    writer.write(make_sample("a", 9))
    with monkeypatch.context() as patch:

        def full(self: Location, names: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(Location, "make_durable", full)
        with pytest.raises(StoreError, match=r"sample b cannot be written to .*: No space left on device"):
            writer.write(make_sample("b", 9))
    assert writer.committed() == {"a"}
    writer.write(make_sample("c", 2))
    writer.close()
    reader = StoreReader(str(tmp_path), make_spec())
    assert reader.sample_ids() == {"a", "c"}
    assert_same(reader.read("c"), make_sample("c", 2))
    group = zarr.open_group(tmp_path / "0123abcd" / "states", mode="r")
    [(_, segment)] = group.groups()
    assert segment["token_ids"].shape == (34,)  # 16 rows of a, 16 that b left, 2 of c


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, make_spec):
    # Red when a file in the way (this test may run as root, whom permissions do not stop) is a bare OSError.
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"store .*file/store cannot be written: Not a directory"):
        StoreWriter(f"{tmp_path}/file/store", make_spec())
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)
