"""The loop of `linear_soft_target_loss`: chunk by chunk, projections, row maths and gradients.

`linear_soft_target_plan` says which rows a chunk has. Buffers are allocated once and serve all chunks; rows that follow
one another are copied as a block, others are gathered.
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
from kernels.linear_soft_target_plan import Plan, Rows, RowVectors, find_pieces, make_plan, used_targets
from kernels.reference import HiddenTargets, TopKTargets, accumulation_dtype
from kernels.soft_target_rows import Objective, RowResults, TargetRows

# Rows of a product of all steps: 2% slower at 3,584 and no faster at 7,168 (H200, D 4096); but every chunk reads and
# writes the head's float32 gradient once, so long inputs take more.
_PRODUCT_ROWS, _MOST_PRODUCT_ROWS, _CHUNKS_BEFORE_MORE = 5120, 7168, 16
_MIN_CHUNK_ROWS = 128
# Of the memory that all logits and soft targets, and the head's float32 gradient, would take: the share that a chunk
# may, above and below 8,192 target rows.
_LARGE, _SHARE_LARGE, _SHARE_SMALL = 8192, 1 / 15.5, 1 / 3.6


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


def default_chunk_rows(
    num_targets: int, num_steps: int, num_columns: int, hidden_size: int, itemsize: int, target_itemsize: int
) -> int:
    """Target rows a chunk: a product of about 5,120 rows; fewer where its logits would not be small beside all, up to
    7,168 where there would be more than 16 chunks.

    All logits and soft targets take T * (K + 1) * Vd elements, the head's gradient Vd * D; a chunk stays below 1/15.5
    of their sum from 8,192 target rows on, and below 1/3.6 of it under them.
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
    num_rows = plan.num_rows
    vectors: _Vectors | None = None
    results = RowResults.empty(num_rows, dtype, device)
    grad_hidden: list[Tensor | None] = [
        (states if call.overwrite_hidden else torch.empty_like(states)) if needed else None
        for states, needed in zip(hidden, call.needs_hidden, strict=True)
    ]
    accumulated = torch.empty(num_columns, hidden_size, dtype=wide, device=device) if call.needs_head else None
    if accumulated is not None and num_rows == 0:
        accumulated.zero_()

    product_rows = max((chunk.num_rows for chunk in plan.chunks), default=0)
    states_buffer = torch.empty(product_rows, hidden_size, dtype=dtype, device=device)
    logits_buffer = _padded(product_rows, num_columns, dtype, device)
    # One column more, for stored tokens outside the draft vocabulary.
    target_buffer = _padded(plan.chunk_rows, num_columns + (0 if is_hidden else 1), target_dtype, device)
    for chunk in plan.chunks:
        first, last = chunk.start, chunk.start + chunk.num_rows
        targets = _target_rows(call, chunk.targets, target_buffer, num_columns)
        states = states_buffer[: chunk.num_rows]
        for of_step, rows, (start, stop) in zip(hidden, chunk.rows, pairwise(chunk.bounds), strict=True):
            if start == stop:
                continue
            if isinstance(rows, slice):
                states[start:stop].copy_(of_step[rows])
            else:
                torch.index_select(of_step, 0, rows, out=states[start:stop])
        logits = torch.mm(states, weights.t(), out=logits_buffer[: chunk.num_rows])
        if vectors is None:
            vectors = _Vectors.of(call, plan, wide, device)  # while the first product runs
        _soft_target_rows(call, vectors, first, last, logits, targets, results.rows(first, last))
        if accumulated is not None:
            _accumulate(accumulated, logits, states, first=first == 0)
        if any(call.needs_hidden):
            # The states are spent: their buffer takes the gradients.
            torch.mm(logits, weights, out=states)
            for gradient, rows, (start, stop) in zip(grad_hidden, chunk.rows, pairwise(chunk.bounds), strict=True):
                if gradient is None or start == stop:
                    continue
                if isinstance(rows, slice):
                    gradient[rows].copy_(states[start:stop])
                else:
                    gradient.index_copy_(0, rows, states[start:stop])
    for gradient, others in zip(grad_hidden, plan.other_rows, strict=True):
        if gradient is not None:
            for rows in others:
                # What lies there: hidden states that are overwritten, or nothing yet.
                if isinstance(rows, slice):
                    gradient[rows].zero_()
                else:
                    gradient.index_fill_(0, rows, 0.0)

    if vectors is None:  # no row counts
        vectors = _Vectors.of(call, plan, wide, device)
    loss = (results.loss * vectors.weight).sum()
    row_loss, alpha, correct = (of[vectors.rows.place] for of in (results.loss, results.alpha, results.correct))
    counts = [rows.shape[0] for rows in call.rows]
    return Computed(
        loss=loss,
        loss_sums=torch.stack([of_step.sum() for of_step in row_loss.split(counts)]),
        correct=correct.view(torch.bool),
        alpha=alpha,
        grad_head=None if accumulated is None else accumulated.to(head.dtype),
        grad_hidden=grad_hidden,
    )


