"""A run whose directory is a URL: work happens in a local scratch folder, and what it makes is uploaded as it is made.

A run's own code sees local files only. The price is local disk for the data, the checkpoints kept and the draft, and an
upload a checkpoint. Whoever holds the run's lease may have been on another machine last, so scratch is brought up to
the URL's state before each stage.

What counts there: a checkpoint's folder once its state.json is there, which is uploaded last and deleted first; other
files once `manifest.json` tells their digest; metrics.jsonl as it is, for its first lines never change.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from storage.errors import StoreError
from storage.location import Location, locate
from tasks.trainer.errors import InputError
from tasks.trainer.files import digest, sync_folder, write_json

logger = logging.getLogger(__name__)

MARKER = ".remote.json"
_MANIFEST, _INDEX, _SEEN = "manifest.json", ".index.json", ".seen.json"
_CHECKPOINTS, _RECEIPTS, _METRICS, _STATE = "checkpoints", "receipts", "metrics.jsonl", "state.json"


def remote_place(run_dir: str) -> Location | None:
    """Where a run directory lies that is no local folder, else None. Raises InputError for a URL nobody serves."""
    try:
        place = locate(run_dir)
    except StoreError as error:
        raise InputError(f"run_dir: {error}") from None
    return None if place.is_local else place


def scratch_folder(place: Location, scratch_dir: str | None) -> Path:
    """The local folder of a remote run: the same for the same URL, so that a retry on this machine finds its files."""
    base = scratch_dir or os.environ.get("EYAS_SCRATCH") or "~/.cache/eyas"
    name = hashlib.blake2b(place.url.encode(), digest_size=6).hexdigest()
    return Path(base).expanduser().absolute() / f"{place.path.rstrip('/').rsplit('/', 1)[-1]}-{name}"


class Mirror:
    """Brings scratch and URL together. Every upload is the caller's to order: what others rely on comes last."""

    def __init__(self, place: Location, root: Path) -> None:
        self.place = place
        self._root = root

    def pull_receipts(self) -> None:
        """What says how far the run is: identity.json and the receipts, exactly as they are there."""
        for name in ("identity.json", "config.yaml"):
            self._pull_small(name)
        # A listing may lack what was just put: what is here goes only when a read says so.
        here = {path.name for path in (self._root / _RECEIPTS).glob("*.json")}
        for name in here | set(self.place.child(_RECEIPTS).names()):
            if not self._pull_small(f"{_RECEIPTS}/{name}"):
                (self._root / _RECEIPTS / name).unlink(missing_ok=True)

    def pull(self) -> None:
        """Everything that a stage may need. Raises OSError when the place cannot be read."""
        self.pull_receipts()
        manifest = self._manifest()
        known = self._known()
        for name, expected in manifest.items():
            if known.get(name) == expected:
                continue
            target = self._root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.place.download(name, target)
            except FileNotFoundError:
                continue  # being replaced when its writer was killed: its stage has no receipt, and is done again
            if digest(target) != expected:
                logger.warning("%s/%s was being replaced when its writer ended; left out", self.place.url, name)
                target.unlink()
        # What was there when we looked last, and no more; what a killed stage of ours left here stays.
        seen_path = self._root / _SEEN
        seen = set(json.loads(seen_path.read_text())) if seen_path.is_file() else set()
        for name in seen - manifest.keys():
            (self._root / name).unlink(missing_ok=True)
        write_json(seen_path, sorted(manifest))
        self._pull_metrics()
        self._pull_checkpoints()

    def push(self, names: Iterable[str]) -> None:
        """Upload files by their names below the run; small ones, that others read by themselves."""
        for name in names:
            self.place.upload(name, self._root / name)

    def drop(self, name: str) -> None:
        """Remove a file there."""
        self.place.delete(name)

    def push_changed(self) -> None:
        """Upload what a stage made, then the manifest that makes it count. Receipts and checkpoints are not its."""
        manifest, known = self._manifest(), self._known()
        changed = [name for name, found in known.items() if manifest.get(name) != found]
        self.push(changed)
        if (self._root / _METRICS).is_file():
            self.push([_METRICS])
        gone = manifest.keys() - known.keys()
        if changed or gone:
            self.place.write_bytes(_MANIFEST, json.dumps(known, indent=1, sort_keys=True).encode())
        for name in gone:
            self.place.delete(name)

    def push_checkpoint(self, folder: Path) -> None:
        """Upload the steps' metrics, then a whole checkpoint; then remove those there that scratch keeps no more."""
        self.push([_METRICS])
        name = f"{_CHECKPOINTS}/{folder.name}"
        self.place.delete(f"{name}/{_STATE}")
        files = sorted(path.name for path in folder.iterdir() if path.name != _STATE)
        self.push(f"{name}/{file}" for file in [*files, _STATE])
        kept = {path.name for path in (self._root / _CHECKPOINTS).glob("step-*")}
        there = self.place.child(_CHECKPOINTS)
        for old in set(there.names()) - kept:
            # state.json first: what is half deleted must not count.
            for file in sorted(there.child(old).names(), key=lambda file: file != _STATE):
                there.delete(f"{old}/{file}")

    def _pull_small(self, name: str) -> bool:
        """Whether it is there."""
        content = self.place.read_bytes(name)
        if content is None:
            return False
        target = self._root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.pulled")
        scratch.write_bytes(content)
        scratch.replace(target)
        return True

    def _pull_metrics(self) -> None:
        """The longer one: both begin with the same steps, and a checkpoint is never ahead of its side's."""
        content = self.place.read_bytes(_METRICS)
        here = self._root / _METRICS
        if content is not None and (not here.is_file() or here.read_bytes().count(b"\n") < content.count(b"\n")):
            here.write_bytes(content)

    def _pull_checkpoints(self) -> None:
        home = self._root / _CHECKPOINTS
        home.mkdir(parents=True, exist_ok=True)
        place = self.place.child(_CHECKPOINTS)
        for name in place.names():
            state = place.read_bytes(f"{name}/{_STATE}")
            if state is None or not name.startswith("step-"):
                continue
            here = home / name / _STATE
            if here.is_file() and _digests(here.read_bytes()) == _digests(state):
                continue
            scratch = home / f".{name}"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                for file in place.child(name).names():
                    place.download(f"{name}/{file}", scratch / file)
            except FileNotFoundError:
                logger.info("%s/%s was removed meanwhile", place.url, name)  # read without the lease, by `open`
                shutil.rmtree(scratch)
                continue
            shutil.rmtree(home / name, ignore_errors=True)
            scratch.rename(home / name)
            sync_folder(home)

    def _manifest(self) -> dict[str, str]:
        content = self.place.read_bytes(_MANIFEST)
        manifest: dict[str, str] = {} if content is None else json.loads(content)
        return manifest

    def _known(self) -> dict[str, str]:
        """Digests of the files of scratch that the manifest tells about; each is read once, then known by its stat."""
        index_path = self._root / _INDEX
        before: dict[str, list[int | str]] = json.loads(index_path.read_text()) if index_path.is_file() else {}
        index: dict[str, list[int | str]] = {}
        for folder, folders, names in os.walk(self._root):
            folders[:] = [name for name in folders if name not in (_CHECKPOINTS, _RECEIPTS) and name[0] != "."]
            for file in names:
                path = Path(folder, file)
                name = path.relative_to(self._root).as_posix()
                if file[0] == "." or file.endswith(".tmp") or name in (_METRICS, "identity.json", "config.yaml"):
                    continue
                stat = path.stat()
                now: list[int | str] = [stat.st_size, stat.st_mtime_ns]
                old = before.get(name, [])
                index[name] = old if old[:2] == now else [*now, digest(path)]
        write_json(index_path, index)
        return {name: str(entry[2]) for name, entry in index.items()}


def _digests(state: bytes) -> object:
    """What a checkpoint's state.json says of its files, or a damaged one's own bytes."""
    try:
        return json.loads(state)["digests"]
    except (ValueError, KeyError):
        return state
