"""A run whose directory is a URL: nothing that counts is on one machine only."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from storage.location import Location, locate
from tasks.trainer import stop as stop_module
from tasks.trainer.errors import InputError
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.remote import Mirror
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import finished, run_stage, stages_of
from tasks.trainer.train import checkpoint, loop
from tasks.trainer.train.curves import read_metrics
from tasks.trainer.train.guard import GradientGuard

Values = Callable[..., dict[str, Any]]


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A remote place: in memory, and on a real S3 server."""
    if request.param == "memory":
        return f"memory://remote/{tmp_path.name}"
    return str(request.getfixturevalue("s3").new_url()).removesuffix("/store") + "/run"


def run_here(values: dict[str, Any], url: str, scratch: Path, *, until: str = "report") -> RunDir:
    """Go through the stages as the flow does, with `scratch` as this machine's disk."""
    config = load_config({**values, "run_dir": url, "scratch_dir": str(scratch)})
    run = RunDir.create(config)
    for stage in stages_of(config):
        if not finished(stage, config, run):
            run_stage(stage, run, silent)
        if stage == until:
            break
    return run


def test_a_fresh_machine_continues_from_the_url(recipe_values: Values, url: str, tmp_path: Path) -> None:
    """Red when a machine that starts from the URL alone starts over, trains on other bits, or leaves no report."""
    train = {"steps": 8, "checkpoint_every": 3, "evaluate_every": 4}
    expected = run_here(recipe_values("whole", train=train), str(tmp_path / "whole"), tmp_path)
    first = run_here(recipe_values(train=train), url, tmp_path / "one", until="train")
    place = locate(url)
    assert "receipts/train.json" in place.sizes()
    # As a crash after step 6 leaves it: the last checkpoint and the receipt never got there.
    newest = max(first.checkpoints.glob("step-*"))
    for name in (*place.child(f"checkpoints/{newest.name}").names(),):
        place.delete(f"checkpoints/{newest.name}/{name}")
    place.delete("receipts/train.json")
    shutil.rmtree(tmp_path / "one")

    second = run_here(recipe_values(train=train), url, tmp_path / "two")
    receipt = second.receipt("train")
    assert receipt is not None
    assert receipt["continued_from"] == 6
    trained, whole = (checkpoint.load_latest(run.checkpoints) for run in (second, expected))
    assert trained is not None
    assert whole is not None
    for name, tensor in {**whole.draft, **whole.optimizer}.items():
        assert torch.equal(tensor, {**trained.draft, **trained.optimizer}[name]), name
    assert [line["loss"] for line in read_metrics(second.metrics)] == [
        line["loss"] for line in read_metrics(expected.metrics)
    ]
    there = place.sizes()
    for name in ("report.md", "plots/tau.png", "draft/config.json", "evaluation.json", "metrics.jsonl", "config.yaml"):
        assert name in there, name
    assert sorted({name.split("/")[1] for name in there if name.startswith("checkpoints/")}) == sorted(
        path.name for path in second.checkpoints.glob("step-*")
    ), "what scratch keeps no more must go there, too"
    assert "lease.json" not in there
    report = json.loads(second.report_json.read_text())
    assert report["run_dir"] == url
    assert report["export"]["folder"] == f"{url}/draft"


