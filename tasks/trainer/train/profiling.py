"""Traces and memory snapshots of chosen steps, in the run's folder `profile/`.

Both slow the steps that they watch, by some percent up to twice, and no other; the draft is the same. A trace opens in
https://ui.perfetto.dev or chrome://tracing, a snapshot in https://pytorch.org/memory_viz; both open files locally.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tasks.trainer.config import Train
from tasks.trainer.errors import InputError

logger = logging.getLogger(__name__)

# Allocations and frees that a snapshot may hold; older ones are forgotten. A step of 7 TTT steps has some ten thousand.
_SNAPSHOT_EVENTS = 500_000


class Profiling:
    """Watches the steps that the config names: `begin` and `end` around each step, `close` at the end of all."""

    def __init__(self, settings: Train, folder: Path, *, device: str) -> None:
        """Raises InputError for memory snapshots on a device that has none."""
        check_profiling(settings, device=device)
        self._folder = folder
        self._device = device
        self._traced = frozenset(settings.profile)
        self._snapshots = frozenset(settings.memory_snapshot)
        self._step = 0
        self._profiler: profile | None = None

    def begin(self, step: int) -> None:
        """Step `step`, as metrics.jsonl counts (from 1), starts."""
        self._step = step
        if step in self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS, stacks="python")
        if step in self._traced:
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._device == "cuda" else [])
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
            self._profiler.start()

    def end(self) -> None:
        """The step is done: write what was seen."""
        if self._profiler is not None:
            if self._device == "cuda":
                torch.cuda.synchronize()  # or its last kernels are not in the trace
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            path = self._made(f"step-{self._step:06d}.json.gz")
            profiler.export_chrome_trace(str(path.with_name(f".{path.name}")))
            path.with_name(f".{path.name}").replace(path)
            logger.info("trace of step %d: %s", self._step, path)
        if self._step in self._snapshots:
            path = self._made(f"memory-{self._step:06d}.pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            logger.info("memory snapshot of step %d: %s", self._step, path)

    def close(self) -> None:
        """Stop watching; a step that did not end leaves nothing."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if self._snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _made(self, name: str) -> Path:
        self._folder.mkdir(exist_ok=True)
        return self._folder / name

    def __enter__(self) -> Profiling:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_profiling(settings: Train, *, device: str) -> None:
    """Raises InputError for memory snapshots without CUDA."""
    if settings.memory_snapshot and device != "cuda":
        raise InputError(
            f"train.memory_snapshot={list(settings.memory_snapshot)} needs a CUDA device, and this run is on the "
            f"{device}; use train.profile, whose trace has the memory of a CPU, too"
        )
