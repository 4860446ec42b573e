"""The alarm: a step that must not be taken leaves the masters alone and names its samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.errors import InputError
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage
from tasks.trainer.train import checkpoint
from tasks.trainer.train.curves import read_metrics
from tasks.trainer.train.guard import Diverged, GradientGuard
from tasks.trainer.train.optim import Optimizer

Values = Callable[..., dict[str, Any]]


def test_a_gradient_that_is_not_finite_stops_before_the_update(
    recipe_values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when NaN reaches the masters, the samples are not named, or the file holds more than their ids."""
    run = RunDir.create(load_config(recipe_values(train={"checkpoint_every": 1})))
    run_stage("prepare", run, silent)
    original, calls = Optimizer.collect, []

    def poisoned(self: Optimizer) -> None:
        original(self)
        calls.append(1)
        if len(calls) == 3:
            gradient = self.masters["norm.weight"].grad
            assert gradient is not None
            gradient[0] = math.nan

    monkeypatch.setattr(Optimizer, "collect", poisoned)
    with pytest.raises(
        InputError, match=r"stopped before step 3: .*nan: not finite.*stopped-step-000003\.json"
    ) as caught:
        run_stage("train", run, silent)
    assert "\n" not in str(caught.value)
    told = json.loads((run.root / "stopped-step-000003.json").read_text())
    assert told.keys() == {"step", "fault", "packs"}
    known = {sample.sample_id for sample in PreparedData.open(run.train_data)}
    assert told["packs"]
    assert all(set(pack) <= known for pack in told["packs"])
    found = checkpoint.load_latest(run.checkpoints)
    assert found is not None
    assert found.step == len(read_metrics(run.metrics)) == 2
    assert all(tensor.isfinite().all() for tensor in found.draft.values())
    assert run.receipt("train") is None


def test_a_norm_far_out_of_line_is_told_from_an_ordinary_one(tmp_path: Path) -> None:
    """Red when a spike passes, the first steps raise an alarm, or the spike itself counts towards the median."""

    def check(guard: GradientGuard, norm: float) -> None:
        guard.check(norm, loss=1.0, step=1, packs=[])

    young = GradientGuard([1.0] * 5, max_ratio=10.0, run=RunDir(tmp_path))
    check(young, 1e6)
    guard = GradientGuard([1.0, 2.0, 3.0] * 10, max_ratio=10.0, run=RunDir(tmp_path))
    check(guard, 19.9)
    for _ in range(100):
        with pytest.raises(Diverged, match=r"gradient norm 21 is 10 times the median 2 of 31 steps"):
            check(guard, 21.0)
    check(GradientGuard([1.0] * 30, max_ratio=0.0, run=RunDir(tmp_path)), 1e9)
    with pytest.raises(Diverged, match="inf"):
        check(GradientGuard([], max_ratio=0.0, run=RunDir(tmp_path)), math.inf)
    with pytest.raises(Diverged, match="loss nan"):
        guard.check(1.0, loss=math.nan, step=1, packs=[])
