"""A home with nights in it, without training: conversations, a nightly config, and drafts of any content."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.trainer.champion import Entry
from tasks.trainer.config_nightly import NightlyConfig, load_nightly

MakeConfig = Callable[..., NightlyConfig]


def line(number: int, *, answer: str = "yes", **more: Any) -> dict[str, Any]:
    """One conversation; its number is its prompt."""
    messages = [{"role": "user", "content": f"prompt {number}"}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def write_draft(folder: Path, *, content: float = 0.0) -> Path:
    """A folder that has an exported draft's files; nothing here looks inside."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"eyas": "test"}))
    save_file({"fc.weight": np.full((2, 2), content, np.float32)}, folder / "model.safetensors")
    return folder


def entry_of(number: int, night: int, digest: str, *, replaced: int | None = None, fingerprint: str = "f") -> Entry:
    return Entry(number, night, digest, replaced, "2030-01-01T00:00:00+00:00", "tiny", fingerprint, ("better",))


@pytest.fixture
def make_config(target_folder: Path, tmp_path: Path) -> MakeConfig:
    """A nightly config over tmp_path/logs; keyword arguments replace keys of a group."""
    if not (tmp_path / "fixed.jsonl").exists():
        write_lines(tmp_path / "fixed.jsonl", (line(number) for number in range(1000, 1010)))

    def make(**groups: dict[str, object]) -> NightlyConfig:
        values: dict[str, dict[str, object]] = {
            "target": {"model": str(target_folder), "dtype": "bfloat16"},
            "data": {
                "source": str(tmp_path / "logs/**/*.jsonl"),
                "heldout_source": str(tmp_path / "fixed.jsonl"),
                "heldout_fraction": 0.2,
            },
            "train": {"steps": 4, "warmup_steps": 0, "device": "cpu"},
            "nightly": {"home": str(tmp_path / "home"), "min_new": 10, "min_recent": 2, "recent_heldout": 0.3},
        }
        for group, changes in groups.items():
            values[group] = {**values.get(group, {}), **changes}
        return load_nightly(values)

    return make
