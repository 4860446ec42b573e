"""The benchmark of ranks: every number of them is measured by the trainer's own step, and recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernels.bench import checkout, results
from kernels.bench.errors import BenchError
from tasks.trainer.bench import ranks
from tasks.trainer.bench.cli import main
from tasks.trainer.bench.ranks_case import make_documents
from tasks.trainer.bench.ranks_telling import Listening


def test_every_number_of_ranks_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when ranks that wait are waited for, a variant is left out, or a rank trains other than its own packs."""
    monkeypatch.setattr(checkout, "clean_commit", lambda *, written: "f" * 40)
    out = tmp_path / "results.csv"
    command = ["ranks", "--tiny", "--device", "cpu", "--steps", "1", "--rounds", "1", "--variants", "online,offline"]
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--out", str(out)])
    assert not exit_.value.code
    rows = results.read(out)
    assert [(row.work, row.variant, row.gpus) for row in rows] == [
        ("ranks", "online", 1), ("ranks", "online", 2), ("ranks", "offline", 1), ("ranks", "offline", 2),
    ]  # fmt: skip
    for one, two in (rows[:2], rows[2:]):
        # The packs of two ranks are twice those of one, and all nearly full.
        assert 1.8 < two.tokens / one.tokens < 2.2
        assert one.tokens_per_s is not None
        assert one.ms is not None
        assert one.tokens_per_s == pytest.approx(one.tokens / one.ms * 1e3, rel=1e-3)


def test_packs_are_full_and_the_same_on_every_rank() -> None:
    """Red when scaling is measured on packs of unlike size, or ranks make documents of their own."""
    settings = ranks.settings_of(
        target="qwen3-8b", pack_tokens=8192, packs=2, steps=1, rounds=1, device="cpu", tiny=True
    )
    one, other = (make_documents(settings, num_packs=8) for _ in range(2))
    assert [sample.sample_id for sample in one.samples] == [sample.sample_id for sample in other.samples]
    filled = [int(one.lengths[pack].sum()) for pack in one.packs]
    assert min(filled) > 0.9 * settings["pack_tokens"]
    assert sorted(number for pack in one.packs for number in pack) == list(range(len(one.samples)))


def test_an_unknown_target_is_named() -> None:
    """Red when a shape is made up for it."""
    with pytest.raises(BenchError, match="--target gpt is unknown: use qwen3-1"):
        ranks.settings_of(target="gpt", pack_tokens=8192, packs=2, steps=1, rounds=1, device="cpu", tiny=False)


def test_a_row_is_recorded_while_the_ranks_go_on(tmp_path: Path) -> None:
    """Red when a run that is cut off, or fails later on, loses what it had measured: this one ends, with an error, only
    when its row was recorded."""
    heard, out = tmp_path / "heard", tmp_path / "found.jsonl"
    script = f"""
import pathlib, sys, time
from tasks.trainer.bench.ranks_telling import Telling
Telling(pathlib.Path({str(out)!r}), True).found({{"variant": "online"}})
ends = time.monotonic() + 60
while not pathlib.Path({str(heard)!r}).exists() and time.monotonic() < ends: time.sleep(0.05)
sys.exit(3 if pathlib.Path({str(heard)!r}).exists() else 4)
"""
    found: list[object] = []

    def record(line: object) -> None:
        found.append(line)
        heard.touch()

    assert ranks._follow([sys.executable, "-c", script], Listening(out), record) == 3
    assert found == [{"variant": "online"}]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    """Red when the command reads a line that a rank is about to finish."""
    path = tmp_path / "found.jsonl"
    listening = Listening(path)
    assert list(listening.lines()) == []
    path.write_text('{"gpus": 1}\n{"gp')
    assert list(listening.lines()) == [{"gpus": 1}]
    with path.open("a") as file:
        file.write('us": 2}\n')
    assert list(listening.lines()) == [{"gpus": 2}]


@pytest.mark.parametrize(("nproc", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_powers_of_two_and_all_are_measured(nproc: int, counts: list[int]) -> None:
    """Red when eight GPUs are measured at every number, or not at eight."""
    assert ranks.counts_of(nproc) == counts
