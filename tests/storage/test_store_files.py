"""What lies on the disk, seen without the reader: plain Zarr arrays with their meaning."""

from __future__ import annotations

import json

import numpy as np
import zarr

from storage.presets import Encoding
from storage.schema import StoreSpec, target_rows
from storage.writer import StoreWriter


def test_plain_zarr_opens_the_arrays_and_finds_their_meaning(tmp_path, make_spec, make_sample):
    # Red when the format cannot be read without this package: names, shapes, bits, attributes, positions. That
    # zarr walks the whole group without a warning (warnings are errors here) is part of it.
    spec = make_spec(encoding=Encoding(aux_step=None, last="hidden", codec="blosc"))
    samples = [make_sample("first", 11, spec), make_sample("second", 3, spec)]
    with StoreWriter(str(tmp_path), spec) as writer:
        for sample in samples:
            writer.write(sample)
    group = zarr.open_group(tmp_path / "0123abcd" / "states", mode="r")
    assert group.attrs["format"] == "eyas.hidden_states"
    assert group.attrs["format_version"] == 2
    assert group.attrs["spec"]["aux_layer_ids"] == [1, 3, 5]
    assert "bfloat16" in group.attrs["meaning"]["aux_bits"]
    assert len(group.members(max_depth=None)) == 1 + 3
    [(name, segment)] = group.groups()
    lines = (tmp_path / "0123abcd" / "index" / f"{name}.000000.jsonl").read_text().splitlines()
    entries = [json.loads(line)["entry"] for line in lines]
    targets = [len(target_rows(sample.loss_mask)) for sample in samples]
    assert [(entry["sample_id"], entry["segment"]) for entry in entries] == [("first", name), ("second", name)]
    assert entries[0]["rows"] == {"tokens": [0, 11], "targets": [0, targets[0]]}
    assert entries[1]["rows"]["tokens"] == [16_384, 3]  # the next shard boundary of every array on the axis
    assert segment["aux_bits"].shape == (16_387, 3, 8)  # cut by close()
    for entry, sample in zip(entries, samples, strict=True):
        tokens, own = (
            slice(start, start + rows) for start, rows in (entry["rows"]["tokens"], entry["rows"]["targets"])
        )
        assert np.array_equal(segment["aux_bits"][tokens], sample.aux_hidden)
        assert np.array_equal(segment["last_bits"][own], sample.last_hidden)
        assert np.array_equal(segment["tokens"][tokens][:, 0], sample.token_ids)
        assert np.array_equal(segment["tokens"][tokens][:, 1], sample.loss_mask)
    for array in ("aux_bits", "last_bits", "tokens"):
        assert segment[array].attrs["meaning"] == group.attrs["meaning"][array]
    # Rows between samples were never written: they show as NaN patterns, not as states of zeros.
    assert (segment["aux_bits"][11:20] == 0xFFFF).all()
    metadata = json.loads((tmp_path / "0123abcd" / "states" / name / "aux_bits" / "zarr.json").read_text())
    sharding = metadata["codecs"][0]["configuration"]
    assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == [8, 3, 8]
    assert sharding["chunk_shape"] == [4, 1, 8]
    assert sharding["index_location"] == "start"
    assert sharding["codecs"][-1]["name"] == "crc32c"
    blosc = sharding["codecs"][1]["configuration"]
    assert (blosc["cname"], blosc["clevel"], blosc["shuffle"], blosc["blocksize"]) == ("zstd", 1, "shuffle", 1 << 20)


def test_the_statistics_of_a_segment_are_arrays_beside_the_codes(tmp_path, make_spec, make_sample):
    # Red when codes cannot be turned into values with plain zarr.
    spec = make_spec(preset="near")
    with StoreWriter(str(tmp_path), spec) as writer:
        writer.write(make_sample("a", 20, spec))
    [(_, segment)] = zarr.open_group(tmp_path / "0123abcd" / "states", mode="r").groups()
    assert writer.statistics is not None
    for name, values in writer.statistics.arrays().items():
        assert segment[name].dtype == values.dtype
        assert np.array_equal(segment[name][...], values), name


def test_a_short_sample_takes_no_room_for_the_rest_of_its_shard(tmp_path, make_sample):
    # Red when unwritten chunks of a shard are stored: a sample of 100 tokens in a shard of 2,048 would take 10 times
    # its raw size uncompressed. Here one chunk of 128 tokens an array of states, plus the shards' indexes.
    encoding = Encoding(aux_step=None, last="hidden", codec="raw", level=0)
    spec = StoreSpec("f", "t", (0, 1, 2), 64, 50, encoding=encoding, chunk_tokens=128, shard_tokens=2048)
    with StoreWriter(str(tmp_path), spec) as writer:
        writer.write(make_sample("a", 100, spec))
    states = sum(path.stat().st_size for path in tmp_path.rglob("c.*") if path.parent.name != "tokens")
    one_chunk = 128 * 4 * 64 * 2
    indexes_and_checksums = (3 + 1) * 16 * 16 + 2 * 4 + 4 * 4
    assert one_chunk < states <= one_chunk + indexes_and_checksums


def test_a_mask_without_supervised_tokens_has_no_targets(tmp_path, make_spec, make_sample):
    # Red when a sample without target rows cannot be stored: it is data, if of no use alone.
    from storage.reader import StoreReader

    spec = make_spec()
    sample = next(s for s in (make_sample(f"s{i}", 2, spec) for i in range(9)) if not len(target_rows(s.loss_mask)))
    with StoreWriter(str(tmp_path), spec) as writer:
        writer.write(sample)
    with StoreReader(str(tmp_path), spec) as reader:
        assert reader.read(sample.sample_id).last_hidden.shape == (0, 8)
        assert list(tmp_path.rglob("last_planes/c.*")) == []
