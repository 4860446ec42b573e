"""What a benchmark's row of tokens looks like: documents, supervised spans, the rows that count and the active ones.

The rules are the trainer's (tasks/trainer/draft/ttt.py, which this package may not import), for one document:

    row p counts at TTT step k when tokens p+1 .. p+2+k exist and are all supervised
    row p is active when it counts at step 0; its target at step k is row p+1+k
"""

from __future__ import annotations

import random
from collections.abc import Sequence

Span = tuple[int, int]

ONE_DOCUMENT = "one document"
DOCUMENTS = "documents"
ALL = "all supervised"
ANSWER = "one answer"
TURNS = "eight turns"
CHAT = "chat lengths"

_NUM_TURNS = 8
_SHARE = 4  # one row in four is supervised in ANSWER and TURNS


def document_lengths(tokens: int, *, shortest: int = 768, longest: int = 1280, seed: int = 0) -> list[int]:
    """Random lengths in [shortest, longest] that sum to tokens; the last document takes what is left over."""
    generator = random.Random(seed)
    lengths: list[int] = []
    left = tokens
    while left > longest:
        lengths.append(min(generator.randint(shortest, longest), left))
        left -= lengths[-1]
    return [*lengths, left]


def supervised_spans(tokens: int, layout: str) -> list[Span]:
    """[start, end) of the supervised tokens of one document: all, its last quarter, or the last quarter of 8 turns."""
    if layout == ALL:
        return [(0, tokens)]
    num_turns = {ANSWER: 1, TURNS: _NUM_TURNS}[layout]
    turn = tokens // num_turns
    spans = [(turn * i + turn - turn // _SHARE, turn * (i + 1)) for i in range(num_turns)]
    return [*spans[:-1], (spans[-1][0], tokens)]


def counting_rows(spans: Sequence[Span], step: int) -> list[Span]:
    """[start, end) ranges of the rows that count at a TTT step."""
    ranges = [(max(start - 1, 0), end - 2 - step) for start, end in spans]
    return [(start, end) for start, end in ranges if start < end]


def active_rows(spans: Sequence[Span]) -> list[Span]:
    """[start, end) ranges of the rows that count at one step at least: those of step 0."""
    return counting_rows(spans, 0)
