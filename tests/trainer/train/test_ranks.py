"""Several ranks are one rank: the same gradients, the same run, on any number of them; and a lost one is told of.

Two processes and gloo, started once for all comparisons (ranks_worker.py); those of stops and losses by the stage's own
process, as a flow starts it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from storage.reader import StoreReader
from tasks.trainer.capture import store_spec
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import EXIT_INPUT, run_stage
from tasks.trainer.stop import EXIT_INTERRUPTED
from tasks.trainer.train import checkpoint
from tasks.trainer.train.curves import read_heldout, read_metrics

Values = Callable[..., dict[str, Any]]

ROOT = Path(__file__).parents[3]
# float32 sums of the same terms in another order.
RELATIVE = 1e-5
CASES = {"even": [[0, 1], [2], [3, 4], [5]], "uneven": [[0, 1, 2], [3], [4]], "nothing": [[0, 1], [-1]]}
TRAIN = {"steps": 6, "grad_accumulation": 4, "checkpoint_every": 2, "keep_checkpoints": 9, "evaluate_every": 3}


def prepared(values: dict[str, Any]) -> RunDir:
    config = load_config(values)
    run = RunDir.create(config)
    run_stage("prepare", run, silent)
    return run


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def two_ranks(jobs: list[dict[str, Any]], folder: Path, *, device: str = "cpu") -> None:
    """Have two ranks do the jobs."""
    path = folder / "jobs.json"
    path.write_text(json.dumps({"device": device, "jobs": jobs}))
    # A rank sees its own GPU only, before anything asks CUDA what there is.
    own_gpu = ["sh", "-c", 'export CUDA_VISIBLE_DEVICES=$LOCAL_RANK; exec "$0" "$@"'] if device == "cuda" else []
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python",
        *own_gpu, sys.executable, "-m", "tests.trainer.train.ranks_worker", str(path),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.double().norm())
    error = float((found.double() - expected.double()).norm())
    return error / scale if scale else error


def lines_of(run: RunDir) -> list[dict[str, Any]]:
    return read_metrics(run.metrics)


def assert_same_training(run: RunDir, expected: RunDir) -> None:
    """The same samples in the same steps; losses and gradients up to the order of sums."""
    ours, theirs = lines_of(run), lines_of(expected)
    for name in ("step", "tokens", "epoch", "rows", "learning_rate"):
        assert [line[name] for line in ours] == [line[name] for line in theirs], name
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([line[name] for line in ours], [line[name] for line in theirs], rtol=1e-4)
    held, expected_held = read_heldout(run.metrics), read_heldout(expected.metrics)
    assert held.keys() == expected_held.keys()
    for step, measured in held.items():
        assert measured["rows"] == expected_held[step]["rows"]
        np.testing.assert_allclose(measured["step_losses"], expected_held[step]["step_losses"], rtol=1e-4)


@pytest.fixture(scope="module")
def worked(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """Everything that two ranks do in one start, and the same by one rank: runs by name."""
    from tests.conftest import write_conversations

    folder = tmp_path_factory.mktemp("ranks")
    write_conversations(folder / "source.jsonl", 24)

    def values(name: str, **train: Any) -> dict[str, Any]:
        return {
            "target": {"model": str(target_folder), "dtype": "bfloat16"},
            "data": {"source": str(folder / "source.jsonl"), "heldout_fraction": 0.25, "max_tokens": 96},
            "hidden_states": {"mode": "online"},
            "draft": {"vocab_size": 200},
            "train": {
                "ttt_steps": 3, "pack_tokens": 128, "learning_rate": 3e-3, "warmup_steps": 2, "device": "cpu",
                "dtype": "float32", "trackers": [], **TRAIN, **train,
            },
            "run_dir": str(folder / name),
        }  # fmt: skip

    store = {"mode": "offline", "store_url": str(folder / "store"), "preset": "near"}
    filled = {"mode": "online", "store_url": str(folder / "filled"), "preset": "lossless"}
    wide = {"model": str(target_folder), "dtype": "float32"}
    tensor = {**wide, "parallel": "tensor"}
    runs = {
        "alone": prepared(values("alone")),
        "ddp": prepared(values("ddp")),
        "fsdp": prepared(values("fsdp", sharding="fsdp")),
        "reshard": prepared(values("reshard", sharding="fsdp")),
        "muon-alone": prepared(values("muon-alone", optimizer="muon", steps=3, evaluate_every=0)),
        "muon": prepared(values("muon", optimizer="muon", steps=3, evaluate_every=0, sharding="fsdp")),
        "offline": prepared({**values("offline", steps=3), "hidden_states": store}),
        "filling": prepared({**values("filling", steps=3), "hidden_states": filled}),
        "tensor": prepared({**values("tensor", steps=3, grad_accumulation=3), "target": tensor}),
        "tensor-alone": prepared({**values("tensor-alone", steps=3, grad_accumulation=3), "target": wide}),
        "tensor-store": prepared({
            **values("tensor-store", steps=2), "target": tensor,
            "hidden_states": {"mode": "offline", "store_url": str(folder / "shared"), "preset": "near"},
        }),
    }  # fmt: skip
    for name in ("alone", "muon-alone", "tensor-alone"):
        run_stage("train", runs[name], silent)

    def job(do: str, name: str, stage: str = "train", **more: Any) -> dict[str, Any]:
        return {"do": do, "run": str(runs[name].root), "stage": stage, **more}

    two_ranks(
        [
            job("gradients", "alone", cases=CASES, out=str(folder)),
            job("stage", "ddp"),
            job("stage", "fsdp"),
            job("stage", "reshard"),
            job("forget", "reshard", after=2),
            job("alone", "reshard"),
            job("forget", "reshard", after=4),
            job("stage", "reshard"),
            job("stage", "muon"),
            job("stage", "offline", "capture"),
            job("stage", "offline"),
            job("stage", "filling"),
            job("stage", "tensor"),
            job("stage", "tensor-store", "capture"),
        ],
        folder,
    )
    return {**runs, "folder": RunDir(folder)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_gradients_of_two_ranks_are_those_of_one(worked: dict[str, RunDir], case: str, sharding: str) -> None:
    """Red when N_k is a rank's own, gradients are means, a rank without rows is left out, or one steps alone."""
    found = load_file(worked["folder"].root / f"{case}-{sharding}.safetensors")
    alone = load_file(worked["folder"].root / f"{case}-alone.safetensors")
    assert found.keys() == alone.keys()
    for name, expected in alone.items():
        assert relative_error(found[name], expected) < RELATIVE, name
    assert torch.equal(found["rows"], alone["rows"])


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_run_over_two_ranks_is_the_run_of_one(worked: dict[str, RunDir], name: str) -> None:
    """Red when packs are dealt twice or not at all, when held-out sums miss a rank's, or two ranks write metrics."""
    assert_same_training(worked[name], worked["alone"])
    assert worked[name].receipt("train")["steps"] == TRAIN["steps"]  # type: ignore[index]


