"""Which rows go through which product of `linear_soft_target_loss`: all of it decided on the host.

    target rows used       0 1 2 3 | 4 5 6 7 | 8 9         chunks of 4
    rows of step 0         a b c d | e f g h | i           each under its target row
    rows of step 1             k l | m n o p | q r
    the buffer of a chunk  [a b c d k l] [e f g h m n o p] [i q r]: one product each

A trainer knows its rows on the host, from the masks, before any forward; then one small copy goes to the device, and
nothing waits for it. (Indices on the device cost one wait.) The work is proportional to the *pieces*: ranges of rows
whose targets are a range too, cut where a chunk ends. A batch has a few a turn and step, not one a row; the vectors
over all rows are made on the device.
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
    step: Tensor
    """int64 [n]."""
    chunks: tuple[Chunk, ...]
    other_rows: tuple[tuple[Rows, ...], ...]
    """K: the rows of hidden[k] that do not count at step k."""
    chunk_rows: int
    """Target rows of a chunk at most."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Ranges of rows whose target rows are ranges too, step after step; int64 [P] on the host."""

    step: Tensor
    row: Tensor
    """First row."""
    target: Tensor
    """First target row."""
    size: Tensor
    """Rows, at least 1."""

    def where(self, chosen: Rows) -> Pieces:
        """Some of them."""
        return Pieces(self.step[chosen], self.row[chosen], self.target[chosen], self.size[chosen])


def find_pieces(rows: Sequence[Tensor], target_rows: Sequence[Tensor], num_states: int, num_targets: int) -> Pieces:
    """K pairs of int64 tensors [n_k], on one device. ValueError if an index is out of range, or rows do not ascend."""
    if rows[0].device.type != "cpu":
        flat = torch.cat([*rows, *target_rows]).cpu().split([index.shape[0] for index in (*rows, *target_rows)])
        rows, target_rows = flat[: len(rows)], flat[len(rows) :]
    found = []
    for step, (own, its) in enumerate(zip(rows, target_rows, strict=True)):
        count = own.shape[0]
        if not count:
            continue
        steady = (own[1:] - own[:-1] == 1) & (its[1:] - its[:-1] == 1)
        start = torch.cat([torch.zeros(1, dtype=torch.int64), (~steady).nonzero().flatten() + 1])
        size = torch.diff(start, append=torch.tensor([count]))
        found.append(Pieces(torch.full_like(start, step), own[start], its[start], size))
    if not found:
        none = torch.empty(0, dtype=torch.int64)
        return Pieces(none, none, none, none)
    pieces = Pieces(*(torch.cat([getattr(part, name) for part in found]) for name in ("step", "row", "target", "size")))
    for name, first, end in (("rows", pieces.row, num_states), ("target_rows", pieces.target, num_targets)):
        smallest, largest = int(first.min()), int((first + pieces.size - 1).max())
        if smallest < 0 or largest >= end:
            raise ValueError(f"{name} contains {smallest if smallest < 0 else largest}: use 0 .. {end - 1}")
    after = pieces.row + pieces.size
    if bool(((pieces.row[1:] < after[:-1]) & (pieces.step[1:] == pieces.step[:-1])).any()):
        raise ValueError("rows must be strictly ascending within each step: a row may count once")
    return pieces


def used_targets(pieces: Pieces, num_targets: int) -> Tensor:
    """bool [num_targets]: the target rows that are named, on the host."""
    edges = torch.zeros(num_targets + 1, dtype=torch.int64)
    edges.index_add_(0, pieces.target, torch.ones_like(pieces.target))
    edges.index_add_(0, pieces.target + pieces.size, -torch.ones_like(pieces.target))
    return edges.cumsum(0)[:-1] > 0


