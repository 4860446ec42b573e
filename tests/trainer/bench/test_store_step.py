"""The store-step benchmark in small: it trains from a store that it filled, and counts what it moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.trainer.bench.cli import main


def test_the_command_measures_every_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a preset is not read back, bytes are those of another pack, or a second call writes again."""
    arguments = ["store-step", "--tiny", "--device", "cpu", "--url", str(tmp_path / "store"), "--samples", "2"]
    for _ in range(2):
        with pytest.raises(SystemExit) as exit_:
            main([*arguments, "--steps", "2", "--presets", "near,lossless", "--tokens", "64"])
        assert not exit_.value.code
        near, lossless = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        assert (near["preset"], lossless["preset"], near["steps"]) == ("near", "lossless", 2)
        assert 0 <= near["wait_ms"] <= near["step_ms"]
        assert near["h2d_mb"] < lossless["h2d_mb"]
        assert lossless["h2d_share"] > 1, "token ids and statistics travel beside the states"
        assert near["stored_mb"] < lossless["stored_mb"]
    assert len(list((tmp_path / "store").glob("*/states/*/zarr.json"))) == 2, "one segment a preset"
