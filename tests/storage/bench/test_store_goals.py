"""The store's goals, recomputed from the committed results."""

from __future__ import annotations

import pytest

from storage.bench import goals, plot, results
from storage.bench.results import Row
from storage.errors import StoreError


@pytest.mark.parametrize(
    "outcome", goals.evaluate(results.read(results.RESULTS)), ids=lambda o: f"{o.text}-{o.goal.variant}-{o.goal.metric}"
)
def test_a_goal_is_met_or_said_to_be_missed(outcome):
    # Red when a figure is claimed that the committed results do not show, or a miss is not said.
    assert outcome.value is not None, "no run measured it"
    if outcome.excuse:
        assert not outcome.met, "the goal is met: take its excuse away"
    else:
        assert outcome.met, f"{outcome.value:.5g} where {outcome.goal.at} {outcome.goal.bound:g} is due"


def row(**changes: object) -> Row:
    cells = {
        "run": "20260101T000000Z-aaaa", "text": "sharegpt", "target": "t", "hidden_size": 8, "samples": 1, "tokens": 2,
        "targets": 1, "variant": "near", "metric": "ratio", "value": 2.5, "machine": "m", "versions": "v",
    }  # fmt: skip
    return Row(**{**cells, "commit": "c", **changes})


def test_rows_survive_their_file(tmp_path):
    path = tmp_path / "results.csv"
    rows = [row(), row(variant="tiny", value=1e-7)]
    results.append(path, rows[:1])
    results.append(path, rows[1:])
    assert results.read(path) == rows


def test_files_with_other_columns_are_refused(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(StoreError, match=r"has the columns a, b, not run, .*: name another --out"):
        results.append(path, [row()])
    with pytest.raises(StoreError, match=r"no results at .*nothing\.csv: run `eyas bench store` first"):
        results.read(tmp_path / "nothing.csv")


def test_the_newest_run_counts():
    rows = [row(run="20260102T000000Z-aaaa", value=3.0), row(run="20260103T000000Z-aaaa", text="own", value=9.0), row()]
    found = results.newest(rows, "sharegpt", "near", "ratio")
    assert found is not None
    assert found.value == 3.0
    assert results.newest(rows, "sharegpt", "near", "latency ms") is None


def test_a_goal_without_a_figure_is_not_met():
    outcomes = goals.evaluate([row()])
    assert all(outcome.value is None and not outcome.met for outcome in outcomes)


def test_the_plot_is_drawn_from_what_there_is(tmp_path):
    rows = [
        row(variant=variant, metric=metric, value=value)
        for variant, value in (("near", 2.8), ("lossless", 1.4), ("safetensors", 1.0))
        for metric in ("ratio", "read MB/s")
    ]
    path = plot.draw(rows, tmp_path / "figures")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(StoreError, match="no run measured text own"):
        plot.draw(rows, tmp_path, text="own")
