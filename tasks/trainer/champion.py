"""The champion: one file that says which draft is served, and everything it has been before.

{home}/champion.json          the pointer and its history, replaced by compare-and-swap (storage.pointer)
{home}/champions/{digest}/    the drafts in the serving layout, named by their content, never changed, never deleted
{store}/keep/{...}.json       what of a store a draft was trained on: `eyas store gc` leaves it

Pointer and history are one file, so there is no moment at which they disagree; the price is that it grows by about a
kilobyte a promotion. A draft and its keep lists are in place before the pointer names them: a crash between leaves
something that nobody refers to, never the reverse.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from storage.errors import StoreError
from storage.location import Location, locate
from storage.pointer import Version, check_swappable, read_version, swap
from tasks.trainer.errors import InputError
from tasks.trainer.parent import parent_digest

CHAMPION, CHAMPIONS = "champion.json", "champions"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A draft that was promoted."""

    number: int
    """From 1, in the order of promotion."""
    night: int
    """The night that trained it."""
    digest: str
    """Of its shape and weights (tasks.trainer.parent); its folder is champions/{digest}."""
    replaced: int | None
    """The champion it started from and took the place of; None for the first."""
    promoted_at: str
    """UTC, ISO 8601."""
    target: str
    """target.model."""
    fingerprint: str
    """Of the target it was trained for and judged with."""
    reasons: tuple[str, ...]
    """Why it was promoted."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What it was judged by: tau, the other's tau, bound and prompts, by set."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the file."""

    at: str
    """UTC, ISO 8601."""
    kind: Literal["promoted", "rolled_back", "measured"]
    """What was done."""
    entry: int
    """The draft it is about: the champion from then on, or the one measured."""
    before: int | None
    """The champion until then."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """Of a measurement: fingerprint of the target, tau, its interval, prompts."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Random: no two contents of the file are alike."""


@dataclass(frozen=True, slots=True)
class History:
    """What champion.json holds."""

    champion: int | None = None
    """Number of the entry that is served; None before the first promotion."""
    entries: tuple[Entry, ...] = ()
    """Every draft that ever was promoted."""
    changes: tuple[Change, ...] = ()
    """Oldest first."""

    @property
    def current(self) -> Entry | None:
        """The champion."""
        return None if self.champion is None else self.entry(self.champion)

    def entry(self, number: int) -> Entry:
        """Raises InputError when there is none of that number."""
        for entry in self.entries:
            if entry.number == number:
                return entry
        known = ", ".join(str(entry.number) for entry in self.entries) or "none"
        raise InputError(f"there is no champion {number} in the history; it holds {known}")

    def of_night(self, night: int) -> Entry | None:
        """The draft that a night promoted."""
        return next((entry for entry in self.entries if entry.night == night), None)

    def lineage(self) -> tuple[Entry, ...]:
        """The champion, the one it started from, and so on."""
        found, entry = [], self.current
        while entry is not None:
            found.append(entry)
            entry = None if entry.replaced is None else self.entry(entry.replaced)
        return tuple(found)

    def is_measured(self, entry: Entry, fingerprint: str) -> bool:
        """Whether an entry's tau with this target is known."""
        return entry.fingerprint == fingerprint or any(
            change.kind == "measured" and change.entry == entry.number and change.note.get("fingerprint") == fingerprint
            for change in self.changes
        )


