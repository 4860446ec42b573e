"""Runs a stage of a run as a subprocess and turns its JSON lines into logs, a progress bar and a receipt.

A process of its own frees the GPU when it ends and keeps Prefect's heartbeats out of the trainer's way. When the task
is cancelled the stage's process group gets SIGTERM and time to save its checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any

from prefect.logging import get_run_logger
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tasks.progress_artifact import ProgressArtifact
from tasks.trainer.errors import InputError
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import EXIT_INPUT, STAGES, run_stage
from tasks.trainer.stop import EXIT_INTERRUPTED

# Prefect kills a cancelled flow 30 s after SIGTERM; the checkpoint and our own end must fit before.
GRACE_SECONDS = 15.0
# Without a terminal, progress goes to the log this often.
LOG_EVERY_SECONDS = 15.0


class StageFailed(RuntimeError):
    """A stage process ended without a receipt; the message carries its last lines."""


def launch(stage: str, run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Run one stage of the run in `run_dir` and return its receipt.

    in_process: for memory:// stores, which live in one process. Raises InputError when the user's input is wrong,
    InterruptedError when the stage was stopped by SIGTERM, StageFailed otherwise.
    """
    assert stage in STAGES
    show = _Display(stage)
    if in_process:
        with show:
            return run_stage(stage, RunDir.open(run_dir), show.progress)
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.trainer.stages", stage, run_dir],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        # Packs differ in length, and blocks of fixed size would leave gaps on the GPU between them.
        env={"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ},
    )
    receipt: dict[str, Any] | None = None
    error = ""
    tail: deque[str] = deque(maxlen=25)
    assert process.stdout is not None
    try:
        with show:
            for line in process.stdout:
                event = _event(line)
                if event is None:
                    tail.append(line.rstrip())
                elif event["event"] == "progress":
                    show.progress(event["done"], event["total"], event["note"])
                elif event["event"] == "log":
                    show.log(event["level"], event["message"])
                elif event["event"] == "receipt":
                    receipt = event["receipt"]
                else:
                    error = event["message"]
            code = process.wait()
    finally:
        _stop(process)
        process.stdout.close()
    if code == EXIT_INPUT:
        raise InputError(error)
    if code == EXIT_INTERRUPTED:
        raise InterruptedError(error or f"stage {stage} was stopped by SIGTERM; start the run again to go on")
    if code != 0 or receipt is None:
        cause = f" ({error})" if error else ""
        raise StageFailed(f"stage {stage} ended with exit code {code}{cause}:\n" + "\n".join(tail))
    return receipt


def _event(line: str) -> dict[str, Any] | None:
    """A JSON event of ours, or None for anything a library printed."""
    if not line.startswith('{"event"'):
        return None
    try:
        event: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event


def _stop(process: subprocess.Popen[str]) -> None:
    """End the stage's whole process group; it may save first, and a second SIGTERM to this process waits for that."""
    if process.poll() is not None:
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if in_main_thread else None
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _Display:
    """A progress bar on a terminal, a line now and then elsewhere; logs go to Prefect's run logger."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._logger = get_run_logger()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._logged = time.monotonic()
        self._artifact = ProgressArtifact(stage)
        if sys.stderr.isatty() and threading.current_thread() is threading.main_thread():
            from rich.console import Console

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )

    def __enter__(self) -> _Display:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()
        if exc[0] is None:  # a stop has no time for a request
            self._artifact.close()

    def progress(self, done: int, total: int, note: str = "") -> None:
        self._artifact.show(done, total, note)
        if self._bar:
            if self._task is None:
                self._task = self._bar.add_task(self._stage, total=total, note=note)
            self._bar.update(self._task, completed=done, total=total, note=note)
        elif time.monotonic() - self._logged > LOG_EVERY_SECONDS:
            self._logged = time.monotonic()
            self._logger.info("%s %d/%d  %s", self._stage, done, total, note)

    def log(self, level: str, message: str) -> None:
        self._logger.log({"WARNING": 30, "ERROR": 40}.get(level, 20), "%s: %s", self._stage, message)
