"""Files in, raw records out, one at a time: JSON Lines, JSON, Parquet, Arrow, compressed or not, on any fsspec URL.

Memory holds one record (of a table: one batch), never the file. JSON documents are cut into records by their brackets,
with strings skipped whole, and each record is parsed alone: an event parser would give no byte of a bad record, and
could not go on behind it. The price: a record whose own brackets do not balance runs into the ones behind it.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.utils import infer_compression

from tasks.trainer.errors import InputError

try:
    from compression.zstd import ZstdError  # type: ignore[import-not-found]  # Python 3.14
except ImportError:
    from backports.zstd import ZstdError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
_READ, _DROP = 1 << 20, 1 << 16
LONGEST_RECORD = 64 << 20
"""Bytes of one record of a JSON document. More is no conversation: its brackets or quotes do not balance."""

# A string whole, a bracket, or the start of a string whose end is not read yet.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]|"', re.DOTALL)
_START = re.compile(rb"[^\s,]")
_END_OF_SCALAR = re.compile(rb"[,\]\n]")
# Documents that hold their records under a name: {"version": 1, "data": [...
_SCALAR = rb'(?:"(?:[^"\\]|\\.)*"|-?[0-9.eE+]+|true|false|null)'
_WRAPPED = re.compile(
    rb'\s*\{\s*(?:"(?:[^"\\]|\\.)*"\s*:\s*'
    + _SCALAR
    + rb'\s*,\s*)*"(?:data|rows|items|examples|samples|train)"\s*:\s*\['
)


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it lies in its file."""

    number: int
    """From 1; in JSON Lines the line."""
    raw: bytes
    """JSON; in JSON Lines with its newline. Of a table: its row, written as JSON."""
    place: str = ""
    """Where it lies, when that is no line: "byte 17", "row 3"."""
    value: Any = None
    """Of a table: the row."""


class TruncatedError(Exception):
    """The file ends in the middle of something; records before it have been given."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


def kind_of(url: str) -> str:
    """`lines`, `json`, `parquet` or `arrow`, by the suffix under that of a compression; whatever else is lines."""
    path = PurePosixPath(urlsplit(url).path or url)
    if infer_compression(path.name):
        path = path.with_suffix("")
    return {".json": "json", ".parquet": "parquet", ".arrow": "arrow"}.get(path.suffix.lower(), "lines")


def read_records(url: str) -> Iterator[Record]:
    """The records of one file.

    Raises:
        InputError: the file is missing or unreadable, or not what its suffix says.
        TruncatedError: it ends in the middle of a record or of its compression.
    """
    with _mistakes(url):
        kind = kind_of(url)
        if kind in ("parquet", "arrow"):
            from tasks.trainer.data.tables import read_rows  # pyarrow takes a third of a second to import

            for number, row in enumerate(read_rows(url, kind), start=1):
                raw = json.dumps(row, default=str).encode() + b"\n"
                yield Record(number, raw, place=f"row {number}", value=row)
            return
        with fsspec.open(url, "rb", compression="infer") as file:
            if kind == "json":
                yield from _document(file)
            else:
                yield from _lines(file)


def _lines(file: Any) -> Iterator[Record]:
    number = 0
    try:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield Record(number, raw)
    except EOFError:
        raise TruncatedError(f"line {number + 1}") from None


def _document(file: Any) -> Iterator[Record]:
    """An array of records, an object that holds one under a name, or objects one after the other."""
    buffer = _Buffer(file)
    while not buffer.held.removeprefix(b"\xef\xbb\xbf").strip():
        if not buffer.fill():
            if buffer.cut:
                raise TruncatedError("its start")
            return
    buffer.drop(len(buffer.held) - len(buffer.held.removeprefix(b"\xef\xbb\xbf").lstrip()))
    if buffer.held.startswith(b"["):
        buffer.drop(1)
        yield from _elements(buffer, closed=True)
    elif wrapped := _WRAPPED.match(buffer.held):
        buffer.drop(wrapped.end())
        yield from _elements(buffer, closed=True)
    else:
        yield from _elements(buffer, closed=False)


class _Buffer:
    """What is read and not yet given; held[0] is byte `at` of the file, after decompression."""

    def __init__(self, file: Any) -> None:
        self._read = getattr(file, "read1", file.read)  # read1 loses nothing when a later block cannot be read
        self.held = b""
        self.at = 0
        self.cut = False
        """Whether the compression ended before its time."""

    def fill(self) -> bool:
        """Read more; False at the end."""
        try:
            block = self._read(_READ)
        except EOFError:
            self.cut = True
            return False
        self.held += block
        return bool(block)

    def drop(self, count: int) -> None:
        self.held = self.held[count:]
        self.at += count

    def place(self, position: int) -> str:
        return f"byte {self.at + position + 1}"


def _elements(buffer: _Buffer, *, closed: bool) -> Iterator[Record]:
    """What lies between the brackets. closed: an array, which must end with its bracket."""
    number = position = 0
    while True:
        if position > _DROP:  # not after every record: each time copies what is left
            buffer.drop(position)
            position = 0
        start = _START.search(buffer.held, position)
        if start is None:
            position = len(buffer.held)
            if buffer.fill():
                continue
            if closed or buffer.cut:
                raise TruncatedError(buffer.place(position))
            return
        if closed and start.group() == b"]":
            return
        position = _end_of_element(buffer, start.start())
        number += 1
        yield Record(number, buffer.held[start.start() : position], place=buffer.place(start.start()))


def _end_of_element(buffer: _Buffer, start: int) -> int:
    """One past the last byte of the element that starts there."""
    if buffer.held[start : start + 1] not in (b"{", b"["):
        while (found := _END_OF_SCALAR.search(buffer.held, start + 1)) is None:
            if not buffer.fill():
                raise TruncatedError(buffer.place(start))
        return found.start()
    depth, position = 0, start
    while True:
        found = _TOKEN.search(buffer.held, position)
        if found is None or found.group() == b'"':
            position = len(buffer.held) if found is None else found.start()
            if len(buffer.held) - start > LONGEST_RECORD:
                raise InputError(
                    f"the record at {buffer.place(start)} has no end within {LONGEST_RECORD >> 20} MiB: its "
                    "brackets or quotes do not balance"
                )
            if not buffer.fill():
                raise TruncatedError(buffer.place(start))
            continue
        position = found.end()
        depth += 1 if found.group() in (b"{", b"[") else -1 if found.group() in (b"}", b"]") else 0
        if depth == 0 and found.group()[:1] != b'"':
            return position


@contextmanager
def _mistakes(url: str) -> Iterator[None]:
    """What can be wrong with a file, as one line."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{url} does not exist: check data.source") from None
    except (IsADirectoryError, NotADirectoryError):
        raise InputError(f"{url} is not a file: data.source takes files, globs, and folders of such files") from None
    except PermissionError:
        raise InputError(f"{url} may not be read by this user: check its permissions") from None
    except EOFError:
        raise TruncatedError("its start") from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, ZstdError):
        raise InputError(f"{url} is not what its suffix says: its compression cannot be read") from None
    except InputError as exc:
        raise exc if url in str(exc) else InputError(f"{url}: {exc}") from None
    except (ImportError, ValueError) as exc:  # unknown protocol or compression, or its package is not installed
        raise InputError(f"{url} cannot be opened: {' '.join(str(exc).split())}") from None