def test_a_run_goes_on_with_another_number_of_ranks(worked: dict[str, RunDir]) -> None:
    """2 -> 1 -> 2 ranks, from checkpoints that are shares, whole, and shares again. Red when a moment, a place in the
    data or a line of metrics is lost."""
    assert_same_training(worked["reshard"], worked["alone"])
    assert worked["reshard"].receipt("train")["continued_from"] == 4  # type: ignore[index]
    # Step 2 was written by two ranks, step 4 by one.
    shares = [sorted(p.name for p in (worked["reshard"].checkpoints / f"step-00000{n}").iterdir()) for n in (2, 4)]
    assert [sum(name.startswith("optimizer-") for name in names) for names in shares] == [2, 0]


def test_a_sharded_checkpoint_is_read_whole(worked: dict[str, RunDir]) -> None:
    """Red when shares are put together in the wrong order, or the d2t table is not in the draft's file."""
    found, alone = (checkpoint.load_latest(worked[name].checkpoints) for name in ("fsdp", "alone"))
    assert found is not None
    assert alone is not None
    assert found.step == alone.step
    for part in ("draft", "optimizer"):
        ours, theirs = getattr(found, part), getattr(alone, part)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].shape == tensor.shape
            assert ours[name].dtype == tensor.dtype
            # Six updates of AdamW divide by moments near zero: rounding grows.
            assert relative_error(ours[name].float(), tensor.float()) < 1e-3, name


def test_a_damaged_share_is_seen(worked: dict[str, RunDir]) -> None:
    """Red when a share's digest is not checked."""
    path = sorted(worked["muon"].checkpoints.glob("step-*"))[-1]
    share = path / "optimizer-00002.safetensors"
    content = bytearray(share.read_bytes())
    content[-1] ^= 1
    share.write_bytes(content)
    found = checkpoint.load_latest(worked["muon"].checkpoints)
    assert found is not None
    assert found.step < int(path.name.removeprefix("step-"))


def test_muon_sees_whole_matrices(worked: dict[str, RunDir]) -> None:
    """Red when a rank orthogonalises its share of a matrix: its norm then is another."""
    assert_same_training(worked["muon"], worked["muon-alone"])


def test_capture_over_ranks_fills_the_store_once(worked: dict[str, RunDir]) -> None:
    """Red when ranks capture the same samples, or the receipt tells of one rank's only."""
    run = worked["offline"]
    receipt, prepared_ = run.receipt("capture"), run.receipt("prepare")
    assert receipt is not None
    assert prepared_ is not None
    wanted = {sample.sample_id for sample in PreparedData.open(run.train_data)}
    with StoreReader(receipt["store_url"], store_spec(run.config(), prepared_)) as reader:
        held = reader.sample_ids()
    assert wanted <= held
    # Claims are advisory, but ranks that start together do not overlap.
    assert receipt["captured_samples"] == receipt["store_samples"] == len(held)
    assert [line["step"] for line in lines_of(run)] == [1, 2, 3]


