"""The loss kernel: a program walks over rows, two or three passes each, and writes the gradient over the logits.

The formulas are those of `soft_target_rows`. Pass 1 reads the draft's row: log-sum-exp and argmax. Pass 2 reads it
again, from the last block to the first, with the target's row: sums and gradient. It hits the L2 cache if the rows in
flight fit there, so their number is limited: then a row costs one read of each and one write. Objectives on alpha, and
a tail, need their sums before the first element of the gradient: a third pass. Nothing of size [R, Vd] is allocated.

All exponentials are to the base 2, of logits scaled by log2(e). Within a pass each lane keeps statistics of its own,
reduced once at the end of the row: a reduction across warps every block costs more than the block's arithmetic.

Rows are addressed in 64 bits (16,384 x 151,936 exceeds 2^31 elements); a block of columns at a time, so any width.
This module imports triton; its callers import it only when it runs.
"""

# mypy: allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (triton has no annotations, and its kernels take pointers, which have no type here)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import PROBABILITY_FLOOR
from kernels.scale_triton import row_grid
from kernels.soft_target_passes_triton import LN2, LOG2E, load_block, probabilities, statistics, store_block
from kernels.soft_target_rows import Objective, RowResults, TargetRows

# The kernels run in Python, on any device: TRITON_INTERPRET=1 was set before triton was imported (which decides for its
# own functions, as tl.sum) and before this module was (which decides for the kernels here).
INTERPRETED: bool = triton.knobs.runtime.interpret and not isinstance(tl.sum, triton.JITFunction)

_FLOOR = tl.constexpr(PROBABILITY_FLOOR)


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """How the row kernels are launched; everything here is speed, not result."""

    block: int
    """Columns a block."""
    num_warps: int
    num_stages: int
    """Blocks loaded ahead, in each pass; 1: none."""
    programs_per_processor: int
    """Rows in flight on each multiprocessor; 0: a program a row."""
    keep_in_cache: bool
    """Say to the L2 cache what is read again, and what is not."""


def row_launch(num_columns: int, itemsize: int) -> RowLaunch:
    """The launch for rows of num_columns elements of itemsize bytes: as many rows in flight as the L2 cache holds.

    The wider the row, the fewer of them, and the more warps for each.
    """
    # Swept on an H200 (60 MB of L2) from 32,000 to 262,144 columns in both dtypes; TB/s of three passes, copy 4.3:
    # bf16 3.2 at 32,000, 2.95 at 151,936, 2.9 at 262,144; float32 3.65 at 32,000 and 64,000.
    if num_columns * itemsize <= 65536:
        return RowLaunch(block=2048, num_warps=8, num_stages=1, programs_per_processor=4, keep_in_cache=True)
    return RowLaunch(block=8192, num_warps=32, num_stages=1, programs_per_processor=2, keep_in_cache=True)


@triton.jit
def _pass_2_block(logits_row, target_row, block, num_columns, logits_column_stride, target_column_stride,
                  lse, tempered_lse, draft_lse, full_lse, full_share, inverse_temperature, weight,
                  loss_lanes, alpha_lanes, below_lanes, tail_lanes,
                  ON_ALPHA: tl.constexpr, HAS_TAIL: tl.constexpr, TEMPERED: tl.constexpr, WRITE: tl.constexpr,
                  MASKED: tl.constexpr, LOGITS_UNIT: tl.constexpr, TARGET_UNIT: tl.constexpr, BLOCK: tl.constexpr,
                  POLICY: tl.constexpr, STORE_POLICY: tl.constexpr):  # fmt: skip
    """A block's share of the row's sums, and its gradient where that needs no sum."""
    draft = load_block(logits_row, block, num_columns, logits_column_stride, 0.0, MASKED, LOGITS_UNIT, BLOCK, POLICY)
    # Past the row's end -inf: p and full_p are 0 there, and nothing is added.
    target = load_block(
        target_row, block, num_columns, target_column_stride, float("-inf"), MASKED, TARGET_UNIT, BLOCK, POLICY
    )
    p, loss_q, surprise, full_p, q = probabilities(
        draft, target, lse, tempered_lse, draft_lse, full_lse, full_share, inverse_temperature, TEMPERED
    )
    loss_lanes += p * surprise
    alpha_lanes += tl.minimum(full_p, q, propagate_nan=tl.PropagateNan.ALL)
    if ON_ALPHA:
        below_lanes += tl.where(q < full_p, q, 0.0)
    if HAS_TAIL:
        is_tail = target == float("-inf")
        if MASKED:
            is_tail = is_tail & (block * BLOCK + tl.arange(0, BLOCK) < num_columns)
        tail_lanes += tl.where(is_tail, q, 0.0)
    if WRITE:
        store_block(
            logits_row, weight * (loss_q - p), block, num_columns, logits_column_stride, MASKED, LOGITS_UNIT, BLOCK,
            STORE_POLICY,
        )  # fmt: skip
    return loss_lanes, alpha_lanes, below_lanes, tail_lanes


