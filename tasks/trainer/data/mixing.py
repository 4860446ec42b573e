"""What a run reads: all sources in order, the share of each that its weight allows, one side of the held-out split.

Everything is decided by hashes of prompts, so each pass over the files gives the same conversations and none need be
kept in memory. The price is reading the files several times: once more for weights, once for each side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from tasks.trainer.config import Data
from tasks.trainer.data.conversation import Conversation, Refusals
from tasks.trainer.data.prepared import prompt_id
from tasks.trainer.data.read import nothing_read, stream_conversations

_ALL = 1 << 64


def stream_sources(settings: Data, limits: Sequence[int], refusals: Refusals) -> Iterator[Conversation]:
    """The conversations of data.source and data.more_sources that `limits` (draw_limits) let through.

    Raises:
        InputError: as stream_conversations; also when no record of all sources is a conversation.
    """
    num_read = 0
    for url, limit in zip(settings.sources, limits, strict=True):
        for conversation in _stream(url, settings, refusals):
            num_read += 1
            if limit == _ALL or _draw(conversation) < limit:
                yield conversation
    if not num_read:
        raise nothing_read(settings.sources, refusals)


def draw_limits(settings: Data) -> list[int]:
    """For each source, below which draw its conversations are taken: as many as the weights allow, none twice.

    The source that is the smallest for its weight is taken whole. Conversations of one prompt share their draw, so they
    are taken or left together, and the shares are met to within one prompt.
    """
    if not settings.weights:
        return [_ALL] * len(settings.sources)
    draws = [
        np.fromiter((_draw(found) for found in _stream(url, settings, Refusals())), dtype=np.uint64)
        for url in settings.sources
    ]
    unit = min(len(drawn) / weight for drawn, weight in zip(draws, settings.weights, strict=True))
    limits = []
    for drawn, weight in zip(draws, settings.weights, strict=True):
        kept = round(unit * weight)
        limits.append(_ALL if kept >= len(drawn) else int(np.partition(drawn, kept)[kept]))
    return limits


def _stream(url: str, settings: Data, refusals: Refusals) -> Iterator[Conversation]:
    stream = stream_conversations(
        [url], on_error=settings.on_error, on_truncated=settings.on_truncated, refusals=refusals
    )
    return (found for found, _ in stream)


def _draw(conversation: Conversation) -> int:
    """64 bits of the prompt's hash, and not those that decide what is held out."""
    return int.from_bytes(
        hashlib.blake2b(prompt_id(conversation).encode(), digest_size=8, person=b"mix").digest(), "big"
    )
