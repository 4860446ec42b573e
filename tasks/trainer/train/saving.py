"""When checkpoints are written: at their step, when a look at held-out samples was the best so far, and on SIGTERM.

Those of a remote run are uploaded in a thread, one at a time, while training goes on: a save waits for the upload of
the one before. A place that cannot be reached costs no step, only the newest checkpoints there, until the run's end.

Of several ranks all come here at the same steps: the first writes, and where the draft is sharded each writes its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

from tasks.trainer.config import Train
from tasks.trainer.run_dir import RunDir
from tasks.trainer.train import checkpoint
from tasks.trainer.train.checkpoint import Checkpoint, Written
from tasks.trainer.train.curves import best_steps
from tasks.trainer.train.metrics import MetricsFile
from tasks.trainer.train.parallel import Layout, from_first, meet

logger = logging.getLogger(__name__)

# What a save may take more than the last one did: another process may want the disk meanwhile.
_MARGIN = 1.3
# Of the time that is left after SIGTERM: for the way out.
_EXIT_SECONDS = 1.0


class Interrupted(InterruptedError):
    """SIGTERM arrived: a new start continues after step `saved`; `lost` finished steps must be done again."""

    def __init__(self, saved: int, lost: int, why: str = "") -> None:
        held = f"the checkpoint holds step {saved}" if saved else "there is no checkpoint yet"
        text = f"stopped by SIGTERM: {held}" + (f", {lost} steps are lost" if lost else "")
        super().__init__(f"{text}{f' ({why})' if why else ''}; start the run again to go on")
        self.saved = saved
        self.lost = lost


class Saver:
    """Writes a run's checkpoints, and uploads them where the run is remote. Close it: it may have a thread."""

    def __init__(
        self,
        run: RunDir,
        settings: Train,
        metrics: MetricsFile,
        snapshot: Callable[[], Checkpoint],
        *,
        saved: int,
        layout: Layout | None = None,
    ) -> None:
        """snapshot: the state after the last finished step. saved: the step of the newest checkpoint, 0 for none.
        layout: of several ranks; run is then without a mirror on all but the first."""
        self._layout = layout or Layout()
        self._run = run
        self._settings = settings
        self._metrics = metrics
        self._snapshot = snapshot
        self._saved = saved
        path = run.checkpoints / f"step-{saved:06d}"
        self._written = Written.of(path) if saved and self._layout.is_first else None
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="upload") if run.mirror else None
        self._upload: Future[None] | None = None

    def due(self, step: int) -> bool:
        """Whether this step's state is to be written: by the calendar, at the end, or for being the best so far."""
        if step == self._saved:
            return False
        best = best_steps(self._metrics.heldout)[:1] == [step]
        return step % self._settings.checkpoint_every == 0 or step == self._settings.steps or best

    def save(self) -> None:
        """Write the state as it is now; all ranks leave together. Raises InputError when another process has taken the
        run."""
        if self._run.lease is not None:
            self._run.lease.check()
        self._uploaded()  # before its folder may be deleted
        self._metrics.sync()  # a checkpoint's steps must have their lines
        state = self._snapshot()
        best = best_steps(self._metrics.heldout)
        saved = checkpoint.save(
            self._run.checkpoints,
            state,
            keep=self._settings.keep_checkpoints,
            best=best[0] if best else None,
            layout=self._layout,
        )
        if saved is not None:
            path, self._written = saved
            self._start_upload(path)
        meet(self._layout, f"the checkpoint of step {state.step}", patience=checkpoint.PATIENCE)
        self._saved = state.step

    def stopped(self, seconds: float) -> Interrupted:
        """SIGTERM: save if it can be done in `seconds`, upload if that can. Returns the error to raise.

        Of several ranks, which all come here after the same step, the first decides.
        """
        interrupted = self._stopped(time.monotonic() + seconds - _EXIT_SECONDS)
        # Whoever ends first has torchrun end the others: not before the first is through.
        meet(self._layout, "the end", patience=checkpoint.PATIENCE)
        return interrupted

    def _stopped(self, deadline: float) -> Interrupted:
        step = self._snapshot().step
        if step != self._saved:
            obstacle = self._obstacle(deadline) if self._layout.is_first else None
            obstacle = from_first(self._layout, obstacle, "the stop")
            if obstacle:
                return Interrupted(self._saved, step - self._saved, obstacle)
            self.save()  # and no word before: a signal may have come in the middle of one
        if self._upload is not None:
            done, _ = wait_for([self._upload], timeout=max(0.0, deadline - time.monotonic()))
            if not done or self._upload.exception():
                return Interrupted(self._saved, 0, f"in {self._run.root} on this machine only: its upload is not whole")
        return Interrupted(self._saved, 0)

    def _obstacle(self, deadline: float) -> str | None:
        """Why there is no time to save."""
        busy = self._upload is not None and not self._upload.done()
        if busy and self._upload is not None:
            wait_for([self._upload], timeout=(deadline - time.monotonic()) / 2)
            busy = not self._upload.done()
        needed = self._written.seconds * _MARGIN if self._written else 0.0
        left = deadline - time.monotonic()
        if not busy and needed <= left:
            return None
        what = "uploading the one before" if busy else f"saving takes about {needed:.0f} s"
        return f"{what}, and {left:.0f} s are left"

    def close(self, *, whole: bool) -> None:
        """whole: the run has ended well, so its last checkpoint must be where it belongs: tried once more, then an
        OSError."""
        if self._uploads is None:
            return
        if whole and self._upload is not None and not self._uploaded():
            assert self._run.mirror is not None
            self._run.mirror.push_checkpoint(checkpoint.newest_first(self._run.checkpoints)[0])
        self._uploads.shutdown(wait=whole, cancel_futures=True)

    def _start_upload(self, path: Path) -> None:
        if self._uploads is not None:
            assert self._run.mirror is not None
            self._upload = self._uploads.submit(self._run.mirror.push_checkpoint, path)

    def _uploaded(self) -> bool:
        """Wait for the upload under way; whether it went well."""
        if self._upload is None:
            return True
        try:
            self._upload.result()
        except OSError as error:
            logger.warning("a checkpoint was not uploaded (%s): the next one will be", error)
            return False
        return True
