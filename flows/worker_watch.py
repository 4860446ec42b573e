"""The engine of a run that a worker started does not outlive that worker.

A worker that is killed (kill -9, out of memory) leaves its engines behind as orphans, which would go on training on a
GPU that Prefect already gives to the next run. The engine therefore watches its parent, and stops as a cancelled run
does: the trainer saves a checkpoint and ends. The run's state is then for the heartbeat automation to set.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from prefect import runtime

_POLL_SECONDS = 1.0
_watching = threading.Event()


def end_with_worker() -> None:
    """Stop this process when the process that started it dies. Only for runs of a deployment: a person's own `eyas
    train` in the background outlives the shell it was started from."""
    if runtime.deployment.id is None or _watching.is_set():
        return
    _watching.set()
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="worker-watch").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    # What this process prints went to the worker. Whoever prints into its broken pipe next is ended in the middle of
    # things (rich raises SystemExit), so there is no word of farewell before this.
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    # Prefect's own handler raises in the main thread, where the task then stops the trainer and waits for it.
    os.kill(os.getpid(), signal.SIGTERM)
