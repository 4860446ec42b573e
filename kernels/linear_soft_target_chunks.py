"""The loop of `linear_soft_target_loss`: chunk by chunk, projections, row maths and gradients.

    target rows used       0 1 2 3 | 4 5 6 7 | 8 9         chunks of 4
    rows of step 0         a b c d | e f g h | i           each under its target row
    rows of step 1             k l | m n o p | q r
    the buffer of a chunk  [a b c d k l] [e f g h m n o p] [i q r]: one product each

Buffers are allocated once and serve all chunks. The host learns the chunks' boundaries, and whether the indices are
valid, in one copy; after it nothing waits for the device.
"""

# mypy: allow-untyped-calls
# (Tensor.split has no annotations)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels import soft_target_rows
from kernels.reference import HiddenTargets, TopKTargets, accumulation_dtype
from kernels.soft_target_rows import Objective, RowResults, TargetRows

# Rows of a product of all steps: from 3,584 on the products' speed does not grow (H200, D 4096), but every chunk reads
# and writes the head's float32 gradient once, so long inputs take twice that.
_PRODUCT_ROWS, _MOST_PRODUCT_ROWS, _CHUNKS_BEFORE_MORE = 3584, 7168, 16
_MIN_CHUNK_ROWS = 128
# Of the memory that all logits and soft targets, and the head's float32 gradient, would take: the share that a chunk
# may, above and below 8,192 target rows.
_LARGE, _SHARE_LARGE, _SHARE_SMALL = 8192, 1 / 13, 1 / 3.6


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of `linear_soft_target_loss` that need no gradient, checked."""

    targets: HiddenTargets | TopKTargets
    rows: tuple[Tensor, ...]
    target_rows: tuple[Tensor, ...]
    target_index: Tensor
    target_lse: Tensor | None
    row_weight: tuple[float, ...]
    mixing: tuple[float, ...] | Tensor | None
    objective: Objective
    head_compute: Tensor | None
    needs_hidden: tuple[bool, ...]
    needs_head: bool
    overwrite_hidden: bool
    chunk_rows: int | None
    backend: str


@dataclass(frozen=True, slots=True)
class Computed:
    """Results, and gradients for an incoming 1."""

    loss: Tensor
    loss_sums: Tensor
    correct: Tensor
    """bool [n], step after step; n the sum of n_k."""
    alpha: Tensor
    """[n], step after step."""
    grad_head: Tensor | None
    grad_hidden: list[Tensor | None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """n rows in the order of the chunks, and within a chunk of the steps."""

    order: Tensor
    """int64 [n]: places in the order of the steps."""
    row: Tensor
    """int64 [n]: rows of hidden."""
    target_row: Tensor
    """int64 [n]: rows within the chunk's target rows."""
    weight: Tensor
    """float32 (float64 for float64 hidden states) [n]."""
    mixing: Tensor | None
    """The same."""
    used: Tensor
    """int64 [>= num_used]: the target rows that are used, ascending."""
    num_used: int
    chunk_rows: int
    bounds: list[list[int]]
    """Of each chunk: where its rows of each step start, and where the last step's end. [K + 1]"""