class Champion:
    """A home's champion.json and the drafts that it names."""

    def __init__(self, home: Location) -> None:
        self.home = home

    def read(self) -> tuple[History, Version]:
        """The history, and the version to change it by. Raises InputError when the file is damaged."""
        version = read_version(self.home, CHAMPION)
        return _parse(version.content, f"{self.home.url}/{CHAMPION}"), version

    def history(self) -> History:
        """What the file holds now."""
        return self.read()[0]

    def folder(self, entry: Entry) -> Location:
        """Where a draft lies."""
        return self.home.child(f"{CHAMPIONS}/{entry.digest}")

    def local_folder(self, entry: Entry, scratch: Path) -> Path:
        """A draft's folder on this machine, under scratch where home is a URL; its content is checked.

        Raises InputError when the draft is missing or not what was promoted.
        """
        place = self.folder(entry)
        if place.is_local:
            return _checked(Path(place.path), entry)
        here = scratch / CHAMPIONS / entry.digest
        if not here.is_dir():
            coming = here.with_name(f".{here.name}.{uuid.uuid4().hex}")
            coming.mkdir(parents=True)
            for name in place.names():
                place.download(name, coming / name)
            _checked(coming, entry)
            if not here.is_dir():
                coming.rename(here)
        return _checked(here, entry)

    def publish(self, draft: Path, digest: str) -> None:
        """Put a local serving folder into champions/, whole; again is no harm. Raises InputError when the draft is not
        the one of that digest."""
        if parent_digest(str(draft)) != digest:
            raise InputError(f"{draft} is not the draft that was judged; run the night again")
        place = self.home.child(f"{CHAMPIONS}/{digest}")
        for path in sorted(draft.iterdir()):
            place.upload(path.name, path)

    def promote(self, entry: Entry, *, version: Version, history: History) -> bool:
        """Make a published draft the champion; False when somebody changed the file since it was read."""
        change = Change(_now(), "promoted", entry.number, history.champion)
        new = replace(history, champion=entry.number, entries=(*history.entries, entry))
        return self._swap(new, change, version)

    def record_measurement(self, entry: Entry, note: Mapping[str, Any]) -> None:
        """Note what an entry is worth with a target. Raises InputError when others keep changing the file."""
        for _ in range(10):
            history, version = self.read()
            if self._swap(history, Change(_now(), "measured", entry.number, history.champion, note), version):
                return
        raise InputError(f"{self.home.url}/{CHAMPION} is being changed by somebody else; run again")

    def roll_back(self, to: int | None = None) -> tuple[Entry, Entry]:
        """Serve an earlier draft again; `to`: its number, or None for the one that the champion replaced.

        Returns the champion before and the champion now. Raises InputError when there is none to go back to, its draft
        is gone, or another process changed the file at the same moment.
        """
        check_swappable(self.home)
        history, version = self.read()
        current = history.current
        if current is None:
            raise InputError(f"{self.home.url} has no champion yet; a nightly run promotes the first")
        if to is None:
            to = current.replaced
        if to is None:
            raise InputError(f"champion {current.number} is the first one; there is none to go back to")
        entry = history.entry(to)
        if entry.number == current.number:
            raise InputError(f"champion {entry.number} is the champion already")
        if not self.folder(entry).names():
            raise InputError(f"the draft of champion {entry.number} is gone: {self.folder(entry).url} is empty")
        change = Change(_now(), "rolled_back", entry.number, current.number)
        if not self._swap(replace(history, champion=entry.number), change, version):
            raise InputError(f"{self.home.url}/{CHAMPION} was changed at the same moment; look at it, and try again")
        return current, entry

    def _swap(self, history: History, change: Change, version: Version) -> bool:
        new = replace(history, changes=(*history.changes, change))
        document = {"format": FORMAT, **asdict(new)}
        return swap(self.home, CHAMPION, json.dumps(document, indent=1).encode() + b"\n", expected=version)


def open_home(url: str) -> Location:
    """The place of `nightly.home`. Raises InputError for what is no place."""
    try:
        return locate(url)
    except StoreError as error:
        raise InputError(f"nightly.home: {error}") from None


def write_keep_list(store_url: str, *, home: Location, night: int, fingerprint: str, sample_ids: Sequence[str]) -> str:
    """Have `eyas store gc` leave what a night's draft was trained on; returns the list's name. OSError if refused."""
    from storage.gc import KEEP_FOLDER  # not above: it imports zarr

    line = hashlib.blake2b(home.url.encode(), digest_size=6).hexdigest()
    name = f"champion-{line}-{night:04d}.json"
    document = {"fingerprint": fingerprint, "home": home.url, "night": night, "sample_ids": list(sample_ids)}
    locate(store_url).child(KEEP_FOLDER).write_bytes(name, json.dumps(document).encode())
    return name


def _checked(folder: Path, entry: Entry) -> Path:
    if parent_digest(str(folder)) != entry.digest:
        raise InputError(
            f"{folder} is not the draft that champion {entry.number} was promoted as; restore it, or roll back with "
            "`eyas champion rollback`"
        )
    return folder


def _parse(content: bytes | None, where: str) -> History:
    if content is None:
        return History()
    try:
        document = json.loads(content)
        if document["format"] != FORMAT:
            raise InputError(f"{where} is of format {document['format']}, this Eyas reads {FORMAT}; update Eyas")
        history = History(
            document["champion"],
            tuple(Entry(**{**entry, "reasons": tuple(entry["reasons"])}) for entry in document["entries"]),
            tuple(Change(**change) for change in document["changes"]),
        )
        history.lineage()
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} is damaged ({error}); restore it from a copy") from None
    return history


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
