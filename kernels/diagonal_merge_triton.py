"""The diagonal merge as two kernels: a program is a few rows of one key/value head with all its query heads.

    forward    reads q, the parts' outputs and log-sum-exps, every step's key and value; writes merged output and lse
    backward   reads q, grad_out, merged output and lse, the parts' dq, keys and values; writes dq and each dk_j, dv_j

Each byte moves once; all arithmetic is float32, each result rounded once. Bounds at 16,384 rows, 32/8 heads of 128,
3 later steps, 4.27 TB/s: forward 0.14 ms, backward 0.25 ms. The key/value head is the fast index of the grid, so that
programs that run together read whole rows.

All tiles are [rows, head dim], one a query head, held in tuples: in a tile [rows, heads, head dim] triton spreads the
heads over threads and warps, and every sum over them goes through shared memory. The price is registers: in the
backward a thread holds all query heads of its elements, so above 8 heads a key the tiles are smaller.

Row offsets are 64-bit: A * H * Dh passes 2^31 at 512K rows. This module imports triton; `diagonal_merge` imports it
only where it runs.
"""

# mypy: allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="misc, var-annotated, assignment"
# (triton has no annotations, and its kernels take pointers, which have no type here; tuples grow)
# ruff: noqa: RUF005
# (triton knows no starred expressions)
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_plan import Rows, Segment

# Elements of a tile: 8 a thread in 4 warps, a 16-byte load of bf16; fewer above 8 query heads a key, where the
# backward would spill (168 registers at 4 heads, 255 at 8).
_TILE = 1024
_MAX_WHOLE_REPEATS = 8
_NUM_WARPS = 4


