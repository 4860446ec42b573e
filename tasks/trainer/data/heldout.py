"""Which held-out samples training looks at: the same ones every time, so that the figures compare."""

from __future__ import annotations

import numpy as np

from tasks.trainer.data.prepared import PreparedData, PreparedSample


def choose_heldout(data: PreparedData, max_tokens: int) -> list[PreparedSample]:
    """At most max_tokens of whole held-out samples, drawn by a fixed seed; the shortest one where none fits."""
    order = np.random.default_rng(0).permutation(len(data)).tolist()
    chosen, left = [], max_tokens
    for number in order:
        length = int(data.lengths[number])
        if length <= left:
            chosen.append(data[number])
            left -= length
    return chosen or [data[int(np.argmin(data.lengths))]]
