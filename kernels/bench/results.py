"""Results: one CSV line a variant and case, and beside it one JSON line an iteration.

Lines of one `run` were measured interleaved, on one GPU, from one commit: ratios are taken within a run only.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kernels.bench.errors import BenchError

RESULTS = Path(__file__).parent / "results.csv"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One line of results.csv; None is an empty cell.

    run: groups what one command measured; it begins with the UTC time. work: attention, loss, step. tokens, vocab
    (draft vocabulary, None where there is none), supervised (share of the rows). shape: layout first, then what else
    tells the case apart, separated by "; ". ms: median time of forward and backward. peak_gib: most memory that the
    process held. extra_gib: peak less inputs and returned gradients. error: relative L2 error, the worst of all outputs
    and gradients, of the same computation on a smaller problem, against float64 (step: against float32). gpus: GPUs of
    the machine that were used. ms, peak_gib and extra_gib are None when the case ran out of memory; shape says so then.
    """

    run: str
    work: str
    variant: str
    tokens: int
    vocab: int | None
    supervised: float
    shape: str
    ms: float | None
    peak_gib: float | None
    extra_gib: float | None
    error: float | None
    tokens_per_s: float | None
    gpus: int
    gpu: str
    versions: str
    commit: str

    @property
    def layout(self) -> str:
        """The first item of shape."""
        return self.shape.split(";")[0]


_READ: dict[str, type] = {
    "tokens": int, "vocab": int, "supervised": float, "ms": float, "peak_gib": float, "extra_gib": float,
    "error": float, "tokens_per_s": float, "gpus": int,
}  # fmt: skip
COLUMNS = tuple(field.name for field in fields(Row))


def raw_path(results: Path) -> Path:
    """Where the iterations of a results file lie: beside it."""
    return results.with_suffix(".raw.jsonl")


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a results file, which is made when missing. Raises BenchError when its columns are others."""
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="", encoding="utf-8") as file:
            found = next(csv.reader(file))
        if tuple(found) != COLUMNS:
            raise BenchError(f"{path} has the columns {', '.join(found)}, not {', '.join(COLUMNS)}: name another --out")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(_cells(row) for row in rows)


def append_raw(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add iterations to the raw file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def read(path: Path) -> list[Row]:
    """The rows of a results file. Raises BenchError when there is none."""
    if not path.exists():
        raise BenchError(f"no results at {path}: run `eyas bench attention`, `loss` and `step` first, or name --out")
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(**{name: _value(name, text) for name, text in line.items()}) for line in csv.DictReader(file)]


class Rows:
    """The rows of one run."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def one(self, variant: str, **cell: Any) -> Row:
        """The row with these cells (tokens=, vocab=, supervised=, layout=). Raises LookupError unless there is one."""
        found = self.all(variant, **cell)
        if len(found) != 1:
            wanted = ", ".join([variant, *(f"{name}={value}" for name, value in cell.items())])
            raise LookupError(f"{len(found)} rows of {wanted}, where one is needed")
        return found[0]

    def all(self, variant: str, **cell: Any) -> list[Row]:
        """Every row with these cells."""
        return [
            row
            for row in self._rows
            if row.variant == variant and all(getattr(row, name) == value for name, value in cell.items())
        ]


def newest_run(rows: Iterable[Row], work: str, layout: str | None = None) -> Rows:
    """The rows of the newest run of a work (that has a row of this layout); empty when there is none."""
    own = [row for row in rows if row.work == work]
    runs = {row.run for row in own if layout is None or row.layout == layout}
    return Rows([row for row in own if row.run == max(runs)] if runs else [])


def _cells(row: Row) -> dict[str, str]:
    return {name: _text(value) for name, value in asdict(row).items()}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(name: str, text: str) -> Any:
    if name not in _READ:
        return text
    return _READ[name](text) if text else None