@triton.jit
def _place(
    row_index_pointer, part_index_pointer, num_rows,
    NUM_GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, ROW_INDEXED: tl.constexpr, PART_INDEXED: tl.constexpr,
):  # fmt: skip
    """(group, place in the segment, active row, row of the parts, whether there is one) of the program's rows."""
    program = tl.program_id(0)
    place = ((program // NUM_GROUPS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    inside = place < num_rows
    row = place
    if ROW_INDEXED:
        row = tl.load(row_index_pointer + place, mask=inside, other=0)
    part_row = place
    if PART_INDEXED:
        part_row = tl.load(part_index_pointer + place, mask=inside, other=0)
    return program % NUM_GROUPS, place, row, part_row, inside


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["lse_0_pointer", "lse_1_pointer", "merged_lse_pointer"],
)
def _merge_forward_kernel(
    query_pointer, keys, values, row_index_pointer, part_index_pointer,
    part_0_pointer, part_1_pointer, lse_0_pointer, lse_1_pointer, merged_pointer, merged_lse_pointer,
    scale, num_rows, query_row_stride, query_head_stride, key_row_stride, key_head_stride,
    value_row_stride, value_head_stride, lse_0_stride, lse_1_stride, merged_lse_stride,
    NUM_GROUPS: tl.constexpr, NUM_REPEATS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_STEPS: tl.constexpr, NUM_PARTS: tl.constexpr,
    ROW_INDEXED: tl.constexpr, PART_INDEXED: tl.constexpr,
):  # fmt: skip
    group, place, row, part_row, inside = _place(
        row_index_pointer, part_index_pointer, num_rows, NUM_GROUPS, BLOCK_ROWS, ROW_INDEXED, PART_INDEXED
    )
    dim = tl.arange(0, BLOCK_DIM)
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    key_offset = (row * key_row_stride + group * key_head_stride)[:, None] + dim[None, :]
    value_offset = (row * value_row_stride + group * value_head_stride)[:, None] + dim[None, :]
    step_keys = ()
    step_values = ()
    for step in tl.static_range(NUM_STEPS):
        step_keys = step_keys + (tl.load(keys[step] + key_offset, mask=mask, other=0.0),)
        step_values = step_values + (tl.load(values[step] + value_offset, mask=mask, other=0.0),)
    for repeat in tl.static_range(NUM_REPEATS):
        head = group * NUM_REPEATS + repeat
        # The parts and the merged output are contiguous [.., H, Dh].
        offset = ((row * NUM_GROUPS * NUM_REPEATS + head) * HEAD_DIM)[:, None] + dim[None, :]
        part_offset = ((part_row * NUM_GROUPS * NUM_REPEATS + head) * HEAD_DIM)[:, None] + dim[None, :]
        part = tl.load(part_0_pointer + part_offset, mask=mask, other=0.0).to(tl.float32)
        lse_0 = tl.load(lse_0_pointer + head.to(tl.int64) * lse_0_stride + place, mask=inside, other=0.0)
        # Part 0 holds the row's own key, so its log-sum-exp is finite; part 1 may be -inf, where a row has none.
        largest = lse_0
        lse_1 = lse_0
        if NUM_PARTS == 2:
            lse_1 = tl.load(lse_1_pointer + head.to(tl.int64) * lse_1_stride + place, mask=inside, other=0.0)
            largest = tl.maximum(largest, lse_1)
        scores = ()
        if NUM_STEPS > 0:
            query_offset = (row * query_row_stride + head * query_head_stride)[:, None] + dim[None, :]
            query = tl.load(query_pointer + query_offset, mask=mask, other=0.0).to(tl.float32)
            for step in tl.static_range(NUM_STEPS):
                score = tl.sum(query * step_keys[step].to(tl.float32), 1) * scale
                scores = scores + (score,)
                largest = tl.maximum(largest, score)
        share = tl.exp(lse_0 - largest)
        total = share
        merged = part * share[:, None]
        if NUM_PARTS == 2:
            share = tl.exp(lse_1 - largest)
            total += share
            merged += tl.load(part_1_pointer + part_offset, mask=mask, other=0.0).to(tl.float32) * share[:, None]
        for step in tl.static_range(NUM_STEPS):
            share = tl.exp(scores[step] - largest)
            total += share
            merged += step_values[step].to(tl.float32) * share[:, None]
        merged = merged / total[:, None]
        tl.store(merged_pointer + offset, merged.to(merged_pointer.dtype.element_ty), mask=mask)
        merged_lse_pointers = merged_lse_pointer + head.to(tl.int64) * merged_lse_stride + row
        tl.store(merged_lse_pointers, largest + tl.log(total), mask=inside)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["lse_pointer", "base_lse_pointer", "grad_base_lse_pointer"],
)
def _merge_backward_kernel(
    query_pointer, keys, values, grad_keys, grad_values, row_index_pointer, part_index_pointer,
    part_0_pointer, part_1_pointer, grad_pointer, merged_pointer, lse_pointer, grad_query_pointer,
    base_lse_pointer, grad_base_pointer, grad_base_lse_pointer,
    scale, num_rows, query_row_stride, query_head_stride, key_row_stride, key_head_stride,
    value_row_stride, value_head_stride, lse_stride, base_lse_stride,
    NUM_GROUPS: tl.constexpr, NUM_REPEATS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_STEPS: tl.constexpr, NUM_PARTS: tl.constexpr,
    ROW_INDEXED: tl.constexpr, PART_INDEXED: tl.constexpr, BASE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """The parts are the base block's dq; with BASE_GRADIENT part 0 is its output, whose gradients are written."""
    group, _, row, part_row, inside = _place(
        row_index_pointer, part_index_pointer, num_rows, NUM_GROUPS, BLOCK_ROWS, ROW_INDEXED, PART_INDEXED
    )
    dim = tl.arange(0, BLOCK_DIM)
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    queries = ()
    grads = ()
    grad_queries = ()
    deltas = ()
    lses = ()
    for repeat in tl.static_range(NUM_REPEATS):
        head = group * NUM_REPEATS + repeat
        offset = ((row * NUM_GROUPS * NUM_REPEATS + head) * HEAD_DIM)[:, None] + dim[None, :]
        part_offset = ((part_row * NUM_GROUPS * NUM_REPEATS + head) * HEAD_DIM)[:, None] + dim[None, :]
        part = tl.load(part_0_pointer + part_offset, mask=mask, other=0.0).to(tl.float32)
        if NUM_PARTS == 2:
            part += tl.load(part_1_pointer + part_offset, mask=mask, other=0.0).to(tl.float32)
        # Kept as loaded, in half the registers of float32.
        grad = tl.load(grad_pointer + offset, mask=mask, other=0.0)
        query_offset = (row * query_row_stride + head * query_head_stride)[:, None] + dim[None, :]
        queries = queries + (tl.load(query_pointer + query_offset, mask=mask, other=0.0),)
        grads = grads + (grad,)
        merged = tl.load(merged_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        delta = tl.sum(grad.to(tl.float32) * merged, 1)
        lse = tl.load(lse_pointer + head.to(tl.int64) * lse_stride + row, mask=inside, other=0.0)
        if BASE_GRADIENT:
            base_lse_offset = head.to(tl.int64) * base_lse_stride + row
            base_lse = tl.load(base_lse_pointer + base_lse_offset, mask=inside, other=0.0)
            share = tl.exp(base_lse - lse)
            grad_base = share[:, None] * grad.to(tl.float32)
            grad_base_lse = share * (tl.sum(grad.to(tl.float32) * part, 1) - delta)
            tl.store(grad_base_pointer + offset, grad_base.to(grad_base_pointer.dtype.element_ty), mask=mask)
            tl.store(grad_base_lse_pointer + base_lse_offset, grad_base_lse, mask=inside)
            part = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
        grad_queries = grad_queries + (part,)
        deltas = deltas + (delta,)
        lses = lses + (lse,)

    key_offset = (row * key_row_stride + group * key_head_stride)[:, None] + dim[None, :]
    value_offset = (row * value_row_stride + group * value_head_stride)[:, None] + dim[None, :]
    grad_key_offset = ((row * NUM_GROUPS + group) * HEAD_DIM)[:, None] + dim[None, :]
    # A diagonal block's share is that of one more key: p = exp(score - lse), ds = p * (dp - delta).
    for step in tl.static_range(NUM_STEPS):
        key = tl.load(keys[step] + key_offset, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(values[step] + value_offset, mask=mask, other=0.0).to(tl.float32)
        grad_key = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
        grad_value = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
        new_grad_queries = ()
        for repeat in tl.static_range(NUM_REPEATS):
            query = queries[repeat].to(tl.float32)
            grad = grads[repeat].to(tl.float32)
            probability = tl.exp(tl.sum(query * key, 1) * scale - lses[repeat])
            grad_score = probability * (tl.sum(grad * value, 1) - deltas[repeat]) * scale
            grad_key += grad_score[:, None] * query
            grad_value += probability[:, None] * grad
            new_grad_queries = new_grad_queries + (grad_queries[repeat] + grad_score[:, None] * key,)
        grad_queries = new_grad_queries
        tl.store(grad_keys[step] + grad_key_offset, grad_key.to(grad_keys[step].dtype.element_ty), mask=mask)
        tl.store(grad_values[step] + grad_key_offset, grad_value.to(grad_values[step].dtype.element_ty), mask=mask)
    for repeat in tl.static_range(NUM_REPEATS):
        offset = ((row * NUM_GROUPS * NUM_REPEATS + group * NUM_REPEATS + repeat) * HEAD_DIM)[:, None] + dim[None, :]
        grad_query = grad_queries[repeat].to(grad_query_pointer.dtype.element_ty)
        tl.store(grad_query_pointer + offset, grad_query, mask=mask)


def _blocks(query: Tensor, num_groups: int) -> dict[str, int]:
    num_heads, head_dim = query.shape[1:]
    block_dim, repeats = triton.next_power_of_2(head_dim), num_heads // num_groups
    tile = _TILE * _MAX_WHOLE_REPEATS // max(_MAX_WHOLE_REPEATS, triton.next_power_of_2(repeats))
    return {
        "NUM_GROUPS": num_groups,
        "NUM_REPEATS": repeats,
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": max(1, tile // block_dim),
        "BLOCK_DIM": block_dim,
        "num_warps": _NUM_WARPS,
    }


def _indices(segment: Segment) -> tuple[int, Tensor | None, Tensor | None]:
    """(rows, index of active rows, index of part rows); None where they are a range."""
    rows, part_rows = segment.rows, segment.part_rows
    num_rows = rows.shape[0] if isinstance(rows, Tensor) else rows.stop - rows.start
    return (
        num_rows,
        rows if isinstance(rows, Tensor) else None,
        part_rows if isinstance(part_rows, Tensor) else None,
    )


def _from(rows: Tensor, first: Rows) -> Tensor:
    """The rows from the first of a range on; all of them for an index, whose values are places in them."""
    return rows[first.start :] if isinstance(first, slice) else rows


def _strides(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[int, ...]:
    """Row and head strides of query, keys and values; all the keys have those of the first, so have the values."""
    key, value = (keys[0], values[0]) if keys else (query, query)
    return (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])


def merge_forward(
    segment: Segment,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
    merged: Tensor,
    merged_lse: Tensor,
) -> None:
    """Write the segment's rows of merged [A, H, Dh] and merged_lse [H, A]. `diagonal_merge.merge` has the shapes."""
    num_rows, row_index, part_index = _indices(segment)
    first = segment.rows
    parts = [_from(part, segment.part_rows) for part in segment.parts]
    query, merged = _from(query, first), _from(merged, first)
    keys, values = [_from(rows, first) for rows in keys], [_from(rows, first) for rows in values]
    lse_of_rows = merged_lse[:, first.start :] if isinstance(first, slice) else merged_lse
    num_groups = keys[0].shape[1] if keys else query.shape[1]
    blocks = _blocks(query, num_groups)
    with torch.cuda.device_of(query):
        _merge_forward_kernel[(triton.cdiv(num_rows, blocks["BLOCK_ROWS"]) * num_groups,)](
            query, tuple(keys) or (query,), tuple(values) or (query,), row_index, part_index,
            parts[0], parts[-1], segment.lses[0], segment.lses[-1], merged, lse_of_rows,
            scale, num_rows, *_strides(query, keys, values),
            segment.lses[0].stride(0), segment.lses[-1].stride(0), merged_lse.stride(0),
            **blocks, NUM_STEPS=len(keys), NUM_PARTS=len(parts),
            ROW_INDEXED=row_index is not None, PART_INDEXED=part_index is not None,
        )  # fmt: skip


def merge_backward(
    segment: Segment,
    grad_out: Tensor,
    query: Tensor,
    merged: Tensor,
    merged_lse: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
    grad_query: Tensor,
    grad_keys: Sequence[Tensor],
    grad_values: Sequence[Tensor],
    *,
    base_lse: Tensor | None = None,
    grad_base: Tensor | None = None,
    grad_base_lse: Tensor | None = None,
) -> None:
    """Write the segment's rows of the gradients. The segment's parts are the base block's dq.

    With base_lse, grad_base and grad_base_lse (all three) its one part is the base block's output: their gradients are
    written, and grad_query is the diagonal blocks' only.
    """
    num_rows, row_index, part_index = _indices(segment)
    first = segment.rows
    parts = [_from(part, segment.part_rows) for part in segment.parts]
    lse_of_rows = merged_lse[:, first.start :] if isinstance(first, slice) else merged_lse
    grad_out, query, merged, grad_query = (_from(rows, first) for rows in (grad_out, query, merged, grad_query))
    keys, values, grad_keys, grad_values = (
        [_from(rows, first) for rows in group] for group in (keys, values, grad_keys, grad_values)
    )
    num_groups = keys[0].shape[1] if keys else query.shape[1]
    blocks = _blocks(query, num_groups)
    with torch.cuda.device_of(query):
        _merge_backward_kernel[(triton.cdiv(num_rows, blocks["BLOCK_ROWS"]) * num_groups,)](
            query, tuple(keys) or (query,), tuple(values) or (query,), tuple(grad_keys) or (query,),
            tuple(grad_values) or (query,), row_index, part_index, parts[0], parts[-1], grad_out, merged, lse_of_rows,
            grad_query, base_lse, grad_base, grad_base_lse,
            scale, num_rows, *_strides(query, keys, values), merged_lse.stride(0),
            base_lse.stride(0) if base_lse is not None else 0,
            **blocks, NUM_STEPS=len(keys), NUM_PARTS=len(parts),
            ROW_INDEXED=row_index is not None, PART_INDEXED=part_index is not None,
            BASE_GRADIENT=base_lse is not None,
        )  # fmt: skip
