"""The step benchmark: it runs the trainer's own step, and its search for the longest context ends where it should."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.bench import checkout, layouts, results
from kernels.bench.results import Row
from kernels.bench.runner import Case
from tasks.trainer.bench import step
from tasks.trainer.bench.cli import main
from tasks.trainer.bench.step_case import StepCase
from tasks.trainer.draft.alignment import align


@pytest.mark.parametrize("layout", [layouts.ALL, layouts.ANSWER, layouts.TURNS])
def test_the_benchmarks_rows_are_the_trainers(layout: str) -> None:
    """Red when the kernels' benchmarks lay out other rows than training does."""
    tokens, steps = 200, 4
    spans = layouts.supervised_spans(tokens, layout)
    mask = torch.zeros(tokens, dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    counts = align(mask, [tokens], steps).counts
    for number in range(steps):
        rows = [row for start, end in layouts.counting_rows(spans, number) for row in range(start, end)]
        assert rows == counts[number].nonzero().flatten().tolist()


def test_a_step_trains(tmp_path: Path) -> None:
    """Red when the timed step leaves out the update, or a second one starts from the same weights."""
    (case, *_) = step.cases([64], against=False, device="cpu", tiny=True)
    made = StepCase(dict(case.settings), torch.device("cpu"))
    masters = made._model.optimizer.masters
    seen = [{name: master.detach().clone() for name, master in masters.items()}]
    for _ in range(3):
        assert made.start("eyas")() == []
        seen.append({name: master.detach().clone() for name, master in masters.items()})
    # The first update has the learning rate 0: warm-up begins there.
    for before, after in itertools.pairwise(seen[1:]):
        assert all(not torch.equal(before[name], after[name]) for name in masters)
    moments = sum(tensor.numel() for tensor in made.inputs)
    assert moments > 3 * sum(master.numel() for master in masters.values())


def test_the_command_records_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when checkpointing changes the gradient, or a quarter of the rows is not measured."""
    monkeypatch.setattr(checkout, "clean_commit", lambda *, written: "f" * 40)
    out = tmp_path / "results.csv"
    with pytest.raises(SystemExit) as exit_:
        main(["step", "--tiny", "--device", "cpu", "--rounds", "1", "--out", str(out)])
    assert not exit_.value.code
    rows = results.read(out)
    assert [(row.variant, row.layout, row.supervised) for row in rows] == [
        ("eyas", layouts.ALL, 1.0), ("eyas_ckpt", layouts.ALL, 1.0), ("eyas", layouts.ANSWER, 0.25),
        ("eyas", layouts.TURNS, 0.25),
    ]  # fmt: skip
    # float32 against float32 in another order.
    assert all(row.error is not None and row.error < 1e-4 for row in rows)


class Machine:
    """A bench on which a step fits up to so many tokens."""

    def __init__(self, room: Mapping[str, int], row: Row) -> None:
        self.room, self.row = room, row
        self.tried: list[int] = []
        self.recorded: list[Row] = []

    def take(self, case: Case) -> tuple[list[Row], list[dict[str, Any]]]:
        from dataclasses import replace

        (variant,) = case.variants
        assert case.settings["states"] == "cpu"
        self.tried.append(case.tokens)
        fits = case.tokens <= self.room[variant]
        return [replace(self.row, variant=variant, tokens=case.tokens, shape=case.shape, ms=1.0 if fits else None)], []

    def record(self, rows: Sequence[Row], raw: object) -> None:
        self.recorded += rows

    def finish(self) -> None:
        pass

    def say(self, text: str) -> None:
        raise AssertionError(text)


def test_the_longest_context_is_found(row_of_a_step: Row) -> None:
    """Red when the search stops early, tries a size twice, or reports a size that did not fit."""
    machine = Machine({"eyas_ckpt": 10**9, "specforge_compact": 53000}, row_of_a_step)
    step.measure_longest(machine, against=True)  # type: ignore[arg-type]
    assert machine.tried == [262144, 32768, 65536, 49152, 57344]
    ours, peer = machine.recorded
    assert (ours.variant, ours.layout, ours.tokens) == ("eyas_ckpt", "longest", 262144)
    assert ours.shape.endswith("not tried past 262144")
    assert (peer.variant, peer.tokens) == ("specforge", 49152)
    assert peer.shape.endswith("out of memory at 57344")


def test_the_search_goes_down_when_the_start_does_not_fit(row_of_a_step: Row) -> None:
    """Red when a machine smaller than the first size gets no answer."""
    machine = Machine({"eyas_ckpt": 9000}, row_of_a_step)
    step.measure_longest(machine, against=False)  # type: ignore[arg-type]
    assert machine.tried == [262144, 131072, 65536, 32768, 16384, 8192]
    assert [row.tokens for row in machine.recorded] == [8192]


@pytest.fixture
def row_of_a_step() -> Row:
    return Row(
        run="r", work="step", variant="", tokens=1, vocab=40, supervised=1.0, shape="", ms=1.0, peak_gib=1.0,
        extra_gib=1.0, error=None, tokens_per_s=1.0, gpus=1, gpu="cpu", versions="", commit="c",
    )  # fmt: skip
