"""A small file that several processes change, each on top of what it read: compare-and-swap, or a refusal.

On this machine's own disks a lock beside the file makes the comparison, and a rename the change. On S3 the server
compares: a put with `If-Match` (or `If-None-Match: *` for the first one) succeeds for one of those who read the same
version. Not every server that speaks S3 does that, and one that ignores the header would let two through, so it is
tried out before it is trusted. Elsewhere there is no such thing that fsspec could ask for, and it is refused.

No two contents may be alike, whoever writes them: an S3 server knows a version by the hash of its bytes, and a put
whose answer was lost is known by its content. So put something random into each.
"""

from __future__ import annotations

import fcntl
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import StoreError
from storage.location import Location

_FAILED_CONDITIONS = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_READS = 10


@dataclass(frozen=True, slots=True)
class Version:
    """What was read."""

    content: bytes | None
    """The file, None where there was none."""
    tag: str = ""
    """The server's name of this version; empty on local disks, where contents are compared."""


def check_swappable(place: Location) -> None:
    """StoreError unless files in `place` can be swapped. On S3 this writes, and removes, an object of no meaning."""
    if place.is_local:
        return
    if place.scheme not in ("s3", "s3a"):
        raise StoreError(
            f"{place.url}: a file there cannot be replaced by compare-and-swap; use a local folder, or an S3 server "
            "that supports conditional puts"
        )
    name = f".conditional-put.{uuid.uuid4().hex}"
    try:
        refused = (
            _put(place, name, b"probe", Version(None))
            and not _put(place, name, b"again", Version(None))
            and not _put(place, name, b"stale", Version(b"", '"00000000000000000000000000000000"'))
            and place.read_bytes(name) == b"probe"
        )
    finally:
        place.delete(name)
    if not refused:
        raise StoreError(
            f"{place.url}: this server takes a put whose condition (If-Match, If-None-Match) does not hold, so two "
            "writers could undo each other; use a local folder, or a server that supports conditional puts"
        )


def read_version(place: Location, name: str) -> Version:
    """The file `name` of `place` as it is now. OSError if it cannot be read."""
    if place.is_local:
        return Version(place.read_bytes(name))
    for _ in range(_READS):
        before = _tag(place, name)
        content = place.read_bytes(name)
        if _tag(place, name) == before:
            return Version(content, before) if before else Version(None)
    raise OSError(f"{place.url}/{name} was changed {_READS} times while it was read")


def swap(place: Location, name: str, content: bytes, *, expected: Version) -> bool:
    """Replace the file by `content` if it still is `expected`; whether it was. Durable on return.

    StoreError where the file system cannot lock; OSError if refused for another reason.
    """
    if not place.is_local:
        # A put whose answer was lost is tried again, and then finds its own content there.
        return _put(place, name, content, expected) or place.read_bytes(name) == content
    with _locked(place, name):
        if place.read_bytes(name) != expected.content:
            return False
        place.write_bytes(name, content)
    return True


@contextmanager
def _locked(place: Location, name: str) -> Iterator[None]:
    folder = Path(place.path)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(
                f"{place.url}: files there cannot be locked ({error.strerror}); use another disk"
            ) from None
        yield


def _tag(place: Location, name: str) -> str:
    tag: str = place._try(_tag_of_object, f"{place.path}/{name}")
    return tag


def _tag_of_object(file_system: Any, path: str) -> str:
    try:
        return str(file_system.info(path)["ETag"])
    except FileNotFoundError:
        return ""


def _put(place: Location, name: str, content: bytes, expected: Version) -> bool:
    condition = {"IfNoneMatch": "*"} if expected.content is None else {"IfMatch": expected.tag}
    return bool(place._try(_put_object_if, f"{place.path}/{name}", content, condition))


def _put_object_if(file_system: Any, path: str, content: bytes, condition: dict[str, str]) -> bool:
    try:
        file_system.pipe_file(path, content, **condition)
    except OSError as error:
        # s3fs makes an OSError of botocore's error, which says why.
        response = getattr(error.__cause__, "response", None) or {}
        if response.get("Error", {}).get("Code") in _FAILED_CONDITIONS:
            return False
        raise
    return True
