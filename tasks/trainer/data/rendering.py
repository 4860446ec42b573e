"""Rendering and tokenising in parallel, in order: processes, because chat templates are Python.

A pool starts only when there is enough to do, since each process imports transformers anew (seconds). Results come in
the order of the conversations whatever finishes first, so the samples, and with them the run's data hash, are the same
for any number of processes; a few chunks are under way at once, so memory stays bounded.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Literal

from tasks.trainer.data.conversation import Conversation
from tasks.trainer.data.mask import ChatRenderer, RefusedConversationError, Row, Supervise

Rendered = tuple[Conversation, list[Row] | str]
"""A conversation with its rows, or with the reason why there are none."""

FEW = 4096
"""Conversations that one process renders faster than a pool starts."""
_CHUNK = 64
_MOST = 16


def render_all(
    renderer: ChatRenderer,
    conversations: Iterable[Conversation],
    *,
    supervise: Supervise = "all",
    workers: int | Literal["auto"] = 1,
) -> Iterator[Rendered]:
    """Each conversation with its rows. workers: processes; auto: one a processor, where there are more than FEW."""
    stream = iter(conversations)
    if workers == "auto":
        few = list(itertools.islice(stream, FEW + 1))
        num_workers = min(os.cpu_count() or 1, _MOST) if len(few) > FEW else 1
        stream = itertools.chain(few, stream)
    else:
        num_workers = workers
    if num_workers == 1:
        yield from (_rendered(renderer, conversation, supervise) for conversation in stream)
        return
    # Not fork: torch and tokenizers hold threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start, initargs=(renderer, supervise)
    ) as pool:
        under_way: deque[tuple[list[Conversation], Future[list[list[Row] | str]]]] = deque()
        while True:
            chunk = list(itertools.islice(stream, _CHUNK))
            if chunk:
                under_way.append((chunk, pool.submit(_render_chunk, chunk)))
            if under_way and (not chunk or len(under_way) > 3 * num_workers):
                done, future = under_way.popleft()
                yield from zip(done, future.result(), strict=True)
            elif not chunk:
                return


def _rendered(renderer: ChatRenderer, conversation: Conversation, supervise: Supervise) -> Rendered:
    try:
        return conversation, renderer.rows(conversation, supervise=supervise)
    except RefusedConversationError as refused:
        return conversation, refused.reason


_own: tuple[ChatRenderer, Supervise] | None = None  # of a pool's process


def _start(renderer: ChatRenderer, supervise: Supervise) -> None:
    global _own
    _own = renderer, supervise
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed tells its pool nothing, and the pool's processes would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _render_chunk(conversations: Sequence[Conversation]) -> list[list[Row] | str]:
    assert _own is not None
    renderer, supervise = _own
    return [_rendered(renderer, conversation, supervise)[1] for conversation in conversations]
