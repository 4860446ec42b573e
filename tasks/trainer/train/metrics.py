"""Training metrics: sums over everything one optimizer step saw, written as one JSON line a step."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.trainer.draft.ttt import Unrolled
from tasks.trainer.train.curves import read_metrics


@dataclass(slots=True)
class Sums:
    """Global sums over packs: a mean of means would weigh short packs too much. float64 [K] each."""

    ttt_steps: int
    loss: float = 0.0
    rows: Tensor = field(init=False)
    loss_sums: Tensor = field(init=False)
    correct_sums: Tensor = field(init=False)
    alpha_sums: Tensor = field(init=False)
    tau_sum: float = 0.0
    tau_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "loss_sums", "correct_sums", "alpha_sums"):
            setattr(self, name, torch.zeros(self.ttt_steps, dtype=torch.float64))

    def add(self, unrolled: Unrolled) -> None:
        """Add one pack."""
        self.loss += float(unrolled.loss.detach())
        for name in ("rows", "loss_sums", "correct_sums", "alpha_sums"):
            setattr(self, name, getattr(self, name) + getattr(unrolled, name).cpu())
        self.tau_sum += unrolled.tau_sum
        self.tau_rows += unrolled.tau_rows

    def summary(self) -> dict[str, Any]:
        """loss; step_losses, acc, alpha by depth; simulated tau (None when no row is valid at all K steps)."""
        rows = self.rows.clamp(min=1)
        return {
            "loss": self.loss,
            "step_losses": (self.loss_sums / rows).tolist(),
            "acc": (self.correct_sums / rows).tolist(),
            "alpha": (self.alpha_sums / rows).tolist(),
            "tau": 1.0 + self.tau_sum / self.tau_rows if self.tau_rows else None,
            "rows": [int(n) for n in self.rows],
        }


class MetricsFile:
    """metrics.jsonl of a run, exactly one line an optimizer step, also after resumes. last: the newest line."""

    def __init__(self, path: Path, *, step: int) -> None:
        """Continue after `step`: lines of later steps, and one cut by a kill, are dropped."""
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        if len(kept) != step:
            raise ValueError(f"{path} has {len(kept)} of the {step} steps before the checkpoint")
        self.last: dict[str, Any] | None = kept[-1] if kept else None
        scratch = path.with_suffix(".tmp")
        with scratch.open("w", encoding="utf-8") as file:
            for line in kept:
                file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append one step. NaN is refused (ValueError): no such step may count."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self.last = line
        self._file.flush()

    def sync(self) -> None:
        """Before a checkpoint: its steps' lines must be on disk first."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
