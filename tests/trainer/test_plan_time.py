"""Predicted seconds and bytes of a store, against recorded runs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from kernels.bench import results
from storage.presets import PRESETS, Encoding
from tasks.trainer.plan_memory import Choices, step_memory
from tasks.trainer.plan_storage import Bandwidth, measure_bandwidth, reading_seconds, stored_bytes
from tasks.trainer.plan_time import DEVICES, measure_device, step_seconds
from tests.trainer.test_plan_memory import RECORDED, SHAPE, rows_of

STORED = Path(__file__).parents[2] / "storage" / "bench" / "results.csv"


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row.variant}-{row.tokens}-{row.layout}")
def test_predicted_time_is_near_the_recorded_one(row: results.Row) -> None:
    """Red when the table of devices no longer gives the recorded steps: within a quarter."""
    choices = Choices(checkpointing="step" if row.variant == "eyas_ckpt" else "none")
    pack = rows_of(row.tokens, row.layout)
    kept = step_memory(SHAPE, pack, choices).activations
    assert row.ms is not None
    assert 1e3 * step_seconds(SHAPE, pack, choices, DEVICES["h200"], kept=kept) == pytest.approx(row.ms, rel=0.25)


@pytest.mark.parametrize("text", ["own", "sharegpt"])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_predicted_bytes_are_those_of_real_states(preset: str, text: str) -> None:
    """Red when a preset's store is predicted more than 10% off on states of a real target, on either text."""
    with STORED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["text"] == text and row["variant"] == preset]
    (found,) = [row for row in rows if row["metric"] == "ratio"]
    size, tokens, targets = int(found["hidden_size"]), int(found["tokens"]), int(found["targets"])
    raw = tokens * (6 * size + 5) + targets * (2 * size + 8)
    predicted = stored_bytes(
        PRESETS[preset], hidden_size=size, tokens=tokens, targets=targets, samples=int(found["samples"])
    )
    assert predicted == pytest.approx(raw / float(found["value"]), rel=0.10)


def test_steps_between_the_presets_lie_between_them() -> None:
    """Red when a store by hand is predicted larger than a more exact one."""

    def size(encoding: Encoding) -> int:
        return stored_bytes(encoding, hidden_size=1024, tokens=1000, targets=1000, samples=1)

    steps = [None, 0.05, 0.1, 0.2, 0.3, 0.6, 1.0]
    sizes = [size(Encoding(aux_step=step, last="hidden", last_step=0.05)) for step in steps]
    assert sizes == sorted(sizes, reverse=True)
    assert size(Encoding(aux_step=0.1, last="topk", top_k=128)) < size(Encoding(aux_step=0.1, last="topk", top_k=200))
    assert size(Encoding(aux_step=None, last="hidden", codec="raw", level=0)) > size(PRESETS["lossless"])


def test_bandwidth_is_measured_where_the_store_will_lie(tmp_path: Path) -> None:
    """Red when the probe leaves files or folders behind, or measures nothing."""
    found = measure_bandwidth(str(tmp_path / "not" / "there"))
    assert found.read > 0
    assert found.write > 0
    assert found.free
    assert list(tmp_path.iterdir()) == []
    assert measure_bandwidth("memory://plan-probe").free is None


def test_a_slow_place_is_what_one_waits_for() -> None:
    """Red when reading ignores the bandwidth, or the decoder."""
    near, slow = PRESETS["near"], Bandwidth(read=1e6, write=1e6, free=None)
    fast = Bandwidth(read=1e12, write=1e12, free=None)
    assert reading_seconds(near, slow, stored=1e7, raw=3e7, cores=8) == pytest.approx(10.0)
    assert 0 < reading_seconds(near, fast, stored=1e7, raw=3e7, cores=8) < 0.1


def test_the_device_found_has_rates() -> None:
    """Red when the calibration of this machine gives nothing to plan with."""
    found = measure_device("cpu", torch.float32)
    assert found.products > 1e8
    assert found.copy > 1e7
    assert found.memory > 2**28
