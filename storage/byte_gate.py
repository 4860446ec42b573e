"""A bound on the bytes that threads hold together: what keeps a writer's and a reader's memory small."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ByteGate:
    """Lets threads in while what they hold together stays within a number of bytes; one may always hold more."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Wait for room, and give it back at the end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + num_bytes <= self._max_bytes)
            self._held += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= num_bytes
                self._changed.notify_all()
