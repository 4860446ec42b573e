"""The index: which samples are committed, where they lie, and what their bytes must be.

    {url}/{fingerprint}/states/zarr.json                     a Zarr group; its attributes hold the spec and the meaning
    {url}/{fingerprint}/states/{segment}/aux_hidden ...      one writer's arrays
    {url}/{fingerprint}/index/{segment}.000000.jsonl ...     one writer's committed samples, 256 lines a file

Each writer owns one segment and the index files of its name; readers take the union of all. So two writers never touch
the same file, and no lock or compare-and-swap is needed, which object stores do not have portably.

An index file is replaced whole at each commit rather than appended to. This is atomic on local disks (temporary
name, fsync, rename) and on object stores (a put), which cannot append, and leaves no torn last line to reason about.
The price is to write up to 256 lines (77 kB) a commit; 50,000 samples are 200 files (1.4 s) to read, not 50,000.
The index lies beside the Zarr group, not inside it, so that plain zarr can walk the group without a warning.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from typing import Any

from storage.errors import StoreError, one_line
from storage.location import Location
from storage.schema import StoreSpec, array_schemas, spec_of

INDEX_FOLDER = "index"
STATES_FOLDER = "states"
ENTRIES_PER_FILE = 256
_INDEX_FILE = re.compile(r"(?P<segment>[0-9A-Za-z_-]+)\.(?P<part>\d{6,})\.jsonl")


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One committed sample."""

    sample_id: str
    """The sample's id."""
    segment: str
    """Segment (one writer's arrays) that holds it."""
    start_token: int
    """Its first row in the segment's arrays, on a shard boundary."""
    num_tokens: int
    """Its length T."""
    checksums: tuple[int, ...]
    """CRC-32 of each array's uncompressed rows, in the order of `array_schemas`."""


class SegmentIndex:
    """The index files that one writer owns."""

    def __init__(self, folder: Location, *, segment: str, spec: StoreSpec) -> None:
        """`folder` is the fingerprint's; nothing is written before the first commit."""
        self._folder = folder.child(INDEX_FOLDER)
        self._segment = segment
        self._array_names = [array.name for array in array_schemas(spec)]
        self._part = 0
        self._lines: list[bytes] = []

    def commit(self, entry: IndexEntry) -> None:
        """Make one sample visible to every reader that opens from now on; durable on return. OSError if refused."""
        assert entry.segment == self._segment
        if len(self._lines) == ENTRIES_PER_FILE:
            self._part += 1
            self._lines = []
        lines = [*self._lines, _encode(entry, self._array_names)]
        self._folder.write_bytes(f"{self._segment}.{self._part:06d}.jsonl", b"".join(lines))
        self._lines = lines


def read_index(folder: Location, spec: StoreSpec) -> dict[str, IndexEntry]:
    """All committed samples under the fingerprint's `folder`, by sample id.

    If two writers committed the same sample, the first segment by name is taken, by every reader. StoreError names an
    index file and line that cannot be read: it was damaged after it was written, and is never skipped silently.
    """
    array_names = [array.name for array in array_schemas(spec)]
    entries: dict[str, IndexEntry] = {}
    index = folder.child(INDEX_FOLDER)
    for name in index.names():
        match = _INDEX_FILE.fullmatch(name)
        if match is None:
            continue  # a temporary name that a killed writer left
        where = f"index file {index.url}/{name}"
        try:
            content = index.read_bytes(name)
        except OSError as error:
            raise StoreError(f"{where} cannot be read: {one_line(error)}") from error
        if content is None:
            continue  # removed since the listing
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                entry = _decode(line, match["segment"], array_names)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise StoreError(
                    f"{where} is damaged at line {number} ({one_line(error)}); "
                    "delete the file to capture its samples again"
                ) from error
            entries.setdefault(entry.sample_id, entry)
    return entries


def stored_fingerprints(root: Location) -> list[str]:
    """Fingerprints that the store URL holds, sorted."""
    return [name for name in root.names() if root.exists(f"{name}/{STATES_FOLDER}/zarr.json")]


def read_spec(group: Location) -> StoreSpec | None:
    """The spec in the attributes of the Zarr group `group`, None if there is no such group; StoreError if damaged."""
    where = f"{group.url}/zarr.json"
    try:
        content = group.read_bytes("zarr.json")
        document: Any = None if content is None else json.loads(content)
    except (OSError, ValueError) as error:
        raise StoreError(f"{where} cannot be read: {one_line(error)}") from error
    if content is None:
        return None
    return spec_of(document.get("attributes") if isinstance(document, dict) else None, where=where)


def _encode(entry: IndexEntry, array_names: list[str]) -> bytes:
    body = {
        "sample_id": entry.sample_id,
        "start_token": entry.start_token,
        "num_tokens": entry.num_tokens,
        "crc32": {name: f"{value:08x}" for name, value in zip(array_names, entry.checksums, strict=True)},
    }
    return json.dumps({"entry": body, "entry_crc32": _body_checksum(body)}).encode() + b"\n"


def _decode(line: bytes, segment: str, array_names: list[str]) -> IndexEntry:
    document = json.loads(line)
    body = document["entry"]
    if _body_checksum(body) != document["entry_crc32"]:
        raise ValueError("the line's checksum differs")
    return IndexEntry(
        sample_id=body["sample_id"],
        segment=segment,
        start_token=body["start_token"],
        num_tokens=body["num_tokens"],
        checksums=tuple(int(body["crc32"][name], 16) for name in array_names),
    )


def _body_checksum(body: Any) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
