"""`eyas bench ranks --variants context`: what the ideal is, and that the ranks are held against one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.trainer.bench.context import ideal_ms, measure_context
from tasks.trainer.bench.ranks import settings_of
from tasks.trainer.bench.ranks_telling import Listening, Telling
from tasks.trainer.train.parallel import joined
from tests.trainer.ranks import run_as_ranks


def test_the_ideal_is_one_gpus_time_for_the_same_tokens() -> None:
    """Red when the ideal is the time of fewer tokens, whose attention is no measure of that of more."""
    assert ideal_ms({1000: 5.0, 2000: 13.0}, 1000, 2) == (6.5, "1/2 of one GPU")


def test_where_they_do_not_fit_the_time_is_extrapolated() -> None:
    """Red when attention's square is forgotten: 3 ms a thousand tokens, and 2 ms a square of them."""
    times = {500: 2.0, 1000: 5.0}
    found, how = ideal_ms(times, 1000, 4)
    assert found == pytest.approx((4 * 3 + 16 * 2) / 4)
    assert "extrapolated" in how


def _measure(out: Path) -> None:
    settings = settings_of(target="qwen3-8b", pack_tokens=0, packs=1, steps=1, rounds=1, device="cpu", tiny=True)
    with joined(device="cpu", patience_s=60) as layout:
        measure_context(settings, layout, Telling(out, layout.is_first))


def test_two_ranks_train_twice_the_tokens(tmp_path: Path) -> None:
    """Red when a rank computes all rows, nobody says how far from the ideal the ranks are, or their gradients are not
    compared with one rank's: float32 says so to a thousandth, or the command fails."""
    run_as_ranks(_measure, tmp_path / "found.jsonl")
    one, double, ranks = Listening(tmp_path / "found.jsonl").lines()
    assert [(line["gpus"], line["tokens"]) for line in (one, double, ranks)] == [(1, 128), (1, 256), (2, 256)]
    assert "x ideal, 1/2 of one GPU; gradients within 0.0% of one rank's" in ranks["about"]
    assert all(len(line["seconds"]) == 1 and line["variant"] == "context" for line in (one, double, ranks))
