"""The index: which samples are committed, where they lie, and what their bytes must be.

    {url}/{fingerprint}/states/zarr.json                     a Zarr group; its attributes hold the spec and the meaning
    {url}/{fingerprint}/states/{segment}/aux_codes ...       one writer's arrays, and the statistics they are coded with
    {url}/{fingerprint}/index/{segment}.000000.jsonl ...     one writer's committed samples, up to 256 lines a file

Each writer owns one segment and the index files of its name; readers take the union of all. So two writers never touch
the same file, and no lock or compare-and-swap is needed, which object stores do not have portably.

An index file is replaced whole at each commit rather than appended to. This is atomic on local disks (temporary
name, fsync, rename) and on object stores (a put), which cannot append, and leaves no torn last line to reason about.
The price is to write one file of up to 256 lines or 512 KiB again for each group of samples committed together.
The index lies beside the Zarr group, not inside it, so that plain zarr can walk the group without a warning.

A line holds the CRC-32C and the length of every chunk of its sample. A swapped, stale or foreign shard is sound by
itself, and only this tells it from the one that was written. It costs 11 bytes a chunk: 3 kB for 16K tokens of D=2048,
which take 90 MB.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from storage.errors import StoreError, one_line
from storage.location import Location
from storage.schema import StoreSpec, spec_of
from storage.seal import unsealed

INDEX_FOLDER = "index"
STATES_FOLDER = "states"
ENTRIES_PER_FILE = 256
_BYTES_PER_FILE = 512 << 10
_INDEX_FILE = re.compile(r"(?P<segment>[0-9A-Za-z_-]+)\.(?P<part>\d{6,})\.jsonl")
# The checksum is of the very bytes of the entry's JSON, so it stands in front of them.
_LINE = re.compile(rb'\{"crc32c": "(?P<crc>[0-9a-f]{8})", "entry": (?P<entry>\{.*\})\}')
_REQUESTS = 16


@dataclass(frozen=True, slots=True, eq=False)
class IndexEntry:
    """One committed sample."""

    sample_id: str
    """The sample's id."""
    segment: str
    """Segment (one writer's arrays) that holds it."""
    rows: Mapping[str, tuple[int, int]]
    """By axis (tokens, targets, exceptions): its first row, on a shard boundary, and its number of rows."""
    chunks: Mapping[str, bytes]
    """By array: CRC-32C and length of each chunk, uint32 little-endian pairs (storage.shard.ChunkTable)."""
    tokens_crc32c: int
    """CRC-32C of token_ids (int32 little-endian), then loss_mask (a byte each)."""
    statistics_digest: str
    """Hash of the segment's statistics (storage.segment.statistics_digest), empty if it has none."""

    @property
    def num_tokens(self) -> int:
        """Its length T."""
        return self.rows["tokens"][1]

    @property
    def num_targets(self) -> int:
        """Its target rows R."""
        return self.rows["targets"][1]

    @property
    def num_exceptions(self) -> int:
        """Values of it that are stored beside the codes."""
        return self.rows["exceptions"][1] if "exceptions" in self.rows else 0

    def table(self, array: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """uint32 [chunks, 2] of one array: CRC-32C and length of each chunk. ValueError if it is no such table."""
        return np.frombuffer(self.chunks[array], "<u4").reshape(-1, 2)

    def chunk_bytes(self, array: str) -> int:
        """Bytes that the chunks of one array take."""
        return int(self.table(array)[:, 1].sum(dtype=np.int64))


class SegmentIndex:
    """The index files that one writer owns."""

    def __init__(self, folder: Location, *, segment: str) -> None:
        """`folder` is the fingerprint's; nothing is written before the first commit."""
        self._folder = folder.child(INDEX_FOLDER)
        self._segment = segment
        self._part = 0
        self._lines: list[bytes] = []

    def commit(self, entries: Sequence[IndexEntry]) -> None:
        """Make samples visible to every reader that opens from now on; durable on return. OSError if refused.

        After an error some of them, in order from the first, may be committed.
        """
        lines = self._lines
        for entry in entries:
            assert entry.segment == self._segment
            if len(lines) == ENTRIES_PER_FILE or sum(map(len, lines)) >= _BYTES_PER_FILE:
                if lines is not self._lines:
                    self._write(lines)
                self._part += 1
                self._lines = lines = []
            lines = [*lines, encode_line(entry)]
        self._write(lines)
        self._lines = lines

    def _write(self, lines: list[bytes]) -> None:
        self._folder.write_bytes(f"{self._segment}.{self._part:06d}.jsonl", b"".join(lines))


def read_index(folder: Location) -> dict[str, IndexEntry]:
    """All committed samples under the fingerprint's `folder`, by sample id.

    If two writers committed the same sample, the first segment by name is taken, by every reader. StoreError as
    `read_entries`.
    """
    entries: dict[str, IndexEntry] = {}
    for entry in read_entries(folder):
        entries.setdefault(entry.sample_id, entry)
    return entries


def read_entries(folder: Location) -> list[IndexEntry]:
    """Every line of the index, by segment; a sample that two writers committed is there twice.

    StoreError names an index file and line that cannot be read: it was damaged after it was written, and is never
    skipped silently.
    """
    entries = []
    for name, content in _index_files(folder):
        segment = _segment_of(name)
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                entries.append(decode_line(line, segment))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise StoreError(
                    f"index file {folder.url}/{INDEX_FOLDER}/{name} is damaged at line {number} ({one_line(error)}); "
                    "`eyas store verify --repair` drops the line, and the next capture fills what it held"
                ) from error
    return entries


def drop_entries(folder: Location, sample_ids: Collection[str]) -> list[str]:
    """Take `sample_ids`, and every line that cannot be read, out of the index; capture then fills them again.

    Returns one line a dropped line. Each file is replaced atomically, or deleted when nothing is left in it. Only for
    a store that nobody writes to: a writer at work would put its own lines back.
    """
    dropped = []
    index = folder.child(INDEX_FOLDER)
    for name, content in _index_files(folder):
        kept = []
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            try:
                entry = decode_line(line.rstrip(b"\n"), _segment_of(name))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                dropped.append(f"{name} line {number}: {one_line(error)}")
                continue
            if entry.sample_id in sample_ids:
                dropped.append(f"{name} line {number}: sample {entry.sample_id}")
            else:
                kept.append(line if line.endswith(b"\n") else line + b"\n")
        if not kept:
            index.delete(name)
        elif b"".join(kept) != content:
            index.write_bytes(name, b"".join(kept))
    return dropped


def stored_fingerprints(root: Location) -> list[str]:
    """Fingerprints that the store URL holds, sorted."""
    return [name for name in root.names() if root.exists(f"{name}/{STATES_FOLDER}/zarr.json")]


def read_spec(group: Location) -> StoreSpec | None:
    """The spec in the attributes of the Zarr group `group`, None if there is no such group; StoreError if damaged."""
    where = f"{group.url}/zarr.json"
    try:
        content = group.read_bytes("zarr.json")
        if content is None:
            return None
        document: Any = json.loads(content)
        # Before the checksum, for what another release wrote must be told from what is damaged.
        spec = spec_of(document.get("attributes") if isinstance(document, dict) else None, where=where)
        unsealed(content)
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        raise StoreError(f"{where} cannot be read: {one_line(error)}") from error
    return spec


def encode_line(entry: IndexEntry) -> bytes:
    """One line of an index file, with its end."""
    body = json.dumps(
        {
            "sample_id": entry.sample_id,
            "segment": entry.segment,
            "rows": {axis: list(rows) for axis, rows in entry.rows.items()},
            "tokens_crc32c": f"{entry.tokens_crc32c:08x}",
            "statistics": entry.statistics_digest,
            "chunks": {array: base64.b64encode(table).decode() for array, table in entry.chunks.items()},
        }
    ).encode()
    return b'{"crc32c": "%08x", "entry": %s}\n' % (google_crc32c.value(body), body)


def decode_line(line: bytes, segment: str) -> IndexEntry:
    """The entry of one line, without its end. ValueError, KeyError, TypeError or AttributeError if it is damaged."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError("it is no index line")
    if google_crc32c.value(match["entry"]) != int(match["crc"], 16):
        raise ValueError("the line's checksum differs")
    body = json.loads(match["entry"])
    if body["segment"] != segment:
        raise ValueError(f"it belongs to segment {body['segment']}")
    return IndexEntry(
        sample_id=body["sample_id"],
        segment=segment,
        rows={axis: (int(start), int(rows)) for axis, (start, rows) in body["rows"].items()},
        chunks={array: base64.b64decode(table) for array, table in body["chunks"].items()},
        tokens_crc32c=int(body["tokens_crc32c"], 16),
        statistics_digest=body["statistics"],
    )


def _segment_of(name: str) -> str:
    match = _INDEX_FILE.fullmatch(name)
    assert match is not None
    return match["segment"]


def _index_files(folder: Location) -> list[tuple[str, bytes]]:
    """Names and contents, sorted by name; without the temporary names that killed writers leave."""
    index = folder.child(INDEX_FOLDER)
    names = [name for name in index.names() if _INDEX_FILE.fullmatch(name)]

    def read(name: str) -> tuple[str, bytes | None]:
        try:
            return name, index.read_bytes(name)
        except OSError as error:
            raise StoreError(f"index file {index.url}/{name} cannot be read: {one_line(error)}") from error

    if not index.is_remote:
        found = [read(name) for name in names]
    else:
        with ThreadPoolExecutor(_REQUESTS) as executor:
            found = list(executor.map(read, names))
    return [(name, content) for name, content in found if content is not None]  # None: removed since the listing
