"""Where a store lies: the one module that knows URLs, file systems and what "durable" means on each.

Local paths (plain or file://) are served by the operating system: a file is written under a temporary name and renamed
(fsspec's local file system writes in place, and a kill leaves half a file under its real name), and is durable after
an fsync of itself and of its folder. Everything else goes through fsspec, whose objects are put whole and are durable
when the put returns: memory:// (for tests), s3://, gs:// and whatever else is installed. Concurrency is the caller's:
every method may be called from many threads, and fsspec's asynchronous file systems then run that many requests at
once on their one event loop.

Credentials come from the environment alone (the AWS_... variables, AWS_ENDPOINT_URL included, for s3://); a URL that
holds some is refused before anything is written. Errors of backends are told with their text scrubbed of everything
that looks like one.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from storage.errors import StoreError
from storage.retry import retried

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:://|::)")
_EXTRAS = {"s3": "pip install 'eyas[s3]'", "s3a": "pip install 'eyas[s3]'"}


@dataclass(frozen=True, slots=True)
class Location:
    """A folder of a local file system or of one of fsspec's."""

    url: str
    """What the user calls it; never holds user info."""
    scheme: str
    """"file", or fsspec's name of the protocol."""
    path: str
    """Absolute path inside that place."""

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's own file system."""
        return self.scheme == "file"

    @property
    def is_remote(self) -> bool:
        """Whether requests cross a network: worth many at once, a cache, and trying again."""
        return self.scheme not in ("file", "memory")

    def child(self, name: str) -> Location:
        """The folder `name` inside this one; it need not exist."""
        return Location(f"{self.url.rstrip('/')}/{name}", self.scheme, f"{self.path.rstrip('/')}/{name}")

    def read_bytes(self, name: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        """The file `name`, whole or its bytes `start` to `stop` (fewer where it ends before), or None if there is none.

        OSError if it cannot be read. To know `stop` saves an object store a request.
        """
        if not self.is_local:
            content: bytes | None = self._try(_read_object, f"{self.path}/{name}", start, stop)
            return content
        try:
            with open(Path(self.path, name), "rb", buffering=0) as file:
                if start is None or stop is None:
                    return file.read()
                return os.pread(file.fileno(), stop - start, start)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def write_bytes(self, name: str, *parts: bytes, durable: bool = True) -> None:
        """Put the file `name` (all `parts`, one after another) whole or not at all, replacing what it was.

        Durable on return, or with `durable=False` after `make_durable`. OSError if refused.
        """
        if not self.is_local:
            self._try(_write_object, f"{self.path}/{name}", parts[0] if len(parts) == 1 else b"".join(parts))
            return
        target = Path(self.path, name)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            file = temporary.open("wb")
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = temporary.open("wb")
        try:
            with file:
                file.writelines(parts)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _fsync(target.parent)

    def make_durable(self, names: Iterable[str], executor: Executor) -> None:
        """Return once the files `names`, written with `durable=False`, and their folders survive a power cut.

        On `executor`, all at once: a journalling file system then commits many files in one go.
        """
        if not self.is_local:
            return
        files = [Path(self.path, name) for name in names]
        list(executor.map(_fsync, files))
        list(executor.map(_fsync, sorted({file.parent for file in files})))

    def make_folders_durable(self) -> None:
        """Return once this folder's own entry, and those of the folders above it, survive a power cut."""
        if self.is_local:
            for folder in Path(self.path).parents:
                if os.access(folder, os.R_OK):
                    _fsync(folder)

    def upload(self, name: str, source: Path) -> None:
        """Put the local file `source` as `name`, whole or not at all, replacing what it was; of any size: an object
        store gets it in parts, and memory holds one of them. OSError if refused."""
        if not self.is_local:
            self._try(_put_object, f"{self.path}/{name}", source)
            return
        target = Path(self.path, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, target)

    def download(self, name: str, target: Path) -> None:
        """Write the file `name` to the local `target`, whole or not at all; its folder must exist.

        FileNotFoundError if there is none, OSError if it cannot be read.
        """
        if self.is_local:
            _copy(Path(self.path, name), target)
            return
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            self._try(_get_object, f"{self.path}/{name}", temporary)
            _fsync(temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        _fsync(target.parent)

    def delete(self, name: str) -> None:
        """Remove the file `name`; nothing to do if there is none. OSError if refused."""
        if not self.is_local:
            self._try(_delete_object, f"{self.path}/{name}")
            return
        Path(self.path, name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Names of the files and folders directly inside, sorted; empty if there is no such folder."""
        if self.is_local:
            try:
                return sorted(os.listdir(self.path))
            except (FileNotFoundError, NotADirectoryError):
                return []
        entries: list[str] = self._try(_list_objects, self.path)
        return sorted(
            {PurePosixPath(entry).name for entry in entries if entry.strip("/") != self.path.strip("/")} - {""}
        )

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder `name`."""
        if self.is_local:
            return Path(self.path, name).exists()
        return bool(self._try(_object_exists, f"{self.path}/{name}"))

    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file under here, by its path relative to this folder."""
        if not self.is_local:
            found: dict[str, int] = self._try(_object_sizes, self.path)
            prefix = self.path.strip("/") + "/"
            # An object store may list an emptied folder as a file of no bytes: the folder itself is not under here.
            paths = {path.strip("/"): size for path, size in found.items()}
            return {name.removeprefix(prefix): size for name, size in paths.items() if name.startswith(prefix)}
        sizes = {}
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = Path(folder, name)
                try:
                    sizes[str(path.relative_to(self.path))] = path.stat().st_size
                except FileNotFoundError:
                    continue  # a temporary name, renamed since the listing
        return sizes

    def total_bytes(self) -> int:
        """Size in bytes of all files under here."""
        return sum(self.sizes().values())

    def changed(self) -> dict[str, float | None]:
        """When every file under here was last changed, in seconds since 1970, by its path relative to this folder.

        None where the file system does not say.
        """
        if not self.is_local:
            found: dict[str, float | None] = self._try(_object_times, self.path)
            prefix = self.path.strip("/") + "/"
            return {path.strip("/").removeprefix(prefix): seconds for path, seconds in found.items()}
        times: dict[str, float | None] = {}
        for name in self.sizes():
            try:
                times[name] = Path(self.path, name).stat().st_mtime
            except FileNotFoundError:
                continue
        return times

    def _try(self, request: Any, *arguments: Any) -> Any:
        file_system = _file_system(self.scheme)
        if not self.is_remote:
            return request(file_system, *arguments)
        return retried(request, file_system, *arguments, where=self.url)


def locate(url: str) -> Location:
    """The place a URL names.

    StoreError for user info (before anything else), a scheme nobody serves or whose package is missing, and no path.
    """
    match = _SCHEME.match(url)
    scheme = match.group(1).lower() if match else "file"
    rest = url[match.end() :] if match else url
    # Neither message repeats the URL: what is refused here may hold a password. A password may hold a slash.
    if match and ("@" in rest.partition("/")[0] or (scheme not in ("file", "memory") and "@" in rest)):
        raise StoreError(
            f"the store URL of scheme {scheme}:// holds user info ('...@'); "
            "take it out and give credentials through the environment"
        )
    if match and (match.group().endswith("::") or scheme in ("http", "https")):
        raise StoreError(f"store URLs of scheme {match.group()} are not served: a store is listed and written to")
    if not rest.strip("/") or "\0" in rest:
        raise StoreError(f"the store URL {url!r} names no folder")
    if scheme == "file":
        if match and not rest.startswith("/"):
            raise StoreError(f"the store URL {url!r} must be file:///absolute/path, or a path without file://")
        path = os.path.abspath(rest if match else os.path.expanduser(rest))
        return Location(path, "file", path)
    _file_system(scheme)
    leading = "/" if scheme == "memory" else ""
    return Location(f"{scheme}://{rest.strip('/')}", scheme, f"{leading}{rest.strip('/')}")


def _file_system(scheme: str) -> Any:
    # Listings are not cached: another process may be writing.
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        # One request an object: s3fs otherwise asks for its size first. Trying again is ours (storage.retry), and a
        # connection each for as many requests as a reader or writer has under way.
        options["max_concurrency"] = 1
        options["config_kwargs"] = {
            "max_pool_connections": 64,
            "connect_timeout": 10,
            "read_timeout": 30,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        }
    try:
        file_system = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        way_out = _EXTRAS.get(scheme, "install the package that fsspec names for it")
        raise StoreError(f"store URLs of scheme {scheme}:// need another package: {way_out}") from error
    except ValueError as error:
        raise StoreError(f"store URLs of scheme {scheme}:// are not served; see fsspec's list of protocols") from error
    if scheme in ("s3", "s3a"):
        file_system.retries = 1
    return file_system


def _read_object(file_system: Any, path: str, start: int | None, stop: int | None) -> bytes | None:
    try:
        content: bytes = file_system.cat_file(path, start=start, end=stop)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    return content


def _write_object(file_system: Any, path: str, content: bytes) -> None:
    file_system.pipe_file(path, content)


def _put_object(file_system: Any, path: str, source: Path) -> None:
    file_system.put_file(str(source), path)


def _get_object(file_system: Any, path: str, target: Path) -> None:
    file_system.get_file(path, str(target))


def _delete_object(file_system: Any, path: str) -> None:
    try:
        file_system.rm_file(path)
    except FileNotFoundError:
        return


def _list_objects(file_system: Any, path: str) -> list[str]:
    try:
        names: list[str] = file_system.ls(path, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return names


def _object_exists(file_system: Any, path: str) -> bool:
    return bool(file_system.exists(path))


def _object_sizes(file_system: Any, path: str) -> dict[str, int]:
    return {name: int(info["size"]) for name, info in file_system.find(path, detail=True).items()}


def _object_times(file_system: Any, path: str) -> dict[str, float | None]:
    return {name: _seconds(info) for name, info in file_system.find(path, detail=True).items()}


def _seconds(info: dict[str, Any]) -> float | None:
    """Each file system has a name of its own for it, and a type."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.replace(tzinfo=value.tzinfo or UTC).timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return _seconds({key: datetime.fromisoformat(value)})
            except ValueError:
                continue
    return None


def _copy(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        shutil.copyfile(source, temporary)
        _fsync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
