"""Who this process is among the ranks of a run, and the few things that ranks do together.

A rank is one process with one device; torchrun starts them (tasks/trainer/ranks.py). Ranks that share a pack along its
tokens are a *context group*; the groups are what data parallelism counts:

    rank           0  1 | 2  3 | 4  5          6 ranks, context_size 2
    data_rank      0  0 | 1  1 | 2  2          each context group trains packs of its own
    context_rank   0  1 | 0  1 | 0  1          and its ranks own rows of them

Talk between ranks goes two ways. Tensors on the device go by NCCL (gloo on a CPU). What the host must agree on (rows
to come, sums, whether somebody was told to stop) goes by gloo, each time after a barrier that knows who is missing:
that costs about a millisecond a step, and a rank that died or hangs is named within `patience` instead of waited for in
silence. One rank alone has no process group, and everything here does nothing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.trainer.errors import InputError

# How long the start may take: other ranks may still download the target.
START_PATIENCE = timedelta(minutes=30)
# The first rank names who is missing, so it must be the first to give up.
_AFTER_FIRST = timedelta(seconds=5)


class RankLost(RuntimeError):
    """Another rank ended; the message says which. The cause is in that rank's own words, if it had any."""


class RankHung(RankLost):
    """Another rank did not come in time, though it had not ended."""


# What rank 0's barrier says of the ranks that did not come.
_MISSING = re.compile(r"Ranks? ([\d, ]+) failed")


@dataclass(frozen=True, slots=True)
class Layout:
    """This process among the ranks."""

    rank: int = 0
    """Of world_size; rank 0 alone writes the run's files."""
    world_size: int = 1
    """Ranks of all machines."""
    local_rank: int = 0
    """Among those of this machine."""
    device: str = "cpu"
    """"cpu" or "cuda": a rank sees one GPU only."""
    data_rank: int = 0
    """Which packs this rank trains; equal within a context group."""
    data_size: int = 1
    """Context groups."""
    context_rank: int = 0
    """Which rows of its packs this rank owns."""
    context_size: int = 1
    """Ranks of a context group."""
    context_group: dist.ProcessGroup | None = None
    """This rank's context group; None when it is alone there."""
    host_group: dist.ProcessGroup | None = None
    """All ranks by gloo, for tensors on the CPU; None for one rank."""
    patient_group: dist.ProcessGroup | None = None
    """The same, where ranks may wait for minutes."""
    device_group: dist.ProcessGroup | None = None
    """All ranks, for tensors on the device; None for the default group."""
    patience: timedelta = timedelta(seconds=30)
    """How long a rank waits for the others."""
    neighbours: Mapping[int, int] = field(default_factory=dict)
    """Process ids of this machine's ranks."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what the run leaves."""
        return self.rank == 0


def split_ranks(world_size: int, rank: int, context_size: int) -> tuple[int, int, int]:
    """(data_rank, data_size, context_rank) of a rank. Raises InputError when the ranks are no whole context groups."""
    if world_size % context_size:
        raise InputError(
            f"train.context_parallel={context_size} does not divide the {world_size} ranks of this run; start a "
            "multiple of it (train.nproc, train.nnodes)"
        )
    return rank // context_size, world_size // context_size, rank % context_size


