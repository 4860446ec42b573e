"""Which rows go through which product of `linear_soft_target_loss`: all of it decided on the host.

    target rows used       0 1 2 3 | 4 5 6 7 | 8 9         chunks of 4
    rows of step 0         a b c d | e f g h | i           each under its target row
    rows of step 1             k l | m n o p | q r
    the buffer of a chunk  [a b c d k l] [e f g h m n o p] [i q r]: one product each

A trainer knows its rows on the host, from the masks, before any forward; then one small copy goes to the device, and
nothing waits for it. (Indices on the device cost one wait.) The work is proportional to the *pieces*: ranges of rows
whose targets are a range too, cut where a chunk ends. A batch has a few a turn and step, not one a row; the vectors
over all rows are made on the device.

In numpy, because the device idles meanwhile: on short arrays it takes a fifth of torch's time, and starts no threads.
"""

# mypy: allow-untyped-calls
# (Tensor.split has no annotations)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Rows = slice | Tensor
"""Rows of a tensor: a range, or int64 indices on its device."""
Ints = npt.NDArray[np.int64]
# Rows in so many ranges are written range by range: a launch each, of 10 us.
_MOST_RANGES = 2


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
class RowVectors:
    """n rows in the order of the chunks, and within a chunk of the steps; on the device."""

    place: Tensor
    """int64 [n]: of each row in the order of the steps, its place in the order of the chunks."""
    target_row: Tensor
    """int64 [n]: rows within the chunk's target rows."""
    step: Tensor
    """int64 [n]."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All chunks, and what the vectors over their rows are made from."""

    chunks: tuple[Chunk, ...]
    other_rows: tuple[tuple[Rows, ...], ...]
    """K: the rows of hidden[k] that do not count at step k: a range or two, or indices."""
    chunk_rows: int
    """Target rows of a chunk at most."""
    num_rows: int
    """n."""
    tables: tuple[Ints, ...]
    """Of the pieces: shift and size by step; first target row, step and size by chunk."""

    def row_vectors(self, device: torch.device) -> RowVectors:
        """Made from the tables, without waiting for the device."""
        shift, size_by_step, target_row, step, size = _upload(self.tables, device)

        def over_rows(values: Tensor, sizes: Tensor) -> Tensor:
            return torch.repeat_interleave(values, sizes, output_size=self.num_rows)

        count = torch.arange(self.num_rows, device=device)
        return RowVectors(
            place=count + over_rows(shift, size_by_step),
            target_row=count + over_rows(target_row, size),
            step=over_rows(step, size),
        )


@dataclass(frozen=True, slots=True)
class Pieces:
    """Ranges of rows whose target rows are ranges too, step after step; int64 [P]."""

    step: Ints
    row: Ints
    """First row."""
    target: Ints
    """First target row."""
    size: Ints
    """Rows, at least 1."""

    def where(self, chosen: slice | Ints) -> Pieces:
        """Some of them."""
        return Pieces(self.step[chosen], self.row[chosen], self.target[chosen], self.size[chosen])


def find_pieces(rows: Sequence[Tensor], target_rows: Sequence[Tensor], num_states: int, num_targets: int) -> Pieces:
    """K pairs of int64 tensors [n_k], on one device. ValueError if an index is out of range, or rows do not ascend."""
    if rows[0].device.type != "cpu":
        flat = torch.cat([*rows, *target_rows]).cpu().split([index.shape[0] for index in (*rows, *target_rows)])
        rows, target_rows = flat[: len(rows)], flat[len(rows) :]
    parts: list[list[Ints]] = [[], [], [], []]
    for step, (own, its) in enumerate(zip(rows, target_rows, strict=True)):
        own_rows, targets = own.numpy(), its.numpy()
        if not own_rows.size:
            continue
        breaks = (own_rows[1:] - own_rows[:-1] != 1) | (targets[1:] - targets[:-1] != 1)
        start = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        size = np.diff(start, append=own_rows.size)
        found = (np.full_like(start, step), own_rows[start], targets[start], size)
        for values, more in zip(parts, found, strict=True):
            values.append(more)
    if not parts[0]:
        none = np.empty(0, dtype=np.int64)
        return Pieces(none, none, none, none)
    pieces = Pieces(*map(np.concatenate, parts))
    for name, first, end in (("rows", pieces.row, num_states), ("target_rows", pieces.target, num_targets)):
        smallest, largest = int(first.min()), int((first + pieces.size - 1).max())
        if smallest < 0 or largest >= end:
            raise ValueError(f"{name} contains {smallest if smallest < 0 else largest}: use 0 .. {end - 1}")
    after = pieces.row + pieces.size
    if ((pieces.row[1:] < after[:-1]) & (pieces.step[1:] == pieces.step[:-1])).any():
        raise ValueError("rows must be strictly ascending within each step: a row may count once")
    return pieces