def _plan(call: Call, hidden: Tensor, head: Tensor, target_dtype: torch.dtype) -> Plan:
    """hidden [A, D]: any step's. ValueError if an index is out of range, or the rows of a step do not ascend."""
    num_targets = call.target_index.shape[0]
    pieces = find_pieces(call.rows, call.target_rows, hidden.shape[0], num_targets)
    if call.target_index.device.type == "cpu" and num_targets:  # elsewhere looking would wait
        smallest, largest = int(call.target_index.min()), int(call.target_index.max())
        if smallest < -1 or largest >= head.shape[0]:
            wrong = smallest if smallest < -1 else largest
            raise ValueError(f"target_index contains {wrong}: use -1 .. {head.shape[0] - 1}")
    is_used = used_targets(pieces, num_targets)
    num_used = int(is_used.sum())
    chunk_rows = call.chunk_rows or default_chunk_rows(
        num_used, len(call.rows), head.shape[0], head.shape[1], hidden.element_size(), target_dtype.itemsize
    )
    return make_plan(
        pieces,
        is_used,
        num_steps=len(call.rows),
        num_states=hidden.shape[0],
        chunk_rows=max(1, min(chunk_rows, num_used)),
        device=head.device,
    )


@dataclass(frozen=True, slots=True)
class _Vectors:
    """What the row maths needs of every row, in the chunks' order."""

    rows: RowVectors
    weight: Tensor
    """float32 (float64) [n]."""
    mixing: Tensor | None
    """The same."""

    @classmethod
    def of(cls, call: Call, plan: Plan, dtype: torch.dtype, device: torch.device) -> _Vectors:
        rows = plan.row_vectors(device)

        def of_steps(values: Sequence[float] | Tensor) -> Tensor:
            if not isinstance(values, Tensor):
                values = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
            return values.detach().to(device=device, dtype=dtype, non_blocking=True)[rows.step]

        return cls(rows, of_steps(call.row_weight), None if call.mixing is None else of_steps(call.mixing))


def _padded(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[num_rows, num_columns] whose rows start at multiples of 16 elements, as fast products and loads want them."""
    return torch.empty(num_rows, -(-num_columns // 16) * 16, dtype=dtype, device=device)[:, :num_columns]


def _target_rows(call: Call, used: Rows, buffer: Tensor, num_columns: int) -> TargetRows:
    """The soft targets of a chunk, in buffer."""
    targets = call.targets
    buffer = buffer[: used.stop - used.start if isinstance(used, slice) else used.shape[0]]
    if isinstance(targets, HiddenTargets):
        assert call.target_lse is not None
        states = targets.last_hidden.detach()[used].to(targets.head.dtype)
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
    call: Call, vectors: _Vectors, first: int, last: int, logits: Tensor, targets: TargetRows, results: RowResults
) -> None:
    target_row, weight = vectors.rows.target_row[first:last], vectors.weight[first:last]
    mixing = None if vectors.mixing is None else vectors.mixing[first:last]
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