@contextmanager
def joined(*, device: str, context_size: int = 1, patience_s: float = 30.0) -> Iterator[Layout]:
    """Join the ranks that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT in the environment);
    one rank alone joins nobody.

    device: "cuda" makes the visible GPU of this process ready for NCCL. Raises InputError for a context_size that does
    not divide the ranks, RankLost when the others do not come.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    data_rank, data_size, context_rank = split_ranks(world_size, rank, context_size)
    if world_size == 1:
        yield Layout(device=device)
        return
    patience = timedelta(seconds=patience_s)
    on_gpu = device == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=patience + timedelta(seconds=15),  # ranks meet before: only a device that hangs runs into this
    )
    host_group = dist.new_group(backend="gloo", timeout=patience + _AFTER_FIRST)
    patient_group = dist.new_group(backend="gloo", timeout=START_PATIENCE)
    context_group = None
    if context_size > 1:
        for first in range(0, world_size, context_size):
            members = list(range(first, first + context_size))
            group = dist.new_group(members, timeout=patience)  # every rank takes part in making each of them
            if rank in members:
                context_group = group
    layout = Layout(
        rank, world_size, local_rank, device, data_rank, data_size, context_rank, context_size,
        context_group, host_group, patient_group, patience=patience,
        neighbours=_neighbours(host_group, rank, local_rank),
    )  # fmt: skip
    meet(layout, "the start", patience=START_PATIENCE)
    yield layout
    dist.destroy_process_group()  # not after an error: it would wait for ranks that may be gone


def _neighbours(host_group: dist.ProcessGroup, rank: int, local_rank: int) -> dict[int, int]:
    pids = [torch.tensor([0]) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]), group=host_group)
    first = rank - local_rank
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {number: int(pids[number]) for number in range(first, first + num_local)}


def among_first(layout: Layout, count: int) -> Layout | None:
    """This rank among the first `count` alone, without context groups; None when it is not one of them. All ranks must
    come: for measuring fewer ranks than were started."""
    assert layout.context_size == 1
    members = list(range(count))
    host_group = dist.new_group(members, backend="gloo", timeout=layout.patience + _AFTER_FIRST)
    patient_group = dist.new_group(members, backend="gloo", timeout=START_PATIENCE)
    device_group = dist.new_group(members, timeout=layout.patience)
    if layout.rank >= count:
        return None
    if count == 1:
        return Layout(device=layout.device)
    return replace(
        layout,
        world_size=count,
        data_size=count,
        host_group=host_group,
        patient_group=patient_group,
        device_group=device_group,
    )


def meet(layout: Layout, what: str, *, patience: timedelta | None = None) -> None:
    """Wait until every rank is here. what: where that is, for the error. Raises RankLost or RankHung, which name who is
    not."""
    if layout.host_group is None:
        return
    # The first rank heeds the timeout and knows who is missing; the others heed their group's, a little longer, so that
    # the first can say so.
    group = layout.patient_group if patience else layout.host_group
    timeout = patience or layout.patience
    started = time.monotonic()
    try:
        dist.monitored_barrier(group, timeout=timeout, wait_all_ranks=True)
    except RuntimeError as error:
        waited = time.monotonic() - started
        missing = [int(rank) for rank in re.findall(r"\d+", "".join(_MISSING.findall(str(error))))] or [0]
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        if waited < 0.9 * timeout.total_seconds():
            raise RankLost(f"{names} ended before {what}") from None
        _end_hung(layout, missing)
        raise RankHung(
            f"{names} did not come to {what} within {waited:.0f} s: hung, or slower than train.rank_timeout allows"
        ) from None


def _end_hung(layout: Layout, ranks: Sequence[int]) -> None:
    """Kill the ranks of this machine that hang. They may heed no SIGTERM, and torchrun would wait half a minute."""
    for rank in ranks:
        if rank in layout.neighbours and rank != layout.rank:
            with suppress(ProcessLookupError):
                os.kill(layout.neighbours[rank], signal.SIGKILL)


@contextmanager
def _together(what: str) -> Iterator[None]:
    """A collective right after `meet`: what fails in it is that another rank ended."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank ended during {what}: {str(error).splitlines()[0]}") from None


def sum_on_host(layout: Layout, values: Tensor, what: str, *, patience: timedelta | None = None) -> Tensor:
    """The sum of every rank's values, a tensor on the CPU; exact for integers. Raises RankLost as `meet`."""
    assert values.device.type == "cpu"
    if layout.host_group is None:
        return values
    meet(layout, what, patience=patience)
    total = values.clone()
    with _together(what):
        dist.all_reduce(total, group=layout.host_group)
    return total


def from_first(layout: Layout, value: Any, what: str) -> Any:
    """Rank 0's value on every rank; plain JSON, so that nothing is unpickled. Others give anything."""
    return from_rank(layout, value, 0, what, patience=START_PATIENCE)


def from_rank(layout: Layout, value: Any, rank: int, what: str, *, patience: timedelta | None = None) -> Any:
    """One rank's value on every rank, as from_first."""
    if layout.host_group is None:
        return value
    meet(layout, what, patience=patience)
    text = json.dumps(value).encode() if layout.rank == rank else b""
    size = torch.tensor([len(text)])
    with _together(what):
        dist.broadcast(size, rank, group=layout.host_group)
        content = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8)
        dist.broadcast(content, rank, group=layout.host_group)
    return json.loads(content.numpy().tobytes())


def tensors_from_first(layout: Layout, tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """Rank 0's tensors by name on every rank, on the CPU. Others give anything."""
    if layout.host_group is None:
        return dict(tensors)
    shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    received = {}
    for name, (dtype, shape) in from_first(layout, shapes, what).items():
        if layout.is_first:
            tensor = tensors[name].detach().cpu().contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        # As bytes: gloo knows neither bool nor bfloat16.
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, group=layout.host_group)
        received[name] = tensor
    return received


@contextmanager
def first_on_machine(layout: Layout) -> Iterator[None]:
    """The block runs on one rank of each machine first, then on its others: the first one downloads a model and reads
    it from disk, the others find it in the page cache."""
    if layout.local_rank:
        meet(layout, "the target's files", patience=START_PATIENCE)
    yield
    if not layout.local_rank:
        meet(layout, "the target's files", patience=START_PATIENCE)


def sum_gradients(layout: Layout, gradients: list[Tensor]) -> None:
    """Add every rank's gradients, in place, in their own float32: once an optimizer step."""
    if layout.host_group is None:
        return
    meet(layout, "the gradients")
    with _together("the gradients"):
        for gradient in gradients:
            dist.all_reduce(gradient, group=layout.device_group)
