"""The capture stage: fills what is missing, survives kills, and explains a store of another target."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import StoreError
from storage.reader import StoreReader
from tasks.trainer.capture import store_spec
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage
from tasks.trainer.target import Target

Values = Callable[..., dict[str, Any]]


def prepare(values: dict[str, Any]) -> RunDir:
    run = RunDir.create(load_config(values))
    run_stage("prepare", run, silent)
    return run


def offline(store: Path, **changes: object) -> dict[str, object]:
    return {"mode": "offline", "store_url": str(store), **changes}


def reader(run: RunDir) -> StoreReader:
    config, prepared = run.config(), run.receipt("prepare")
    assert prepared is not None
    return StoreReader(config.hidden_states.store_url, store_spec(config, prepared))  # type: ignore[union-attr]


def test_only_what_is_missing_is_captured(
    recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a second run computes again what the store holds, or loads a target for nothing."""
    store = offline(tmp_path / "store")
    first = run_stage("capture", prepare(recipe_values("first", hidden_states=store)), silent)
    assert first["captured_samples"] == first["store_samples"] > 0
    monkeypatch.setattr(Target, "load", lambda *a, **k: pytest.fail("the target was loaded for nothing"))
    again = run_stage("capture", prepare(recipe_values("second", hidden_states=store, train={"seed": 5})), silent)
    assert again["captured_samples"] == 0
    monkeypatch.undo()
    grown = run_stage("capture", prepare(recipe_values("third", hidden_states=store, data={"max_tokens": 40})), silent)
    assert 0 < grown["captured_samples"] < grown["store_samples"]


def test_kill_9_during_capture(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a killed capture leaves a sample that reads wrongly, or the next run does not finish the store."""
    expected = prepare(recipe_values("whole", hidden_states=offline(tmp_path / "whole-store")))
    run_stage("capture", expected, silent)
    run = prepare(recipe_values("killed", hidden_states=offline(tmp_path / "store")))
    index = tmp_path / "store"
    with subprocess.Popen(
        [sys.executable, "-m", "tasks.trainer.stages", "capture", str(run.root)], stdout=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 120
        while not list(index.rglob("*.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
    committed = reader(run).sample_ids()
    receipt = run_stage("capture", run, silent)
    assert receipt["captured_samples"] == receipt["store_samples"] - len(committed)
    whole, resumed = reader(expected), reader(run)
    assert resumed.sample_ids() == whole.sample_ids()
    for sample_id in whole.sample_ids():
        one, other = whole.read(sample_id), resumed.read(sample_id)
        for name in ("token_ids", "loss_mask", "aux_hidden", "last_hidden", "target_argmax", "target_lse"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_refuse_explains_what_the_store_holds_instead(recipe_values: Values, tmp_path: Path) -> None:
    """Red when states of another target or of other layers are trained on, or the error does not say whose they are."""
    store = tmp_path / "store"
    run_stage("capture", prepare(recipe_values("first", hidden_states=offline(store))), silent)
    refuse = offline(store, on_missing="refuse")
    other_layers = prepare(recipe_values("layers", hidden_states=refuse, target={"aux_layer_ids": [0, 2, 5]}))
    with pytest.raises(StoreError) as caught:
        run_stage("capture", other_layers, silent)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(recipe_values()["target"]["model"]), "layers 1/3/4", "layers 0/2/5"):
        assert part in message, message
    same = prepare(recipe_values("same", hidden_states=refuse))
    assert run_stage("capture", same, silent)["captured_samples"] == 0
    shorter = prepare(recipe_values("shorter", hidden_states=refuse, data={"max_tokens": 40}))
    with pytest.raises(StoreError, match=r"lacks \d+ of \d+ samples.*on_missing=capture"):
        run_stage("capture", shorter, silent)


def test_a_store_is_never_mixed_with_another_layout(recipe_values: Values, tmp_path: Path) -> None:
    """Red when raw samples are written among lossless ones under one spec."""
    store = tmp_path / "store"
    run = prepare(recipe_values("first", hidden_states=offline(store)))
    run_stage("capture", run, silent)
    raw = prepare(recipe_values("raw", hidden_states=offline(store, codec="raw")))
    with pytest.raises(StoreError, match="codec"):
        run_stage("capture", raw, silent)
    assert reader(run).sample_ids() == {sample.sample_id for sample in PreparedData.open(run.train_data)}
