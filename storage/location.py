"""Where a store lies: the one module that knows URLs, file systems and what "durable" means on each.

Two kinds of place are served: a local path (plain or file://), and memory:// (fsspec's, shared by everything in the
process, for tests). The kinds differ in two things only: local states go through zarr's LocalStore, which writes a
temporary file and renames (an fsspec store on file:// writes in place, and a kill leaves truncated shards under their
real keys), and local bytes are durable after an fsync of the file and of its folder, while an object is when it is put.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import fsspec
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.storage import FsspecStore, LocalStore

from storage.errors import StoreError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:://|::)")


@dataclass(frozen=True, slots=True)
class Location:
    """A folder of a local file system or of fsspec's memory."""

    url: str
    """What the user calls it; never holds user info."""
    scheme: Literal["file", "memory"]
    """Which kind of place."""
    path: str
    """Absolute path inside that place."""

    def child(self, name: str) -> Location:
        """The folder `name` inside this one; it need not exist."""
        return Location(f"{self.url.rstrip('/')}/{name}", self.scheme, f"{self.path.rstrip('/')}/{name}")

    def zarr_store(self, *, read_only: bool) -> Any:
        """A zarr store rooted here."""
        if self.scheme == "file":
            return LocalStore(self.path, read_only=read_only)
        wrapped = AsyncFileSystemWrapper(self._file_system(), asynchronous=True)
        return FsspecStore(wrapped, path=self.path, read_only=read_only)

    def read_bytes(self, name: str) -> bytes | None:
        """The file `name` whole, or None if there is none. OSError if it cannot be read."""
        try:
            content: bytes = self._file_system().cat_file(f"{self.path}/{name}")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        return content

    def write_bytes(self, name: str, content: bytes) -> None:
        """Put the file `name` whole or not at all, replacing what it was; durable on return. OSError if refused."""
        if self.scheme == "memory":
            self._file_system().pipe_file(f"{self.path}/{name}", content)
            return
        target = Path(self.path, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _fsync(target.parent)

    def make_durable(self, names: Iterable[str]) -> None:
        """Return once the files `names`, which zarr wrote here without fsync, and their folders survive a power cut."""
        if self.scheme == "memory":
            return
        folders = set()
        for name in names:
            file = Path(self.path, name)
            _fsync(file)
            folders.add(file.parent)
        for folder in sorted(folders):
            _fsync(folder)

    def make_folders_durable(self) -> None:
        """Return once this folder's own entry, and those of the folders above it, survive a power cut."""
        if self.scheme == "file":
            for folder in Path(self.path).parents:
                if os.access(folder, os.R_OK):
                    _fsync(folder)

    def names(self) -> list[str]:
        """Names of the files and folders directly inside, sorted; empty if there is no such folder."""
        try:
            entries = self._file_system().ls(self.path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(PurePosixPath(entry).name for entry in entries if entry.rstrip("/") != self.path)

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder `name`."""
        return bool(self._file_system().exists(f"{self.path}/{name}"))

    def total_bytes(self) -> int:
        """Size in bytes of all files under here."""
        files = self._file_system().find(self.path, detail=True)
        return sum(int(info["size"]) for info in files.values())

    def _file_system(self) -> Any:
        # Listings are not cached: another process may be writing.
        return fsspec.filesystem(self.scheme, use_listings_cache=False)


def locate(url: str) -> Location:
    """The place a URL names. StoreError for user info (before anything else), other schemes, and no path at all."""
    match = _SCHEME.match(url)
    scheme = match.group(1).lower() if match else "file"
    rest = url[match.end() :] if match else url
    # Neither message repeats the URL: what is refused here may hold a password. A password may hold a slash.
    if match and ("@" in rest.partition("/")[0] or (scheme not in ("file", "memory") and "@" in rest)):
        raise StoreError(
            f"the store URL of scheme {scheme}:// holds user info ('...@'); "
            "take it out and give credentials through the environment"
        )
    if scheme not in ("file", "memory"):
        raise StoreError(f"store URLs of scheme {scheme}:// are not served yet; use a local path or file://")
    if not rest.strip("/") or "\0" in rest:
        raise StoreError(f"the store URL {url!r} names no folder")
    if scheme == "memory":
        return Location(f"memory://{rest.strip('/')}", "memory", f"/{rest.strip('/')}")
    if match and not rest.startswith("/"):
        raise StoreError(f"the store URL {url!r} must be file:///absolute/path, or a path without file://")
    path = os.path.abspath(rest if match else os.path.expanduser(rest))
    return Location(path, "file", path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
