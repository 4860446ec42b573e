"""The diagonal merge as two kernels: a program is a few rows of one key/value head with all its query heads.

    forward    reads q, the parts' outputs and log-sum-exps, every step's key and value; writes merged output and lse
    backward   reads q, grad_out, merged output and lse, the parts' dq, keys and values; writes dq and each dk_j, dv_j

Each byte moves once; all arithmetic is float32, each result rounded once. Bounds at 16,384 rows, 32/8 heads of 128,
3 later steps, 4.27 TB/s: forward 0.14 ms, backward 0.25 ms. The key/value head is the fast index of the grid, so that
programs that run together read whole rows.

Row offsets are 64-bit: A * H * Dh passes 2^31 at 512K rows. This module imports triton; `diagonal_merge` imports it
only where it runs.
"""

# mypy: allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (triton has no annotations, and its kernels take pointers, which have no type here)
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_plan import Rows, Segment

# Elements of a program's query tile: 16 a thread in 4 warps, for two 16-byte loads of bf16; the backward holds about
# eight such tiles in registers.
_TILE = 2048
_ELEMENTS_PER_WARP = 512


@triton.jit
def _place(
    row_index_pointer, num_rows,
    NUM_GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, ROW_INDEXED: tl.constexpr,
):  # fmt: skip
    """(group, place in the segment, active row int64, whether there is one) of the program's rows."""
    program = tl.program_id(0)
    place = (program // NUM_GROUPS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = place < num_rows
    row = place.to(tl.int64)
    if ROW_INDEXED:
        row = tl.load(row_index_pointer + place, mask=inside, other=0)
    return program % NUM_GROUPS, place, row, inside


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
    BLOCK_ROWS: tl.constexpr, BLOCK_REPEATS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    NUM_STEPS: tl.constexpr, NUM_PARTS: tl.constexpr, ROW_INDEXED: tl.constexpr, PART_INDEXED: tl.constexpr,
):  # fmt: skip
    group, place, row, inside = _place(row_index_pointer, num_rows, NUM_GROUPS, BLOCK_ROWS, ROW_INDEXED)
    part_row = place.to(tl.int64)
    if PART_INDEXED:
        part_row = tl.load(part_index_pointer + place, mask=inside, other=0)
    repeat = tl.arange(0, BLOCK_REPEATS)
    head = group * NUM_REPEATS + repeat
    dim = tl.arange(0, BLOCK_DIM)
    key_mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    head_mask = inside[:, None] & (repeat < NUM_REPEATS)[None, :]
    mask = head_mask[:, :, None] & (dim < HEAD_DIM)[None, None, :]
    # The parts and the merged output are contiguous [.., H, Dh].
    head_offset = (head * HEAD_DIM)[None, :, None] + dim[None, None, :]
    row_size = NUM_GROUPS * NUM_REPEATS * HEAD_DIM

    part_offset = (part_row * row_size)[:, None, None] + head_offset
    merged = tl.load(part_0_pointer + part_offset, mask=mask, other=0.0).to(tl.float32)
    lse_offset = head.to(tl.int64)[None, :]
    largest = tl.load(lse_0_pointer + lse_offset * lse_0_stride + place[:, None], mask=head_mask, other=0.0)
    total = tl.full((BLOCK_ROWS, BLOCK_REPEATS), 1.0, tl.float32)
    # Online softmax from here: merged = sum_i exp(lse_i - largest) * out_i, total = sum_i exp(lse_i - largest).
    # Part 0 holds the row's own key, so its log-sum-exp is finite; part 1 may be -inf, where a row has none.
    if NUM_PARTS == 2:
        other = tl.load(part_1_pointer + part_offset, mask=mask, other=0.0).to(tl.float32)
        lse = tl.load(lse_1_pointer + lse_offset * lse_1_stride + place[:, None], mask=head_mask, other=0.0)
        larger = tl.maximum(largest, lse)
        old, new = tl.exp(largest - larger), tl.exp(lse - larger)
        merged = merged * old[:, :, None] + other * new[:, :, None]
        total = total * old + new
        largest = larger
    if NUM_STEPS > 0:
        query_offset = (row * query_row_stride)[:, None, None] + (head * query_head_stride)[None, :, None]
        q = tl.load(query_pointer + query_offset + dim[None, None, :], mask=mask, other=0.0).to(tl.float32)
        key_offset = (row * key_row_stride + group * key_head_stride)[:, None] + dim[None, :]
        value_offset = (row * value_row_stride + group * value_head_stride)[:, None] + dim[None, :]
        for step in tl.static_range(NUM_STEPS):
            key = tl.load(keys[step] + key_offset, mask=key_mask, other=0.0).to(tl.float32)
            value = tl.load(values[step] + value_offset, mask=key_mask, other=0.0).to(tl.float32)
            score = tl.sum(q * key[:, None, :], 2) * scale
            larger = tl.maximum(largest, score)
            old, new = tl.exp(largest - larger), tl.exp(score - larger)
            merged = merged * old[:, :, None] + value[:, None, :] * new[:, :, None]
            total = total * old + new
            largest = larger
    merged = merged / total[:, :, None]
    merged_offset = (row * row_size)[:, None, None] + head_offset
    tl.store(merged_pointer + merged_offset, merged.to(merged_pointer.dtype.element_ty), mask=mask)
    merged_lse_offset = lse_offset * merged_lse_stride + row[:, None]
    tl.store(merged_lse_pointer + merged_lse_offset, largest + tl.log(total), mask=head_mask)


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
    BLOCK_ROWS: tl.constexpr, BLOCK_REPEATS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    NUM_STEPS: tl.constexpr, NUM_PARTS: tl.constexpr, ROW_INDEXED: tl.constexpr, PART_INDEXED: tl.constexpr,
    BASE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """The parts are the base block's dq; with BASE_GRADIENT part 0 is its output, whose gradients are written."""
    group, place, row, inside = _place(row_index_pointer, num_rows, NUM_GROUPS, BLOCK_ROWS, ROW_INDEXED)
    part_row = place.to(tl.int64)
    if PART_INDEXED:
        part_row = tl.load(part_index_pointer + place, mask=inside, other=0)
    repeat = tl.arange(0, BLOCK_REPEATS)
    head = group * NUM_REPEATS + repeat
    dim = tl.arange(0, BLOCK_DIM)
    key_mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    head_mask = inside[:, None] & (repeat < NUM_REPEATS)[None, :]
    mask = head_mask[:, :, None] & (dim < HEAD_DIM)[None, None, :]
    head_offset = (head * HEAD_DIM)[None, :, None] + dim[None, None, :]
    row_size = NUM_GROUPS * NUM_REPEATS * HEAD_DIM

    offset = (row * row_size)[:, None, None] + head_offset
    part_offset = (part_row * row_size)[:, None, None] + head_offset
    part = tl.load(part_0_pointer + part_offset, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_pointer + offset, mask=mask, other=0.0).to(tl.float32)
    grad_query = tl.zeros((BLOCK_ROWS, BLOCK_REPEATS, BLOCK_DIM), tl.float32)
    if not BASE_GRADIENT:
        grad_query = part
        if NUM_PARTS == 2:
            grad_query += tl.load(part_1_pointer + part_offset, mask=mask, other=0.0).to(tl.float32)
    if NUM_STEPS > 0:
        merged = tl.load(merged_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        delta = tl.sum(grad * merged, 2)
        lse_offset = head.to(tl.int64)[None, :]
        lse = tl.load(lse_pointer + lse_offset * lse_stride + row[:, None], mask=head_mask, other=0.0)
        if BASE_GRADIENT:
            base_lse_offset = lse_offset * base_lse_stride + row[:, None]
            base_lse = tl.load(base_lse_pointer + base_lse_offset, mask=head_mask, other=0.0)
            share = tl.exp(base_lse - lse)
            grad_base = share[:, :, None] * grad
            grad_base_lse = share * (tl.sum(grad * part, 2) - delta)
            tl.store(grad_base_pointer + offset, grad_base.to(grad_base_pointer.dtype.element_ty), mask=mask)
            tl.store(grad_base_lse_pointer + base_lse_offset, grad_base_lse, mask=head_mask)
        query_offset = (row * query_row_stride)[:, None, None] + (head * query_head_stride)[None, :, None]
        q = tl.load(query_pointer + query_offset + dim[None, None, :], mask=mask, other=0.0).to(tl.float32)
        key_offset = (row * key_row_stride + group * key_head_stride)[:, None] + dim[None, :]
        value_offset = (row * value_row_stride + group * value_head_stride)[:, None] + dim[None, :]
        grad_key_offset = (row * (NUM_GROUPS * HEAD_DIM) + group * HEAD_DIM)[:, None] + dim[None, :]
        # A diagonal block's share is that of one more key: p = exp(score - lse), ds = p * (dp - delta).
        for step in tl.static_range(NUM_STEPS):
            key = tl.load(keys[step] + key_offset, mask=key_mask, other=0.0).to(tl.float32)
            value = tl.load(values[step] + value_offset, mask=key_mask, other=0.0).to(tl.float32)
            probability = tl.exp(tl.sum(q * key[:, None, :], 2) * scale - lse)
            grad_score = probability * (tl.sum(grad * value[:, None, :], 2) - delta) * scale
            grad_query += grad_score[:, :, None] * key[:, None, :]
            grad_key = tl.sum(grad_score[:, :, None] * q, 1)
            grad_value = tl.sum(probability[:, :, None] * grad, 1)
            grad_key_pointers = grad_keys[step] + grad_key_offset
            grad_value_pointers = grad_values[step] + grad_key_offset
            tl.store(grad_key_pointers, grad_key.to(grad_keys[step].dtype.element_ty), mask=key_mask)
            tl.store(grad_value_pointers, grad_value.to(grad_values[step].dtype.element_ty), mask=key_mask)
    tl.store(grad_query_pointer + offset, grad_query.to(grad_query_pointer.dtype.element_ty), mask=mask)


def _blocks(query: Tensor, num_groups: int) -> dict[str, int]:
    num_heads, head_dim = query.shape[1:]
    repeats = num_heads // num_groups
    block_repeats, block_dim = triton.next_power_of_2(repeats), triton.next_power_of_2(head_dim)
    block_rows = max(1, _TILE // (block_repeats * block_dim))
    tile = block_rows * block_repeats * block_dim
    return {
        "NUM_GROUPS": num_groups,
        "NUM_REPEATS": repeats,
        "HEAD_DIM": head_dim,
        "BLOCK_ROWS": block_rows,
        "BLOCK_REPEATS": block_repeats,
        "BLOCK_DIM": block_dim,
        # A power of two, as the tile is.
        "num_warps": max(1, min(16, tile // _ELEMENTS_PER_WARP)),
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
    num_groups = keys[0].shape[1] if keys else 1
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
    num_groups = keys[0].shape[1] if keys else 1
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
