"""Every kind of draft through a whole run: what is chosen in the config is what is trained, decoded and exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tasks.trainer.export.folder import load_exported
from tasks.trainer.files import read_json
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage, stages_of
from tasks.trainer.train.curves import read_metrics

Values = Callable[..., dict[str, Any]]
DRAFTS: dict[str, dict[str, Any]] = {
    "two layers": {"num_layers": 2, "vocab_size": 200},
    "whole vocabulary": {"vocab_size": None},
    "eagle3.1": {"variant": "eagle3.1", "vocab_size": 200},
    "all of them": {"variant": "eagle3.1", "num_layers": 2, "vocab_size": None},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_run_of_each_kind(name: str, recipe_values: Values) -> None:
    """Red when a stage does not know a kind of draft: the loss must fall, decoding be lossless, the export the draft.

    The target's weights are random and large, so what falls in a few steps is small; a kind that learns nothing would
    show no fall at all.
    """
    chosen = DRAFTS[name]
    config = load_config(recipe_values(draft=chosen, train={"steps": 30, "learning_rate": 1e-2}))
    run = RunDir.create(config)
    for stage in stages_of(config):
        run_stage(stage, run, silent)
    losses = [line["loss"] for line in read_metrics(run.metrics)]
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert read_json(run.evaluation)["acceptance"]["lossless"]
    exported = json.loads((run.draft / "config.json").read_text())
    size = chosen["vocab_size"] or 300
    assert (exported["num_hidden_layers"], exported["draft_vocab_size"]) == (chosen.get("num_layers", 1), size)
    assert exported.get("norm_output", False) is exported["fc_norm"] is (chosen.get("variant") == "eagle3.1")
    draft = load_exported(run.draft, embedding=torch.zeros(300, 32))
    assert (draft.config.num_layers, draft.config.vocab_size) == (chosen.get("num_layers", 1), size)


def test_a_killed_run_of_several_layers_continues(recipe_values: Values) -> None:
    """Red when a checkpoint loses the shape of a kind of draft: another start goes on from it, bit for bit."""

    def train(name: str, steps: tuple[int, ...]) -> list[float]:
        for last in steps:
            draft = {"variant": "eagle3.1", "num_layers": 2}
            config = load_config(recipe_values(name, draft=draft, train={"steps": 6, "checkpoint_every": 3}))
            run = RunDir.create(config)
            run_stage("prepare", run, silent) if run.receipt("prepare") is None else None
            run_stage("train", run, silent)
            if last == 3:
                (run.checkpoints / "step-000006").rename(run.root / "lost")
        return [line["loss"] for line in read_metrics(run.metrics)]

    assert train("cut", (3, 6)) == train("whole", (6,))
