"""Which documents share a pack: best fit into a few open packs, in the order given.

Sorting the documents by length first (first-fit decreasing) fills packs a little better, and makes every one of them a
collection of like lengths: a batch of long documents, then one of short ones. Taking them in shuffled order, each into
the fullest of OPEN_PACKS packs that has room for it, costs a few tenths of a percent and leaves packs as mixed as the
data. Only what is open at the end is packed anew, sorted.

Unfilled, on log-normal lengths of median 1,024 up to 16,384 (next-fit, the order kept: 11.7%; sorted: 0.1%):

    20,000 documents into packs of 16,384    0.2%
    20,000 documents into packs of 4,096     1.0%, longer ones cut

Documents of more than half a pack each leave the rest of theirs empty, whatever packs them. Unfilled tokens cost
nothing, for rows are not padded, but a step then trains on fewer. A million documents take about a second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

OPEN_PACKS = 16

# Tokens of one document whose attention costs as much as all else in a training step (TTT attention measured against
# the whole step of an 8B target's draft, 8,192 and 32,768 tokens): a document costs length + length^2 / this.
_SQUARE_TOKENS = 60_000

Integers = npt.NDArray[np.int64]


def pack_documents(lengths: Integers, order: Integers, *, pack_tokens: int) -> list[list[int]]:
    """Packs of whole documents, as lists of their numbers; each document is in exactly one.

    lengths int64 [n], at least 1: tokens of each document. order int64 [m]: the documents to pack, in the order they
    are taken. A pack holds up to pack_tokens; a document of more is a pack alone.
    """
    closed, opened = _best_fit(order.tolist(), lengths[order].tolist(), pack_tokens, OPEN_PACKS)
    rest = np.array([document for pack in opened for document in pack], dtype=np.int64)
    rest = rest[np.argsort(-lengths[rest], kind="stable")]
    again = _best_fit(rest.tolist(), lengths[rest].tolist(), pack_tokens, len(rest))
    return closed + min([*again[0], *again[1]], opened, key=len)


def deal_packs(packs: Sequence[Sequence[int]], lengths: Integers, *, num_ranks: int) -> list[list[int]]:
    """Which of one step's packs each rank takes, as numbers among them, so that the ranks finish together.

    lengths int64 [n]: tokens of every document. The dearest pack goes first, each to the rank that has the least to do.
    Every rank gets one at least, for there are no fewer packs than ranks; all packs are dealt, once.
    """
    assert len(packs) >= num_ranks
    costs = [sum(_cost(int(length)) for length in lengths[list(pack)]) for pack in packs]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for number in sorted(range(len(packs)), key=lambda number: -costs[number]):
        load, rank = heappop(loads)
        dealt[rank].append(number)
        heappush(loads, (load + costs[number], rank))
    return [sorted(numbers) for numbers in dealt]


def _cost(length: int) -> int:
    """Of a document in a training step, in sixty-thousandths of a token: integers, the same on every machine."""
    return length * _SQUARE_TOKENS + length * length


def unfilled_share(lengths: Integers, packs: Sequence[Sequence[int]], *, pack_tokens: int) -> float:
    """The share of the packs' room that is left empty; a document longer than a pack fills its own."""
    tokens = sum(min(int(lengths[pack].sum()), pack_tokens) for pack in packs)
    return 1.0 - tokens / (pack_tokens * len(packs))


def _best_fit(
    documents: Iterable[int], lengths: Iterable[int], pack_tokens: int, most_open: int
) -> tuple[list[list[int]], list[list[int]]]:
    """(closed packs, open ones): each document goes where it leaves the least room."""
    closed: list[list[int]] = []
    rooms: list[int] = []  # ascending; below 0: a document longer than a pack
    opened: list[list[int]] = []  # the packs with these rooms
    for document, length in zip(documents, lengths, strict=True):
        fits = bisect_left(rooms, length)
        if fits < len(rooms):
            pack, room = opened.pop(fits), rooms.pop(fits) - length
            pack.append(document)
        else:
            pack, room = [document], pack_tokens - length
        if len(opened) == most_open:  # the fullest takes the least to come
            closed.append(opened.pop(0))
            rooms.pop(0)
        place = bisect_left(rooms, room)
        opened.insert(place, pack)
        rooms.insert(place, room)
    return closed, opened
