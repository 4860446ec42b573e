"""The results file: what is written comes back, and ratios stay inside one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.bench import results
from kernels.bench.errors import BenchError
from kernels.bench.results import Row, Rows, newest_run

Make = Callable[..., Row]


def test_rows_come_back_with_their_types(row: Make, tmp_path: Path) -> None:
    """Red when an empty cell becomes a 0 or a string, or a second append writes the header again."""
    path = tmp_path / "results.csv"
    rows = [row(), row(work="loss", vocab=32000, shape='linear; "7" steps, D 4096'), row(ms=None, peak_gib=None)]
    results.append(path, rows[:1])
    results.append(path, rows[1:])
    assert results.read(path) == rows


def test_a_file_of_other_columns_is_left_alone(row: Make, tmp_path: Path) -> None:
    """Red when rows are appended under columns that are not theirs."""
    path = tmp_path / "results.csv"
    path.write_text("time,memory\n1,2\n")
    with pytest.raises(BenchError, match=r"time, memory.*--out"):
        results.append(path, [row()])
    assert path.read_text() == "time,memory\n1,2\n"


def test_the_newest_run_alone_is_read(row: Make) -> None:
    """Red when rows of two runs meet in a ratio, or a newer run of another part hides this one's."""
    old, new = "20260101T000000Z-ffff", "20260102T000000Z-0000"
    rows = [row(run=old, ms=1.0), row(run=new, ms=3.0), row(run=new, variant="flex"), row(run="3", work="loss")]
    assert [one.ms for one in newest_run(rows, "attention")] == [3.0, 2.0]
    rows.append(row(run="20260103T000000Z-0000", shape="mask; 7 steps"))
    assert [one.ms for one in newest_run(rows, "attention", "one document")] == [3.0, 2.0]
    assert not newest_run(rows, "step")


def test_a_case_that_is_missing_or_double_is_an_error(row: Make) -> None:
    """Red when a ratio is silently taken of the wrong row."""
    rows = Rows([row(), row(tokens=2048), row(tokens=2048)])
    assert rows.one("fused", tokens=1024) == row()
    with pytest.raises(LookupError, match="0 rows of flex, tokens=1024"):
        rows.one("flex", tokens=1024)
    with pytest.raises(LookupError, match="2 rows"):
        rows.one("fused", tokens=2048)
