"""Where things lie in a run; no other module joins these paths.

A run whose directory is a URL is worked on in a local scratch folder of the same layout (remote.py).

config.yaml               the resolved config
identity.json             the config fields that decide the result; a run is continued only with the same ones
data/train, data/heldout  prepared samples (memory-mapped .npy)
data/answers              regenerated answers, unless data.regenerate_dir says otherwise
vocabulary.safetensors    d2t, t2d
checkpoints/step-000200   masters, moments, position
metrics.jsonl             one line an optimizer step, one a look at held-out samples
trackers/                 TensorBoard's events and the like, and how far each has come
profile/                  traces and memory snapshots of chosen steps
stopped-step-000123.json  sample ids of a step that must not be taken
lease.json                who works on the run at this moment
evaluation.json           acceptance and held-out metrics
judgement.json            of a night's run: counts by prompt, of the draft and of what it must beat
draft/                    the exported draft
plan.md, plan.json        what each choice would cost
plots/, report.md, report.json
receipts/STAGE.json       written last by each stage: what it did. Without it the stage is not done
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from storage.location import locate
from tasks.trainer.config import Offline, Online, RunConfig, identity_fields
from tasks.trainer.errors import InputError
from tasks.trainer.files import read_json, write_json, write_text
from tasks.trainer.lease import Lease, hold
from tasks.trainer.recipe import dump_config, read_config
from tasks.trainer.remote import MARKER, Mirror, remote_place, scratch_folder


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run."""

    root: Path
    """The local folder: the run itself, or scratch."""
    mirror: Mirror | None = field(default=None, compare=False)
    """Of a run that lies at a URL."""
    lease: Lease | None = field(default=None, compare=False)
    """While this process holds the run."""

    @classmethod
    def create(cls, config: RunConfig) -> RunDir:
        """Make the run's folder, or continue the one that is there.

        Raises InputError when it cannot be written, or holds a run whose config differs in a field that decides the
        result (the message names the fields).
        """
        run = cls._at(config.run_dir, config.scratch_dir)
        try:
            for folder in (run.root, run.data, run.checkpoints, run.plots, run.receipts):
                folder.mkdir(parents=True, exist_ok=True)
            if not os.access(run.root, os.W_OK):
                raise PermissionError(13, "permission denied")
            if run.mirror is not None:
                write_json(run.root / MARKER, run.mirror.place.url)
                run.mirror.pull_receipts()
            identity = identity_fields(config)
            if run.identity_path.exists():
                before = read_json(run.identity_path)
                if before["hidden_states"] == {"mode": "auto"}:  # not decided yet, so nothing is trained
                    before["hidden_states"] = identity["hidden_states"]
                    write_json(run.identity_path, identity)
                elif config.hidden_states.mode == "auto":  # the run goes on with what was decided
                    config = config.model_copy(update={"hidden_states": run.config().hidden_states})
                    identity = identity_fields(config)
                changed = _differences(before, identity)
                if changed:
                    raise InputError(
                        f"run_dir={config.run_dir!r} holds another run: {'; '.join(changed)}. Give another run_dir, or "
                        "the first run's values to continue it"
                    )
            else:
                write_json(run.identity_path, identity)
            # Where scratch lies is this machine's affair, not the run's.
            write_text(run.config_path, dump_config(config.model_copy(update={"scratch_dir": None})))
            if run.mirror is not None:
                run.mirror.push(["identity.json", "config.yaml"])
        except OSError as error:
            raise InputError(f"run_dir={config.run_dir!r} cannot be written: {error.strerror or error}") from None
        return run

    @classmethod
    def open(cls, path: str, scratch_dir: str | None = None) -> RunDir:
        """An existing run: its folder, its URL, or the scratch folder of one. Raises InputError when there is none.

        scratch_dir: as in the config, for a URL.
        """
        marker = Path(path, MARKER)
        if marker.is_file():
            place = remote_place(read_json(marker))
            assert place is not None, "the marker names a URL"
            run = cls(Path(path).absolute(), Mirror(place, Path(path).absolute()))
        else:
            run = cls._at(path, scratch_dir)
            if run.mirror is not None:
                try:
                    run.receipts.mkdir(parents=True, exist_ok=True)
                    write_json(run.root / MARKER, run.mirror.place.url)
                    run.mirror.pull()
                except OSError as error:
                    raise InputError(f"{path!r} cannot be read: {error.strerror or error}") from None
        if not run.config_path.is_file():
            raise InputError(f"{path!r} is no run directory: it has no config.yaml")
        return run

    @classmethod
    def _at(cls, run_dir: str, scratch_dir: str | None) -> RunDir:
        place = remote_place(run_dir)
        if place is None:
            return cls(Path(locate(run_dir).path))
        root = scratch_folder(place, scratch_dir)
        return cls(root, Mirror(place, root))

    @property
    def url(self) -> str:
        """Where the run lies, for people: its folder, or its URL."""
        return str(self.root) if self.mirror is None else self.mirror.place.url

    def where(self, path: Path) -> str:
        """A path of the run, for people."""
        return f"{self.url}/{path.relative_to(self.root).as_posix()}"

    def config(self) -> RunConfig:
        """The run's resolved config."""
        return read_config(str(self.config_path))

    def decide(self, config: RunConfig, states: Online | Offline) -> None:
        """Write what hidden_states.mode=auto became into the run's config and identity, which comes last."""
        decided = config.model_copy(update={"hidden_states": states})
        write_text(self.config_path, dump_config(decided))
        write_json(self.identity_path, identity_fields(decided))
        if self.mirror is not None:
            self.mirror.push(["config.yaml", "identity.json"])

    def publish(self, path: Path) -> None:
        """Have a file at the run's URL, too, whatever becomes of its stage."""
        if self.mirror is not None:
            self.mirror.push([path.relative_to(self.root).as_posix()])

    def receipt(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage wrote last, or None."""
        path = self.receipts / f"{stage}.json"
        if not path.is_file():
            return None
        receipt: dict[str, Any] = read_json(path)
        return receipt

    def write_receipt(self, stage: str, receipt: dict[str, Any]) -> None:
        """Mark a stage as done, after what it made is where it belongs. Raises InputError when the lease was lost."""
        if self.lease is not None:
            self.lease.check()
        if self.mirror is not None:
            self.mirror.push_changed()
        write_json(self.receipts / f"{stage}.json", receipt)
        if self.mirror is not None:
            self.mirror.push([f"receipts/{stage}.json"])

    def drop_receipt(self, stage: str) -> None:
        """Mark a stage as not done, before what it made is replaced."""
        (self.receipts / f"{stage}.json").unlink(missing_ok=True)
        if self.mirror is not None:
            self.mirror.drop(f"receipts/{stage}.json")

    @contextmanager
    def lock(self, *, patience: float = 20.0) -> Iterator[RunDir]:
        """Hold the run alone: gives the run to work with, brought up to what its URL holds.

        patience: seconds to wait for another holder, which may be saving its last checkpoint. Raises InputError then,
        which tells who it is.
        """
        place = locate(str(self.root)) if self.mirror is None else self.mirror.place
        with hold(self.root, place, patience=patience) as lease:
            if self.mirror is not None:
                self.mirror.pull()
            yield replace(self, lease=lease)

    @property
    def config_path(self) -> Path:
        return self.root / "config.yaml"

    @property
    def identity_path(self) -> Path:
        return self.root / "identity.json"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def train_data(self) -> Path:
        return self.data / "train"

    @property
    def heldout_data(self) -> Path:
        return self.data / "heldout"

    @property
    def answers(self) -> Path:
        return self.data / "answers"

    @property
    def vocabulary(self) -> Path:
        return self.root / "vocabulary.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    def stopped_step(self, step: int) -> Path:
        """The file that names the samples of a step that must not be taken."""
        return self.root / f"stopped-step-{step:06d}.json"

    @property
    def trackers(self) -> Path:
        return self.root / "trackers"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

    @property
    def plan_json(self) -> Path:
        return self.root / "plan.json"

    @property
    def plan_markdown(self) -> Path:
        return self.root / "plan.md"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation.json"

    @property
    def judgement(self) -> Path:
        return self.root / "judgement.json"

    @property
    def draft(self) -> Path:
        return self.root / "draft"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def report_markdown(self) -> Path:
        return self.root / "report.md"

    @property
    def report_json(self) -> Path:
        return self.root / "report.json"

    @property
    def receipts(self) -> Path:
        return self.root / "receipts"


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`group.key: old -> new` of every field that differs."""
    differences = []
    for group in sorted({*before, *now}):
        old, new = before.get(group, {}), now.get(group, {})
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                differences.append(f"{group}.{key} was {old.get(key)!r}, now {new.get(key)!r}")
    return differences
