"""When checkpoints are written: at their step, when a look at held-out samples was the best so far, and on SIGTERM."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tasks.trainer.config import Train
from tasks.trainer.run_dir import RunDir
from tasks.trainer.train import checkpoint
from tasks.trainer.train.checkpoint import Checkpoint, Written
from tasks.trainer.train.curves import best_steps
from tasks.trainer.train.metrics import MetricsFile

logger = logging.getLogger(__name__)

# What a save may take more than the last one did: another process may want the disk meanwhile.
_MARGIN = 1.3


class Interrupted(InterruptedError):
    """SIGTERM arrived: a new start continues after step `saved`; `lost` finished steps must be done again."""

    def __init__(self, saved: int, lost: int, why: str = "") -> None:
        held = f"the checkpoint holds step {saved}" if saved else "there is no checkpoint yet"
        text = f"stopped by SIGTERM: {held}" + (f", {lost} steps are lost ({why})" if lost else "")
        super().__init__(f"{text}; start the run again to go on")
        self.saved = saved
        self.lost = lost


class Saver:
    """Writes a run's checkpoints."""

    def __init__(
        self,
        run: RunDir,
        settings: Train,
        metrics: MetricsFile,
        snapshot: Callable[[], Checkpoint],
        *,
        saved: int,
    ) -> None:
        """snapshot: the state after the last finished step. saved: the step of the newest checkpoint, 0 for none."""
        self._run = run
        self._settings = settings
        self._metrics = metrics
        self._snapshot = snapshot
        self._saved = saved
        path = run.checkpoints / f"step-{saved:06d}"
        self._written = Written.of(path) if saved else None

    def due(self, step: int) -> bool:
        """Whether this step's state is to be written: by the calendar, at the end, or for being the best so far."""
        if step == self._saved:
            return False
        best = best_steps(self._metrics.heldout)[:1] == [step]
        return step % self._settings.checkpoint_every == 0 or step == self._settings.steps or best

    def save(self) -> None:
        """Write the state as it is now."""
        self._metrics.sync()  # a checkpoint's steps must have their lines
        state = self._snapshot()
        best = best_steps(self._metrics.heldout)
        _, self._written = checkpoint.save(
            self._run.checkpoints,
            state,
            keep=self._settings.keep_checkpoints,
            best=best[0] if best else None,
        )
        self._saved = state.step

    def stopped(self, seconds: float) -> Interrupted:
        """SIGTERM: save if it can be done in `seconds`. Returns the error to raise."""
        step = self._snapshot().step
        if step == self._saved:
            return Interrupted(step, 0)
        needed = self._written.seconds * _MARGIN if self._written else 0.0
        if needed > seconds:
            why = f"saving takes about {needed:.0f} s and {seconds:.0f} s are left"
            return Interrupted(self._saved, step - self._saved, why)
        logger.info("SIGTERM: saving step %d", step)
        self.save()
        return Interrupted(step, 0)
