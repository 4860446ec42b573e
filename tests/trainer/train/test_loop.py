"""The loop: gradients that add up, resumes that lose nothing, modes that touch only what is theirs."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import storage.reader
import storage.writer
from tasks.trainer.config import Train
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.shape import draft_shape
from tasks.trainer.draft.ttt import Computation, unroll
from tasks.trainer.errors import InputError
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage, stages_of
from tasks.trainer.stop import EXIT_INTERRUPTED
from tasks.trainer.target import Document, Target
from tasks.trainer.train import checkpoint
from tasks.trainer.train.batches import Packs, Position
from tasks.trainer.train.curves import read_metrics
from tasks.trainer.train.dealing import row_weights
from tasks.trainer.train.loop import choose_objective
from tasks.trainer.train.optim import Optimizer
from tasks.trainer.train.sources import OnlineSource

Values = Callable[..., dict[str, Any]]
K = 3


def make_run(values: dict[str, Any], *, until: str = "train") -> RunDir:
    """Run the stages up to and including `until` in this process."""
    config = load_config(values)
    run = RunDir.create(config)
    for stage in stages_of(config):
        run_stage(stage, run, silent)
        if stage == until:
            break
    return run


def masters(run: RunDir) -> dict[str, torch.Tensor]:
    found = checkpoint.load_latest(run.checkpoints)
    assert found is not None
    return {**found.draft, **found.optimizer}


def losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in read_metrics(run.metrics)]


def assert_same_run(run: RunDir, expected: RunDir) -> None:
    assert losses(run) == losses(expected)
    for name, tensor in masters(expected).items():
        assert torch.equal(tensor, masters(run)[name]), name


def make_draft(target: Target) -> Eagle3Draft:
    load = load_config({"target": {"model": "x"}, "data": {"source": "x"}})
    shape = draft_shape(target.config, load.draft, vocab_size=300, target_vocab_size=300, aux_layer_ids=(1, 3, 4))
    d2t = torch.zeros(300, dtype=torch.int64)
    return Eagle3Draft.initialise(
        shape, embedding=target.embedding, head=target.head, d2t=d2t, t2d=torch.ones(300, dtype=torch.bool), seed=0
    )


def gradients(
    draft: Eagle3Draft, target: Target, packs: list[list[int]], data: PreparedData
) -> dict[str, torch.Tensor]:
    """Gradients of one optimizer step over `packs`, and its loss."""
    optimizer = Optimizer(draft, draft.state_dict(), Train(ttt_steps=K))
    weights = row_weights(data, packs, K, 0.8)
    total = 0.0
    for pack in packs:
        unrolled = unroll(
            draft,
            next(OnlineSource(target).batches([[data[number] for number in pack]])),
            ttt_steps=K,
            row_weight=weights,
            head=target.head.float(),
            draft_ids=draft.draft_ids(),
            computation=Computation(attention="fused", loss="linear"),
        )
        unrolled.loss.backward()
        optimizer.collect()
        total += float(unrolled.loss.detach())
    found = {name: master.grad for name, master in optimizer.masters.items() if master.grad is not None}
    return {**found, "loss": torch.tensor(total)}


def test_packing_and_accumulation_give_the_gradients_of_the_documents(recipe_values: Values) -> None:
    """Red when packed documents see each other, N_k is taken per pack, or accumulation averages means."""
    run = make_run(recipe_values(), until="prepare")
    data = PreparedData.open(run.train_data)
    target = Target.load(run.config().target.model, dtype="bfloat16")
    draft = make_draft(target)
    together = gradients(draft, target, [[0, 1, 2, 3]], data)
    for packs in ([[0], [1], [2], [3]], [[2, 0], [3, 1]]):
        apart = gradients(draft, target, packs, data)
        assert apart.keys() == together.keys()
        for name, gradient in together.items():
            # fp32 sums in another order.
            torch.testing.assert_close(apart[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_document_shorter_than_the_unroll_adds_nothing_to_late_steps(recipe_values: Values) -> None:
    """Red when a step without rows gives NaN or a division by zero."""
    assert row_weights(_Masks([[True, True, False]]), [[0]], K, 0.8) == [0.0, 0.0, 0.0]  # type: ignore[arg-type]
    assert row_weights(_Masks([[False, True, True]]), [[0]], K, 0.8)[1:] == [0.0, 0.0]  # type: ignore[arg-type]


class _Masks:
    def __init__(self, masks: list[list[bool]]) -> None:
        self._masks = masks

    def __getitem__(self, number: int) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(loss_mask=np.array(self._masks[number]))


def test_training_learns(recipe_values: Values) -> None:
    """Red when the optimizer does not reach the draft: forty steps on 18 documents must take 0.5 off the loss."""
    run = make_run(recipe_values(train={"steps": 40, "learning_rate": 1e-2}))
    curve = losses(run)
    assert np.mean(curve[-5:]) < np.mean(curve[:5]) - 0.5


def test_online_opens_no_store_and_calls_the_target_every_epoch(
    recipe_values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when online training caches states (memory, or a store behind the user's back)."""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("online training opened a store")

    for owner in (storage.reader.StoreReader, storage.writer.StoreWriter):
        monkeypatch.setattr(owner, "__init__", forbidden)
    captured: list[str] = []
    original = Target.capture

    def counting(self: Target, documents: Sequence[Document], **options: Any) -> Any:
        captured.extend(document.sample_id for document in documents)
        return original(self, documents, **options)

    monkeypatch.setattr(Target, "capture", counting)
    values = recipe_values(train={"steps": 30})
    run = make_run(values)
    data = PreparedData.open(run.train_data)
    packs = Packs(data.lengths.tolist(), pack_tokens=128, seed=0)
    expected, epoch = [], 0
    while len(expected) < 30:
        expected += packs.epoch(epoch)
        epoch += 1
    assert epoch >= 3, "the run must go over the data more than once"
    assert captured == [data[number].sample_id for pack in expected[:30] for number in pack]