def test_filling_a_store_over_ranks(worked: dict[str, RunDir]) -> None:
    """Red when ranks disagree about what is in the store, or training differs from that without one."""
    ours, theirs = lines_of(worked["filling"]), lines_of(worked["alone"])
    for line, expected in zip(ours, theirs, strict=False):
        assert line["rows"] == expected["rows"]
    # Another schedule (3 steps, not 6), but the first update has the learning rate 0.
    np.testing.assert_allclose([line["loss"] for line in ours[:2]], [line["loss"] for line in theirs[:2]], rtol=1e-4)


def test_a_target_spread_over_ranks_is_the_target(worked: dict[str, RunDir]) -> None:
    """transformers' tensor parallelism. Red when a rank gets another's states, or ranks wait for each other for ever:
    three packs over two ranks, so one of them has none in the first round."""
    ours, theirs = lines_of(worked["tensor"]), lines_of(worked["tensor-alone"])
    assert [line["rows"] for line in ours] == [line["rows"] for line in theirs]
    # The states are rounded to bfloat16, after sums in another order: a few differ in their last bit.
    np.testing.assert_allclose([line["loss"] for line in ours], [line["loss"] for line in theirs], rtol=1e-3)
    receipt = worked["tensor-store"].receipt("capture")
    assert receipt is not None
    assert receipt["captured_samples"] == receipt["store_samples"] > 0


# --- stops and losses --------------------------------------------------------------------------------------------


class Started:
    """The train stage of a run over two ranks, in a process of its own."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tasks.trainer.stages", "train", str(run.root)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=ROOT,
        )  # fmt: skip

    def wait_for_steps(self, num: int) -> None:
        deadline = time.monotonic() + 120
        while len(lines_of(self.run)) < num:
            assert self.process.poll() is None, self.process.communicate()[0][-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def pid(self, rank: int) -> int:
        """Of a rank: a child of the stage's process with this RANK."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for pid in (pid for listed in children for pid in listed.read_text().split()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return int(pid)
        raise AssertionError(f"no rank {rank}")

    def end(self) -> tuple[int, str, float]:
        """Exit code, the error it told, and the seconds it took to end."""
        started = time.monotonic()
        output, _ = self.process.communicate(timeout=100)
        errors = [json.loads(line)["message"] for line in output.splitlines() if line.startswith('{"event": "error"')]
        assert errors, output[-4000:]
        return self.process.returncode, errors[-1], time.monotonic() - started  # the last counts, as for the launcher


@pytest.fixture
def long_run(recipe_values: Values) -> RunDir:
    """More steps than any test waits for."""
    return prepared(
        recipe_values(
            train={
                "steps": 5000, "nproc": 2, "grad_accumulation": 3, "checkpoint_every": 5000, "evaluate_every": 0,
                "rank_timeout": 5, "trackers": [],
            }
        )
    )  # fmt: skip


def test_a_stop_of_one_rank_stops_all_after_the_same_step(long_run: RunDir) -> None:
    """Red when a rank saves alone, or what it saved is not what metrics.jsonl tells. Then one is killed: red when its
    peers wait for it, or the error is theirs."""
    started = Started(long_run)
    started.wait_for_steps(3)
    os.kill(started.pid(1), signal.SIGTERM)
    code, error, _ = started.end()
    assert code == EXIT_INTERRUPTED
    found = checkpoint.load_latest(long_run.checkpoints)
    assert found is not None
    assert found.step == len(lines_of(long_run))
    assert f"the checkpoint holds step {found.step}" in error
    started = Started(long_run)
    started.wait_for_steps(found.step + 2)
    os.kill(started.pid(1), signal.SIGKILL)
    code, error, seconds = started.end()
    assert (code, "rank 1 was killed by SIGKILL" in error) == (1, True)
    assert seconds < 60


def test_a_rank_that_hangs_ends_the_run_by_name(long_run: RunDir) -> None:
    """Red when a stopped process is waited for in silence."""
    started = Started(long_run)
    started.wait_for_steps(2)
    os.kill(started.pid(1), signal.SIGSTOP)
    code, error, seconds = started.end()
    assert code == 1
    assert error.startswith("rank 0 failed: RankHung: rank 1 did not come to ")
    assert seconds < 60


def test_more_ranks_than_packs_are_refused(recipe_values: Values) -> None:
    """Red when ranks without a pack would train on nothing in silence; by the stage's own process."""
    run = prepared(recipe_values(train={"nproc": 2, "grad_accumulation": 1}))
    code, error, _ = Started(run).end()
    assert code == EXIT_INPUT
    assert "2 ranks share train.grad_accumulation=1 packs" in error


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_are_one(recipe_values: Values, tmp_path: Path) -> None:
    """The gradients by NCCL. Red as on the CPU; TF32 is off for float32 by default."""
    run = prepared(recipe_values(train={"device": "cuda"}))
    two_ranks(
        [{"do": "gradients", "run": str(run.root), "cases": CASES, "out": str(tmp_path)}], tmp_path, device="cuda"
    )
    for case in CASES:
        alone = load_file(tmp_path / f"{case}-alone.safetensors")
        for sharding in ("ddp", "fsdp"):
            found = load_file(tmp_path / f"{case}-{sharding}.safetensors")
            for name, expected in alone.items():
                # The states themselves are float32 on both; only sums differ in order.
                assert relative_error(found[name], expected) < 1e-4, (case, sharding, name)
