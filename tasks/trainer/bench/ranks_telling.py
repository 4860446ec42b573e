"""What the ranks of `eyas bench ranks` say while they measure: where the time goes, and each row once it is known.

A machine of several GPUs is lent by the minute, and a run of it may be cut off anywhere. So the first rank prints every
phase with the seconds since the command was started, and each row goes into a file of JSON lines at once, which the
command reads as it grows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Telling:
    """The first rank's words; the others' are not heard."""

    path: Path
    """File of JSON lines."""
    is_first: bool
    """Whether this is the first rank."""
    since: float = field(default_factory=time.monotonic)
    """The machine's monotonic clock, seconds, when the command was started."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """In every line: what the rows say about the machine."""

    def say(self, text: str) -> None:
        """A phase begins."""
        if self.is_first:
            print(f"[{time.monotonic() - self.since:6.1f} s] {text}", flush=True)

    def found(self, line: Mapping[str, Any]) -> None:
        """A row is known."""
        if self.is_first:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, **self.facts}, allow_nan=False) + "\n")


@dataclass(slots=True)
class Listening:
    """The other end: the lines of a file that grows."""

    path: Path
    """The file; it may not be there yet."""
    _read: int = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines that were finished since the last call."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)
