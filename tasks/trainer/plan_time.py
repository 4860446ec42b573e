"""How long a step takes, predicted: products, attention pairs and bytes, divided by what the device does of each.

A device's rates are measured in a second on the device found, or come from the table of devices that were measured
(`DEVICES`, from recorded runs). A step that was never run is predicted within a quarter or so: that ranks the choices,
which is what it is for. Memory is predicted much closer (plan_memory.py).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from tasks.trainer.plan_memory import Choices, PackRows, Shape, num_parameters

# Of the rate of one large product: what a step's products reach, its attention (forward and backward), and a target's
# forward (H200, kernels/bench/results.csv).
_PRODUCTS, _ATTENTION, _TARGET = 0.85, 0.65, 0.6
# Of flex and of the dense reference, against fused attention (the same file).
_ATTENTION_SLOWDOWN = {"fused": 1.0, "flex": 2.0, "eager": 8.0}
# Every kept byte is written, read, and its gradient written and read, with what lies between.
_PASSES = 5
# Launches, small kernels and the host's own work, a pack.
_OVERHEAD_S = 0.02


@dataclass(frozen=True, slots=True)
class Device:
    """What a device can do."""

    name: str
    """Its name."""
    kind: str
    """cuda or cpu."""
    memory: int
    """Bytes that a run may use."""
    products: float
    """Floating point operations a second of a large matrix product in the training dtype."""
    copy: float
    """Bytes a second of a copy, read and written."""
    cores: int
    """Of its host, for reading a store."""
    count: int = 1
    """Devices of its kind in the machine."""
    measured: bool = True
    """Here and now, or taken from the table."""


DEVICES = {
    "h200": Device("NVIDIA H200 (table)", "cuda", 139 * 2**30, 790e12, 4.3e12, cores=16, measured=False),
}
"""Devices that were measured; their rates hold the step's recorded times within a fifth (a test)."""


def measure_device(kind: str, dtype: torch.dtype) -> Device:
    """The device found: its memory, and its rates on one product and one copy (about a second)."""
    cuda = kind == "cuda"
    size = 8192 if cuda else 768
    rate = 2.0 * size**3 / _seconds(lambda a, b: a @ b, size, dtype, kind)
    # Twice: what is read and what is written.
    copied = 2.0 * dtype.itemsize * size * size / _seconds(lambda a, b: b.copy_(a), size, dtype, kind)
    if cuda:
        free, _ = torch.cuda.mem_get_info()
        count = torch.cuda.device_count()
        return Device(torch.cuda.get_device_name(), kind, free, rate, copied, cores=_cores(), count=count)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("CPU", kind, memory, rate, copied, cores=_cores())


def _seconds(function: Any, size: int, dtype: torch.dtype, kind: str) -> float:
    """Of one call, the fastest of a few."""
    left, right = (torch.ones(size, size, dtype=dtype, device=kind) for _ in range(2))

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()

    best = float("inf")
    for _ in range(6):
        wait()
        started = time.perf_counter()
        function(left, right)
        wait()
        best = min(best, time.perf_counter() - started)
    return best


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def step_seconds(shape: Shape, pack: PackRows, choices: Choices, device: Device, *, kept: int) -> float:
    """Seconds of one pack: forward, backward, and its share of the update. kept: bytes of its activations."""
    size, columns, steps = shape.hidden_size, shape.vocab_size, choices.ttt_steps
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    mlp = 3 * size * shape.intermediate_size
    layer = size * (queries + 2 * keys) + queries * size + mlp
    # Multiplications: of an active row and TTT step, forward and two gradients; of every token, fc and its key and
    # value; the head of the rows that count, and the target's.
    rows = 3 * steps * shape.num_layers * layer * pack.active
    tokens = pack.tokens * (2 * 3 * size * size + 3 * 4 * size * keys)
    head = columns * size * (3 * pack.counted + pack.targets)
    again = {"none": 0, "mlp": mlp, "step": layer}[choices.checkpointing] * steps * shape.num_layers * pack.active
    products = 2 * (rows + tokens + head + again) / (_PRODUCTS * device.products)
    pairs = _pairs(pack) * steps * shape.num_layers * queries
    attention = (14 + (4 if choices.checkpointing == "step" else 0)) * pairs / (_ATTENTION * device.products)
    moved = _PASSES * kept + 28 * num_parameters(shape) / choices.grad_accumulation
    return products + attention * _ATTENTION_SLOWDOWN[choices.attention] + moved / device.copy + _OVERHEAD_S


def _pairs(pack: PackRows) -> float:
    """Pairs of a query and a key, if documents are alike and what is active ends them."""
    length, active = pack.tokens / pack.documents, pack.active / pack.documents
    return pack.documents * active * (length - active / 2)


def target_seconds(
    config: Any, pack: PackRows, device: Device, *, active_parameters: int, soft_targets: bool = True
) -> float:
    """Seconds of the target's forward on one pack. active_parameters: what one token goes through.

    soft_targets: with the head on the target rows.
    """
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    length = pack.tokens / pack.documents
    attention = 4 * heads * head_dim * int(config.num_hidden_layers) * pack.tokens * length / 2
    head = 2 * pack.targets * int(config.hidden_size) * int(config.vocab_size) if soft_targets else 0
    return (2 * active_parameters * pack.tokens + attention + head) / (_TARGET * device.products)
