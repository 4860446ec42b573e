"""Results of `eyas bench store`: one CSV line a figure. Lines of one `run` were measured on the same states."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from storage.errors import StoreError

RESULTS = Path(__file__).parent / "results.csv"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    run: str
    """What one command measured; begins with the UTC time."""
    text: str
    """Where the tokens come from: sharegpt, own (the target's own answers), synthetic, or a file's name."""
    target: str
    """Target whose states they are; "gaussian" for synthetic ones."""
    hidden_size: int
    """D."""
    samples: int
    """Samples measured on."""
    tokens: int
    """Their tokens."""
    targets: int
    """Their target rows."""
    variant: str
    """A preset, "aux step 0.1" and the like (the other states lossless), or a peer."""
    metric: str
    """See storage.bench.measure."""
    value: float
    """The figure."""
    machine: str
    """Processor, and how many cores could be used."""
    versions: str
    """Packages that matter."""
    commit: str
    """Of the measured tree."""


COLUMNS = tuple(field.name for field in fields(Row))
_READ: dict[str, type] = {"hidden_size": int, "samples": int, "tokens": int, "targets": int, "value": float}


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a results file, which is made when missing. StoreError when its columns are others."""
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="", encoding="utf-8") as file:
            found = tuple(next(csv.reader(file)))
        if found != COLUMNS:
            raise StoreError(f"{path} has the columns {', '.join(found)}, not {', '.join(COLUMNS)}: name another --out")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({**asdict(row), "value": f"{row.value:.6g}"})


def read(path: Path) -> list[Row]:
    """The rows of a results file. StoreError when there is none."""
    if not path.exists():
        raise StoreError(f"no results at {path}: run `eyas bench store` first, or name --out")
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return [Row(**{name: _READ.get(name, str)(text) for name, text in line.items()}) for line in lines]


def newest(rows: Sequence[Row], text: str, variant: str, metric: str) -> Row | None:
    """The figure of the newest run that has it."""
    found = [row for row in rows if (row.text, row.variant, row.metric) == (text, variant, metric)]
    return max(found, key=lambda row: row.run, default=None)