def used_targets(pieces: Pieces, num_targets: int) -> npt.NDArray[np.bool_]:
    """bool [num_targets]: the target rows that are named."""
    edges = np.zeros(num_targets + 1, dtype=np.int64)
    np.add.at(edges, pieces.target, 1)
    np.add.at(edges, pieces.target + pieces.size, -1)
    is_used: npt.NDArray[np.bool_] = edges.cumsum()[:-1] > 0
    return is_used


def make_plan(
    pieces: Pieces,
    is_used: npt.NDArray[np.bool_],
    *,
    num_steps: int,
    num_states: int,
    chunk_rows: int,
    device: torch.device,
) -> Plan:
    """Put the pieces into chunks of chunk_rows used target rows. num_states: A, the rows of a step's hidden states."""
    used = np.flatnonzero(is_used)
    num_chunks = -(-used.size // chunk_rows)
    cut, target = _cut(pieces, is_used.cumsum() - 1, chunk_rows)
    # The order of the steps is that of `cut`; the order of the chunks sorts its pieces, which keep their order within.
    group = target // chunk_rows * num_steps + cut.step
    order = group.argsort(kind="stable")
    moved = cut.where(order)
    start_by_chunk = moved.size.cumsum() - moved.size
    shift = np.empty_like(start_by_chunk)
    shift[order] = start_by_chunk
    shift -= cut.size.cumsum() - cut.size

    of_group = [0, *np.bincount(group, minlength=num_chunks * num_steps).cumsum().tolist()]
    begin, row, size = start_by_chunk.tolist(), moved.row.tolist(), moved.size.tolist()
    lists: list[Ints] = []  # what is no range: uploaded together
    found: list[tuple[int, list[int], list[slice | int], slice | int]] = []  # an int: a place in lists
    for chunk in range(num_chunks):
        bounds, of_steps = [0], list[slice | int]()
        for first, last in pairwise(of_group[chunk * num_steps : (chunk + 1) * num_steps + 1]):
            bounds.append(bounds[-1] + sum(size[first:last]))
            if last - first > 1:
                of_steps.append(len(lists))
                lists.append(_rows_of(moved.where(slice(first, last))))
            else:
                of_steps.append(slice(row[first], row[first] + size[first]) if first < last else slice(0, 0))
        of_used = used[chunk * chunk_rows : (chunk + 1) * chunk_rows]
        if of_used[-1] - of_used[0] == of_used.size - 1:
            targets: slice | int = slice(int(of_used[0]), int(of_used[-1]) + 1)
        else:
            targets = len(lists)
            lists.append(of_used)
        found.append((begin[of_group[chunk * num_steps]], bounds, of_steps, targets))
    others: list[list[slice | int]] = []
    for gaps in _other_rows(pieces, num_steps, num_states):
        if len(gaps) <= _MOST_RANGES:
            others.append(list(gaps))
        else:
            others.append([len(lists)])
            lists.append(np.concatenate([np.arange(gap.start, gap.stop) for gap in gaps]))
    gathered = _upload(lists, device) if lists else []

    def placed(rows: slice | int) -> Rows:
        return gathered[rows] if isinstance(rows, int) else rows

    return Plan(
        chunks=tuple(
            Chunk(start, tuple(bounds), tuple(map(placed, of_steps)), placed(targets))
            for start, bounds, of_steps, targets in found
        ),
        other_rows=tuple(tuple(map(placed, parts)) for parts in others),
        chunk_rows=chunk_rows,
        num_rows=sum(size),
        tables=(shift, cut.size, target[order] % chunk_rows - start_by_chunk, moved.step, moved.size),
    )


def _cut(pieces: Pieces, number: Ints, chunk_rows: int) -> tuple[Pieces, Ints]:
    """The pieces cut where a chunk ends, and the number of each one's first target among those in use."""
    first = number[pieces.target]
    first_chunk = first // chunk_rows
    parts = (first + pieces.size - 1) // chunk_rows - first_chunk + 1
    piece = np.repeat(np.arange(parts.size), parts)
    part = np.arange(piece.size) - np.repeat(parts.cumsum() - parts, parts)
    edge = (first_chunk[piece] + part) * chunk_rows
    begin = np.maximum(edge, first[piece])
    size = np.minimum(edge + chunk_rows, (first + pieces.size)[piece]) - begin
    skipped = begin - first[piece]
    cut = Pieces(pieces.step[piece], pieces.row[piece] + skipped, pieces.target[piece] + skipped, size)
    return cut, begin


def _rows_of(pieces: Pieces) -> Ints:
    start = pieces.size.cumsum() - pieces.size
    return np.arange(int(pieces.size.sum())) + np.repeat(pieces.row - start, pieces.size)


def _other_rows(pieces: Pieces, num_steps: int, num_states: int) -> list[list[slice]]:
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
    return gaps


def _upload(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Arrays on the device, in one copy that the host does not wait for."""
    flat = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        flat = flat.pin_memory()
    return list(flat.to(device, non_blocking=True).split([array.size for array in arrays]))
