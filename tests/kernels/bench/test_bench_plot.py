"""The figures are drawn from rows, and from what there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.bench import layouts, plot
from kernels.bench.errors import BenchError
from kernels.bench.results import Row

Make = Callable[..., Row]


def test_figures_are_drawn_for_the_works_that_were_measured(row: Make, tmp_path: Path) -> None:
    """Red when a missing work, variant or cell (a case out of memory) keeps the others from being drawn."""
    attention = [row(variant=variant, tokens=tokens, ms=tokens / 100) for variant in ("fused", "plain_causal")
                 for tokens in (8192, 16384)]  # fmt: skip
    assert [path.name for path in plot.draw(attention, tmp_path)] == ["attention.png"]
    steps = [row(work="step", variant=variant, shape=f"{layouts.ALL}; 7 steps", tokens=tokens)
             for variant in ("eyas", "specforge") for tokens in (8192, 16384)]  # fmt: skip
    steps.append(row(work="step", variant="specforge", shape=f"{layouts.ALL}; 7 steps; out of memory", tokens=32768,
                     ms=None, peak_gib=None, extra_gib=None, tokens_per_s=None))  # fmt: skip
    losses = [row(work="loss", variant="linear", vocab=32000, shape="linear; 7 steps", extra_gib=0.5)]
    written = plot.draw([*attention, *steps, *losses], tmp_path)
    assert [path.name for path in written] == ["attention.png", "loss.png", "step.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    """Red when an empty file gives empty figures."""
    with pytest.raises(BenchError, match="no results to draw"):
        plot.draw([], tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
