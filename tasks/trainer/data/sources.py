"""Which files a source means: one file, a glob, or a folder (also one that `datasets` saved), on any fsspec URL.

Splits are never chosen for the user: a folder that holds train and test files is refused with what to write instead,
for a draft that was trained on its test set is worth nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.utils import infer_compression

from tasks.trainer.data.records import SUFFIXES
from tasks.trainer.errors import InputError

_SPLIT = re.compile(r"(?:^|[/_.-])(train|test|validation|valid|val|dev|eval)(?:[/_.-]|$)")


def expand_source(url: str) -> list[str]:
    """The files of a source, sorted by name; the URL itself when it is one file, or is not there (opening says so).

    Raises:
        InputError: a URL with credentials, a glob or folder without files, a folder of several splits, an unknown
            protocol.
    """
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise InputError(
            f"the data URL on host {parts.hostname} carries a user name or password: put credentials in the environment"
        )
    if parts.scheme in ("http", "https"):  # no folders, and a question mark is part of the address
        return [url]
    try:
        file_system, path = fsspec.core.url_to_fs(url)
        if any(character in path for character in "*?[") and not file_system.exists(path):
            found = [name for name in sorted(file_system.glob(path)) if not file_system.isdir(name)]
            if not found:
                raise InputError(f"{url} matches no file: check data.source")
        elif file_system.isdir(path):
            found = _files_of_folder(file_system, path.rstrip("/"), url)
        else:
            return [url]
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{url} cannot be opened: {' '.join(str(error).split())}") from None
    return [name if "://" not in url else file_system.unstrip_protocol(name) for name in found]


def _files_of_folder(file_system: Any, folder: str, url: str) -> list[str]:
    if file_system.isfile(f"{folder}/dataset_dict.json"):
        splits = json.loads(file_system.cat_file(f"{folder}/dataset_dict.json")).get("splits", [])
        if splits != ["train"]:
            raise InputError(f"{url} holds the splits {', '.join(splits)}: name one, for example {url}/{splits[0]}")
        folder = f"{folder}/train"
    if file_system.isfile(f"{folder}/state.json"):  # saved by datasets: it lists its files, others are caches
        listed = json.loads(file_system.cat_file(f"{folder}/state.json")).get("_data_files", [])
        return [f"{folder}/{entry['filename']}" for entry in listed]
    found = sorted(name for name in file_system.find(folder) if _is_data(name[len(folder) :]))
    if not found:
        raise InputError(f"{url} is not a file, and as a folder it holds none of {', '.join(SUFFIXES)}")
    _refuse_splits(found, folder, url)
    return found


def _is_data(name: str) -> bool:
    parts = name.strip("/").split("/")
    plain = parts[-1].rsplit(".", 1)[0] if infer_compression(parts[-1]) else parts[-1]
    return plain.endswith(SUFFIXES) and not any(part.startswith((".", "_")) for part in parts)


def _refuse_splits(found: Sequence[str], folder: str, url: str) -> None:
    splits = {match.group(1) for name in found if (match := _SPLIT.search(name[len(folder) :]))}
    if len(splits) > 1:
        raise InputError(
            f"{url} holds files of several splits ({', '.join(sorted(splits))}): name those to train on, for example "
            f"{url}/**/*train*"
        )
