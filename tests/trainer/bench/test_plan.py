"""The plan benchmark: it runs the trainer's steps, online too, and holds measured peaks against predicted ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernels.bench import checkout, results
from kernels.bench.errors import BenchError
from tasks.trainer.bench import plan
from tasks.trainer.bench.cli import main
from tasks.trainer.bench.plan_case import predict


def test_the_benchmark_runs_and_records_both_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a case no longer runs on the trainer's own code, or a prediction is not kept beside the measurement."""
    monkeypatch.setattr(checkout, "clean_commit", lambda *_, **__: "0" * 40)
    out = tmp_path / "results.csv"
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--tiny", "--device", "cpu", "--out", str(out)])
    rows = results.read(out)
    assert [row.variant for row in rows] == ["measured", "predicted"] * len(plan.cases(tiny=True))
    assert all(row.work == "plan" for row in rows)
    assert any("online" in row.shape for row in rows)
    assert all(row.peak_gib for row in rows if row.variant == "predicted")


def test_the_largest_error_counts() -> None:
    """Red when a small error hides a large one, or nothing measured reads as no error."""
    rows = [
        results.Row("r", "plan", "measured", 8, 8, 1.0, "s", 1.0, peak, None, None, None, 1, "g", "v", "c")
        for peak in (10.0, 20.0)
    ]
    pairs = [(rows[0], replace(rows[0], peak_gib=9.9)), (rows[1], replace(rows[1], peak_gib=23.0))]
    assert plan.worst_error(pairs) == pytest.approx(0.15)
    with pytest.raises(BenchError, match="no peak was measured"):
        plan.worst_error([(replace(rows[0], peak_gib=None), rows[0])])


def test_the_shapes_are_unlike_those_that_the_account_was_read_from() -> None:
    """Red when a case of the plan is one of the step benchmark's: it would be held against what it was fitted to."""
    from tasks.trainer.bench.step import DRAFT

    assert all(case.settings["hidden_size"] != DRAFT["hidden_size"] for case in plan.cases())


def test_todays_account_gives_the_measured_peaks() -> None:
    """Red when the plan's account, as it now is, is off by more than a tenth from a step measured on a GPU."""
    measured = [row for row in results.read(results.RESULTS) if row.variant == "measured"]
    assert len(measured) >= 5
    assert any(row.layout.startswith("online") for row in measured)
    settings = {(case.tokens, case.vocab, case.shape): case.settings for case in plan.cases()}
    for row in measured:
        predicted = predict(settings[row.tokens, row.vocab, row.shape]) / results.GIB
        assert row.peak_gib is not None
        assert predicted == pytest.approx(row.peak_gib, rel=0.1), row.shape
