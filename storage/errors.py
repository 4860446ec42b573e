"""The errors that a store's user has to know.

A store's own failures (a wrong spec, a damaged shard, a URL it cannot serve) are all the same to the caller: one
line that names the offending thing and the way out. Bugs of this package stay assertions, never StoreErrors.
"""

from __future__ import annotations


class StoreError(ValueError):
    """A store refused its input or found its files damaged; the message is one line for the user."""


class DamageError(StoreError):
    """A committed sample's bytes are not those that were written: it can be dropped and captured again.

    An unreachable server is no damage, and no DamageError.
    """

    def __init__(self, sample_id: str, array: str, shard: str, what: str) -> None:
        """shard: path of the file or object, from the fingerprint's folder."""
        super().__init__(
            f"sample {sample_id}: {array} is damaged: {shard} {what}; `eyas store verify --repair` drops the sample, "
            "and the next capture fills it in again"
        )
        self.sample_id = sample_id
        """The sample's id."""
        self.array = array
        """Name of the array, or "metadata"."""
        self.shard = shard
        """Where the damage lies."""
        self.what = what
        """What is wrong, as the message says it."""


def one_line(error: BaseException) -> str:
    """Text of an error raised below us (zarr, the operating system), folded into one line for a StoreError."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
