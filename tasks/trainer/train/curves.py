"""Reading metrics.jsonl; free of torch, for reports.

Two kinds of lines: one for each optimizer step, and {"step": N, "heldout": {...}} after the steps that were evaluated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; a last line without its newline was cut by a kill and is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The optimizer steps' lines."""
    return [line for line in read_lines(path) if "heldout" not in line]


def read_heldout(path: Path) -> dict[int, dict[str, Any]]:
    """Held-out metrics by the step they were measured after."""
    return {line["step"]: line["heldout"] for line in read_lines(path) if "heldout" in line}


def best_steps(heldout: dict[int, dict[str, Any]]) -> list[int]:
    """Evaluated steps, the highest simulated tau first; the earlier one where two are equal."""
    scored = [(-metrics["tau"], step) for step, metrics in heldout.items() if metrics["tau"] is not None]
    return [step for _, step in sorted(scored)]
