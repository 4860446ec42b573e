"""Which rows go through which product of `linear_soft_target_loss`: all of it decided on the host.

    target rows used       0 1 2 3 | 4 5 6 7 | 8 9         chunks of 4
    rows of step 0         a b c d | e f g h | i           each under its target row
    rows of step 1             k l | m n o p | q r
    the buffer of a chunk  [a b c d k l] [e f g h m n o p] [i q r]: one product each

A trainer knows its rows on the host, from the masks, before any forward; then the device is given two small copies and
nothing waits for it. Indices on the device cost one wait. Made of vector operations over all rows: a loop over chunks
and steps would take longer than the products of a short batch.
"""

# mypy: allow-untyped-calls
# (Tensor.split has no annotations)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = slice | Tensor
"""Rows of a tensor: a range, or int64 indices on its device."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One product."""

    start: int
    """Its first row among all n."""
    bounds: tuple[int, ...]
    """[K + 1]: where the rows of each step start within the product, and the last step's end."""
    rows: tuple[Rows, ...]
    """K: the rows of hidden[k], in the product's order."""
    targets: Rows
    """The target rows in use, ascending."""

    @property
    def num_rows(self) -> int:
        """Rows of the product."""
        return self.bounds[-1]


@dataclass(frozen=True, slots=True)
class Plan:
    """n rows in the order of the chunks, and within a chunk of the steps."""

    place: Tensor
    """int64 [n]: of each row in the order of the steps, its place in the order of the chunks."""
    target_row: Tensor
    """int64 [n]: rows within the chunk's target rows."""
    weight: Tensor
    """float32 (float64 for float64 hidden states) [n]."""
    step: Tensor | None
    """int64 [n], only where asked for."""
    chunks: tuple[Chunk, ...]
    other_rows: tuple[tuple[Rows, ...], ...]
    """K: the rows of hidden[k] that do not count at step k."""
    chunk_rows: int
    """Target rows of a chunk at most."""


def to_host(*groups: Sequence[Tensor]) -> list[list[Tensor]]:
    """Index tensors on the CPU; those of a device in one copy."""
    flat = [index for group in groups for index in group]
    if flat and flat[0].device.type != "cpu":
        flat = list(torch.cat(flat).cpu().split([index.shape[0] for index in flat]))
    moved = iter(flat)
    return [[next(moved) for _ in group] for group in groups]


def used_targets(target_rows: Sequence[Tensor], num_targets: int) -> Tensor:
    """bool [num_targets]: the target rows that are named; indices in range, on the host."""
    is_used = torch.zeros(num_targets, dtype=torch.bool)
    for index in target_rows:
        is_used[index] = True
    return is_used


