"""Soft targets as the target's k likeliest tokens: 1.7 bytes an entry at k = 256, 1.9 at k = 64 (V = 49,152).

A row is stored by ascending id: distances between ids, and a level for each log-probability. Sorted by id, the order of
the entries costs nothing, which saves log2(k!) bits a row over any other order; and distances are small, as tokenizers
number frequent tokens first. Bytes of a kind lie together, so that zstd sees their uneven frequencies.

    log p = r + level * LEVEL_STEP         level = round((log p - least log p of the row) / LEVEL_STEP)
    r     = log((1 - tail) / sum(exp(level * LEVEL_STEP)))       log(tail / (1 - tail)) = tail_level / TAIL_STEPS

r is not stored: it is what makes the row's mass right. So the tail's mass, which the loss needs, and the row's come
back within 0.2% of themselves, and a row never sums to more than 1. The error of a log-probability is that of its own
level less the row's mean one: at most LEVEL_STEP + 1/512, about 0.3 LEVEL_STEP rms. Tokens more than 255 LEVEL_STEP
under the likeliest (1e-14 of its probability) are taken for that.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from storage.schema import TopK, top_k_id_bytes

LEVEL_STEP = 0.125
"""Nats between two levels of a log-probability."""
LARGEST_LEVEL = 255
TAIL_STEPS = 256
"""Levels of the tail's log-odds a nat."""
NO_TAIL = -32_768
"""Level of a tail whose mass is 0 by float64, or less than exp(-128)."""


def encode_top_k(top_k: TopK, *, vocab_size: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Rows of `topk`, uint8 [R, planes, k] (levels; bytes of the distances), and levels of the tail, int32 [R]."""
    order = np.argsort(top_k.ids, axis=1)
    ids = np.take_along_axis(top_k.ids, order, axis=1)
    log_probabilities = np.take_along_axis(top_k.log_probabilities, order, axis=1).astype(np.float64)
    distances = np.diff(ids, axis=1, prepend=0)
    planes = np.empty((len(ids), 1 + top_k_id_bytes(vocab_size), ids.shape[1]), dtype=np.uint8)
    for byte in range(planes.shape[1] - 1):
        planes[:, 1 + byte] = distances >> (8 * byte) & 0xFF
    highest = log_probabilities.max(axis=1, keepdims=True)
    base = np.maximum(log_probabilities.min(axis=1, keepdims=True), highest - LARGEST_LEVEL * LEVEL_STEP)
    planes[:, 0] = np.clip(np.rint((log_probabilities - base) / LEVEL_STEP), 0, LARGEST_LEVEL)
    mass = np.exp(log_probabilities).sum(axis=1)
    # Rounding may carry a mass past 1 (validate allows 0.001), and one of 1e-300 is a tail of 1.
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.rint(TAIL_STEPS * np.log((1 - mass) / mass))
    level = np.where(mass < 1, np.clip(odds, NO_TAIL, -NO_TAIL), NO_TAIL)
    return planes, level.astype(np.int32)


def decode_top_k(planes: npt.NDArray[np.uint8], tail_levels: npt.NDArray[np.int32]) -> TopK:
    """Undo `encode_top_k`: ids ascend in each row; sum(exp(log_probabilities)) <= 1 in exact arithmetic."""
    distances = planes[:, 1].astype(np.int64)
    for byte in range(1, planes.shape[1] - 1):
        distances |= planes[:, 1 + byte].astype(np.int64) << (8 * byte)
    ids = np.cumsum(distances, axis=1).astype(np.int32)
    # Under the row's highest, as exp(32) and its like are no friends of a sum.
    relative = (planes[:, 0].astype(np.float64) - planes[:, 0].max(axis=1, keepdims=True)) * LEVEL_STEP
    odds = np.exp(tail_levels / TAIL_STEPS)
    log_mass = -np.log1p(np.where(tail_levels == NO_TAIL, 0.0, odds))
    exact = relative + (log_mass - np.log(np.exp(relative).sum(axis=1)))[:, None]
    log_probabilities = exact.astype(np.float32)
    # Down, not to nearest: half a million roundings must not add up to more than the row's mass.
    above = log_probabilities > exact - 1e-12
    np.nextafter(log_probabilities, np.float32(-np.inf), out=log_probabilities, where=above)
    return TopK(ids, log_probabilities)
