"""Claims: which samples a living writer is about to capture, so that another one takes others.

A claim saves work and protects nothing: object stores have no portable compare-and-swap, so two writers may claim the
same sample at the same moment and both capture it. The store is then right all the same (storage.index takes the first
segment by name). A writer that died is forgotten at once on its own machine, so that a capture that was killed goes on
without waiting for itself; elsewhere, once its file is older than `CLAIM_SECONDS`. Clocks that differ by more than that
make claims useless, not wrong.

    {url}/{fingerprint}/claims/{writer}.json
        {"time": seconds since 1970, "host": name, "pid": process, "sample_ids": [...]}
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Container, Iterable

from storage.errors import one_line
from storage.location import Location

CLAIMS_FOLDER = "claims"
CLAIM_SECONDS = 600.0
_RENEW_SECONDS = 60.0
_HOST = socket.gethostname()

logger = logging.getLogger(__name__)


class Claims:
    """The claims of one writer. OSError if its file cannot be written."""

    def __init__(self, folder: Location, *, writer: str) -> None:
        """folder: the fingerprint's. Nothing is written before the first claim."""
        self._folder = folder.child(CLAIMS_FOLDER)
        self._file = f"{writer}.json"
        self._sample_ids: list[str] = []
        self._renewed = 0.0

    def claim(self, sample_ids: Iterable[str], *, under_way: Container[str] = ()) -> list[str]:
        """Of `sample_ids`, in order, those that no other living writer has claimed; they are this writer's now.

        Takes the place of the claim before, but for what of it is `under_way`: captured, and not committed yet.
        """
        still = [sample_id for sample_id in self._sample_ids if sample_id in under_way]
        taken = self._others()
        mine = [sample_id for sample_id in sample_ids if sample_id not in taken]
        self._put([*still, *mine])
        # Two that claim at once see each other now; the one with the smaller name keeps what both want.
        for writer, theirs in self._others_by_writer().items():
            if writer < self._file:
                mine = [sample_id for sample_id in mine if sample_id not in theirs]
        self._put([*still, *mine])
        return mine

    def renew(self) -> None:
        """Say that this writer lives, at most once a minute."""
        if self._sample_ids and time.monotonic() - self._renewed > _RENEW_SECONDS:
            self._put(self._sample_ids)

    def release(self) -> None:
        """Give up all claims."""
        if self._renewed:
            self._sample_ids = []
            self._folder.delete(self._file)

    def _put(self, sample_ids: list[str]) -> None:
        self._sample_ids = sample_ids
        self._renewed = time.monotonic()
        content = {"time": time.time(), "host": _HOST, "pid": os.getpid(), "sample_ids": sample_ids}
        self._folder.write_bytes(self._file, json.dumps(content).encode(), durable=False)

    def _others(self) -> set[str]:
        return set().union(*self._others_by_writer().values())

    def _others_by_writer(self) -> dict[str, frozenset[str]]:
        claims = {}
        for name in self._folder.names():
            if name == self._file or not name.endswith(".json") or name.startswith("."):
                continue
            content = self._folder.read_bytes(name)
            try:
                document = json.loads(content or b"{}")
                is_young = time.time() - float(document["time"]) < CLAIM_SECONDS
                if is_young and not _has_died(document.get("host"), document.get("pid")):
                    claims[name] = frozenset(map(str, document["sample_ids"]))
            except (ValueError, KeyError, TypeError) as error:
                logger.info("claims file %s/%s is ignored: %s", self._folder.url, name, one_line(error))
        return claims


def _has_died(host: object, pid: object) -> bool:
    """Whether a writer is known to be gone. Two machines of one name only cost work that is done twice."""
    if host != _HOST or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
