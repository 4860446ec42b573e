"""Damaged stores: a reader gives every sample as it was written, or names what is wrong; there is no third."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from storage.encoding import PRESETS, round_trip
from storage.errors import DamageError, StoreError
from storage.index import decode_line, encode_line, read_index
from storage.location import locate
from storage.reader import StoreReader
from storage.schema import Sample, StoreSpec
from storage.segment import shard_keys, shard_layouts
from storage.writer import StoreWriter
from tests.storage.conftest import same, sample_of, spec_with

LENGTHS = {"a": 13, "b": 6, "c": 1, "d": 21, "e": 8}


@dataclass(frozen=True)
class Store:
    """A store of two segments, what its samples must read as, and whose each shard is."""

    url: Path
    spec: StoreSpec
    expected: dict[str, Sample]
    owners: dict[Path, tuple[str, str]]
    """Sample and array, by shard."""
    segments: dict[str, set[str]]
    """Samples, by segment."""

    @property
    def folder(self) -> Path:
        return self.url / self.spec.fingerprint


def build(url: Path, spec: StoreSpec, *, seed: int = 0) -> Store:
    expected = {}
    for names in ("abc", "de"):
        with StoreWriter(str(url), spec) as writer:
            for name in names:
                writer.write(sample_of(name, LENGTHS[name], spec, seed=seed))
            writer.flush()
            for name in names:
                sample = sample_of(name, LENGTHS[name], spec, seed=seed)
                expected[name] = round_trip(sample, spec, writer.statistics)
    owners, segments = {}, {}
    for entry in read_index(locate(str(url)).child(spec.fingerprint)).values():
        segments.setdefault(entry.segment, set()).add(entry.sample_id)
        for array, layout in shard_layouts(spec).items():
            for key in shard_keys(entry, layout):
                owners[url / spec.fingerprint / "states" / entry.segment / key] = (entry.sample_id, array)
    assert len(segments) == 2
    assert all(path.exists() for path in owners)
    return Store(url, spec, expected, owners, segments)


def check(store: Store, named: dict[str, str], *, where: str = "") -> None:
    """Every sample in `named` is refused with that text (a pattern), and all others read as they were written."""
    with StoreReader(str(store.url), store.spec) as reader:
        assert reader.sample_ids() == store.expected.keys(), where
        for sample_id, want in store.expected.items():
            if sample_id not in named:
                same(reader.read(sample_id), want)
                continue
            with pytest.raises(DamageError) as refused:
                reader.read(sample_id)
            message = str(refused.value)
            assert re.search(rf"sample {sample_id}: {named[sample_id]}", message), f"{where}: {message}"
            assert "--repair" in message
            assert "\n" not in message
            with pytest.raises(DamageError):
                reader.read_encoded(sample_id)


def refused(store: Store, message: str, *, where: str = "") -> None:
    """Neither a reader nor a writer opens the store, for the reason given (a pattern)."""
    for opened in (StoreReader, StoreWriter):
        with pytest.raises(StoreError) as found:
            opened(str(store.url), store.spec)
        assert re.search(message, str(found.value)), f"{where}: {found.value}"


@pytest.fixture(params=PRESETS)
def store(request, tmp_path: Path) -> Store:
    return build(tmp_path / "store", spec_with(preset=request.param))


# Each fault damages the store by chance and says what must be named: samples, or what stops the store from opening.
Fault = Callable[[Store, random.Random, Path], tuple[dict[str, str], str | None]]


def flip_a_shard(store: Store, draw: random.Random, spare: Path) -> tuple[dict[str, str], str | None]:
    path = draw.choice(sorted(store.owners))
    flip(path, draw)
    return {store.owners[path][0]: rf"{store.owners[path][1]} is damaged: .*{re.escape(path.name)}"}, None


def cut_a_shard(store: Store, draw: random.Random, spare: Path) -> tuple[dict[str, str], str | None]:
    path = draw.choice(sorted(store.owners))
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])
    return {store.owners[path][0]: rf"{store.owners[path][1]} is damaged: .*{re.escape(path.name)}"}, None


def grow_a_shard(store: Store, draw: random.Random, spare: Path) -> tuple[dict[str, str], str | None]:
    path = draw.choice(sorted(store.owners))
    path.write_bytes(path.read_bytes() + b"\0")
    return {store.owners[path][0]: rf"{store.owners[path][1]} is damaged: .*{re.escape(path.name)}"}, None


def delete_a_shard(store: Store, draw: random.Random, spare: Path) -> tuple[dict[str, str], str | None]:
    path = draw.choice(sorted(store.owners))
    path.unlink()
    return {store.owners[path][0]: rf"{store.owners[path][1]} is damaged: .*{re.escape(path.name)} is missing"}, None


def swap_two_shards(store: Store, draw: random.Random, spare: Path) -> tuple[dict[str, str], str | None]:
    one, two = draw.sample(sorted(store.owners), 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    if first == second:
        return {}, None
    pairs = [store.owners[path] for path in (one, two)]
    arrays = {sample_id: "|".join(array for name, array in pairs if name == sample_id) for sample_id, _ in pairs}
    return {sample_id: f"({names}) is damaged" for sample_id, names in arrays.items()}, None


def take_a_shard_of_another_capture(
    store: Store, draw: random.Random, spare: Path
) -> tuple[dict[str, str], str | None]:
    twin = build(spare, store.spec, seed=1)
    sample_id, array = store.owners[path := draw.choice(sorted(store.owners))]
    for theirs, owner in twin.owners.items():
        if owner == (sample_id, array) and theirs.name == path.name:
            if theirs.read_bytes() == path.read_bytes():
                return {}, None
            shutil.copy(theirs, path)
            return {sample_id: f"{array} is damaged"}, None
    return {}, None  # with other random masks the twin has fewer target rows


def flip_metadata(store: Store, draw: random.Random, spare: Path) -> tuple[dict[str, str], str | None]:
    segment = draw.choice(sorted(store.segments))
    files = [path for path in (store.folder / "states" / segment).rglob("*") if path.is_file()]
    path = draw.choice(sorted(path for path in files if path not in store.owners))
    flip(path, draw)
    return dict.fromkeys(store.segments[segment], "[a-z_]+ is damaged: states/"), None


def delete_metadata(store: Store, draw: random.Random, spare: Path) -> tuple[dict[str, str], str | None]:
    segment = draw.choice(sorted(store.segments))
    files = [path for path in (store.folder / "states" / segment).rglob("*") if path.is_file()]
    draw.choice(sorted(path for path in files if path not in store.owners)).unlink()
    return dict.fromkeys(store.segments[segment], "[a-z_]+ is damaged: states/.* is missing"), None


def flip_the_group(store: Store, draw: random.Random, spare: Path) -> tuple[dict[str, str], str | None]:
    flip(store.folder / "states" / "zarr.json", draw)
    return {}, "zarr.json"


def flip_the_index(store: Store, draw: random.Random, spare: Path) -> tuple[dict[str, str], str | None]:
    path = draw.choice(sorted((store.folder / "index").iterdir()))
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content) - 1)  # the last line's end may be lost without harm
    content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return {}, rf"index file \S+{re.escape(path.name)} is damaged at line \d"


def cut_the_index(store: Store, draw: random.Random, spare: Path) -> tuple[dict[str, str], str | None]:
    path = draw.choice(sorted((store.folder / "index").iterdir()))
    content = path.read_bytes()
    ends = {at + 1 for at, byte in enumerate(content) if byte == 10} | {
        at for at, byte in enumerate(content) if byte == 10
    }
    path.write_bytes(content[: draw.choice([at for at in range(1, len(content)) if at not in ends])])
    return {}, rf"index file \S+{re.escape(path.name)} is damaged at line \d"


def take_the_index_of_another_capture(
    store: Store, draw: random.Random, spare: Path
) -> tuple[dict[str, str], str | None]:
    twin = build(spare, store.spec, seed=1)
    segment = draw.choice(sorted(store.segments))
    [theirs] = [name for name, samples in twin.segments.items() if samples == store.segments[segment]]
    lines = (twin.folder / "index" / f"{theirs}.000000.jsonl").read_bytes().splitlines()
    stale = [encode_line(replace(decode_line(line, theirs), segment=segment)) for line in lines]
    (store.folder / "index" / f"{segment}.000000.jsonl").write_bytes(b"".join(stale))
    return dict.fromkeys(store.segments[segment], "[a-z_]+ is damaged: "), None


def take_the_fingerprint_of_another_store(
    store: Store, draw: random.Random, spare: Path
) -> tuple[dict[str, str], str | None]:
    twin = build(spare, replace(store.spec, fingerprint="ffff"), seed=1)
    segment = draw.choice(sorted(store.segments))
    [theirs] = [name for name, samples in twin.segments.items() if samples == store.segments[segment]]
    shutil.rmtree(store.folder / "states" / segment)
    shutil.copytree(twin.folder / "states" / theirs, store.folder / "states" / segment)
    return dict.fromkeys(store.segments[segment], "metadata is damaged: .*fingerprint is 'ffff' there"), None


def take_the_place_of_another_fingerprint(
    store: Store, draw: random.Random, spare: Path
) -> tuple[dict[str, str], str | None]:
    twin = build(spare, replace(store.spec, fingerprint="ffff"), seed=1)
    shutil.rmtree(store.folder)
    shutil.copytree(twin.folder, store.folder)
    return {}, "fingerprint is 'ffff' there, '0123abcd' here"


FAULTS: list[Fault] = [
    flip_a_shard, cut_a_shard, grow_a_shard, delete_a_shard, swap_two_shards, take_a_shard_of_another_capture,
    flip_metadata, delete_metadata, flip_the_group, flip_the_index, cut_the_index, take_the_index_of_another_capture,
    take_the_fingerprint_of_another_store, take_the_place_of_another_fingerprint,
]  # fmt: skip


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize("num_trials", [14, pytest.param(210, marks=pytest.mark.soak)])
def test_random_damage_is_named_and_never_read(store, tmp_path, num_trials):
    # Red when any fault gives a wrong sample, goes unnoticed, hides a sound sample, or is told without sample, array
    # and shard. Each fault hits a random place; the soak run makes 1,050 trials over the five presets.
    draw = random.Random(num_trials)
    kept = tmp_path / "kept"
    shutil.copytree(store.url, kept)
    for trial in range(num_trials):
        fault = FAULTS[trial % len(FAULTS)]
        named, stopped = fault(store, draw, tmp_path / f"spare{trial}")
        where = f"trial {trial}, {fault.__name__}"
        if stopped is not None:
            refused(store, stopped, where=where)
        else:
            check(store, named, where=where)
        shutil.rmtree(store.url)
        shutil.copytree(kept, store.url)
        shutil.rmtree(tmp_path / f"spare{trial}", ignore_errors=True)
    check(store, {})


def test_every_changed_byte_of_a_small_file_is_named(tmp_path):
    # Red when some byte of the metadata, statistics or index is covered by no check.
    store = build(tmp_path / "store", spec_with(preset="near"))
    small = [path for path in sorted(store.folder.rglob("*")) if path.is_file() and path not in store.owners]
    draw = random.Random(0)
    for path in small:
        content = path.read_bytes()
        for at in sorted({0, 1, len(content) - 2, *draw.sample(range(len(content) - 1), min(3, len(content) - 1))}):
            damaged = bytearray(content)
            damaged[at] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            if path.parent.name == "index" or path.parent.name == "states":
                refused(store, path.name, where=f"{path} at {at}")
            else:
                segment = path.relative_to(store.folder / "states").parts[0]
                named = dict.fromkeys(store.segments[segment], "[a-z_]+ is damaged")
                check(store, named, where=f"{path} at {at}")
        path.write_bytes(content)


def test_an_index_of_yesterday_only_lacks_what_came_since(tmp_path):
    # Red when a restored backup of an index file gives errors or wrong data: its samples are captured again.
    store = build(tmp_path / "store", spec_with())
    [path] = [path for path in (store.folder / "index").iterdir() if b'"c"' in path.read_bytes()]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    expected = {name: sample for name, sample in store.expected.items() if name != "c"}
    check(replace(store, expected=expected), {})
    with StoreWriter(str(store.url), store.spec) as writer:
        writer.write(sample_of("c", LENGTHS["c"], store.spec))
    check(store, {})


def test_what_killed_writers_leave_is_no_data(tmp_path):
    # Red when a temporary file, a shard without an entry or a segment without an index is taken for data.
    store = build(tmp_path / "store", spec_with())
    [index, *_] = sorted((store.folder / "index").iterdir())
    index.with_name(f".{index.name}.0123.partial").write_bytes(index.read_bytes()[:50])
    [segment, *_] = sorted(store.segments)
    shutil.copytree(store.folder / "states" / segment, store.folder / "states" / "20200101T000000Z-0123456789ab")
    shard = next(iter(store.owners))
    shutil.copy(shard, shard.with_name("c.999.0.0.0"))
    check(store, {})


def test_a_store_of_another_release_is_told_from_a_damaged_one(tmp_path):
    # Red when format 1 is read, or called damaged; or when a foreign zarr.json is overwritten.
    store = build(tmp_path / "store", spec_with())
    path = store.folder / "states" / "zarr.json"
    content = path.read_text()
    for damaged, message in (
        ("{", "cannot be read"),
        ("[]", "is not a store of hidden states"),
        (content.replace("eyas.hidden_states", "another.format"), "is not a store of hidden states"),
        (content.replace('"format_version": 2', '"format_version": 1'), r"has format version 1; this release reads 2"),
        (content.replace('"hidden_size"', '"hidden_sizes"'), "holds an unreadable spec"),
        (content.replace('"format_version": 2', '"format_version": 2, "more": 1'), "its checksum differs"),
        (re.sub(r',\s*"crc32c": "[0-9a-f]+"', "", content), "carries no checksum"),
    ):
        assert damaged != content
        path.write_text(damaged)
        refused(store, message)
        assert path.read_text() == damaged
    with pytest.raises(StoreError, match=r"it holds 0123abcd \(its attributes are damaged\)"):
        StoreReader(str(store.url), replace(store.spec, fingerprint="other"))
