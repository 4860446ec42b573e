"""Runs that are killed at any moment, and continued: none may differ from the uninterrupted run by one bit."""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.trainer.acceptance import heldout
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage
from tasks.trainer.stop import EXIT_INTERRUPTED, interrupted, stop
from tasks.trainer.train import checkpoint, loop
from tasks.trainer.train.curves import read_lines, read_metrics
from tasks.trainer.train.metrics import MetricsFile
from tasks.trainer.train.optim import Optimizer

Values = Callable[..., dict[str, Any]]

# What a clock says; all else must be the same in every bit.
CLOCKS = {"seconds", "data_wait_s"}
TRAIN = {"steps": 12, "checkpoint_every": 3, "evaluate_every": 4, "grad_accumulation": 2}
# Functions whose n-th call a trial is killed at: in forward and update, between masters and metrics, and at every move
# of a save, a deletion and a look at held-out samples.
MOMENTS = (
    (loop, "unroll"),
    (heldout, "unroll"),
    (Optimizer, "collect"),
    (Optimizer, "_write_back"),
    (MetricsFile, "_append"),
    (MetricsFile, "sync"),
    (checkpoint, "save_file"),
    (checkpoint, "sync_file"),
    (checkpoint, "digest"),
    (checkpoint, "write_json"),
    (checkpoint, "sync_folder"),
    (Path, "rename"),
    (shutil, "rmtree"),
    (os, "fsync"),
)


def create(values: dict[str, Any]) -> RunDir:
    return RunDir.create(load_config(values))


def state(run: RunDir) -> dict[str, torch.Tensor]:
    """Masters, moments and generators of the newest checkpoint."""
    found = checkpoint.load_latest(run.checkpoints)
    assert found is not None
    random_states = {f"random.{name}": tensor for name, tensor in found.random.items()}
    return {**found.draft, **found.optimizer, **random_states}


def metrics(run: RunDir) -> list[dict[str, Any]]:
    return [{key: line[key] for key in line.keys() - CLOCKS} for line in read_lines(run.metrics)]


def assert_same(run: RunDir, expected: RunDir) -> None:
    assert metrics(run) == metrics(expected)
    theirs = state(expected)
    ours = state(run)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name


@pytest.mark.parametrize("num_trials", [14, pytest.param(200, marks=pytest.mark.soak)])
def test_random_kills(num_trials: int, recipe_values: Values) -> None:
    """Red when any moment of a SIGKILL or SIGTERM loses, repeats or changes a bit of masters, moments or metrics."""
    # A forked child has none of OpenMP's threads and crashes where it wants them; the same number for all runs, because
    # sums over threads differ in the last bit.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kill_at_random(recipe_values, num_trials)
    finally:
        torch.set_num_threads(threads)


