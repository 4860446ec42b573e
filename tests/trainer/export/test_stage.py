"""The export of a real run, and `eyas export` on it and on its folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from flows.cli import app
from tasks.trainer.errors import InputError
from tasks.trainer.export.folder import read_exported
from tasks.trainer.files import read_json, write_json
from tasks.trainer.parent import parent_digest
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage


def eyas(*arguments: object) -> dict[str, Any]:
    """`eyas export ... --json`."""
    done = CliRunner().invoke(app, ["export", *map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    receipt: dict[str, Any] = json.loads(done.stdout)
    return receipt


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_in_each_layout(recipe_values: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Red when a layout is not the trained draft, the card's facts are not the run's, a table of another checkpoint is
    told as this one's, or a folder written again is another."""
    config = load_config(recipe_values(train={"steps": 4, "checkpoint_every": 2, "export_layout": "vllm"}))
    run = RunDir.create(config)
    for stage in ("prepare", "train", "evaluate", "export"):
        run_stage(stage, run, silent)
    prepared, evaluation = run.receipt("prepare"), read_json(run.evaluation)
    assert prepared is not None
    written = read_exported(run.draft)
    about = written.about
    assert (written.layout, about.target, about.architectures) == ("vllm", config.target.model, ("LlamaForCausalLM",))
    assert about.training is not None
    assert about.training.data_hash == prepared["data_hash"]
    assert (about.training.steps, about.training.samples) == (4, prepared["train"]["samples"])
    assert (about.taus[0].tau, about.taus[0].num_prompts) == (
        evaluation["acceptance"]["tau"], evaluation["acceptance"]["num_prompts"],
    )  # fmt: skip
    digests = {parent_digest(str(run.draft))}
    for layout in ("sglang", "speculators"):
        receipt = eyas(run.root, tmp_path / layout, "--layout", layout, "--check", "--target", "org/name")
        assert (receipt["layout"], receipt["step"], receipt["dtype"]) == (layout, 4, "bfloat16")
        assert receipt["check"]["difference"] < 1e-4 < receipt["check"]["rounding"]
        found = read_exported(tmp_path / layout)
        assert found.about.target == "org/name"
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in written.tensors.items())
        # A folder in, the same out; and through it the run's own layout.
        receipt = eyas(tmp_path / layout, tmp_path / "again", "--check")
        assert receipt["check"]["rounding"] == 0, "what was rounded once is not rounded again"
        assert contents(tmp_path / "again") == contents(tmp_path / layout)
        eyas(tmp_path / layout, tmp_path / "own", "--layout", "vllm", "--target", config.target.model)
        assert contents(tmp_path / "own") == contents(run.draft)
        digests.add(parent_digest(str(tmp_path / layout)))
    assert len(digests) == 3
    assert digests >= {parent_digest(str(tmp_path / "own"))}
    # Measured again, the draft is the same parent: what it is worth is no part of it.
    write_json(run.evaluation, {**evaluation, "acceptance": {**evaluation["acceptance"], "tau": 9.0}})
    eyas(run.root, tmp_path / "own")
    assert "9.000" in (tmp_path / "own" / "README.md").read_text()
    assert parent_digest(str(tmp_path / "own")) in digests
    write_json(run.evaluation, {**evaluation, "step": 2})
    eyas(run.root, tmp_path / "own")
    assert "Not measured." in (tmp_path / "own" / "README.md").read_text()


def test_a_folder_of_no_known_target(recipe_values: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Red when a draft of another trainer is written without a target's name, or its fault is not told in one line."""
    from tasks.trainer.export.about import About
    from tasks.trainer.export.folder import export_draft
    from tests.trainer.drafts import random_draft

    export_draft(random_draft(torch.float32), tmp_path / "in", about=About("t"), dtype=torch.float32)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    del config["eyas"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="name it"):
        CliRunner().invoke(app, ["export", str(tmp_path / "in"), str(tmp_path / "out")], catch_exceptions=False)
    eyas(tmp_path / "in", tmp_path / "out", "--layout", "vllm", "--target", "org/name")
    assert "Not trained by Eyas" in (tmp_path / "out" / "README.md").read_text()
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors.pop("norm.weight")
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(InputError, match=r"no tensor 'norm\.weight'"):
        CliRunner().invoke(app, ["export", str(tmp_path / "in"), str(tmp_path / "x")], catch_exceptions=False)
