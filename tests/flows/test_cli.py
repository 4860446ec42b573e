"""The `eyas` command as a user types it: mistakes are one line on stderr and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli import main
from flows.demo import demo_configs
from tasks.trainer.config import RunConfig
from tasks.trainer.config_nightly import NightlyConfig

Values = Callable[..., dict[str, Any]]


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message


def write_recipe(values: dict[str, Any], folder: Path) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_mistakes_before_the_run_are_one_line(
    recipe_values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a wrong key, file or folder gives a traceback, or starts a server first."""
    recipe = write_recipe(recipe_values(), tmp_path)
    assert "'train.stpes'" in fails(["train", recipe, "--set", "train.stpes=3"], capsys)
    assert "absent.yaml" in fails(["train", str(tmp_path / "absent.yaml")], capsys)
    (tmp_path / "file").write_text("")
    assert "run_dir=" in fails(["train", recipe, "--run-dir", str(tmp_path / "file/run")], capsys)
    assert "no run directory" in fails(["evaluate", str(tmp_path)], capsys)
    assert "no run directory" in fails(["export", str(tmp_path), str(tmp_path / "out")], capsys)


def test_another_kernels_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when the registry's package of the same name is imported in place of ours."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "kernels"]:
        monkeypatch.delitem(sys.modules, name)
    assert "environment of its own" in fails(["config", "--schema"], capsys)


def test_mistakes_inside_a_stage_are_one_line_too(recipe_values: Values, tmp_path: Path) -> None:
    """Red when the error of a stage's process reaches the terminal as a traceback. Runs the real command."""
    source = tmp_path / "bad.jsonl"
    source.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"messages": \n')
    recipe = write_recipe(recipe_values(data={"source": str(source)}), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "flows.train_draft", recipe],
        capture_output=True,
        text=True,
        check=False,
        env={**_environment(), "PREFECT_HOME": str(tmp_path / "prefect")},
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "bad.jsonl" in line
    assert "line 2" in line


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}


def test_config_prints_the_resolved_recipe_and_the_schema(
    recipe_values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when the printed config is not the one that would run, or the schema is not the config's."""
    with pytest.raises(SystemExit):
        main(["config", write_recipe(recipe_values(), tmp_path), "--set", "train.steps=77"])
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 77
    with pytest.raises(SystemExit):
        main(["config", "--schema"])
    assert json.loads(capsys.readouterr().out) == RunConfig.model_json_schema()
    with pytest.raises(SystemExit):
        main(["config", "--schema", "--nightly"])
    assert json.loads(capsys.readouterr().out) == NightlyConfig.model_json_schema()
    values = recipe_values(data={"heldout_source": "fixed.jsonl"}) | {"nightly": {"replay": 0.3}}
    recipe = write_recipe(values, tmp_path)
    assert "'nightly'" in fails(["config", recipe], capsys)
    with pytest.raises(SystemExit):
        main(["config", recipe, "--nightly"])
    assert yaml.safe_load(capsys.readouterr().out)["nightly"]["replay"] == 0.3


def test_the_demo_is_one_recipe_run_two_ways() -> None:
    """Red when the demo's online and offline runs differ in more than the mode, the store and the folder."""
    configs = {mode: config.model_dump() for mode, config in demo_configs("runs/demo", []).items()}
    assert configs["online"].pop("run_dir") == "runs/demo/online"
    assert configs["offline"].pop("run_dir") == "runs/demo/offline"
    online, offline = configs["online"].pop("hidden_states"), configs["offline"].pop("hidden_states")
    assert (online["mode"], online["store_url"]) == ("online", None)
    assert (offline["mode"], offline["store_url"], offline["preset"]) == ("offline", "runs/demo/store", "lossless")
    assert configs["online"] == configs["offline"]


def test_evaluate_and_export_a_finished_run(
    recipe_values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a run cannot be measured again with other values, or exported to another folder."""
    from tasks.trainer.progress import silent
    from tasks.trainer.recipe import load_config
    from tasks.trainer.run_dir import RunDir
    from tasks.trainer.stages import run_stage, stages_of

    config = load_config(recipe_values())
    run = RunDir.create(config)
    for stage in stages_of(config):
        run_stage(stage, run, silent)
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", str(run.root), "--set", "evaluate.draft_tokens=2"])
    assert not exit_.value.code
    assert json.loads(run.report_json.read_text())["acceptance"]["num_draft_tokens"] == 2
    capsys.readouterr()
    assert "train.seed" in fails(["evaluate", str(run.root), "--set", "train.seed=9"], capsys)
    with pytest.raises(SystemExit) as exit_:
        main(["export", str(run.root), str(tmp_path / "out")])
    assert not exit_.value.code
    assert (tmp_path / "out/model.safetensors").read_bytes() == (run.draft / "model.safetensors").read_bytes()