def kill_at_random(recipe_values: Values, num_trials: int) -> None:
    def values(name: str, *, filling: bool) -> dict[str, Any]:
        """Every fourth trial fills a store as it trains, so that kills meet its writer, too."""
        store = {"mode": "online", "store_url": str(template.with_name(f"{name}-store")), "preset": "lossless"}
        return recipe_values(name, train=TRAIN, **({"hidden_states": store} if filling else {}))

    prepared = create(recipe_values("prepared", train=TRAIN))
    run_stage("prepare", prepared, silent)
    template = prepared.root
    expected = {}
    for filling in (False, True):
        name = f"whole-{filling}"
        shutil.copytree(template, template.with_name(name))
        expected[filling] = create(values(name, filling=filling))
        started = time.monotonic()
        run_stage("train", expected[filling], silent)
        seconds = time.monotonic() - started
    first = int(os.environ.get("SOAK_SEED", "0"))
    ends: dict[int, int] = {}
    for trial in range(first, first + num_trials):
        filling = trial % 4 == 3
        root = template.with_name(f"trial-{trial}")
        shutil.copytree(template, root)
        run = create(values(root.name, filling=filling))
        chance = random.Random(trial)
        for number in range(chance.randint(1, 3)):
            # First every moment in turn, by SIGTERM and by SIGKILL; then any.
            first_kill = MOMENTS[trial % len(MOMENTS)], (signal.SIGTERM, signal.SIGKILL)[trial // len(MOMENTS) % 2]
            status = killed_run(run, chance, seconds, None if number else first_kill)
            ends[status] = ends.get(status, 0) + 1
        try:
            run_stage("train", run, silent)
            assert_same(run, expected[filling])
        except Exception as error:
            raise AssertionError(f"trial {trial} (SOAK_SEED={trial} runs it first): {error}") from error
        for folder in template.parent.glob(f"{root.name}*"):
            shutil.rmtree(folder)
    assert ends.keys() >= {-signal.SIGKILL, EXIT_INTERRUPTED}, f"both signals must have met a run: {ends}"


def killed_run(
    run: RunDir, chance: random.Random, seconds: float, chosen: tuple[tuple[Any, str], signal.Signals] | None
) -> int:
    """Start training in a forked process and have it killed; returns its exit status.

    chosen: a moment, at one of its first calls, and the signal. None: any moment, or any time within `seconds`.
    """
    number = chance.choice((signal.SIGKILL, signal.SIGTERM))
    at_call = chosen is not None or chance.random() < 0.7
    wait = chance.uniform(0.0, seconds)
    arm = (chance.choice(MOMENTS), chance.randint(1, 16), number) if at_call else None
    if chosen is not None:
        arm = (chosen[0], chance.randint(2, 4), chosen[1])
    child = os.fork()
    if child == 0:
        train_and_exit(run, arm)
    if not at_call:
        time.sleep(wait)
        os.kill(child, number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # 0: it was done before. -SIGTERM: it had not begun.
    assert status in (-signal.SIGKILL, -signal.SIGTERM, EXIT_INTERRUPTED, 0), f"a run ended by itself with {status}"
    return status


def train_and_exit(run: RunDir, arm: tuple[tuple[Any, str], int, int] | None) -> None:
    """The child. It must not come back into pytest."""
    status = 1
    try:
        if arm is not None:
            signal_at_call(*arm)
        with stop.installed(interrupted("the trial")):
            run_stage("train", run, silent)
        status = 0
    except InterruptedError:
        status = EXIT_INTERRUPTED
    except BaseException:
        logging.getLogger(__name__).exception("the trial failed")
        raise
    finally:
        os._exit(status)


def signal_at_call(moment: tuple[Any, str], call: int, number: int) -> None:
    """Have this process signal itself at one call of a function."""
    owner, name = moment
    original, calls = getattr(owner, name), itertools.count(1)

    def counting(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return original(*arguments, **options)

    setattr(owner, name, counting)


def test_sigterm_inside_a_backward_drops_the_step(recipe_values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when half a step reaches the masters or moments, waits for its end, or the steps before it are lost."""
    train = {**TRAIN, "checkpoint_every": 12, "evaluate_every": 0}
    expected = create(recipe_values("whole", train=train))
    run = create(recipe_values("cut", train=train))
    for each in (expected, run):
        run_stage("prepare", each, silent)
    run_stage("train", expected, silent)
    original, calls, collected = loop.unroll, itertools.count(1), []

    def signalled(*arguments: Any, **options: Any) -> Any:
        unrolled = original(*arguments, **options)
        # The second pack of step 4: the first one's gradients are with the masters already.
        if next(calls) == 8:
            unrolled.loss.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGTERM))
        return unrolled

    def collecting(self: Optimizer) -> None:
        collected.append(1)
        original_collect(self)

    original_collect = Optimizer.collect
    monkeypatch.setattr(loop, "unroll", signalled)
    monkeypatch.setattr(Optimizer, "collect", collecting)
    with pytest.raises(InterruptedError, match="the checkpoint holds step 3;"):
        run_stage("train", run, silent)
    assert len(collected) == 7, "the backward that was stopped must not have been finished"
    assert run.receipt("train") is None
    found = checkpoint.load_latest(run.checkpoints)
    assert found is not None
    assert found.step == len(read_metrics(run.metrics)) == 3
    monkeypatch.undo()
    run_stage("train", run, silent)
    assert_same(run, expected)


def test_sigterm_without_time_to_save_says_what_is_lost(recipe_values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a save is begun that cannot end in time, or the message hides the loss."""
    run = create(recipe_values(train={**TRAIN, "evaluate_every": 0}))
    run_stage("prepare", run, silent)
    original, calls = loop.unroll, itertools.count(1)

    def signalled(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 11:  # of step 6
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    saved = checkpoint.save

    def slow(*arguments: Any, **options: Any) -> Any:
        path, written = saved(*arguments, **options)
        return path, checkpoint.Written(written.num_bytes, 60.0)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(loop, "unroll", signalled)
    with pytest.raises(
        InterruptedError, match=r"holds step 3, 2 steps are lost \(saving takes about 78 s, and 1. s are"
    ):
        run_stage("train", run, silent)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000003"]


@pytest.mark.gpu
def test_a_cut_run_on_a_gpu_is_the_whole_run(recipe_values: Values) -> None:
    """Red when a CUDA run with train.deterministic resumes with other bits: generators, fused moments or masters."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, none is available")
    train = {**TRAIN, "device": "cuda", "dtype": "bfloat16", "deterministic": True}
    runs = [create(recipe_values(name, train=train)) for name in ("whole", "cut")]
    for run in runs:
        run_stage("prepare", run, silent)
        run_stage("train", run, silent)
    shutil.rmtree(runs[1].checkpoints / "step-000012")
    run_stage("train", runs[1], silent)
    receipt = runs[1].receipt("train")
    assert receipt is not None
    assert receipt["continued_from"] < 12
    assert_same(runs[1], runs[0])