def make_plan(
    pieces: Pieces, is_used: Tensor, *, num_steps: int, num_states: int, chunk_rows: int, device: torch.device
) -> Plan:
    """Put the pieces into chunks of chunk_rows used target rows. num_states: A, the rows of a step's hidden states."""
    used = is_used.nonzero().flatten()
    num_chunks = -(-used.shape[0] // chunk_rows)
    number = is_used.cumsum(0) - 1 if pieces.size.shape[0] else is_used.to(torch.int64)
    cut, target_place = _cut(pieces, number, chunk_rows)
    # The order of the steps is that of `cut`; the order of the chunks sorts its pieces, which keep their order within.
    group = torch.div(target_place, chunk_rows, rounding_mode="floor") * num_steps + cut.step
    order = group.argsort(stable=True)
    moved = cut.where(order)
    start_by_chunk = moved.size.cumsum(0) - moved.size
    start_by_step = cut.size.cumsum(0) - cut.size
    shift = torch.empty_like(start_by_chunk)
    shift[order] = start_by_chunk
    shift -= start_by_step
    first_target = target_place[order] % chunk_rows - start_by_chunk

    of_group = [0, *torch.bincount(group, minlength=num_chunks * num_steps).cumsum(0).tolist()]
    begin, row, size = start_by_chunk.tolist(), moved.row.tolist(), moved.size.tolist()
    num_rows = int(cut.size.sum())
    lists: list[Tensor] = []  # what is no range, to be gathered: uploaded with the tables
    chunks = []
    for chunk in range(num_chunks):
        bounds, of_steps = [0], list[Rows | int]()
        for step in range(num_steps):
            first, last = of_group[chunk * num_steps + step], of_group[chunk * num_steps + step + 1]
            bounds.append(bounds[-1] + sum(size[first:last]))
            if last - first > 1:
                lists.append(_rows_of(moved.where(slice(first, last))))
                of_steps.append(len(lists) - 1)
            else:
                of_steps.append(slice(row[first], row[first] + size[first]) if first < last else slice(0, 0))
        of_used = used[chunk * chunk_rows : (chunk + 1) * chunk_rows]
        targets: Rows | int | None = _range(of_used)
        if targets is None:
            lists.append(of_used)
            targets = len(lists) - 1
        chunks.append((begin[of_group[chunk * num_steps]], tuple(bounds), of_steps, targets))
    others = _other_rows(pieces, num_steps, num_states)
    tables = [shift, cut.size, first_target, moved.size, moved.step]
    shift, size_by_step, first_target, size_by_chunk, step_by_chunk, *gathered = _upload([*tables, *lists], device)

    def over_rows(values: Tensor, sizes: Tensor) -> Tensor:
        return torch.repeat_interleave(values, sizes, output_size=num_rows)

    def placed(rows: Rows | int) -> Rows:
        return gathered[rows] if isinstance(rows, int) else rows

    count = torch.arange(num_rows, device=device)
    return Plan(
        place=count + over_rows(shift, size_by_step),
        target_row=count + over_rows(first_target, size_by_chunk),
        step=over_rows(step_by_chunk, size_by_chunk),
        chunks=tuple(
            Chunk(start, bounds, tuple(map(placed, of_steps)), placed(targets))
            for start, bounds, of_steps, targets in chunks
        ),
        other_rows=others,
        chunk_rows=chunk_rows,
    )


def _cut(pieces: Pieces, number: Tensor, chunk_rows: int) -> tuple[Pieces, Tensor]:
    """The pieces cut where a chunk ends, and the number of each one's first target among those in use."""
    first = number[pieces.target]
    first_chunk = torch.div(first, chunk_rows, rounding_mode="floor")
    parts = torch.div(first + pieces.size - 1, chunk_rows, rounding_mode="floor") - first_chunk + 1
    piece = torch.repeat_interleave(torch.arange(parts.shape[0]), parts)
    part = torch.arange(piece.shape[0]) - torch.repeat_interleave(parts.cumsum(0) - parts, parts)
    edge = (first_chunk[piece] + part) * chunk_rows
    begin = torch.maximum(edge, first[piece])
    size = torch.minimum(edge + chunk_rows, (first + pieces.size)[piece]) - begin
    skipped = begin - first[piece]
    cut = Pieces(pieces.step[piece], pieces.row[piece] + skipped, pieces.target[piece] + skipped, size)
    return cut, begin


def _rows_of(pieces: Pieces) -> Tensor:
    start = pieces.size.cumsum(0) - pieces.size
    return torch.arange(int(pieces.size.sum())) + torch.repeat_interleave(pieces.row - start, pieces.size)


def _other_rows(pieces: Pieces, num_steps: int, num_states: int) -> tuple[tuple[slice, ...], ...]:
    """The gaps between each step's pieces, which ascend."""
    gaps = [list[slice]() for _ in range(num_steps)]
    reached = [0] * num_steps
    for step, row, size in zip(pieces.step.tolist(), pieces.row.tolist(), pieces.size.tolist(), strict=True):
        if row > reached[step]:
            gaps[step].append(slice(reached[step], row))
        reached[step] = row + size
    for of_step, end in zip(gaps, reached, strict=True):
        if end < num_states:
            of_step.append(slice(end, num_states))
    return tuple(map(tuple, gaps))


def _range(index: Tensor) -> slice | None:
    """Ascending indices as a range, if they are one."""
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first == index.shape[0] - 1 else None


def _upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one dtype on the device, in one copy that the host does not wait for."""
    if device.type == "cpu":
        return list(tensors)
    flat = torch.cat(list(tensors))
    if device.type == "cuda":
        flat = flat.pin_memory()
    return list(flat.to(device, non_blocking=True).split([tensor.shape[0] for tensor in tensors]))