def test_offline_training_never_loads_the_target(
    recipe_values: Values, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Red when offline training needs the target's layers in memory."""
    store = {"mode": "offline", "store_url": str(tmp_path / "store"), "preset": "small", "top_k": 32}
    values = recipe_values(hidden_states=store)
    make_run(values, until="capture")
    monkeypatch.setattr(Target, "__init__", lambda *a, **k: pytest.fail("offline training built a target"))
    run = RunDir.create(load_config(values))
    run_stage("train", run, silent)
    assert len(losses(run)) == 8


def test_online_and_offline_train_bit_identically(recipe_values: Values, tmp_path: Path) -> None:
    """Red when one bit differs between the modes: losses, masters or moments."""
    online = make_run(recipe_values("online"))
    offline = {"mode": "offline", "store_url": str(tmp_path / "store"), "preset": "lossless"}
    assert_same_run(make_run(recipe_values("offline", hidden_states=offline)), online)
    hybrid = {"mode": "online", "store_url": str(tmp_path / "filled"), "preset": "lossless"}
    assert_same_run(make_run(recipe_values("hybrid", hidden_states=hybrid)), online)


# 300 tokens calibrate; top-16 of a vocabulary of 300.
LOSSY = {"near": {}, "tiny": {"preset": "tiny", "top_k": 16}}


@pytest.mark.parametrize("name", LOSSY)
def test_a_run_that_fills_its_store_is_the_run_that_reads_it(
    name: str, recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the first epoch, from the target, trains on other numbers than later ones and later runs, from the
    store; when the store fills up again; or a run that is cut and continued differs."""
    store = {"mode": "online", "store_url": str(tmp_path / "store"), "calibration_tokens": 300, **LOSSY[name]}
    train = {"steps": 30}
    filling = make_run(recipe_values("filling", hidden_states=store, train=train))
    receipt = filling.receipt("train")
    assert receipt is not None
    samples = len(PreparedData.open(filling.train_data))
    assert receipt["store"]["captured_samples"] == receipt["store"]["store_samples"] == samples
    offline = {**store, "mode": "offline", "on_missing": "refuse"}
    assert losses(make_run(recipe_values("reading", hidden_states=offline, train=train))) == losses(filling)
    monkeypatch.setattr(Target, "capture", lambda *a, **k: pytest.fail("a sample went through the target again"))
    assert_same_run(make_run(recipe_values("again", hidden_states=store, train=train)), filling)
    monkeypatch.undo()
    elsewhere = {**store, "store_url": str(tmp_path / "elsewhere"), "store_budget_gb": 1e-9}
    cut = make_run(recipe_values("cut", hidden_states=elsewhere, train=train))
    shutil.rmtree(max(cut.checkpoints.glob("step-*")))
    run_stage("train", cut, silent)
    assert_same_run(cut, filling)


def test_a_store_is_read_once_a_pack_and_not_past_the_end(
    recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when reading ahead goes past the run's last pack, or reads a sample twice."""
    store = {"mode": "offline", "store_url": str(tmp_path / "store")}
    run = make_run(recipe_values(hidden_states=store), until="capture")
    read: list[str] = []
    original = storage.reader.StoreReader.read_window

    def counting(self: storage.reader.StoreReader, sample_id: str, *window: int) -> Any:
        read.append(sample_id)
        return original(self, sample_id, *window)

    monkeypatch.setattr(storage.reader.StoreReader, "read_window", counting)
    run_stage("train", run, silent)
    data = PreparedData.open(run.train_data)
    order = Packs(data.lengths.tolist(), pack_tokens=128, seed=0).read_from(Position())
    packs = [pack for pack, _ in itertools.islice(order, 8)]
    # Threads read ahead side by side.
    assert sorted(read) == sorted(data[number].sample_id for pack in packs for number in pack)


def test_every_step_says_what_it_waited_for_and_moved(recipe_values: Values, tmp_path: Path) -> None:
    """Red when waiting for data is not measured, or bytes are counted of another step."""
    store = {"mode": "offline", "store_url": str(tmp_path / "store"), "preset": "near", "calibration_tokens": 300}
    run = make_run(recipe_values(hidden_states=store))
    lines, receipt = read_metrics(run.metrics), run.receipt("train")
    assert receipt is not None
    assert all(0 <= line["data_wait_s"] <= line["seconds"] for line in lines)
    assert all(line["h2d_bytes"] > 96 * line["tokens"] for line in lines), "a byte an element of the auxiliary states"
    assert sum(line["h2d_bytes"] for line in lines) == receipt["h2d_bytes"]
    assert receipt["h2d_bytes_bf16"] > 2 * 96 * sum(line["tokens"] for line in lines)


@pytest.mark.parametrize("mixing", ["row", "step"])
def test_lambda_by_step_resumes_exactly(mixing: str, recipe_values: Values) -> None:
    """Red when a resumed run takes lambda from other metrics than the step before, or mixing has no effect."""
    train = {"objective": "lk_lambda", "lk_mixing": mixing, "steps": 8, "checkpoint_every": 3}
    whole = make_run(recipe_values("whole", train=train))
    cut = make_run(recipe_values("cut", train=train))
    newest = max(cut.checkpoints.glob("step-*"))
    shutil.rmtree(newest)
    run_stage("train", cut, silent)
    receipt = cut.receipt("train")
    assert receipt is not None
    assert receipt["continued_from"] == 6
    assert_same_run(cut, whole)
    other = {**train, "lk_mixing": "row" if mixing == "step" else "step"}
    assert losses(make_run(recipe_values("other", train=other)))[1:] != losses(whole)[1:]


def test_muon_and_a_schedule_with_a_decay_resume_exactly(recipe_values: Values) -> None:
    """Red when a checkpoint lacks Muon's momentum, or a resumed run takes the schedule up at another step."""
    train = {"optimizer": "muon", "schedule": "warmup_stable_decay", "decay_steps": 3, "learning_rate": 1e-3,
             "steps": 8, "checkpoint_every": 3}  # fmt: skip
    whole = make_run(recipe_values("whole", train=train))
    cut = make_run(recipe_values("cut", train=train))
    shutil.rmtree(max(cut.checkpoints.glob("step-*")))
    run_stage("train", cut, silent)
    receipt = cut.receipt("train")
    assert receipt is not None
    assert receipt["continued_from"] == 6
    assert_same_run(cut, whole)
    assert any(name.endswith("momentum_buffer") for name in masters(whole))


def test_lambda_follows_the_alpha_of_the_step_before() -> None:
    """Red when lambda does not start at cross entropy, or is not exp(-decay * alpha)."""
    settings = Train(objective="lk_lambda", lk_mixing="step", lk_decay=2.0, ttt_steps=2, steps=200)
    assert choose_objective(settings, None).mixing == (1.0, 1.0)
    assert choose_objective(settings, {"alpha": [0.5, 0.25]}).mixing == (math.exp(-1.0), math.exp(-0.5))
    assert choose_objective(Train(lk_mixing="step"), {"alpha": [0.5] * 7}).mixing is None


def test_a_run_continues_with_other_memory_choices(recipe_values: Values) -> None:
    """Red when a run that ran out of memory cannot go on with checkpointing, or the choice is not the one computed."""
    run = make_run(recipe_values("same"))
    shutil.rmtree(max(run.checkpoints.glob("step-*")))
    changed = recipe_values("same", train={"checkpointing": "step", "mlp_chunk_rows": 128})
    again = RunDir.create(load_config(changed))
    run_stage("train", again, silent)
    receipt = again.receipt("train")
    assert receipt is not None
    assert receipt["continued_from"] == 6


def start(run: RunDir, stage: str = "train") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.trainer.stages", stage, str(run.root)], stdout=subprocess.PIPE, text=True
    )


def wait_for_steps(run: RunDir, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while len(read_metrics(run.metrics)) < steps:
        assert process.poll() is None, "the trainer ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_kill_9_in_the_middle_changes_nothing(recipe_values: Values) -> None:
    """Red when a killed run starts over, skips or repeats a pack, or loses an update's moments."""
    train = {"steps": 60, "checkpoint_every": 7}
    expected = make_run(recipe_values("whole", train=train))
    run = make_run(recipe_values("killed", train=train), until="prepare")
    with start(run) as process:
        wait_for_steps(run, 12, process)
        process.kill()
    assert len(read_metrics(run.metrics)) < 60
    run_stage("train", run, silent)
    receipt = run.receipt("train")
    assert receipt is not None
    assert receipt["continued_from"] >= 7
    assert_same_run(run, expected)


def test_sigterm_saves_and_exits_75(recipe_values: Values) -> None:
    """Red when a stopped trainer loses the steps since the last checkpoint, or claims success."""
    train = {"steps": 2000, "checkpoint_every": 1999}
    run = make_run(recipe_values(train=train), until="prepare")
    with start(run) as process:
        wait_for_steps(run, 5, process)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == EXIT_INTERRUPTED
    assert json.loads(output.splitlines()[-1])["event"] == "error"
    assert run.receipt("train") is None
    found = checkpoint.load_latest(run.checkpoints)
    assert found is not None
    assert found.step == len(read_metrics(run.metrics)) >= 5


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    recipe_values: Values, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when a flipped byte goes unnoticed, a fresh start hides it, or a good checkpoint is not used."""
    expected = make_run(recipe_values("whole"))
    run = make_run(recipe_values("damaged"))
    newest, before = sorted(run.checkpoints.glob("step-*"), reverse=True)
    content = bytearray((newest / "draft.safetensors").read_bytes())
    content[-5] ^= 1
    (newest / "draft.safetensors").write_bytes(content)
    run_stage("train", run, silent)
    assert f"checkpoint {newest.name} is damaged" in caplog.text
    assert_same_run(run, expected)
    for folder in (newest, before):
        (folder / "state.json").write_text("{")
    with pytest.raises(InputError, match="all 2 checkpoints"):
        run_stage("train", run, silent)


def test_changed_data_is_another_run(recipe_values: Values) -> None:
    """Red when a run continues its checkpoint on other data."""
    values = recipe_values()
    run = make_run(values)
    source = Path(values["data"]["source"])
    source.write_text("".join(source.read_text().splitlines(keepends=True)[:-4]))
    run_stage("prepare", run, silent)
    with pytest.raises(InputError, match=r"belongs to another run \(its data changed"):
        run_stage("train", run, silent)