def default_chunk_rows(
    num_targets: int, num_steps: int, num_columns: int, hidden_size: int, itemsize: int, target_itemsize: int
) -> int:
    """Target rows a chunk: a product of about 3,584 rows; fewer where its logits would not be small beside all, up to
    7,168 where there would be more than 16 chunks.

    All logits and soft targets take T * (K + 1) * Vd elements, the head's gradient Vd * D; a chunk stays below 1/13 of
    their sum from 8,192 target rows on, and below 1/3.6 of it under them.
    """
    all_bytes = num_columns * (num_targets * (num_steps * itemsize + target_itemsize) + 4 * hidden_size)
    share = _SHARE_LARGE if num_targets >= _LARGE else _SHARE_SMALL
    bytes_a_row = num_steps * (num_columns + hidden_size) * itemsize + num_columns * target_itemsize
    fitting = max(_MIN_CHUNK_ROWS, int(share * all_bytes / bytes_a_row))
    wanted = min(max(num_targets // _CHUNKS_BEFORE_MORE, _PRODUCT_ROWS // num_steps), _MOST_PRODUCT_ROWS // num_steps)
    rows = min(fitting, max(_MIN_CHUNK_ROWS, wanted))
    # Equal chunks: a last one of a few rows would pay for a whole one.
    num_chunks = max(1, -(-num_targets // rows))
    return max(1, -(-num_targets // num_chunks))


def compute(call: Call, hidden: Sequence[Tensor], head: Tensor) -> Computed:
    """Run all chunks; hidden and head without graph. With call.overwrite_hidden the gradients replace hidden."""
    dtype, device = hidden[0].dtype, head.device
    wide = accumulation_dtype(dtype)
    weights = call.head_compute.detach() if call.head_compute is not None else head.to(dtype)
    num_columns, hidden_size = head.shape
    is_hidden = isinstance(call.targets, HiddenTargets)
    target_dtype = call.targets.head.dtype if isinstance(call.targets, HiddenTargets) else wide
    plan = _plan(call, hidden[0], head, target_dtype)
    num_rows = plan.order.shape[0]
    results = RowResults.empty(num_rows, dtype, device)
    grad_hidden: list[Tensor | None] = [
        (states if call.overwrite_hidden else torch.zeros_like(states)) if needed else None
        for states, needed in zip(hidden, call.needs_hidden, strict=True)
    ]
    accumulated = torch.empty(num_columns, hidden_size, dtype=wide, device=device) if call.needs_head else None
    if accumulated is not None and num_rows == 0:
        accumulated.zero_()

    product_rows = max((bounds[-1] - bounds[0] for bounds in plan.bounds), default=0)
    states_buffer = torch.empty(product_rows, hidden_size, dtype=dtype, device=device)
    logits_buffer = _padded(product_rows, num_columns, dtype, device)
    # One column more, for stored tokens outside the draft vocabulary.
    target_buffer = _padded(plan.chunk_rows, num_columns + (0 if is_hidden else 1), target_dtype, device)
    for chunk, bounds in enumerate(plan.bounds):
        first, last = bounds[0], bounds[-1]
        if first == last:
            continue
        used = plan.used[chunk * plan.chunk_rows : min((chunk + 1) * plan.chunk_rows, plan.num_used)]
        targets = _target_rows(call, used, target_buffer[: used.shape[0]], num_columns)
        states = states_buffer[: last - first]
        for step, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                torch.index_select(hidden[step], 0, plan.row[start:stop], out=states[start - first : stop - first])
        logits = torch.mm(states, weights.t(), out=logits_buffer[: last - first])
        _soft_target_rows(call, plan, first, last, logits, targets, results.rows(first, last))
        if accumulated is not None:
            _accumulate(accumulated, logits, states, first=first == 0)
        if any(call.needs_hidden):
            # The states are spent: their buffer takes the gradients.
            torch.mm(logits, weights, out=states)
            for step, (start, stop) in enumerate(pairwise(bounds)):
                gradient = grad_hidden[step]
                if gradient is not None and start < stop:
                    gradient.index_copy_(0, plan.row[start:stop], states[start - first : stop - first])
    if call.overwrite_hidden:
        for gradient, rows in zip(grad_hidden, call.rows, strict=True):
            if gradient is not None:
                _clear_others(gradient, rows)

    loss = (results.loss * plan.weight).sum()
    row_loss, alpha = torch.empty_like(results.loss), torch.empty_like(results.alpha)
    correct = torch.empty_like(results.correct)
    for by_step, by_chunk in ((row_loss, results.loss), (alpha, results.alpha), (correct, results.correct)):
        by_step.index_copy_(0, plan.order, by_chunk)
    counts = [rows.shape[0] for rows in call.rows]
    return Computed(
        loss=loss,
        loss_sums=torch.stack([of_step.sum() for of_step in row_loss.split(counts)]),
        correct=correct.view(torch.bool),
        alpha=alpha,
        grad_head=None if accumulated is None else accumulated.to(head.dtype),
        grad_hidden=grad_hidden,
    )


def _plan(call: Call, hidden: Tensor, head: Tensor, target_dtype: torch.dtype) -> _Plan:
    """hidden [A, D]: any step's."""
    device, wide = head.device, accumulation_dtype(hidden.dtype)
    counts = [rows.shape[0] for rows in call.rows]
    num_steps, num_rows, num_targets = len(counts), sum(counts), call.target_index.shape[0]
    rows, target_rows = torch.cat(call.rows), torch.cat(call.target_rows)
    # At most this many target rows are used, and hardly fewer: the steps share them.
    most_used = min(num_targets, num_rows)
    chunk_rows = call.chunk_rows or default_chunk_rows(
        min(most_used, max(counts)),
        num_steps,
        head.shape[0],
        head.shape[1],
        hidden.element_size(),
        target_dtype.itemsize,
    )
    chunk_rows = max(1, min(chunk_rows, most_used))
    num_chunks = -(-most_used // chunk_rows)

    # Filled on the device: a tensor made of a list would be a copy that waits.
    def by_step(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.cat(
            [torch.full((n,), value, dtype=dtype, device=device) for n, value in zip(counts, values, strict=True)]
        )

    step = by_step(range(num_steps), torch.int64)
    # Out of range is refused below, after the host copy; until then it must not be read.
    named = target_rows.clamp(0, max(num_targets - 1, 0))
    is_used = torch.zeros(num_targets, dtype=torch.bool, device=device)
    if num_targets:
        is_used.index_fill_(0, named, True)
    number = is_used.cumsum(0)
    used = torch.empty(num_targets + 1, dtype=torch.int64, device=device)
    used.scatter_(0, torch.where(is_used, number - 1, num_targets), torch.arange(num_targets, device=device))
    place = number[named] - 1 if num_targets else named
    key = torch.div(place, chunk_rows, rounding_mode="floor") * num_steps + step
    order = key.argsort(stable=True)
    edges = torch.searchsorted(key[order], torch.arange(num_chunks * num_steps + 1, device=device))
    ascends = (rows[1:] > rows[:-1]) | (step[1:] != step[:-1])
    facts = [is_used.sum(), (~ascends).any()]
    if num_rows:
        facts += [bound for index in (rows, target_rows, call.target_index) for bound in index.aminmax()]
    on_host = torch.cat([torch.stack([fact.to(torch.int64) for fact in facts]), edges]).tolist()
    num_used, unordered, *ranges = on_host[: len(facts)]
    if num_rows:
        _check_ranges(ranges, hidden.shape[0], num_targets, head.shape[0])
    if unordered:
        raise ValueError("rows must be strictly ascending within each step: a row may count once")
    bounds = on_host[len(facts) :]

    if call.mixing is None:
        mixing = None
    elif isinstance(call.mixing, Tensor):
        mixing = call.mixing.detach().to(device=device, dtype=wide)[step[order]]
    else:
        mixing = by_step(call.mixing, wide)[order]
    return _Plan(
        order=order,
        row=rows[order],
        target_row=place[order] % chunk_rows,
        weight=by_step(call.row_weight, wide)[order],
        mixing=mixing,
        used=used,
        num_used=num_used,
        chunk_rows=chunk_rows,
        bounds=[bounds[chunk * num_steps : (chunk + 1) * num_steps + 1] for chunk in range(num_chunks)],
    )


def _check_ranges(ranges: Sequence[int], num_states: int, num_targets: int, num_columns: int) -> None:
    lowest = {"rows": (0, num_states), "target_rows": (0, num_targets), "target_index": (-1, num_columns)}
    for (name, (low, end)), smallest, largest in zip(lowest.items(), ranges[::2], ranges[1::2], strict=True):
        if smallest < low or largest >= end:
            wrong = smallest if smallest < low else largest
            raise ValueError(f"{name} contains {wrong}: use {low} .. {end - 1}")


def _padded(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[num_rows, num_columns] whose rows start at multiples of 16 elements, as fast products and loads want them."""
    return torch.empty(num_rows, -(-num_columns // 16) * 16, dtype=dtype, device=device)[:, :num_columns]


def _target_rows(call: Call, used: Tensor, buffer: Tensor, num_columns: int) -> TargetRows:
    """The soft targets of a chunk, in buffer."""
    targets = call.targets
    if isinstance(targets, HiddenTargets):
        assert call.target_lse is not None
        states = targets.last_hidden.detach().index_select(0, used).to(targets.head.dtype)
        torch.mm(states, targets.head.detach().t(), out=buffer)
        draft_lse = _log_sum_exp(call, buffer)
        lse = call.target_lse[used].to(draft_lse.dtype)
        return TargetRows(logits=buffer, index=call.target_index[used], lse=lse, draft_lse=draft_lse)

    index, log_probability = targets.index[used].long(), targets.log_probability[used].to(buffer.dtype)
    probability = log_probability.exp()
    is_inside = index >= 0
    buffer.fill_(float("-inf"))
    buffer.scatter_(1, torch.where(is_inside, index, num_columns), log_probability)
    # A row that stores the whole draft vocabulary has no tail in it.
    tail = torch.where(is_inside.sum(-1) == num_columns, 0.0, (1 - probability.sum(-1)).clamp_(min=0))
    total = (probability * is_inside).sum(-1) + tail
    # A row whose tokens all lie outside, with nothing left: no soft target, and its argmax cannot count.
    total = torch.where(total > 0, total, 1.0)
    return TargetRows(
        logits=buffer[:, :num_columns],
        index=call.target_index[used],
        lse=torch.zeros_like(total),
        draft_lse=total.log(),
        tail=tail / total,
    )


def _log_sum_exp(call: Call, logits: Tensor) -> Tensor:
    if call.backend == "torch":
        return soft_target_rows.log_sum_exp(logits, call.objective.temperature)
    # Loaded only here: the torch backend works where triton is not installed.
    from kernels import soft_target_rows_triton

    return soft_target_rows_triton.log_sum_exp(logits, call.objective.temperature)


def _soft_target_rows(
    call: Call, plan: _Plan, first: int, last: int, logits: Tensor, targets: TargetRows, results: RowResults
) -> None:
    target_row, weight = plan.target_row[first:last], plan.weight[first:last]
    mixing = None if plan.mixing is None else plan.mixing[first:last]
    write_gradient = call.needs_head or any(call.needs_hidden)
    if call.backend == "torch":
        soft_target_rows.soft_target_rows(
            logits,
            targets,
            results,
            target_row=target_row,
            weight=weight,
            mixing=mixing,
            objective=call.objective,
            write_gradient=write_gradient,
        )
    else:
        from kernels import soft_target_rows_triton

        soft_target_rows_triton.soft_target_rows(
            logits,
            targets,
            results,
            target_row=target_row,
            weight=weight,
            mixing=mixing,
            objective=call.objective,
            write_gradient=write_gradient,
        )


def _accumulate(accumulated: Tensor, grad_logits: Tensor, states: Tensor, *, first: bool) -> None:
    """accumulated [Vd, D] += grad_logits.T @ states, the sum in accumulated's dtype; the first product is written over
    it, which saves clearing it and reading it once."""
    dtype = accumulated.dtype
    if states.dtype != dtype and states.device.type == "cuda":
        # Low-precision factors, float32 sum: nothing is rounded between chunks.
        if first:
            torch.ops.aten.mm.dtype_out(grad_logits.t(), states, dtype, out=accumulated)
        else:
            torch.ops.aten.addmm.dtype_out(accumulated, grad_logits.t(), states, dtype, out=accumulated)
    elif first:
        torch.mm(grad_logits.t().to(dtype), states.to(dtype), out=accumulated)
    else:
        accumulated.addmm_(grad_logits.t().to(dtype), states.to(dtype))


def _clear_others(gradient: Tensor, rows: Tensor) -> None:
    """Zero every row of gradient that rows does not name: hidden states are left there."""
    if rows.shape[0] < gradient.shape[0]:
        is_other = torch.ones(gradient.shape[0], dtype=torch.bool, device=gradient.device)
        is_other.index_fill_(0, rows, False)
        gradient.masked_fill_(is_other[:, None], 0.0)


def scale_in_place(gradient: Tensor, factor: Tensor, backend: str) -> None:
    """gradient *= factor, a scalar; the product in float32, and none where it is 1."""
    if backend == "triton":
        from kernels import scale_triton

        scale_triton.scale_in_place(gradient, factor)
    else:
        # Waits for the device on CUDA; the alternative would round the factor to the gradient's dtype.
        number = float(factor)
        if number != 1:
            gradient.mul_(number)
