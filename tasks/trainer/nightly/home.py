"""Where things lie in a home of nights, and which night it is; no other module joins these paths.

champion.json, champions/       tasks/trainer/champion.py
lease.json                      which process works on the home at this moment
answers/                        regenerated answers, of all nights (in scratch where home is a URL)
nights/0001/                    a night; its number is never used again
  train.jsonl validation.jsonl  what it trains on, and what chooses the checkpoint
  fixed.jsonl recent.jsonl      what it is judged on
  seen.npy trained.npy          ids (hashes) of conversations that were new, and of those trained on
  plan.json                     written last of these: from here on the night exists
  run/                          the run that trained (tasks/trainer/run_dir.py)
  report.md
  verdict.json                  written last of all: the night is over

A night with a plan and no verdict was killed; the next start continues it, from the same data. Conversations count as
seen once a night that had them is over. Everything in nights/ but ids, plan, report and verdict is removed in time;
the conversations' text lies in train.jsonl and its neighbours, and in run/data.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage.location import Location
from storage.pointer import check_swappable
from tasks.trainer.champion import Champion, open_home
from tasks.trainer.config import RunConfig
from tasks.trainer.config_nightly import NightlyConfig
from tasks.trainer.errors import InputError
from tasks.trainer.lease import Lease, hold
from tasks.trainer.remote import scratch_folder

NIGHTS, PLAN, VERDICT, REPORT, RUN = "nights", "plan.json", "verdict.json", "report.md", "run"
TRAIN, VALIDATION, FIXED, RECENT = "train.jsonl", "validation.jsonl", "fixed.jsonl", "recent.jsonl"
SEEN, TRAINED = "seen.npy", "trained.npy"
KEPT = (SEEN, TRAINED, PLAN, REPORT, VERDICT)

Outcome = Literal["promoted", "not_promoted", "abandoned"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a night does, decided before it begins."""

    number: int
    """Of the night."""
    champion: int | None
    """Entry that it starts from and must beat; None on a first night."""
    champion_digest: str | None
    """Of that draft."""
    fingerprint: str
    """Of the target."""
    new_target: bool
    """Whether the champion was made for another revision of the target."""
    identity: str
    """Of the settings that decide the result: a night is continued only with the same ones."""
    fixed_digest: str
    """Of the prompts of the fixed held-out set, to tell whether two nights' figures compare."""
    counts: Mapping[str, int]
    """Files, conversations, and what became of them."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a start of the flow has to do."""

    plan: Plan | None
    """The night; None when there is nothing to do."""
    message: str
    """One sentence on it."""
    counts: Mapping[str, int]
    """Files, conversations, and what became of them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a night ended."""

    number: int
    """Of the night."""
    outcome: Outcome
    """promoted; not_promoted (it was judged); abandoned (it was not, and its conversations stay new)."""
    reasons: tuple[str, ...]
    """One sentence each."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What it was judged by, by set."""
    entry: int | None = None
    """The champion's entry, where it was promoted."""


