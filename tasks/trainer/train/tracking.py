"""Trackers: views of metrics.jsonl in TensorBoard, Weights & Biases, MLflow and others, through accelerate.

metrics.jsonl stays the record. A tracker gets the same lines, each once: how far it has come is kept beside it, a run
that continues goes on from there, and one that gains a tracker late gives it the steps before. TensorBoard also takes
back the steps that a killed run had done past its checkpoint; the others keep them, which are the same up to clocks.

Nothing is sent anywhere unless the worker's environment says so (WANDB_MODE=online, MLFLOW_TRACKING_URI).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from tasks.trainer.config import Train
from tasks.trainer.errors import InputError
from tasks.trainer.train.curves import read_lines

logger = logging.getLogger(__name__)

_STATE = "state.json"
# Lists of a line, one value a TTT step, and single values; what is not named here stays in metrics.jsonl.
_BY_STEP = ("acc", "alpha")
_SINGLE = ("loss", "tau", "grad_norm", "learning_rate", "data_wait_s", "seconds", "epoch")


@dataclass(slots=True)
class Mark:
    """How far one tracker has come."""

    step: int = 0
    """The newest step it has been given."""
    heldout: int = 0
    """The newest step whose look at held-out samples it has been given."""
    run: str | None = None
    """The tracker's own name of the run, for those that need it to append."""


class Tracking:
    """The trackers of one run, opened to go on after `step`. Close it."""

    def __init__(self, settings: Train, folder: Path, *, run_name: str, metrics: Path, step: int) -> None:
        """folder: for what they write here. metrics: metrics.jsonl, continued after `step`; what a tracker lacks of it
        is given to it now. Raises InputError when a tracker's package is not installed."""
        check_trackers(settings)
        self._path = folder / _STATE
        self._marks: dict[str, Mark] = {}
        self._trackers: dict[str, Any] = {}
        if not settings.trackers:
            return
        folder.mkdir(exist_ok=True)
        self._marks = _read_marks(self._path)
        for name in settings.trackers:
            mark = self._marks.setdefault(name, Mark())
            if name == "tensorboard":
                mark.step, mark.heldout = min(mark.step, step), min(mark.heldout, step)
            self._trackers[name] = _open(name, mark, folder, project=settings.tracker_project, run_name=run_name)
        for line in read_lines(metrics):
            self.log(line)

    def log(self, line: Mapping[str, Any]) -> None:
        """Give a line of metrics.jsonl to every tracker that has not had it."""
        heldout = "heldout" in line
        for name, tracker in self._trackers.items():
            mark = self._marks[name]
            if line["step"] > (mark.heldout if heldout else mark.step):
                tracker.log(scalars(line), step=line["step"])
                if heldout:
                    mark.heldout = line["step"]
                else:
                    mark.step = line["step"]
                self._write_marks()

    def close(self) -> None:
        """Let the trackers finish."""
        for tracker in self._trackers.values():
            tracker.finish()
        self._trackers = {}

    def _write_marks(self) -> None:
        # Not synced: it is written every step, and one lost to a power cut only makes the trackers begin again.
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text(json.dumps({name: asdict(mark) for name, mark in self._marks.items()}))
        scratch.replace(self._path)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_trackers(settings: Train) -> None:
    """Raises InputError, naming the package, when a tracker cannot be had here."""
    for name in settings.trackers:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"train.trackers={list(settings.trackers)}: the Python package {name!r} is not installed on this "
                f"worker; install it (pip install {name.replace('_', '-')}), or leave {name} out"
            )


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a line by the names that trackers show: train/... or heldout/..., by depth as acc_0, acc_1."""
    prefix, values = ("heldout", line["heldout"]) if "heldout" in line else ("train", line)
    found = {f"{prefix}/{name}": values[name] for name in _SINGLE if values.get(name) is not None}
    for name in _BY_STEP:
        found |= {f"{prefix}/{name}_{k}": value for k, value in enumerate(values.get(name, ()))}
    if values.get("seconds"):
        found[f"{prefix}/tokens_per_s"] = values["tokens"] / values["seconds"]
    return found


def _open(name: str, mark: Mark, folder: Path, *, project: str, run_name: str) -> Any:
    """Start a tracker where `mark` says, and mark the run it writes to."""
    kind = LOGGER_TYPE_TO_CLASS[name]
    PartialState()  # accelerate's own logging refuses to work before; some trackers make it, wandb's does not
    if name == "tensorboard":
        # What is there from this step on is hidden: steps past the checkpoint, and all when nothing is known of it.
        tracker = kind("tensorboard", folder, purge_step=mark.step + 1)
    elif name == "wandb":
        mark.run = mark.run or secrets.token_hex(4)
        tracker = kind(
            project,
            name=run_name,
            id=mark.run,
            resume="allow",
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings={"console": "off"},  # our standard output is for the process that started us
        )
    elif name == "mlflow":
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder.absolute()}/mlflow.db")
        tracker = kind(project, str(folder.absolute() / "mlflow"), run_id=mark.run, run_name=run_name)
    else:
        tracker = kind(project, folder) if kind.requires_logging_directory else kind(project)
    tracker.start()
    if name == "mlflow":
        mark.run = tracker.tracker.info.run_id
    return tracker


def _read_marks(path: Path) -> dict[str, Mark]:
    if not path.is_file():
        return {}
    try:
        return {name: Mark(**values) for name, values in json.loads(path.read_text()).items()}
    except json.JSONDecodeError as error:
        logger.warning("%s is damaged (%s): the trackers begin again, from the first step", path, error)
        return {}
