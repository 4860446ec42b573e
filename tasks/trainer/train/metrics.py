"""Training metrics: sums over everything one optimizer step saw, written as one JSON line a step."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from tasks.trainer.draft.ttt import Unrolled
from tasks.trainer.train.curves import read_lines
from tasks.trainer.train.parallel import Layout, sum_on_host

logger = logging.getLogger(__name__)


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
        self.tau_sum += float(unrolled.tau_sum)
        self.tau_rows += unrolled.tau_rows

    def over(self, layout: Layout, what: str) -> Sums:
        """These sums and every other rank's."""
        own = [self.rows, self.loss_sums, self.correct_sums, self.alpha_sums]
        single = torch.tensor([self.loss, self.tau_sum, float(self.tau_rows)], dtype=torch.float64)
        total = sum_on_host(layout, torch.cat([*own, single]), what)
        summed = Sums(self.ttt_steps)
        summed.rows, summed.loss_sums, summed.correct_sums, summed.alpha_sums = total[:-3].split(self.ttt_steps)
        summed.loss, summed.tau_sum, summed.tau_rows = float(total[-3]), float(total[-2]), int(total[-1])
        return summed

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
    """metrics.jsonl of a run: exactly one line an optimizer step and one an evaluation, also after resumes."""

    def __init__(self, path: Path, *, step: int, heldout_hash: str | None = None) -> None:
        """Continue after `step`: lines of later steps, and one cut by a kill, are dropped.

        heldout_hash: of the held-out samples; figures of other samples are dropped, for they do not compare. None: all
        are kept.
        """
        kept = [line for line in read_lines(path) if line["step"] <= step]
        if heldout_hash is not None:
            others = [
                line for line in kept if line.get("heldout", {}).get("samples_hash", heldout_hash) != heldout_hash
            ]
            if others:
                logger.warning("%d looks at other held-out samples than today's are forgotten", len(others))
                kept = [line for line in kept if line not in others]
        steps = [line for line in kept if "heldout" not in line]
        self.recent = deque(steps, maxlen=100)
        """The newest steps' lines."""
        self.heldout = {line["step"]: line["heldout"] for line in kept if "heldout" in line}
        """Held-out metrics by step."""
        if len(steps) != step:
            raise ValueError(f"{path} has {len(steps)} of the {step} steps before the checkpoint")
        scratch = path.with_suffix(".tmp")
        with scratch.open("w", encoding="utf-8") as file:
            for line in kept:
                file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
        self._file: TextIO | None = path.open("a", encoding="utf-8")

    @classmethod
    def of_first(cls, told: Mapping[str, Any]) -> MetricsFile:
        """For the ranks that write none: what rank 0's `telling` says, and what they are given from then on."""
        metrics = cls.__new__(cls)
        metrics.recent = deque(told["recent"], maxlen=100)
        metrics.heldout = {int(step): line for step, line in told["heldout"].items()}
        metrics._file = None
        return metrics

    def telling(self) -> dict[str, Any]:
        """What other ranks need to decide as this one does; plain JSON."""
        return {"recent": list(self.recent), "heldout": self.heldout}

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest step's line."""
        return self.recent[-1] if self.recent else None

    def write(self, line: dict[str, Any]) -> None:
        """Append one step. NaN is refused (ValueError): no such step may count."""
        self._append(line)
        self.recent.append(line)

    def write_heldout(self, step: int, metrics: dict[str, Any]) -> None:
        """Append what was measured on held-out samples after `step`."""
        self._append({"step": step, "heldout": metrics})
        self.heldout[step] = metrics

    def sync(self) -> None:
        """Before a checkpoint: its steps' lines must be on disk first."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()
