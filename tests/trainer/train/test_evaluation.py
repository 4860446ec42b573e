"""Held-out metrics while training: the same samples, from the same source, and the best checkpoint for it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.trainer.acceptance.heldout import heldout_metrics
from tasks.trainer.data.heldout import choose_heldout
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.draft.shape import trained_draft
from tasks.trainer.export.stage import export_run
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage, stages_of
from tasks.trainer.target import Target
from tasks.trainer.train import checkpoint
from tasks.trainer.train.computation import evaluation_computation
from tasks.trainer.train.curves import best_steps, read_heldout, read_metrics
from tasks.trainer.train.sources import OnlineSource

Values = Callable[..., dict[str, Any]]
TRAIN = {"steps": 8, "checkpoint_every": 3, "evaluate_every": 4}


def make_run(values: dict[str, Any], *, until: str = "train") -> RunDir:
    config = load_config(values)
    run = RunDir.create(config)
    for stage in stages_of(config):
        run_stage(stage, run, silent)
        if stage == until:
            break
    return run


def losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in read_metrics(run.metrics)]


def test_evaluation_changes_nothing_and_measures_the_checkpoint(recipe_values: Values) -> None:
    """Red when a look at held-out samples moves the training, or its figures are not those of the checkpoint, measured
    apart, one sample at a time."""
    run = make_run(recipe_values(train=TRAIN))
    assert losses(run) == losses(make_run(recipe_values("without")))
    measured = read_heldout(run.metrics)
    assert list(measured) == [4, 8]
    assert measured[4]["loss"] > measured[8]["loss"], "training helps held-out samples, too"
    found = checkpoint.load_latest(run.checkpoints)
    assert found is not None
    target = Target.of(run.config().target, device="cpu")
    draft = trained_draft(found.shape, found.draft, embedding=target.embedding, dtype=torch.float32)
    apart = heldout_metrics(
        draft,
        OnlineSource(target),
        [[sample] for sample in PreparedData.open(run.heldout_data)],
        head=target.head[draft.target_ids],
        ttt_steps=3,
        step_loss_decay=0.8,
        computation=evaluation_computation(device="cpu", dtype=torch.float32, head_dim=found.shape.head_dim),
        progress=silent,
    )
    assert measured[8]["rows"] == apart["rows"]
    for name in ("loss", "acc", "alpha", "step_losses", "tau"):
        assert measured[8][name] == pytest.approx(apart[name], rel=1e-5), name  # packs: fp32 sums in another order


def test_every_source_measures_the_same(recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when offline runs need the target for held-out samples, or a store gives other states for them."""
    online = make_run(recipe_values("online", train=TRAIN))
    lossless = {"store_url": str(tmp_path / "store"), "preset": "lossless"}
    values = recipe_values("offline", train=TRAIN, hidden_states={"mode": "offline", **lossless})
    make_run(values, until="capture")
    monkeypatch.setattr(Target, "__init__", lambda *a, **k: pytest.fail("offline training built a target"))
    offline = RunDir.create(load_config(values))
    run_stage("train", offline, silent)
    monkeypatch.undo()
    filling = {"mode": "online", **lossless, "store_url": str(tmp_path / "filled")}
    hybrid = make_run(recipe_values("hybrid", train=TRAIN, hidden_states=filling))
    assert read_heldout(offline.metrics) == read_heldout(hybrid.metrics) == read_heldout(online.metrics)
    assert losses(offline) == losses(hybrid) == losses(online)


def test_held_out_samples_stay_within_their_tokens(recipe_values: Values) -> None:
    """Red when the bound is not kept, samples are cut, or another call chooses others."""
    run = make_run(recipe_values(), until="prepare")
    data = PreparedData.open(run.heldout_data)
    whole = {sample.sample_id: len(sample.token_ids) for sample in data}
    bound = sum(whole.values()) // 2
    chosen = choose_heldout(data, bound)
    assert 0 < sum(len(sample.token_ids) for sample in chosen) <= bound
    assert all(len(sample.token_ids) == whole[sample.sample_id] for sample in chosen)
    assert [s.sample_id for s in chosen] == [s.sample_id for s in choose_heldout(data, bound)]
    assert [len(sample.token_ids) for sample in choose_heldout(data, 1)] == [min(whole.values())]
    assert {sample.sample_id for sample in choose_heldout(data, 10**9)} == set(whole)


