"""A stage's progress as a Prefect artifact, so that the UI shows it: one that is updated now and then.

The first comes after a while only: a stage of seconds needs none, and each update is a request to the server. A server
that does not answer costs the picture, not the run.
"""

from __future__ import annotations

import time
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

EVERY_SECONDS = 15.0


class ProgressArtifact:
    """Of one stage. `show` may be called for every step."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._id: UUID | None = None
        self._sent = time.monotonic()
        self._unsent: tuple[float, str] | None = None
        self._gone = False

    def show(self, done: int, total: int, note: str = "") -> None:
        """done of total; the note is shown beside it."""
        self._unsent = 100.0 * min(done, total) / max(1, total), f"{self._stage} {done:,} of {total:,}  {note}".strip()
        if time.monotonic() - self._sent >= EVERY_SECONDS:
            self._send()

    def close(self) -> None:
        """Show the last state, where anything was shown."""
        if self._id is not None:
            self._send()

    def _send(self) -> None:
        if self._unsent is None or self._gone:
            return
        progress, description = self._unsent
        self._sent, self._unsent = time.monotonic(), None
        try:
            if self._id is None:
                made = create_progress_artifact(progress, key=f"{self._stage}-progress", description=description)
                assert isinstance(made, UUID), "asked for outside an event loop"
                self._id = made
            else:
                update_progress_artifact(self._id, progress, description=description)
        except httpx.HTTPError as error:
            self._gone = True
            get_run_logger().warning("no more progress of %s in the UI: %s", self._stage, error)
