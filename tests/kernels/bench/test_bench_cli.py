"""The commands as typed, on the CPU with tiny shapes; the peer is a stand-in of the same modules and names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.bench import checkout, results
from kernels.bench.cli import main
from kernels.bench.results import Row

TINY = ["--tiny", "--device", "cpu", "--rounds", "1"]

PEER_LOSS = """
import torch

class LogSoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, mask):
        ctx.save_for_backward(logits.softmax(-1) - target)
        return -(target * logits.log_softmax(-1)).sum(-1).mean()

    @staticmethod
    def backward(ctx, gradient):
        (difference,) = ctx.saved_tensors
        return gradient * difference / difference.shape[1], None, None

def _compute_loss(logits, target, mask):
    raise AssertionError("only above 131,072 columns")
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results file of its own; the working tree of whoever runs the tests may hold changes."""
    monkeypatch.setattr(checkout, "clean_commit", lambda *, written: "f" * 40)
    return tmp_path / "results.csv"


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    package = tmp_path / "peer/specforge/core"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "loss.py").write_text(PEER_LOSS)
    return tmp_path / "peer"


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


def test_attention_records_every_case(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a variant computes something else than the reference, or a case is lost."""
    assert run(["attention", *TINY, "--out", str(recorded)]) == 0
    rows = results.read(recorded)
    found = {(row.variant, row.layout) for row in rows}
    assert found == {
        ("eager", "one document"), ("fused", "one document"), ("plain_causal", "one document"), ("fused", "documents"),
        ("fused", "one answer"), ("fused", "eight turns"), ("flex_mask", "mask"),
    }  # fmt: skip
    # float32 sums of a hundred rows against float64.
    assert all(row.error is not None and row.error < 1e-5 for row in rows if row.variant != "flex_mask")
    assert {row.commit for row in rows} == {"f" * 40}
    assert len({row.run for row in rows}) == 1
    assert "fused" in capsys.readouterr().out


def test_loss_against_a_peer_in_its_own_process(recorded: Path, peer: Path) -> None:
    """Red when ours and the peer's do not solve the same problem, or the peer is imported by our processes."""
    assert run(["loss", *TINY, "--against", "specforge", "--peer-path", str(peer), "--out", str(recorded)]) == 0
    rows = results.read(recorded)
    found = {(row.variant, row.layout, row.supervised) for row in rows}
    assert found == {
        ("triton", "logits", 1.0), ("specforge", "logits", 1.0), ("copy", "logits", 1.0), ("linear", "linear", 1.0),
        ("specforge", "linear", 1.0), ("matmul", "linear", 1.0), ("linear", "linear", 0.25),
    }  # fmt: skip
    assert all(row.error is not None and row.error < 1e-4 for row in rows if row.variant not in ("copy", "matmul"))
    assert {row.variant for row in rows if "specforge unpacked" in row.versions} == {"specforge"}
    assert "specforge" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--tokens", "8K"], "--tokens 8K must be positive numbers"),
        (["loss", "--against", "other"], "--against other is unknown: use specforge"),
        (["loss", "--against", "specforge", "--peer-path", "absent"], "--peer-path absent is no folder"),
        (["loss", "--part", "log"], "--part log is unknown"),
        (["goals", "--out", "absent.csv"], "no results at absent.csv"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a mistake gives a traceback, or is found only after minutes of measuring."""
    assert run([*arguments, "--try"] if arguments[0] != "goals" else arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_try_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when figures of an uncommitted tree reach a file."""
    monkeypatch.setattr(checkout, "clean_commit", lambda *, written: pytest.fail("the tree does not matter here"))
    assert run(["attention", *TINY, "--try", "--out", str(tmp_path / "results.csv")]) == 0
    assert not list(tmp_path.iterdir())


def test_goals_are_printed(row: Callable[..., Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when what was not measured is printed as met."""
    path = tmp_path / "results.csv"
    results.append(path, [row(tokens=16384), row(tokens=16384, shape="documents; 7 steps", ms=0.5)])
    assert run(["goals", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "no rows" in printed
    assert "yes" not in printed
