"""Seconds, for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