@triton.jit
def _pass_3_block(logits_row, target_row, block, num_columns, logits_column_stride, target_column_stride,
                  lse, tempered_lse, draft_lse, full_lse, full_share, inverse_temperature,
                  from_entropy, from_alpha, below, tail_ratio,
                  ON_ALPHA: tl.constexpr, HAS_TAIL: tl.constexpr, TEMPERED: tl.constexpr, MASKED: tl.constexpr,
                  LOGITS_UNIT: tl.constexpr, TARGET_UNIT: tl.constexpr, BLOCK: tl.constexpr,
                  POLICY: tl.constexpr):  # fmt: skip
    """A block's gradient, once the row's sums are known."""
    draft = load_block(logits_row, block, num_columns, logits_column_stride, 0.0, MASKED, LOGITS_UNIT, BLOCK, POLICY)
    target = load_block(target_row, block, num_columns, target_column_stride, 0.0, MASKED, TARGET_UNIT, BLOCK, POLICY)
    p, loss_q, _, full_p, q = probabilities(
        draft, target, lse, tempered_lse, draft_lse, full_lse, full_share, inverse_temperature, TEMPERED
    )
    if HAS_TAIL:
        # The tail's share of a column that is not stored: as the draft itself spreads it.
        p = tl.where(target == float("-inf"), q * tail_ratio, p)
    gradient = from_entropy * (loss_q - p)
    if ON_ALPHA:
        gradient += from_alpha * (tl.where(q < full_p, q, 0.0) - q * below)
    store_block(logits_row, gradient, block, num_columns, logits_column_stride, MASKED, LOGITS_UNIT, BLOCK, POLICY)


