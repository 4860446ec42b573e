"""Damaged files: a reader gives the samples as written, or a StoreError naming sample and fault; there is no third."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.reader import StoreReader
from storage.writer import StoreWriter

ARRAYS = ("aux_hidden", "last_hidden", "token_ids", "loss_mask", "target_argmax", "target_lse")


@pytest.fixture(params=["lossless", "raw"])
def spec(request, make_spec):
    return make_spec(codec=request.param)


@pytest.fixture
def store(tmp_path: Path, spec, make_sample) -> Path:
    """A store of two samples; the victim spans the first two shards of each array."""
    with StoreWriter(str(tmp_path / "store"), spec) as writer:
        writer.write(make_sample("victim", 13))
        writer.write(make_sample("bystander", 6))
    return tmp_path / "store"


def shard_of(store: Path, array: str, shard: int) -> Path:
    [path] = store.glob(f"*/states/*/{array}/c.{shard}*")
    return path


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("shard", [0, 1])
def test_a_missing_shard_is_an_error_not_zeros(store, spec, array, shard, make_sample, assert_same):
    # Red when the index's checksum of the rows is not compared: zarr itself raises nothing here.
    shard_of(store, array, shard).unlink()
    reader = StoreReader(str(store), spec)
    if array == "loss_mask" and not make_sample("victim", 13).loss_mask[8 * shard : 8 * shard + 8].any():
        pytest.fail("the drawn mask must have a supervised token in each shard for this test to mean anything")
    with pytest.raises(
        StoreError, match=rf"sample victim: {array} is damaged .*shard {array}/c\.{shard}\S* is missing"
    ):
        reader.read("victim")
    assert_same(reader.read("bystander"), make_sample("bystander", 6))


@pytest.mark.parametrize("array", ARRAYS)
def test_every_flipped_bit_of_a_shard_is_an_error(store, spec, array):
    # Red when a chunk or a shard's index has no checksum of its own, or when the index's is not compared.
    path = shard_of(store, array, 1)
    content = path.read_bytes()
    draw = random.Random(array)
    for position in {0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(12))}:
        damaged = bytearray(content)
        damaged[position] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=f"sample victim: {array} is damaged"):
            StoreReader(str(store), spec).read("victim")


@pytest.mark.parametrize("array", ["aux_hidden", "loss_mask"])
def test_a_truncated_shard_is_an_error(store, spec, array):
    # Red when a shard cut anywhere, from nothing left to one byte short, gives data or another error.
    path = shard_of(store, array, 0)
    content = path.read_bytes()
    for length in {0, 1, 20, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:length])
        with pytest.raises(StoreError, match=f"sample victim: {array} is damaged"):
            StoreReader(str(store), spec).read("victim")


def test_a_shard_of_another_place_is_an_error(store, spec):
    # Red when only zarr's own checksums are trusted: this shard is intact, but it is the bystander's.
    shutil.copy(shard_of(store, "last_hidden", 2), shard_of(store, "last_hidden", 0))
    with pytest.raises(StoreError, match=r"sample victim: last_hidden is damaged .* its checksum differs"):
        StoreReader(str(store), spec).read("victim")


def test_missing_metadata_is_an_error(store, spec):
    # Red when a lost zarr.json or a lost segment is a zarr error without the sample's name.
    [metadata] = store.glob("*/states/*/token_ids/zarr.json")
    metadata.unlink()
    with pytest.raises(StoreError, match=r"sample victim: token_ids is damaged .* its metadata"):
        StoreReader(str(store), spec).read("victim")
    shutil.rmtree(metadata.parents[1])
    with pytest.raises(StoreError, match=r"sample victim: metadata is damaged .* segment \S+ is missing"):
        StoreReader(str(store), spec).read("victim")


def test_a_damaged_index_is_named_never_skipped(store, spec):
    # Red when a changed index line is believed, or its samples vanish without a word.
    [path] = store.glob("*/index/*.jsonl")
    content = path.read_bytes()
    second_line = content.index(b"\n") + 1
    for damaged in (
        content.replace(b'"num_tokens": 6', b'"num_tokens": 5'),
        content.replace(b"bystander", b"bystandes"),
        content[: second_line + 40],
        content[:second_line] + b"\xff\xfe\n",
        content[:second_line] + b"[]\n",
        content[:second_line] + b"\n",
    ):
        path.write_bytes(damaged)
        for opened in (StoreReader, StoreWriter):
            with pytest.raises(StoreError, match=rf"index file \S+{path.name} is damaged at line 2 .* delete the file"):
                opened(str(store), spec)


def test_deleting_the_index_files_is_the_way_out(store, spec, make_sample, assert_same):
    # Red when the advice in the error messages does not work: damage, delete, capture again.
    shard_of(store, "aux_hidden", 0).unlink()
    with pytest.raises(StoreError) as refused:
        StoreReader(str(store), spec).read("victim")
    pattern = str(refused.value).rsplit("delete ", 1)[1]
    for path in Path("/").glob(pattern.lstrip("/")):
        path.unlink()
    with StoreWriter(str(store), spec) as writer:
        assert writer.committed() == frozenset()
        writer.write(make_sample("victim", 13))
    assert_same(StoreReader(str(store), spec).read("victim"), make_sample("victim", 13))


def test_what_killed_writers_leave_in_the_index_folder_is_no_data(store, spec):
    # Red when a temporary file of the index is taken for an index file.
    [path] = store.glob("*/index/*.jsonl")
    path.with_name(f".{path.name}.0123.partial").write_bytes(path.read_bytes()[:50])
    assert StoreReader(str(store), spec).sample_ids() == {"victim", "bystander"}


def test_damaged_attributes_are_named(store, spec, make_spec):
    # Red when an unreadable or foreign zarr.json is a bare JSON error, or taken for an empty store and overwritten.
    [path] = store.glob("*/states/zarr.json")
    content = path.read_text()
    for damaged, message in (
        ("{", "cannot be read"),
        ("[]", "is not a store of hidden states"),
        (content.replace("eyas.hidden_states", "another.format"), "is not a store of hidden states"),
        (content.replace('"format_version": 1', '"format_version": 2'), "has format version 2; this release reads 1"),
        (content.replace('"hidden_size"', '"hidden_sizes"'), "holds an unreadable spec"),
    ):
        path.write_text(damaged)
        for opened in (StoreReader, StoreWriter):
            with pytest.raises(StoreError, match=message):
                opened(str(store), spec)
        assert path.read_text() == damaged
    with pytest.raises(StoreError, match=r"it holds 0123abcd \(its attributes are damaged\)"):
        StoreReader(str(store), make_spec(fingerprint="other"))


def read_all(store: Path, spec, make_sample, assert_same) -> None:
    reader = StoreReader(str(store), spec)
    for sample_id in reader.sample_ids():
        assert_same(reader.read(sample_id), make_sample(sample_id, 13 if sample_id == "victim" else 6))


@pytest.mark.parametrize("num_trials", [60, pytest.param(3000, marks=pytest.mark.soak)])
def test_random_damage_never_gives_wrong_data(store, spec, num_trials, make_sample, assert_same):
    # Red when any changed byte or cut of any file, metadata included, gives a wrong sample or an error that is not a
    # StoreError. Damage may be harmless (a word in an attribute): then the samples are right.
    draw = random.Random(num_trials)
    files = sorted(path for path in store.rglob("*") if path.is_file())
    for _ in range(num_trials):
        path = draw.choice(files)
        content = path.read_bytes()
        damaged = bytearray(content)
        if draw.random() < 0.3:
            damaged = damaged[: draw.randrange(len(damaged))]
        else:
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(StoreError):
            read_all(store, spec, make_sample, assert_same)
        path.write_bytes(content)
    read_all(store, spec, make_sample, assert_same)
