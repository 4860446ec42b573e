"""Writing files so that a killed process leaves the old one or the new one, never half of it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import fsspec

from tasks.trainer.errors import InputError


def write_text(path: Path, text: str) -> None:
    """Write beside, fsync, rename. The folder must exist."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON; floats survive exactly."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Raises OSError or json.JSONDecodeError: what `write_json` wrote is always whole."""
    return json.loads(path.read_text(encoding="utf-8"))


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush a file that a library wrote."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def digest(path: Path) -> str:
    """blake2b of a file's bytes, 32 hex characters."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def digest_url(url: str) -> str:
    """blake2b of what any fsspec URL holds, 32 hex characters. Raises InputError when it cannot be read."""
    hasher = hashlib.blake2b(digest_size=16)
    try:
        with fsspec.open(url, "rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {url!r}: {getattr(error, 'strerror', None) or error}") from None
    return hasher.hexdigest()
