"""The alarm: a loss or gradient that is not finite, or far out of line, stops the run before it touches the masters.

Clipping bounds such a step's size, not its direction: one broken sample can undo a day. Stopping costs the run's time
until somebody looks, so the default asks for a norm of 100 times the median. The file names samples, never text.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from tasks.trainer.data.prepared import PreparedSample
from tasks.trainer.errors import InputError
from tasks.trainer.files import write_json
from tasks.trainer.run_dir import RunDir

# Below so many steps a median says little: the first gradients of a fresh draft differ by factors.
_MIN_STEPS, _WINDOW = 20, 100


class Diverged(InputError):
    """A step must not be taken; the message names the file with its samples. Trying again would end the same way."""


class GradientGuard:
    """Compares each step's gradient norm with the running median; a pure function of the metrics, resumes included."""

    def __init__(self, norms: Iterable[float], *, max_ratio: float, run: RunDir, writes: bool = True) -> None:
        """norms: of the steps before, oldest first. max_ratio: 0 checks for NaN and Inf alone. writes: of several
        ranks, which all come to the same, one leaves the file."""
        self._norms = deque(norms, maxlen=_WINDOW)
        self._max_ratio = max_ratio
        self._run = run
        self._writes = writes

    def check(self, norm: float, *, loss: float, step: int, packs: Sequence[Sequence[PreparedSample]]) -> None:
        """Raises Diverged for a step that must not be taken, its sample ids in `stopped-step-NNNNNN.json`."""
        fault = self._fault(loss, norm)
        if fault is None:
            self._norms.append(norm)
            return
        path = self._run.stopped_step(step)
        ids = [[sample.sample_id for sample in pack] for pack in packs]
        if self._writes:
            write_json(path, {"step": step, "fault": fault, "packs": ids})
            self._run.publish(path)
        raise Diverged(
            f"stopped before step {step}: {fault}. Its sample ids are in {self._run.where(path)}: look at these, or "
            "lower train.learning_rate in a new run; train.max_grad_norm_ratio moves the alarm. The checkpoints before "
            "are whole"
        )

    def _fault(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss) or not math.isfinite(norm):
            return f"loss {loss}, gradient norm {norm}: not finite"
        if not self._max_ratio or len(self._norms) < _MIN_STEPS:
            return None
        median = statistics.median(self._norms)
        if norm <= self._max_ratio * median:
            return None
        times = norm / median if median else math.inf
        return f"gradient norm {norm:.4g} is {times:.0f} times the median {median:.4g} of {len(self._norms)} steps"
