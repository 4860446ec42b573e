"""How a stage tells what it is doing: a protocol of three calls, so that libraries need no console and no Prefect."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Protocol


class Progress(Protocol):
    """Called by long work."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """done of total units; note: a few figures to show beside the bar, never text of the data."""
        ...


def silent(done: int, total: int, note: str = "") -> None:
    """For callers that show nothing."""


class JsonLines:
    """Progress as JSON lines on stdout, for the process that started this stage; at most ten a second."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._last = 0.0

    def __call__(self, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if done < total and now - self._last < 0.1:
            return
        self._last = now
        emit({"event": "progress", "stage": self._stage, "done": done, "total": total, "note": note})


def emit(event: dict[str, object]) -> None:
    """One event on stdout. When nobody reads it any more, nothing: a stage whose parent was killed is about to be
    stopped, and must save first, not fail over a word that nobody hears."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
