"""The mistakes of who runs a benchmark."""

from __future__ import annotations


class BenchError(Exception):
    """A benchmark cannot run as asked; one line that names the thing and the way out."""
