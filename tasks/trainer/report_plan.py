"""What was predicted against what was measured: a section of the report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tasks.trainer.durations import duration

GIB = 2**30


def against_plan(
    plan: dict[str, Any] | None,
    lines: Sequence[dict[str, Any]],
    *,
    trained: dict[str, Any],
    captured: dict[str, Any] | None,
    stored_bytes_per_token: float,
) -> list[dict[str, Any]]:
    """Rows of {what, unit, predicted, measured}, either None where there is none. plan: the plan stage's receipt.

    lines: metrics.jsonl's, one an optimizer step; its medians count, for first steps compile.
    """
    if plan is None:
        return []
    seconds = [line["seconds"] for line in lines]
    waits = [line["data_wait_s"] for line in lines]
    rows: list[tuple[str, str, Any, Any]] = [
        ("stored", "bytes a token", plan["stored_bytes_per_token"] or None, stored_bytes_per_token or None),
        ("a step", "seconds", plan["step_seconds"], statistics.median(seconds) if seconds else None),
        ("of it waiting", "seconds", plan["wait_seconds"], statistics.median(waits) if waits else None),
    ]
    if trained.get("peak_bytes"):  # a GPU's
        rows.insert(1, ("peak GPU memory", "bytes", plan["peak_bytes"], trained["peak_bytes"]))
    if captured is not None and captured.get("captured_samples") and "seconds" in captured:
        rows.append(("capture", "seconds", plan["capture_seconds"], captured["seconds"]))
    return [
        {"what": what, "unit": unit, "predicted": predicted, "measured": measured}
        for what, unit, predicted, measured in rows
    ]


def comparison_cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The rows as cells: what, predicted, measured, and how far off."""
    cells = []
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        off = f"{predicted / measured - 1:+.0%}" if predicted and measured else "-"
        cells.append([row["what"], _shown(predicted, row["unit"]), _shown(measured, row["unit"]), off])
    return cells


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return f"{value / GIB:.2f} GiB"
    return duration(value) if unit == "seconds" else f"{value:,.0f} bytes a token"
