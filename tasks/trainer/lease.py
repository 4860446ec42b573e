"""The lease: one process at a time works on a run, and who it is can be read.

Two means, because neither is enough. A lock of the operating system on a local folder is given back the moment its
process dies, so a retry on the same machine never waits; but it says nothing across machines. A lease file with a
heartbeat does, for a shared folder or a remote URL; the price is that after a crash on another machine the next process
waits until the heartbeat is old. Machines' clocks must agree within half a minute (NTP).
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from storage.location import Location
from tasks.trainer.errors import InputError

logger = logging.getLogger(__name__)

LEASE = "lease.json"
# Renewed six times while it is valid: one failed request, or a machine that swaps, must not lose a run.
VALID_SECONDS = 90.0
# What the other of two processes that took a remote lease at once needs to see that it lost: one request each.
_SETTLE_SECONDS = 1.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who works on a run."""

    token: str
    """Of this hold alone: a process that takes the run twice has two."""
    host: str
    """Name of the machine (or container)."""
    machine: str
    """Tells machines, boots and containers of one name apart: a pid means something inside one of them only."""
    pid: int
    since: float
    """When it took the run, seconds since 1970."""
    heartbeat: float
    """When it last said so, seconds since 1970."""

    @classmethod
    def here(cls) -> Holder:
        """This process, now."""
        now = time.time()
        return cls(uuid.uuid4().hex, socket.gethostname(), _machine(), os.getpid(), now, now)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return (
            f"process {self.pid} on {self.host}, since {since}, last heard of {time.time() - self.heartbeat:.0f} s ago"
        )


class Lease:
    """A hold on a run; `check` it before anything that others rely on is written."""

    def __init__(self, place: Location, holder: Holder, *, valid: float = VALID_SECONDS) -> None:
        self._place = place
        self._holder = holder
        self._valid = valid
        self._lost: str | None = None

    def check(self) -> None:
        """Raises InputError when another process has taken the run (this one was suspended, or its network away)."""
        if self._lost:
            raise InputError(self._lost)

    def _take(self) -> None:
        _write(self._place, self._holder)

    def _renew(self) -> None:
        """One heartbeat. A place that cannot be reached is tried again; the lease may run out meanwhile."""
        try:
            found = _read(self._place)
            if found is not None and found.token != self._holder.token:
                self._lost = f"{self._place.url}: another process took this run meanwhile ({found}); stop one of them"
                logger.error("%s", self._lost)
                return
            self._holder = replace(self._holder, heartbeat=time.time())
            _write(self._place, self._holder)
        except OSError as error:
            logger.warning("lease of %s not renewed: %s", self._place.url, error)

    def _release(self) -> None:
        try:
            found = _read(self._place)
            if found is not None and found.token == self._holder.token:
                self._place.delete(LEASE)
        except OSError as error:
            logger.warning("lease of %s not given back (%s): it runs out by itself", self._place.url, error)

    @contextmanager
    def _renewed(self) -> Iterator[None]:
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(self._valid / 6) and self._lost is None:
                self._renew()

        thread = threading.Thread(target=beat, daemon=True, name="lease")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def hold(
    folder: Path, place: Location, *, name: str = "run_dir", patience: float = 20.0, valid: float = VALID_SECONDS
) -> Iterator[Lease]:
    """Hold a run alone, or whatever else is one process's at a time.

    folder: local; its lock tells about processes of this machine. place: where the run lies, for all machines. name: of
    the setting that gives the place, for messages.
    patience: seconds to wait for another holder, which may be saving its last checkpoint; one that has gone silent is
    waited for until its lease runs out. Raises InputError, which names the holder, when it is alive.
    """
    deadline = time.monotonic() + patience
    with (folder / ".lock").open("w") as file:
        locked = _lock(file, place, deadline, name)
        _wait_for_others(place, deadline, name, locked=locked, valid=valid)
        lease = Lease(place, Holder.here(), valid=valid)
        lease._take()
        if not place.is_local:
            time.sleep(min(_SETTLE_SECONDS, valid / 6))
            found = _read(place)
            if found is None or found.token != lease._holder.token:
                raise _refused(place, found, name)
        try:
            with lease._renewed():
                yield lease
        finally:
            lease._release()


def _lock(file: TextIO, place: Location, deadline: float, name: str) -> bool:
    """Whether the system's lock is held now; False where the file system has none."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _refused(place, _read(place), name) from None
            time.sleep(0.2)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False


def _wait_for_others(place: Location, deadline: float, name: str, *, locked: bool, valid: float) -> None:
    """Return once nobody else holds the lease. Raises InputError when its holder is seen alive after the deadline."""
    first: Holder | None = None
    while (found := _read(place)) is not None and not _is_over(found, place, locked=locked, valid=valid):
        if first is None or found.token != first.token:
            first = found
            logger.info("%s is held by %s; waiting", place.url, found)
        if found.heartbeat != first.heartbeat and time.monotonic() > deadline:
            raise _refused(place, found, name)
        time.sleep(min(1.0, valid / 10))


def _is_over(holder: Holder, place: Location, *, locked: bool, valid: float) -> bool:
    """Whether a lease no longer counts: its process is dead as far as this machine can tell, or it ran out."""
    if time.time() - holder.heartbeat > valid:
        return True
    if holder.machine != _machine():
        return False
    # In its own folder we hold the lock that it would hold; a remote run may have several scratch folders.
    return (locked and place.is_local) or not _is_alive(holder.pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # A child that nobody has waited for yet is dead all the same.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return not Path("/proc/self").exists()


def _machine() -> str:
    """Boot and process namespace, where the system tells them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _refused(place: Location, holder: Holder | None, name: str) -> InputError:
    who = f": {holder}" if holder else ""
    what = "this run" if name == "run_dir" else "it"
    return InputError(f"{name}={place.url!r}: another process works on {what}{who}; wait for it or stop it")


def _read(place: Location) -> Holder | None:
    content = place.read_bytes(LEASE)
    if content is None:
        return None
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        logger.warning("%s/%s is no lease; taking the run", place.url, LEASE)
        return None


def _write(place: Location, holder: Holder) -> None:
    place.write_bytes(LEASE, json.dumps(asdict(holder), indent=1).encode())
