"""The codec-quality experiment: paired runs, resumed where they were, and intervals that are those of the pairs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kernels.bench.errors import BenchError
from tasks.trainer.bench import codec_quality
from tasks.trainer.bench.cli import main
from tasks.trainer.bench.codec_quality import EXACT, losses, read_results, run_all, table, trials
from tasks.trainer.progress import silent
from tasks.trainer.run_dir import RunDir
from tasks.trainer.train.curves import read_metrics

Values = Callable[..., dict[str, Any]]


def write_recipe(values: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_paired_runs_end_to_end_and_again(
    recipe_values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when the pairs differ in more than the states, an encoding is not applied, something is stored, a second
    start trains again, or a run that was killed begins anew."""
    recipe = write_recipe(recipe_values(train={"steps": 6, "checkpoint_every": 2}), tmp_path)
    arguments = ["codec-quality", recipe, "--out", str(tmp_path / "out"), "--seeds", "3", "--jobs", "2"]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--presets", "near,lossless"])
    assert not exit_.value.code
    rows = {row["preset"]: row for row in read_results(tmp_path / "out")}
    assert set(rows) == {EXACT, "near", "lossless"}
    runs = {preset: RunDir.open(str(tmp_path / "out/runs" / f"{preset}-3")) for preset in rows}
    curves = {preset: [line["loss"] for line in read_metrics(run.metrics)] for preset, run in runs.items()}
    assert curves["lossless"] == curves[EXACT], "lossless is the round trip that changes nothing"
    assert rows["lossless"]["tau_sum"] == rows[EXACT]["tau_sum"]
    assert curves["near"] != curves[EXACT]
    assert np.allclose(curves["near"], curves[EXACT], rtol=0.05)
    for preset in ("near", "lossless"):
        receipt = runs[preset].receipt("train")
        assert receipt is not None
        assert receipt["store"]["store_samples"] == 0
    out = capsys.readouterr().out
    assert re.search(r"\| lossless \| \d.* \| \+0\.00% \| \+0\.00% to \+0\.00% \| 1 \|", out), out

    # A run whose result is lost goes on from its checkpoint; one that has it is not touched.
    results = tmp_path / "out" / codec_quality.RESULTS
    results.write_text(
        "".join(line for line in results.read_text().splitlines(True) if '"near"' not in line) + '{"preset": "ne'
    )
    runs["near"].drop_receipt("train")
    newest = max(runs["near"].checkpoints.glob("step-*"))
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    before = (runs["lossless"].root / "log.txt").stat().st_mtime_ns
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--presets", "near,lossless"])
    assert not exit_.value.code
    assert (runs["lossless"].root / "log.txt").stat().st_mtime_ns == before
    receipt = runs["near"].receipt("train")
    assert receipt is not None
    assert receipt["continued_from"] == 4
    again = {row["preset"]: row for row in read_results(tmp_path / "out")}
    assert again["near"] == rows["near"]
    assert json.loads((tmp_path / "out/losses.json").read_text())[0]["preset"] == EXACT


def test_a_failing_run_says_why(recipe_values: Values, tmp_path: Path) -> None:
    """Red when an experiment ends as if nothing were wrong, or hides the run's own words."""
    values = recipe_values(train={"attention": "eager", "steps": 2, "warmup_steps": 0})
    (planned, *_) = trials([], [0])
    folder = tmp_path / "out"
    run_all(values, [], folder, jobs=1, progress=silent)
    vocabulary = folder / "prepared/vocabulary.safetensors"
    vocabulary.write_bytes(b"no safetensors")
    with pytest.raises(BenchError, match=r"run exact-0 failed: .+"):
        run_all(values, [planned], folder, jobs=1, progress=silent)


def test_refusals(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a misspelt preset or seed gets a traceback, or another experiment's rows are mixed in."""
    with pytest.raises(BenchError, match="preset 'nearly' is unknown: use lossless"):
        trials(["nearly"], [0])
    recipe = write_recipe(recipe_values(), tmp_path)
    for arguments in (["--seeds", "a"], ["--presets", "nearly"], ["--set", "train.stepps=3"]):
        with pytest.raises(SystemExit) as exit_:
            main(["codec-quality", recipe, "--out", str(tmp_path / "out"), *arguments])
        assert exit_.value.code == 2
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / codec_quality.RESULTS).write_text(json.dumps({"preset": EXACT, "seed": 0, "identity": {}}) + "\n")
    with pytest.raises(BenchError, match="holds exact-0 of another recipe"):
        run_all(recipe_values(), trials([], [0]), folder, jobs=1, progress=silent)


def rows_of(effect: float, *, seeds: int, prompts: int, seed: int = 0) -> list[dict[str, Any]]:
    """Runs whose conversations differ much, whose seeds differ little, and a preset that loses `effect` of tau - 1."""
    generator = np.random.default_rng(seed)
    rows = generator.integers(20, 200, prompts)
    easy = generator.uniform(0.2, 2.0, prompts)
    made = []
    for number in range(seeds):
        luck = 1 + 0.005 * generator.standard_normal()
        for preset, factor in ((EXACT, 1.0), ("near", 1.0 - effect)):
            noise = 1 + 0.01 * generator.standard_normal(prompts)
            made.append(
                {
                    "preset": preset, "seed": number, "sample_ids": [str(n) for n in range(prompts)],
                    "tau_sum": (rows * easy * luck * factor * noise).tolist(), "tau_rows": rows.tolist(),
                    "correct": (rows * 0.5)[:, None].tolist(), "rows": rows[:, None].tolist(),
                }
            )  # fmt: skip
    return made


def test_pairing_finds_a_small_loss() -> None:
    """Red when conversations are resampled apart for the two drafts of a pair: their spread hides a loss of 1%."""
    exact, near = losses(rows_of(0.02, seeds=4, prompts=100), samples=2000)
    assert (exact.loss, exact.low, exact.high) == (0.0, 0.0, 0.0)
    assert near.seeds == 4
    assert exact.acc == pytest.approx(0.5)
    share = (exact.tau - 1) / exact.tau
    assert near.low < 0.02 * share < near.high
    assert 0 < near.low < near.high < 0.02
    (_, none) = losses(rows_of(0.0, seeds=4, prompts=100), samples=2000)
    assert none.low < 0 < none.high
    assert "| near | " in table([exact, near])


def test_unpaired_rows_are_left_out_or_refused() -> None:
    """Red when a seed without its baseline counts, or drafts are compared on different conversations."""
    rows = rows_of(0.02, seeds=2, prompts=20)
    assert [found.seeds for found in losses([row for row in rows if (row["preset"], row["seed"]) != (EXACT, 1)])] == [
        1,
        1,
    ]
    rows[0]["sample_ids"] = ["x"] * 20
    with pytest.raises(BenchError, match="different held-out conversations"):
        losses(rows)