@triton.jit
def _rows_kernel(
    logits_pointer,
    target_pointer,
    target_row_pointer,
    target_index_pointer,
    target_lse_pointer,
    draft_lse_pointer,
    tail_pointer,
    weight_pointer,
    mixing_pointer,
    loss_pointer,
    correct_pointer,
    alpha_pointer,
    num_rows,
    num_columns,
    logits_row_stride,
    logits_column_stride,
    target_row_stride,
    target_column_stride,
    inverse_temperature,
    lk_decay,
    OBJECTIVE: tl.constexpr,
    TEMPERED: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    RAGGED: tl.constexpr,
    LOGITS_UNIT: tl.constexpr,
    TARGET_UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    READ_AGAIN: tl.constexpr,
    READ_LAST: tl.constexpr,
):
    # Pointers that are None: target_row (row r has target row r), draft_lse (found here), tail, mixing.
    ON_ALPHA: tl.constexpr = OBJECTIVE != "soft_cross_entropy"
    HAS_TAIL: tl.constexpr = tail_pointer is not None
    SUMS_FIRST: tl.constexpr = ON_ALPHA or HAS_TAIL
    WRITE_IN_PASS_2: tl.constexpr = WRITE_GRADIENT and not SUMS_FIRST
    PASS_2: tl.constexpr = READ_AGAIN if WRITE_GRADIENT and SUMS_FIRST else READ_LAST
    num_whole = num_columns // BLOCK
    num_blocks = num_whole + 1 if RAGGED else num_whole
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        target_number = tl.cast(row, tl.int64) if target_row_pointer is None else tl.load(target_row_pointer + row)
        logits_row = logits_pointer + tl.cast(row, tl.int64) * logits_row_stride
        target_row = target_pointer + target_number * target_row_stride
        target_index = tl.load(target_index_pointer + target_number)
        full_lse = tl.load(target_lse_pointer + target_number) * LOG2E

        if draft_lse_pointer is None:
            _, draft_lse, _ = statistics(target_row, num_columns, target_column_stride, inverse_temperature,
                                          TEMPERED, RAGGED, TARGET_UNIT, BLOCK, NUM_STAGES, READ_AGAIN)  # fmt: skip
        else:
            draft_lse = tl.load(draft_lse_pointer + target_number) * LOG2E
        lse, tempered_lse, best_column = statistics(
            logits_row, num_columns, logits_column_stride, inverse_temperature,
            TEMPERED, RAGGED, LOGITS_UNIT, BLOCK, NUM_STAGES, READ_AGAIN)  # fmt: skip
        full_share = tl.exp2(draft_lse - full_lse)
        # A product, not a branch: a row that does not count is 0 when finite, and NaN when its logits are not.
        counts = tl.where(target_index >= 0, 1.0, 0.0)
        weight = tl.load(weight_pointer + row) * counts * inverse_temperature

        loss_lanes = tl.zeros([BLOCK], tl.float32)
        alpha_lanes = tl.zeros([BLOCK], tl.float32)
        below_lanes = tl.zeros([BLOCK], tl.float32)
        tail_lanes = tl.zeros([BLOCK], tl.float32)
        if RAGGED:
            loss_lanes, alpha_lanes, below_lanes, tail_lanes = _pass_2_block(
                logits_row, target_row, num_whole, num_columns, logits_column_stride, target_column_stride,
                lse, tempered_lse, draft_lse, full_lse, full_share, inverse_temperature, weight,
                loss_lanes, alpha_lanes, below_lanes, tail_lanes,
                ON_ALPHA, HAS_TAIL, TEMPERED, WRITE_IN_PASS_2, True, LOGITS_UNIT, TARGET_UNIT, BLOCK,
                PASS_2, READ_LAST)  # fmt: skip
        for step in tl.range(0, num_whole, num_stages=NUM_STAGES):
            # Backwards: the blocks that pass 1 read last are the surest to be in the cache.
            loss_lanes, alpha_lanes, below_lanes, tail_lanes = _pass_2_block(
                logits_row, target_row, num_whole - 1 - step, num_columns, logits_column_stride, target_column_stride,
                lse, tempered_lse, draft_lse, full_lse, full_share, inverse_temperature, weight,
                loss_lanes, alpha_lanes, below_lanes, tail_lanes,
                ON_ALPHA, HAS_TAIL, TEMPERED, WRITE_IN_PASS_2, False, LOGITS_UNIT, TARGET_UNIT, BLOCK,
                PASS_2, READ_LAST)  # fmt: skip

        cross_entropy = tl.sum(loss_lanes, 0) * LN2
        alpha = tl.sum(alpha_lanes, 0)
        tail_ratio = 0.0
        if HAS_TAIL:
            tail_p = tl.load(tail_pointer + target_number)
            tail_q = tl.sum(tail_lanes, 0)
            tail_q = tl.where(tail_q < _FLOOR, _FLOOR, tail_q)
            cross_entropy -= tail_p * tl.log2(tail_q) * LN2
            tail_ratio = tail_p / tail_q
        # d row loss / dz = from_entropy * (q - p) + from_alpha * q * ((q < full_p) - A)
        from_entropy, from_alpha = 1.0, 0.0
        if OBJECTIVE == "soft_cross_entropy":
            loss = cross_entropy
        elif OBJECTIVE == "lk_alpha":
            is_low = alpha < _FLOOR
            floored = tl.where(is_low, _FLOOR, alpha)
            loss = -tl.log2(floored) * LN2
            # The derivative of the clamped logarithm: nothing below the floor.
            from_entropy, from_alpha = 0.0, tl.where(is_low, 0.0, -1.0 / floored)
        elif OBJECTIVE == "total_variation":
            loss = 1.0 - alpha
            from_entropy, from_alpha = 0.0, -1.0
        else:
            lam = tl.exp2(-lk_decay * alpha * LOG2E) if mixing_pointer is None else tl.load(mixing_pointer + row)
            loss = lam * cross_entropy + (1.0 - lam) * (1.0 - alpha)
            from_entropy, from_alpha = lam, lam - 1.0
        tl.store(loss_pointer + row, counts * loss)
        tl.store(alpha_pointer + row, alpha)
        # A row with a NaN is a miss: its log-sum-exp is no number.
        is_correct = (best_column == target_index) & (lse - lse == 0.0)
        tl.store(correct_pointer + row, is_correct.to(tl.uint8))

        if WRITE_GRADIENT and SUMS_FIRST:
            below = tl.sum(below_lanes, 0)
            for block in tl.range(0, num_blocks, num_stages=NUM_STAGES):
                # Forwards: pass 2 ended at the first block.
                _pass_3_block(
                    logits_row, target_row, block, num_columns, logits_column_stride, target_column_stride,
                    lse, tempered_lse, draft_lse, full_lse, full_share, inverse_temperature,
                    from_entropy * weight, from_alpha * weight, below, tail_ratio,
                    ON_ALPHA, HAS_TAIL, TEMPERED, RAGGED, LOGITS_UNIT, TARGET_UNIT, BLOCK, READ_LAST)  # fmt: skip


