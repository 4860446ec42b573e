"""Committing samples in the order in which they came, several at once.

All samples that are ready when the index is written share one write of it, and their files' fsyncs run side by side.
Nothing waits for a group to fill: while one group is made durable, the next one gathers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from storage.errors import StoreError, one_line
from storage.index import IndexEntry, SegmentIndex
from storage.location import Location

# More lines than an index file holds would write it twice.
_GROUP = 128


@dataclass(frozen=True, slots=True, eq=False)
class WrittenSample:
    """A sample whose shards are put, and not yet committed."""

    entry: IndexEntry
    """Its index entry."""
    keys: list[str]
    """Its shards, inside its segment."""


class CommitQueue:
    """Samples under way of one writer. `add` is for one thread; everything else for any."""

    def __init__(self, entries: dict[str, IndexEntry], *, where: str, executor: Executor) -> None:
        """entries: the samples committed so far; it grows. where: the store, for errors. executor: for fsyncs."""
        self._entries = entries
        self._where = where
        self._syncs = executor
        self._segment: Location | None = None
        self._index: SegmentIndex | None = None
        self._changed = threading.Condition()
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._tokens: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="store-commit")

    def open_segment(self, segment: Location, index: SegmentIndex) -> None:
        """Where the samples that are added from now on lie."""
        self._segment, self._index = segment, index

    def committed(self) -> frozenset[str]:
        """Ids of the committed samples."""
        with self._changed:
            return frozenset(self._entries)

    def under_way(self) -> frozenset[str]:
        """Ids of the samples that were taken and are not committed yet."""
        with self._changed:
            return frozenset(self._tokens)

    def tokens_crc32c(self, sample_id: str) -> int | None:
        """The checksum of a sample's tokens if it is committed or reserved, else None."""
        with self._changed:
            entry = self._entries.get(sample_id)
            return self._tokens.get(sample_id) if entry is None else entry.tokens_crc32c

    def reserve(self, sample_id: str, size: int, *, tokens_crc32c: int, max_bytes: int) -> None:
        """Take up `size` bytes for a sample, once they fit into `max_bytes` or nothing else is under way.

        Raises what made an earlier sample fail.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or not self._pending_bytes or self._pending_bytes + size <= max_bytes
            )
            self.raise_failure()
            self._pending_bytes += size
            self._tokens[sample_id] = tokens_crc32c

    def fits(self, size: int, *, max_bytes: int) -> bool:
        """Whether `reserve` would go through at once."""
        with self._changed:
            return not self._pending_bytes or self._pending_bytes + size <= max_bytes

    def add(self, sample_id: str, size: int, work: Executor, write: Callable[[], WrittenSample | None]) -> None:
        """Run `write` on `work`, and commit what it gives (None: nothing) after all samples added before."""
        with self._changed:
            future = work.submit(write)
            self._pending.append(_Pending(sample_id, size, future))
        future.add_done_callback(lambda _: self._committer.submit(self._advance).add_done_callback(self._notice))

    def wait(self) -> None:
        """Return once everything added is committed, or something failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._pending)

    def fail(self, error: BaseException) -> None:
        """Commit nothing more. The first error counts."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raise what made a sample fail, if one did."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop the thread. The executors that samples were added to must have stopped before."""
        self._committer.shutdown(wait=True, cancel_futures=True)

    def _advance(self) -> None:
        """Commit every sample that is ready and has none before it that is not. On the committer's one thread."""
        group: list[_Pending] = []
        with self._changed:
            if self._failure is not None:
                return
            for item in self._pending:
                if len(group) == _GROUP or not item.future.done():
                    break
                group.append(item)
        failed = next((item for item in group if item.future.exception() is not None), None)
        if failed is not None:
            group = group[: group.index(failed)]
        written = [sample for item in group if (sample := item.future.result()) is not None]
        if written:
            assert self._segment is not None
            assert self._index is not None
            try:
                self._segment.make_durable((key for sample in written for key in sample.keys), self._syncs)
                self._index.commit([sample.entry for sample in written])
            except OSError as error:
                self.fail(self._cannot_write(group[0].sample_id, error))
                return
        with self._changed:
            self._entries.update({sample.entry.sample_id: sample.entry for sample in written})
            for _ in group:
                done = self._pending.popleft()
                self._pending_bytes -= done.size
                del self._tokens[done.sample_id]
            self._changed.notify_all()
        if failed is not None:
            cause = failed.future.exception()
            assert cause is not None
            self.fail(self._cannot_write(failed.sample_id, cause) if isinstance(cause, OSError) else cause)

    def _cannot_write(self, sample_id: str, error: OSError) -> StoreError:
        return StoreError(
            f"sample {sample_id} cannot be written to {self._where}: {one_line(error)}; all committed before it is "
            "good, and a new capture goes on from there"
        )

    def _notice(self, advanced: Future[None]) -> None:
        if not advanced.cancelled() and (error := advanced.exception()) is not None:
            self.fail(error)


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A sample on its way."""

    sample_id: str
    size: int
    future: Future[WrittenSample | None]
