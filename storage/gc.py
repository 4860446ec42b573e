"""Taking away what no index entry names: the shards of killed writers, of dropped samples, of fingerprints given up.

Nothing that a reader can see is ever deleted, but by name: `drop` gives up the samples of whole fingerprints, and even
then not those that a keep list names. A keep list is a file `{store}/keep/*.json` that says what somebody still refers
to (the history of a champion, say):

    {"fingerprint": "0123abcd", "sample_ids": ["...", ...]}          or "sample_ids": null for all of them

One that cannot be read stops everything: it is better to keep too much.

A living writer puts a sample's shards seconds before it commits them. So files are left alone until they are a day old
(`min_age_s`), and the files are listed before the index is read, never after.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from storage.claims import CLAIMS_FOLDER
from storage.errors import StoreError, one_line
from storage.index import STATES_FOLDER, drop_entries, read_entries, read_spec
from storage.location import Location, locate
from storage.segment import shard_keys, shard_layouts

KEEP_FOLDER = "keep"
MIN_AGE_S = 86_400.0
_TEMPORARY = re.compile(r"(?:.*/)?\.[^/]+\.partial")


@dataclass(frozen=True, slots=True)
class Garbage:
    """What may go from one fingerprint's folder."""

    fingerprint: str
    """The fingerprint."""
    files: tuple[str, ...]
    """Paths from the fingerprint's folder, in the order in which they are deleted."""
    num_bytes: int
    """Their sizes together."""
    dropped: tuple[str, ...]
    """Ids of committed samples given up (or to be, in a dry run)."""
    kept: int
    """Samples of a fingerprint given up that stay, as keep lists name them."""
    num_young: int
    """Files that nobody refers to either, but that are too young."""


def collect(
    url: str,
    *,
    drop: Collection[str] = (),
    min_age_s: float = MIN_AGE_S,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Garbage]:
    """Delete what may go from each fingerprint of a store; dry_run only says what.

    drop: fingerprints to give up. progress: called with files deleted and all, for each fingerprint.
    StoreError: no store there, a fingerprint to drop that it does not hold, a keep list or index that cannot be read.
    OSError if a file cannot be deleted.
    """
    root = locate(url)
    keep = _keep_lists(root)
    held = [name for name in root.names() if root.exists(f"{name}/{STATES_FOLDER}/zarr.json")]
    if not held:
        raise StoreError(f"there is no store of hidden states at {root.url}")
    missing = sorted(set(drop) - set(held))
    if missing:
        raise StoreError(
            f"store {root.url} holds no fingerprint {', '.join(missing)}; `eyas store ls` names what it does"
        )
    results = []
    for fingerprint in held:
        garbage = _find(
            root.child(fingerprint), fingerprint, keep.get(fingerprint, set()), fingerprint in drop, min_age_s
        )
        if not dry_run:
            folder = root.child(fingerprint)
            if garbage.dropped:
                drop_entries(folder, garbage.dropped)
            for done, name in enumerate(garbage.files, start=1):
                folder.delete(name)
                progress(done, len(garbage.files))
        results.append(garbage)
    return results


def _find(folder: Location, fingerprint: str, keep: set[str] | None, is_dropped: bool, min_age_s: float) -> Garbage:
    """keep: ids of samples that must stay, None for all."""
    # Before the index: what was not there yet is not listed, and what was, and is committed, is named by the index.
    changed, sizes = folder.changed(), folder.sizes()
    spec = read_spec(folder.child(STATES_FOLDER))
    if spec is None:
        raise StoreError(f"fingerprint {fingerprint} vanished from {folder.url} while it was read")
    layouts = shard_layouts(spec)
    entries = read_entries(folder)
    ids = {entry.sample_id for entry in entries}
    dropped = (ids - keep if keep is not None else set()) if is_dropped else set()
    staying = [entry for entry in entries if entry.sample_id not in dropped]
    named = {
        f"{STATES_FOLDER}/{entry.segment}/{key}"
        for entry in staying
        for layout in layouts.values()
        for key in shard_keys(entry, layout)
    }
    segments = {entry.segment for entry in staying}
    oldest = time.time() - min_age_s
    files, young = [], 0
    for name, seconds in sorted(changed.items()):
        if name in named or not _is_garbage(name, segments, layouts):
            continue
        # A file system that does not say how old a file is leaves it for good.
        if seconds is not None and seconds <= oldest:
            files.append(name)
        else:
            young += 1
    # A segment's own description last: while anything of it is left, it can be seen what it is.
    files.sort(key=lambda name: (name.endswith("zarr.json"), name))
    return Garbage(
        fingerprint=fingerprint,
        files=tuple(files),
        num_bytes=sum(sizes.get(name, 0) for name in files),
        dropped=tuple(sorted(dropped)),
        kept=len(ids) - len(dropped) if is_dropped else 0,
        num_young=young,
    )


def _is_garbage(name: str, segments: Collection[str], arrays: Collection[str]) -> bool:
    """Whether a file that no index entry names may go. name: its path from the fingerprint's folder."""
    if _TEMPORARY.fullmatch(name):
        return True
    top, _, rest = name.partition("/")
    if top == CLAIMS_FOLDER:
        return True
    if top != STATES_FOLDER or "/" not in rest:
        return False  # the group's zarr.json, the index, whatever a user put there
    segment, _, inside = rest.partition("/")
    if segment not in segments:
        return True
    # Of a segment in use, metadata and statistics stay; only its shards are named by index entries.
    array, _, key = inside.partition("/")
    return array in arrays and key.startswith("c.")


def _keep_lists(root: Location) -> dict[str, set[str] | None]:
    """By fingerprint, ids of the samples that must stay; None for all."""
    keep: dict[str, set[str] | None] = {}
    folder = root.child(KEEP_FOLDER)
    for name in folder.names():
        if not name.endswith(".json") or name.startswith("."):
            continue
        where = f"keep list {folder.url}/{name}"
        try:
            content = folder.read_bytes(name)
            document: Any = json.loads(content or b"")
            fingerprint, sample_ids = document["fingerprint"], document["sample_ids"]
            if not isinstance(fingerprint, str) or not (sample_ids is None or _are_names(sample_ids)):
                raise ValueError("fingerprint must be a name, sample_ids a list of names or null")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{where} cannot be read, so nothing is deleted: {one_line(error)}; mend or remove it"
            ) from error
        before = keep.get(fingerprint, set())
        keep[fingerprint] = None if before is None or sample_ids is None else before | set(sample_ids)
    return keep


def _are_names(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