@triton.jit
def _log_sum_exp_kernel(logits_pointer, lse_pointer, num_rows, num_columns, row_stride, column_stride,
                        inverse_temperature, TEMPERED: tl.constexpr, RAGGED: tl.constexpr, UNIT: tl.constexpr,
                        BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        logits_row = logits_pointer + tl.cast(row, tl.int64) * row_stride
        _, lse, _ = statistics(logits_row, num_columns, column_stride, inverse_temperature, TEMPERED, RAGGED, UNIT,
                                BLOCK, NUM_STAGES, "")  # fmt: skip
        tl.store(lse_pointer + row, lse * LN2)


def _block(num_columns: int, launch: RowLaunch) -> int:
    block: int = triton.next_power_of_2(num_columns)
    return min(block, launch.block)


def soft_target_rows(
    logits: Tensor,
    targets: TargetRows,
    results: RowResults,
    *,
    target_row: Tensor | None,
    weight: Tensor,
    mixing: Tensor | None,
    objective: Objective,
    write_gradient: bool,
    launch: RowLaunch | None = None,
) -> None:
    """`kernels.soft_target_rows.soft_target_rows` in one kernel; vectors (index, lse, weight, ...) are contiguous."""
    num_rows, num_columns = logits.shape
    if num_rows == 0:
        return
    launch = launch or row_launch(num_columns, logits.element_size())
    block = _block(num_columns, launch)
    with torch.cuda.device_of(logits):
        _rows_kernel[row_grid(num_rows, launch.programs_per_processor, logits.device)](
            logits,
            targets.logits,
            target_row,
            targets.index,
            targets.lse,
            targets.draft_lse,
            targets.tail,
            weight,
            mixing,
            results.loss,
            results.correct,
            results.alpha,
            num_rows,
            num_columns,
            *logits.stride(),
            *targets.logits.stride(),
            1 / objective.temperature,
            objective.lk_decay,
            OBJECTIVE=objective.name,
            TEMPERED=objective.temperature != 1,
            WRITE_GRADIENT=write_gradient,
            RAGGED=num_columns % block != 0,
            LOGITS_UNIT=logits.stride(1) == 1,
            TARGET_UNIT=targets.logits.stride(1) == 1,
            BLOCK=block,
            NUM_STAGES=launch.num_stages,
            READ_AGAIN="evict_last" if launch.keep_in_cache else "",
            READ_LAST="evict_first" if launch.keep_in_cache else "",
            num_warps=launch.num_warps,
        )


def log_sum_exp(logits: Tensor, temperature: float, launch: RowLaunch | None = None) -> Tensor:
    """float32 [M]: log-sum-exp of each row of logits [M, Vd] / temperature."""
    num_rows, num_columns = logits.shape
    lse = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        launch = launch or row_launch(num_columns, logits.element_size())
        block = _block(num_columns, launch)
        with torch.cuda.device_of(logits):
            # Read once: rows in flight need no limit.
            _log_sum_exp_kernel[(num_rows,)](
                logits,
                lse,
                num_rows,
                num_columns,
                *logits.stride(),
                1 / temperature,
                TEMPERED=temperature != 1,
                RAGGED=num_columns % block != 0,
                UNIT=logits.stride(1) == 1,
                BLOCK=block,
                NUM_STAGES=launch.num_stages,
                num_warps=launch.num_warps,
            )
    return lse
