"""The one error that a store's user has to know.

A store's own failures (a wrong spec, a damaged shard, a URL it cannot serve) are all the same to the caller: one
line that names the offending thing and the way out. Bugs of this package stay assertions, never StoreErrors.
"""

from __future__ import annotations


class StoreError(ValueError):
    """A store refused its input or found its files damaged; the message is one line for the user."""


def one_line(error: BaseException) -> str:
    """Text of an error raised below us (zarr, the operating system), folded into one line for a StoreError."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
