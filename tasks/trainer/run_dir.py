"""Where things lie in a run; no other module joins these paths.

config.yaml               the resolved config
identity.json             the config fields that decide the result; a run is continued only with the same ones
data/train, data/heldout  prepared samples (memory-mapped .npy)
data/answers              regenerated answers, unless data.regenerate_dir says otherwise
vocabulary.safetensors    d2t, t2d
checkpoints/step-000200   masters, moments, position
metrics.jsonl             one line an optimizer step
evaluation.json           acceptance and held-out metrics
draft/                    the exported draft
plots/, report.md, report.json
receipts/STAGE.json       written last by each stage: what it did. Without it the stage is not done
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.trainer.config import RunConfig, identity_fields
from tasks.trainer.errors import InputError
from tasks.trainer.files import read_json, write_json, write_text
from tasks.trainer.recipe import dump_config, read_config


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run."""

    root: Path

    @classmethod
    def create(cls, config: RunConfig) -> RunDir:
        """Make the run's folder, or continue the one that is there.

        Raises InputError when it cannot be written, or holds a run whose config differs in a field that decides the
        result (the message names the fields).
        """
        if "://" in config.run_dir and not config.run_dir.startswith("file://"):
            raise InputError(f"run_dir={config.run_dir!r}: a run directory is a local folder; give a path")
        run = cls(Path(config.run_dir.removeprefix("file://")).absolute())
        try:
            for folder in (run.root, run.data, run.checkpoints, run.plots, run.receipts):
                folder.mkdir(parents=True, exist_ok=True)
            if not os.access(run.root, os.W_OK):
                raise PermissionError(13, "permission denied")
            identity = identity_fields(config)
            if run.identity_path.exists():
                changed = _differences(read_json(run.identity_path), identity)
                if changed:
                    raise InputError(
                        f"run_dir={config.run_dir!r} holds another run: {'; '.join(changed)}. Give another run_dir, or "
                        "the first run's values to continue it"
                    )
            else:
                write_json(run.identity_path, identity)
            write_text(run.config_path, dump_config(config))
        except OSError as error:
            raise InputError(f"run_dir={config.run_dir!r} cannot be written: {error.strerror}") from None
        return run

    @classmethod
    def open(cls, path: str) -> RunDir:
        """An existing run. Raises InputError when there is none."""
        run = cls(Path(path).absolute())
        if not run.config_path.is_file():
            raise InputError(f"{path!r} is no run directory: it has no config.yaml")
        return run

    def config(self) -> RunConfig:
        """The run's resolved config."""
        return read_config(str(self.config_path))

    def receipt(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage wrote last, or None."""
        path = self.receipts / f"{stage}.json"
        if not path.is_file():
            return None
        receipt: dict[str, Any] = read_json(path)
        return receipt

    def write_receipt(self, stage: str, receipt: dict[str, Any]) -> None:
        """Mark a stage as done."""
        write_json(self.receipts / f"{stage}.json", receipt)

    def drop_receipt(self, stage: str) -> None:
        """Mark a stage as not done, before what it made is replaced."""
        (self.receipts / f"{stage}.json").unlink(missing_ok=True)

    @contextmanager
    def lock(self, *, patience: float = 20.0) -> Iterator[None]:
        """Hold the run alone; the system frees the lock when the process dies, however it dies.

        patience: seconds to wait for another holder, which may be saving its last checkpoint. Raises InputError then.
        """
        path = self.root / ".lock"
        with path.open("w") as file:
            deadline = time.monotonic() + patience
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise InputError(
                            f"run_dir={str(self.root)!r}: another process works on this run; wait for it or stop it"
                        ) from None
                    time.sleep(0.2)
            yield

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

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation.json"

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
