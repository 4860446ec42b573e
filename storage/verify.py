"""Whether a store still is what was written, and what to do if it is not.

Everything is read and decoded, at the speed of `StoreReader.read`: hours for terabytes, but there is no cheaper way to
know. Repair takes damaged samples out of the index, so that the next capture fills them in again; what they leave
behind is garbage for `storage.gc`. It invents nothing: a sample is either what was written or not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage.errors import DamageError, StoreError
from storage.index import drop_entries
from storage.location import locate
from storage.reader import StoreReader

# Samples under way at once: each holds its bfloat16 states, 268 MB for 16K tokens of D = 2,048.
_SAMPLES_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong."""

    message: str
    """One line for the user; for a damaged sample it names sample, array and shard."""
    sample_id: str | None = None
    """The damaged sample, None where the fault is none of a sample's bytes."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of reading a fingerprint."""

    num_samples: int
    """Samples read."""
    faults: tuple[Fault, ...]
    """Everything found, in the order of the samples' ids."""
    dropped: tuple[str, ...] = ()
    """What repair took out of the index, one line each."""
    is_repaired: bool = False
    """Whether repair took away all that was found."""


def verify(
    url: str, fingerprint: str, *, repair: bool = False, progress: Callable[[int, int], None] = lambda done, total: None
) -> Verified:
    """Read every committed sample of a fingerprint.

    repair: drop damaged samples and unreadable index lines; only while nobody writes to the store. progress: called
    with samples read and all. OSError or StoreError if the repair cannot be written.
    """
    folder = locate(url).child(fingerprint)
    dropped: list[str] = []
    opening: list[Fault] = []
    try:
        reader = StoreReader(url, fingerprint=fingerprint)
    except StoreError as error:
        opening.append(Fault(str(error)))
        if not repair:
            return Verified(0, tuple(opening))
        # If it was the index, it can be read after this; if it was anything else, it still cannot.
        dropped += drop_entries(folder, ())
        try:
            reader = StoreReader(url, fingerprint=fingerprint)
        except StoreError as error:
            return Verified(0, (Fault(str(error)),), tuple(dropped))
    faults: list[Fault] = []
    with reader:
        sample_ids = sorted(reader.sample_ids())
        for done, fault in enumerate(_read_all(reader, sample_ids), start=1):
            if fault is not None:
                faults.append(fault)
            progress(done, len(sample_ids))
    damaged = {fault.sample_id for fault in faults if fault.sample_id is not None}
    if repair and damaged:
        dropped += drop_entries(folder, damaged)
    is_repaired = repair and all(fault.sample_id is not None for fault in faults)
    return Verified(len(sample_ids), (*opening, *faults), tuple(dropped), is_repaired=is_repaired)


def _read_all(reader: StoreReader, sample_ids: list[str]) -> Iterator[Fault | None]:
    def read(sample_id: str) -> Fault | None:
        try:
            reader.read(sample_id)
        except DamageError as error:
            return Fault(str(error), sample_id)
        except StoreError as error:
            # A server that cannot be reached is no damage, and nothing to drop a sample for.
            return Fault(str(error))
        return None

    with ThreadPoolExecutor(_SAMPLES_AT_ONCE, thread_name_prefix="store-verify") as executor:
        yield from executor.map(read, sample_ids)
