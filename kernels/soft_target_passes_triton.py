"""What the passes of the loss kernel share: blocks of a row, its log-sum-exp and argmax, its probabilities.

Exponentials are to the base 2, of logits scaled by log2(e). This module imports triton; its callers import it only when
it runs.
"""

# mypy: allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (triton has no annotations, and its kernels take pointers, which have no type here)
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Where a maximum starts: below any logit, but not -inf, as -inf - -inf would be NaN; finite over any temperature.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def load_block(row, block, num_columns, column_stride, OTHER: tl.constexpr, MASKED: tl.constexpr, UNIT: tl.constexpr,
          BLOCK: tl.constexpr, POLICY: tl.constexpr):  # fmt: skip
    """A block of a row in float32, scaled to base 2; OTHER past the row's end."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    # Columns in 64 bits too where they are apart: a transposed tensor's column stride is its number of rows.
    pointers = row + (columns if UNIT else columns.to(tl.int64) * column_stride)
    if MASKED:
        values = tl.load(pointers, mask=columns < num_columns, other=OTHER, eviction_policy=POLICY)
    else:
        values = tl.load(pointers, eviction_policy=POLICY)
    return values.to(tl.float32) * LOG2E


@triton.jit
def store_block(row, values, block, num_columns, column_stride, MASKED: tl.constexpr, UNIT: tl.constexpr,
           BLOCK: tl.constexpr, POLICY: tl.constexpr):  # fmt: skip
    columns = block * BLOCK + tl.arange(0, BLOCK)
    pointers = row + (columns if UNIT else columns.to(tl.int64) * column_stride)
    if MASKED:
        tl.store(pointers, values.to(row.dtype.element_ty), mask=columns < num_columns, eviction_policy=POLICY)
    else:
        tl.store(pointers, values.to(row.dtype.element_ty), eviction_policy=POLICY)


@triton.jit
def _online(values, block, highest, total, tempered_total, block_of_highest, inverse_temperature,
            TEMPERED: tl.constexpr):  # fmt: skip
    """Each lane's online softmax: one exponential, of the distance between the value and the highest so far."""
    larger = values > highest
    # A NaN is never larger: it passes by the maximum and enters the sum.
    distance = -tl.abs(values - highest)
    ratio = tl.exp2(distance)
    total = tl.where(larger, total * ratio + 1.0, total + ratio)
    if TEMPERED:
        ratio = tl.exp2(distance * inverse_temperature)
        tempered_total = tl.where(larger, tempered_total * ratio + 1.0, tempered_total + ratio)
    # Strictly larger: of a tie the lane's lowest column stays.
    block_of_highest = tl.where(larger, block, block_of_highest)
    return tl.where(larger, values, highest), total, tempered_total, block_of_highest


@triton.jit
def statistics(row, num_columns, column_stride, inverse_temperature, TEMPERED: tl.constexpr, RAGGED: tl.constexpr,
                UNIT: tl.constexpr, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr, POLICY: tl.constexpr):  # fmt: skip
    """(log-sum-exp, log-sum-exp at the temperature, lowest column of the highest value) of a row, in base 2."""
    highest = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    tempered_total = tl.zeros([BLOCK], tl.float32)
    block_of_highest = tl.zeros([BLOCK], tl.int32)
    num_whole = num_columns // BLOCK
    for block in tl.range(0, num_whole, num_stages=NUM_STAGES):
        values = load_block(row, block, num_columns, column_stride, float("-inf"), False, UNIT, BLOCK, POLICY)
        highest, total, tempered_total, block_of_highest = _online(
            values, block, highest, total, tempered_total, block_of_highest, inverse_temperature, TEMPERED
        )
    if RAGGED:
        values = load_block(row, num_whole, num_columns, column_stride, float("-inf"), True, UNIT, BLOCK, POLICY)
        highest, total, tempered_total, block_of_highest = _online(
            values, num_whole, highest, total, tempered_total, block_of_highest, inverse_temperature, TEMPERED
        )
    best = tl.max(highest, 0)
    below = highest - best
    lse = best + tl.log2(tl.sum(total * tl.exp2(below), 0))
    tempered_lse = lse
    if TEMPERED:
        tempered_total *= tl.exp2(below * inverse_temperature)
        tempered_lse = best * inverse_temperature + tl.log2(tl.sum(tempered_total, 0))
    columns = block_of_highest * BLOCK + tl.arange(0, BLOCK)
    return lse, tempered_lse, tl.min(tl.where(highest == best, columns, num_columns), 0)


@triton.jit
def probabilities(draft, target, lse, tempered_lse, draft_lse, full_lse, full_share, inverse_temperature,
                   TEMPERED: tl.constexpr):  # fmt: skip
    """(p, q of the loss, -log2 q of the loss, full_p, q) of a block."""
    q = tl.exp2(draft - lse)
    if TEMPERED:
        p = tl.exp2(target * inverse_temperature - draft_lse)
        surprise = tempered_lse - draft * inverse_temperature
        return p, tl.exp2(-surprise), surprise, tl.exp2(target - full_lse), q
    else:
        p = tl.exp2(target - draft_lse)
        # p over the full vocabulary is p over the draft's times one number a row.
        return p, q, lse - draft, p * full_share, q
