"""Traces and snapshots: of the steps that were named, whole, and without a trace in the draft."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.trainer.config import Train, identity_fields
from tasks.trainer.errors import InputError
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage
from tasks.trainer.train import checkpoint
from tasks.trainer.train.profiling import Profiling

Values = Callable[..., dict[str, Any]]


def train(values: dict[str, Any]) -> RunDir:
    run = RunDir.create(load_config(values))
    for stage in ("prepare", "train"):
        run_stage(stage, run, silent)
    return run


def read_trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return list(json.load(file)["traceEvents"])


def test_traces_of_chosen_steps_change_nothing(recipe_values: Values) -> None:
    """Red when another step is traced, a trace lacks the forward, the backward, the update or the memory, or a traced
    run trains another draft."""
    run = train(recipe_values("traced", train={"profile": [2, 5]}))
    assert sorted(path.name for path in run.profile.iterdir()) == ["step-000002.json.gz", "step-000005.json.gz"]
    for path in run.profile.iterdir():
        names = {event.get("name", "") for event in read_trace(path)}
        for part in ("aten::mm", "MmBackward0", "aten::_fused_adamw_", "[memory]"):
            assert any(part in name for name in names), part
    plain = train(recipe_values("plain"))
    traced, expected = (checkpoint.load_latest(each.checkpoints) for each in (run, plain))
    assert traced is not None
    assert expected is not None
    assert traced.identity == expected.identity
    for name, tensor in {**expected.draft, **expected.optimizer}.items():
        assert torch.equal(tensor, {**traced.draft, **traced.optimizer}[name]), name


def test_a_step_that_does_not_end_leaves_no_trace(tmp_path: Path) -> None:
    """Red when an interrupted step leaves half a trace, or a profiler that the next run trips over."""
    for _ in range(2):
        with Profiling(Train(profile=(1,)), tmp_path / "p", device="cpu") as profiling:
            profiling.begin(1)
        assert not torch.autograd._profiler_enabled()
    assert not (tmp_path / "p").exists()
    with Profiling(Train(profile=(1,)), tmp_path / "p", device="cpu") as profiling:
        profiling.begin(1)
        torch.ones(3) @ torch.ones(3)
        profiling.end()
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["step-000001.json.gz"]


def test_a_snapshot_on_a_cpu_is_refused_before_anything_is_prepared(
    recipe_values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the refusal comes after hours, or does not say what a CPU has instead."""
    run = RunDir.create(load_config(recipe_values(train={"memory_snapshot": [2]})))
    monkeypatch.setattr("tasks.trainer.data.prepare.load_text", lambda *a, **k: pytest.fail("prepare went ahead"))
    with pytest.raises(InputError, match=r"memory_snapshot=\[2\] needs a CUDA device.* use train\.profile"):
        run_stage("prepare", run, silent)


def test_watching_is_not_in_the_identity(recipe_values: Values) -> None:
    """Red when a run cannot be continued with a profiler or a tracker."""
    watched = recipe_values(train={"profile": [2], "memory_snapshot": [3], "trackers": [], "tracker_project": "x"})
    assert identity_fields(load_config(watched)) == identity_fields(load_config(recipe_values()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_kernels_are_traced_and_memory_is_snapped(tmp_path: Path) -> None:
    """Red when a trace ends before its last kernel, or a snapshot lacks the step's allocations."""
    weight = torch.ones(512, 512, device="cuda")
    with Profiling(Train(profile=(2,), memory_snapshot=(2,)), tmp_path, device="cuda") as profiling:
        for step in (1, 2, 3):
            profiling.begin(step)
            torch.relu(weight @ weight)
            profiling.end()
    assert any("relu" in event["name"] for event in read_trace(tmp_path / "step-000002.json.gz") if "name" in event)
    assert any(event.get("cat") == "kernel" for event in read_trace(tmp_path / "step-000002.json.gz"))
    snapshot = pickle.loads((tmp_path / "memory-000002.pickle").read_bytes())  # noqa: S301  (written just now)
    sizes = [event["size"] for trace in snapshot["device_traces"] for event in trace if event["action"] == "alloc"]
    assert sizes.count(512 * 512 * 4) == 2
