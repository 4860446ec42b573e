"""The capture stage: fills what is missing, survives kills, and explains a store of another target."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import StoreError
from storage.reader import StoreReader
from storage.writer import StoreWriter
from tasks.trainer.capture import capture_samples, store_spec, to_stored
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage
from tasks.trainer.target import Document, Target

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
    notes: list[str] = []
    run = prepare(recipe_values("first", hidden_states=store))
    first = run_stage("capture", run, lambda done, total, note="": notes.append(note))
    assert first["captured_samples"] == first["store_samples"] > 0
    assert (first["preset"], first["ratio"]) == ("near", first["raw_bytes"] / first["stored_bytes"])
    assert all("tokens/s" in note and "MB stored" in note for note in notes)
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


def test_two_captures_share_the_work(recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a capture computes what another one has claimed, or returns before those samples are there."""
    store = offline(tmp_path / "store")
    run = prepare(recipe_values("one", hidden_states=store))
    config, prepared = run.config(), run.receipt("prepare")
    assert prepared is not None
    data = PreparedData.open(run.train_data)
    target = Target.of(config.target, device="cpu")
    theirs = [data[number] for number in range(3)]
    with StoreWriter(str(tmp_path / "store"), store_spec(config, prepared)) as other:
        other.claim(sample.sample_id for sample in theirs)
        computed: list[str] = []
        original = Target.capture

        def counting(self: Target, documents: Sequence[Document], **options: Any) -> Any:
            computed.extend(document.sample_id for document in documents)
            return original(self, documents, **options)

        def meanwhile(seconds: float) -> None:
            """The other writer does its part while ours sleeps."""
            monkeypatch.undo()
            for sample in theirs:
                other.write(to_stored(sample, capture_samples(target, [sample])[0]))
            other.flush()

        monkeypatch.setattr(Target, "capture", counting)
        monkeypatch.setattr("tasks.trainer.capture.time.sleep", meanwhile)
        receipt = run_stage("capture", run, silent)
    assert len(computed) == receipt["captured_samples"] == len(data) - 3
    assert not {sample.sample_id for sample in theirs} & set(computed)
    assert receipt["store_samples"] == len(data)


def test_what_another_capture_committed_meanwhile_is_not_computed(
    recipe_values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a capture looks at the store once, at its beginning: samples are then in it twice."""
    run = prepare(recipe_values("one", hidden_states=offline(tmp_path / "store")))
    config, prepared = run.config(), run.receipt("prepare")
    assert prepared is not None
    data = PreparedData.open(run.train_data)
    theirs = [data[len(data) - 1 - number] for number in range(3)]
    target = Target.of(config.target, device="cpu")
    computed: list[str] = []
    original = Target.capture
    with StoreWriter(str(tmp_path / "store"), store_spec(config, prepared)) as other:

        def counting(self: Target, documents: Sequence[Document], **options: Any) -> Any:
            if not computed:  # ours has begun; the other one is ahead, and through with its part
                computed.append(documents[0].sample_id)
                for sample in theirs:
                    other.write(to_stored(sample, capture_samples(target, [sample])[0]))
                other.flush()
                computed.clear()
            computed.extend(document.sample_id for document in documents)
            return original(self, documents, **options)

        monkeypatch.setattr("tasks.trainer.capture.CLAIMED_SAMPLES", 2)
        monkeypatch.setattr(Target, "capture", counting)
        receipt = run_stage("capture", run, silent)
    assert not {sample.sample_id for sample in theirs} & set(computed)
    assert receipt["captured_samples"] == len(data) - 3
    assert receipt["store_samples"] == len(data)


@pytest.mark.parametrize("changes", [{"preset": "tiny", "top_k": 16}, {"preset": "lossless"}])
def test_other_encodings_are_captured(changes: dict[str, Any], recipe_values: Values, tmp_path: Path) -> None:
    """Red when the store's encoding does not decide what the target keeps of its distribution."""
    run = prepare(recipe_values(hidden_states=offline(tmp_path / "store", **changes)))
    run_stage("capture", run, silent)
    sample = PreparedData.open(run.train_data)[0]
    stored = reader(run).read(sample.sample_id)
    states = to_stored(sample, capture_samples(Target.of(run.config().target, device="cpu"), [sample], top_k=16)[0])
    if changes["preset"] == "lossless":
        assert stored.top_k is None
        assert np.array_equal(stored.aux_hidden, states.aux_hidden)
    else:
        assert stored.last_hidden is None
        assert stored.top_k is not None
        assert states.top_k is not None
        assert np.array_equal(stored.top_k.ids, np.sort(states.top_k.ids, axis=1))


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
    """Red when samples of one encoding are written among those of another under one spec."""
    store = tmp_path / "store"
    run = prepare(recipe_values("first", hidden_states=offline(store)))
    run_stage("capture", run, silent)
    for name, changes in {
        "raw": {"codec": "raw"},
        "coarse": {"aux_step": 0.3},
        "shards": {"shard_tokens": 2048},
    }.items():
        other = prepare(recipe_values(name, hidden_states=offline(store, **changes)))
        with pytest.raises(StoreError, match=next(iter(changes))):
            run_stage("capture", other, silent)
    assert reader(run).sample_ids() == {sample.sample_id for sample in PreparedData.open(run.train_data)}