@dataclass(frozen=True, slots=True)
class Home:
    """A home of nights."""

    place: Location
    """The folder or URL."""
    scratch: Path
    """The same folder, or a local one that stands in for the URL."""
    scratch_dir: str | None = None
    """Where the user wants local folders of what lies at a URL."""
    lease: Lease | None = None
    """While this process holds the home."""

    @classmethod
    def open(cls, url: str, scratch_dir: str | None = None) -> Home:
        """The home at a folder or URL; nothing is written. Raises InputError for what is no place."""
        place = open_home(url)
        scratch = Path(place.path) if place.is_local else scratch_folder(place, scratch_dir)
        return cls(place, scratch, scratch_dir)

    @contextmanager
    def hold(self, *, patience: float = 5.0) -> Iterator[Home]:
        """Hold the home alone, for as long as a night takes.

        Raises InputError when another night is under way (it says where), StoreError where nothing can be promoted,
        which is better known before training than after.
        """
        check_swappable(self.place)
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"nightly.home={self.place.url!r} cannot be written: {error.strerror}") from None
        with hold(self.scratch, self.place, name="nightly.home", patience=patience) as lease:
            yield replace(self, lease=lease)

    @property
    def name(self) -> str:
        """The last part of its place, for people."""
        return self.place.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def champion(self) -> Champion:
        """Its pointer."""
        return Champion(self.place)

    def night(self, number: int) -> Location:
        """A night's folder."""
        return self.place.child(f"{NIGHTS}/{number:04d}")

    def run_url(self, number: int) -> str:
        """Where a night's run lies."""
        return f"{self.night(number).url}/{RUN}"

    @property
    def answers(self) -> Path:
        """Regenerated answers, a local folder."""
        return self.scratch / "answers"

    def numbers(self) -> list[int]:
        """The nights that there are, ascending: those with a plan. Only the newest folder may be without one."""
        found = sorted(int(name) for name in self.place.child(NIGHTS).names() if name.isdecimal())
        return found if not found or self.night(found[-1]).exists(PLAN) else found[:-1]

    def plan(self, number: int) -> Plan:
        """Raises InputError when it cannot be read."""
        return Plan(**_read(self.night(number), PLAN))

    def verdict(self, number: int) -> Verdict | None:
        """None while the night is not over."""
        document = _read(self.night(number), VERDICT, optional=True)
        return Verdict(**{**document, "reasons": tuple(document["reasons"])}) if document else None

    def write_plan(self, plan: Plan) -> None:
        """The night exists from here on."""
        _write(self.night(plan.number), PLAN, asdict(plan))

    def write_verdict(self, verdict: Verdict) -> None:
        """The night is over."""
        if self.lease is not None:
            self.lease.check()
        _write(self.night(verdict.number), VERDICT, asdict(verdict))

    def ids(self, number: int, name: str) -> npt.NDArray[np.uint8]:
        """uint8 [n, 16] of SEEN (conversations), or [n, 32] of TRAINED (conversation, prompt)."""
        content = self.night(number).read_bytes(name)
        if content is None:
            raise InputError(f"{self.night(number).url}/{name} is missing; restore it from a copy")
        ids: npt.NDArray[np.uint8] = np.load(io.BytesIO(content), allow_pickle=False)
        return ids

    def write_ids(self, number: int, name: str, ids: npt.NDArray[np.uint8]) -> None:
        """See `ids`."""
        buffer = io.BytesIO()
        np.save(buffer, ids, allow_pickle=False)
        self.night(number).write_bytes(name, buffer.getvalue())

    def has_text(self, number: int) -> bool:
        """Whether a night's conversations and run are still there."""
        return self.night(number).exists(TRAIN)

    def drop_text(self, number: int) -> None:
        """Remove a night's conversations and run, here and in scratch."""
        night = self.night(number)
        names = [name for name in night.sizes() if name not in KEPT]
        for name in sorted(names, key=lambda name: (name == TRAIN, name)):  # has_text asks for this one: last
            night.delete(name)
        run = night.child(RUN)
        # What is left of it: empty folders, or the run's scratch.
        here = Path(run.path) if run.is_local else scratch_folder(run, self.scratch_dir)
        shutil.rmtree(here, ignore_errors=True)


def night_of(run_url: str) -> tuple[Home, Plan]:
    """The home and plan of a night, by where its run lies. Raises InputError when it is no night's run."""
    home, _, number = run_url.removesuffix(f"/{RUN}").rpartition(f"/{NIGHTS}/")
    if not home or not number.isdecimal():
        raise InputError(f"{run_url!r} is not the run of a night: nights lie in {NIGHTS}/ of nightly.home")
    found = Home.open(home)
    return found, found.plan(int(number))


def training_config(config: NightlyConfig, plan: Plan, home: Home) -> RunConfig:
    """The config of the run that a plan asks for. Raises InputError when the champion's draft is missing or damaged."""
    night = home.night(plan.number).url
    data = config.data.model_dump() | {
        "source": f"{night}/{TRAIN}",
        "heldout_source": f"{night}/{VALIDATION}",
    }
    if config.data.regenerate and config.data.regenerate_dir is None:
        data["regenerate_dir"] = str(home.answers)
    changes: dict[str, Any] = {"data": data, "run_dir": home.run_url(plan.number), "scratch_dir": config.scratch_dir}
    if plan.champion is not None:
        entry = home.champion.history().entry(plan.champion)
        folder = home.champion.local_folder(entry, home.scratch)
        start = {"init": str(folder), "vocabulary": "parent", "start": "random"}
        changes["draft"] = config.draft.model_dump() | start
    elif config.nightly.first_steps is not None:
        changes["train"] = config.train.model_dump() | {"steps": config.nightly.first_steps}
    return config.run_config(**changes)


def _read(night: Location, name: str, *, optional: bool = False) -> dict[str, Any]:
    """optional: an empty document where there is no file."""
    content = night.read_bytes(name)
    if content is None and optional:
        return {}
    try:
        document: dict[str, Any] = json.loads(content or b"")
    except ValueError:
        raise InputError(f"{night.url}/{name} is damaged; restore it from a copy, or remove the night") from None
    return document


def _write(night: Location, name: str, document: Mapping[str, Any]) -> None:
    night.write_bytes(name, json.dumps(document, indent=1).encode() + b"\n")