def test_a_listing_that_lags_drops_no_receipt(
    recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a receipt that the place has is dropped here because its listing does not show it yet."""
    url = f"memory://lags/{tmp_path.name}"
    run = run_here(recipe_values(), url, tmp_path / "one", until="prepare")
    monkeypatch.setattr(Location, "names", lambda place: [])
    with run.lock():
        assert run.receipt("prepare") is not None
    monkeypatch.undo()
    locate(url).delete("receipts/prepare.json")
    with run.lock():
        assert run.receipt("prepare") is None


def test_another_run_at_the_url_is_refused(recipe_values: Values, tmp_path: Path) -> None:
    """Red when the identity is looked up on this machine only."""
    url = f"memory://refused/{tmp_path.name}"
    run_here(recipe_values(), url, tmp_path / "one", until="prepare")
    with pytest.raises(InputError, match=r"train\.seed was 0, now 1"):
        run_here(recipe_values(train={"seed": 1}), url, tmp_path / "two")


def test_open_by_url_and_by_scratch(recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when `eyas export URL` does not find the run, or a stage's process loses sight of the URL."""
    monkeypatch.setenv("EYAS_SCRATCH", str(tmp_path / "three"))
    url = f"memory://open/{tmp_path.name}"
    run = run_here(recipe_values(), url, tmp_path / "one", until="prepare")
    assert RunDir.open(str(run.root)).url == url
    opened = RunDir.open(url)
    assert opened.root.parent == tmp_path / "three"
    assert opened.config().scratch_dir is None, "another machine's folder means nothing here"
    assert opened.receipt("prepare") == run.receipt("prepare")
    assert (opened.train_data / "token_ids.npy").read_bytes() == (run.train_data / "token_ids.npy").read_bytes()
    with pytest.raises(InputError, match="no run directory"):
        RunDir.open(f"{url}/nothing")


def test_a_place_that_is_away_for_a_while_costs_no_step(
    recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when one failed upload ends the training, or is not made up for."""
    url = f"memory://away/{tmp_path.name}"
    run_here(recipe_values(), url, tmp_path / "one", until="prepare")
    original, tried = Location.upload, []

    def failing(self: Location, name: str, source: Path) -> None:
        if name.endswith("draft.safetensors"):
            tried.append(name)
            if len(tried) <= 3:
                raise OSError(5, "the place is away")
        original(self, name, source)

    monkeypatch.setattr(Location, "upload", failing)
    with caplog.at_level(logging.WARNING):
        run = run_here(recipe_values(), url, tmp_path / "one", until="train")
    assert len(tried) == 4, "steps 3, 6 and 8, and 8 once more"
    assert "was not uploaded" in caplog.text
    newest = max(run.checkpoints.glob("step-*")).name
    assert f"checkpoints/{newest}/state.json" in locate(url).sizes()


def test_sigterm_leaves_the_steps_at_the_url(
    recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a stopped machine keeps the steps to itself, or says nothing when it has to."""
    url = f"memory://stopped/{tmp_path.name}"
    train = {"steps": 8, "checkpoint_every": 3}
    original, calls = loop.unroll, itertools.count(1)

    def signalled(*arguments: Any, **options: Any) -> Any:
        if next(calls) in (6, 8):  # of step 6; and, the first five being saved, of step 8
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    monkeypatch.setattr(loop, "unroll", signalled)
    with pytest.raises(InterruptedError, match="the checkpoint holds step 5;"):
        run_here(recipe_values(train=train), url, tmp_path / "one")
    assert "checkpoints/step-000005/state.json" in locate(url).sizes()
    assert "lease.json" not in locate(url).sizes()

    def hanging(self: Mirror, folder: Path) -> None:
        time.sleep(3.0)

    monkeypatch.setattr(stop_module, "GRACE_SECONDS", 2.0)
    monkeypatch.setattr(Mirror, "push_checkpoint", hanging)
    with pytest.raises(InterruptedError, match=r"holds step 6 \(in .* on this machine only: its upload is not whole\)"):
        run_here(recipe_values(train=train), url, tmp_path / "two")


def test_a_killed_stage_process_is_followed_at_once(
    recipe_values: Values, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Red when a retry on the same machine waits for the lease of a dead process, or the process of a stage does not
    upload what it finishes."""
    url = request.getfixturevalue("s3").new_url()
    values = recipe_values(train={"steps": 400, "checkpoint_every": 2})
    run = run_here(values, url, tmp_path / "one", until="prepare")
    command = [sys.executable, "-m", "tasks.trainer.stages", "train", str(run.root)]
    place = locate(url)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not any(name.endswith("state.json") for name in place.sizes()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
    assert "lease.json" in place.sizes()
    # Another scratch folder, so no lock of the system tells that the holder is dead.
    other = RunDir.create(load_config({**values, "run_dir": url, "scratch_dir": str(tmp_path / "two")}))
    with other.lock(patience=0.0) as held:
        found = checkpoint.load_latest(held.checkpoints)
    assert found is not None
    assert found.step >= 2


def test_the_samples_of_a_bad_step_are_named_at_the_url(
    recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the file that the message names is on a machine that is gone."""
    url = f"memory://diverged/{tmp_path.name}"
    monkeypatch.setattr(GradientGuard, "_fault", lambda self, loss, norm: "made up")
    with pytest.raises(InputError, match=rf"{url}/stopped-step-000001\.json"):
        run_here(recipe_values(), url, tmp_path / "one")
    assert "stopped-step-000001.json" in locate(url).sizes()


def test_a_file_that_was_being_replaced_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red when a reader takes a file whose writer was killed before it said so."""
    place = locate(f"memory://half/{tmp_path.name}")
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    (one / "evaluation.json").write_text("first")
    (one / "vocabulary.safetensors").write_text("whole")
    Mirror(place, one).push_changed()
    (one / "evaluation.json").write_text("second")
    Mirror(place, one).push(["evaluation.json"])
    Mirror(place, two).pull()
    assert "being replaced" in caplog.text
    assert not (two / "evaluation.json").exists()
    assert (two / "vocabulary.safetensors").read_text() == "whole"
    Mirror(place, one).push_changed()
    Mirror(place, two).pull()
    assert (two / "evaluation.json").read_text() == "second"
    (one / "evaluation.json").unlink()
    Mirror(place, one).push_changed()
    (two / "own.json").write_text("what a killed stage left here")
    Mirror(place, two).pull()
    assert not (two / "evaluation.json").exists()
    assert (two / "own.json").exists()