def make_plan(
    rows: Sequence[Tensor],
    target_rows: Sequence[Tensor],
    is_used: Tensor,
    *,
    num_states: int,
    row_weight: Sequence[float],
    weight_dtype: torch.dtype,
    with_steps: bool,
    chunk_rows: int,
    device: torch.device,
) -> Plan:
    """Put the rows of all K steps into chunks of chunk_rows used target rows.

    rows, target_rows: K int64 tensors [n_k] on the host, rows strictly ascending in each. is_used: `used_targets`.
    num_states: A, the rows of each step's hidden states.
    """
    counts = torch.tensor([index.shape[0] for index in rows])
    num_steps = counts.shape[0]
    of_step = torch.repeat_interleave(torch.arange(num_steps), counts)
    all_rows, all_targets = torch.cat(list(rows)), torch.cat(list(target_rows))
    used = is_used.nonzero().flatten()
    num_chunks = -(-used.shape[0] // chunk_rows)
    target_place = (is_used.cumsum(0) - 1)[all_targets]
    chunk = torch.div(target_place, chunk_rows, rounding_mode="floor")

    # Rows of a (chunk, step) stay in the order that they have in the step: a stable counting sort by chunk and step.
    group = chunk * num_steps + of_step
    sizes = torch.bincount(group, minlength=num_chunks * num_steps)
    starts = sizes.cumsum(0) - sizes
    order = _stable_order(group, of_step, chunk)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0])

    row = all_rows[order]
    is_range = _are_ranges(row, starts, sizes)
    chunks_of_used = [used[i : i + chunk_rows] for i in range(0, used.shape[0], chunk_rows)]
    others = [_others(index, num_states) for index in rows]
    indices = [place, target_place[order] % chunk_rows]
    indices += [of_step[order]] if with_steps else []
    indices += [row] if not all(is_range) else []
    lists = [index for index in (*chunks_of_used, *(part for parts in others for part in parts)) if not _is_run(index)]
    moved = _upload([*indices, *lists], device)
    row_on_device = moved[len(indices) - 1] if not all(is_range) else None
    moved_lists = iter(moved[len(indices) :])

    def placed(index: Tensor) -> Rows:
        return _range(index) if _is_run(index) else next(moved_lists)

    targets = [placed(index) for index in chunks_of_used]
    other_rows = tuple(tuple(placed(part) for part in parts) for parts in others)
    begin, size, first = starts.tolist(), sizes.tolist(), row[starts.clamp(max=max(row.shape[0] - 1, 0))].tolist()
    chunks = []
    for number in range(num_chunks):
        start = begin[number * num_steps]
        bounds, of_steps = [0], list[Rows]()
        for index in range(number * num_steps, (number + 1) * num_steps):
            bounds.append(bounds[-1] + size[index])
            if is_range[index]:
                of_steps.append(slice(first[index], first[index] + size[index]))
            else:
                assert row_on_device is not None
                of_steps.append(row_on_device[begin[index] : begin[index] + size[index]])
        chunks.append(Chunk(start, tuple(bounds), tuple(of_steps), targets[number]))
    weight = torch.tensor(list(row_weight), dtype=weight_dtype)[of_step[order]]
    return Plan(
        place=moved[0],
        target_row=moved[1],
        weight=_upload([weight], device)[0],
        step=moved[2] if with_steps else None,
        chunks=tuple(chunks),
        other_rows=other_rows,
        chunk_rows=chunk_rows,
    )


def _stable_order(group: Tensor, of_step: Tensor, chunk: Tensor) -> Tensor:
    """argsort(group, stable); a trainer's targets ascend in each step, so that no sort is needed there."""
    same_step = of_step[1:] == of_step[:-1]
    if bool(((chunk[1:] < chunk[:-1]) & same_step).any()):
        return group.argsort(stable=True)
    # Each (step, chunk) is one range of the step order: move the ranges.
    edge = torch.ones(group.shape[0], dtype=torch.bool)
    edge[1:] = group[1:] != group[:-1]
    range_start = edge.nonzero().flatten()
    length = torch.diff(range_start, append=torch.tensor([group.shape[0]]))
    by_group = group[range_start].argsort()
    range_start, length = range_start[by_group], length[by_group]
    shift = range_start - (length.cumsum(0) - length)
    return torch.arange(group.shape[0]) + torch.repeat_interleave(shift, length)


def _are_ranges(row: Tensor, starts: Tensor, sizes: Tensor) -> list[bool]:
    """Whether the ascending rows of each group are consecutive numbers; empty ones are."""
    if not row.shape[0]:
        return [True] * starts.shape[0]
    last = (starts + sizes - 1).clamp(min=0)
    whole = row[last] - row[starts.clamp(max=row.shape[0] - 1)] == sizes - 1
    result: list[bool] = (whole | (sizes == 0)).tolist()
    return result


def _others(rows: Tensor, num_states: int) -> list[Tensor]:
    """What is missing in ascending rows of 0 .. num_states - 1: up to two ranges, or all in one."""
    if not rows.shape[0]:
        return [torch.arange(num_states)] if num_states else []
    if _is_run(rows):
        parts = [torch.arange(int(rows[0])), torch.arange(int(rows[-1]) + 1, num_states)]
    else:
        missing = torch.ones(num_states, dtype=torch.bool)
        missing[rows] = False
        parts = [missing.nonzero().flatten()]
    return [part for part in parts if part.shape[0]]


def _is_run(index: Tensor) -> bool:
    return index.shape[0] > 0 and int(index[-1]) - int(index[0]) == index.shape[0] - 1


def _range(index: Tensor) -> slice:
    return slice(int(index[0]), int(index[-1]) + 1)


def _upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one dtype on the device, in one copy that the host does not wait for."""
    if device.type == "cpu":
        return list(tensors)
    flat = torch.cat(list(tensors))
    if device.type == "cuda":
        flat = flat.pin_memory()
    return list(flat.to(device, non_blocking=True).split([tensor.shape[0] for tensor in tensors]))