def test_the_best_checkpoint_is_kept_and_exported(
    recipe_values: Values, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when the best is deleted for being old, not written for being off the calendar, or not what is exported."""
    # So high a rate that tau falls after its first look.
    train = {**TRAIN, "steps": 24, "evaluate_every": 2, "checkpoint_every": 5, "learning_rate": 0.2}
    run = make_run(recipe_values(train=train))
    best = best_steps(read_heldout(run.metrics))[0]
    assert best < 20, "the test needs a best step that keep_checkpoints=2 would delete"
    kept = sorted(checkpoint.step_of(path) for path in run.checkpoints.glob("step-*"))
    assert best in kept
    assert kept[-1] == 24
    receipt = run.receipt("train")
    assert receipt is not None
    assert receipt["best_step"] == best
    assert export_run(run.config(), run, tmp_path / "best")["step"] == best
    last = load_config(recipe_values(train={**train, "export": "last"}))
    assert export_run(last, run, tmp_path / "last")["step"] == 24
    (run.checkpoints / f"step-{best:06d}" / "draft.safetensors").write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        assert export_run(run.config(), run, tmp_path / "next")["step"] != best
    assert f"step-{best:06d} is damaged" in caplog.text


def test_a_look_that_a_kill_cut_off_is_made_again(recipe_values: Values) -> None:
    """Red when a run continued at a step that was due for a look goes on without it."""
    expected = make_run(recipe_values("whole", train={**TRAIN, "checkpoint_every": 4}))
    run = make_run(recipe_values("cut", train={**TRAIN, "checkpoint_every": 4}))
    shutil.rmtree(run.checkpoints / "step-000008")
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:4]))  # without the look after step 4
    run_stage("train", run, silent)
    assert read_heldout(run.metrics) == read_heldout(expected.metrics)
    assert losses(run) == losses(expected)


def test_other_held_out_samples_do_not_compare(recipe_values: Values, caplog: pytest.LogCaptureFixture) -> None:
    """Red when the best checkpoint is chosen among figures of different samples."""
    run = make_run(recipe_values(train=TRAIN))
    shutil.rmtree(run.checkpoints / "step-000008")
    again = RunDir.create(load_config(recipe_values(train={**TRAIN, "evaluate_tokens": 80})))
    with caplog.at_level(logging.WARNING):
        run_stage("train", again, silent)
    assert "other held-out samples" in caplog.text
    assert len({metrics["samples_hash"] for metrics in read_heldout(again.metrics).values()}) == 1


def test_nothing_of_the_held_out_samples_is_read_without_evaluation(
    recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when evaluate_every=0 still captures or reads held-out samples."""
    store = {"mode": "offline", "store_url": str(tmp_path / "store")}
    run = make_run(recipe_values(train={"evaluate_every": 0}, hidden_states=store))
    receipt = run.receipt("capture")
    assert receipt is not None
    assert receipt["captured_samples"] == len(PreparedData.open(run.train_data))
    assert read_heldout(run.metrics) == {}


def test_the_report_tells_what_was_looked_at(recipe_values: Values) -> None:
    """Red when the report leaves out the held-out curve, or which checkpoint its figures are of."""
    run = make_run(recipe_values(train=TRAIN), until="report")
    report = json.loads(run.report_json.read_text())
    assert [look["step"] for look in report["heldout_curve"]] == [4, 8]
    best = best_steps(read_heldout(run.metrics))[0]
    assert report["evaluation"]["step"] == report["export"]["step"] == best
    assert (
        f"in 2 looks, simulated tau {report['heldout_curve'][best // 4 - 1]['tau']:.3f} at step {best}; step {best} is"
        in (run.report_markdown.read_text())
    )
    assert (run.plots / "training.png").stat().st_size > 0
