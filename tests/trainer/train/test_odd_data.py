"""Data sets at the edges: documents shorter than the unroll, sets smaller than a pack or than an optimizer step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.draft.alignment import count_rows
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage
from tasks.trainer.train.batches import Packs
from tasks.trainer.train.curves import read_metrics

Values = Callable[..., dict[str, Any]]
K = 7


def write(path: Path, prompt: str, answers: list[str]) -> str:
    with path.open("w") as file:
        for number, answer in enumerate(answers):
            messages = [{"role": "user", "content": f"{prompt}{number}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return str(path)


@pytest.fixture
def trained(recipe_values: Values, tmp_path: Path) -> Callable[..., tuple[RunDir, list[dict[str, Any]]]]:
    """Train on these answers: the run and its steps."""

    def train(answers: list[str], **settings: Any) -> tuple[RunDir, list[dict[str, Any]]]:
        source = write(tmp_path / "odd.jsonl", "", answers)
        heldout = write(tmp_path / "heldout.jsonl", "held out ", ["the river"] * 2)
        values = recipe_values(
            data={"source": source, "heldout_source": heldout},
            train={"steps": 3, "ttt_steps": K, "warmup_steps": 0, **settings},
        )
        run = RunDir.create(load_config(values))
        run_stage("prepare", run, silent)
        run_stage("train", run, silent)
        return run, read_metrics(run.metrics)

    return train


def test_answers_shorter_than_the_unroll(trained: Callable[..., Any]) -> None:
    """Red when answers too short for the later steps are dropped or padded, a step without rows gives NaN, or tau is
    told of rows that are not there. "a" and its end-of-turn token: one row, at step 0."""
    run, lines = trained(["a", "e", "o", "u"])
    data = PreparedData.open(run.train_data)
    assert [int(sample.loss_mask.sum()) for sample in data] == [2] * 4
    for line in lines:
        assert line["rows"] == [4] + [0] * (K - 1)
        assert math.isfinite(line["loss"])
        assert line["loss"] > 0
        assert line["step_losses"][1:] == [0.0] * (K - 1)
        assert line["tau"] is None
    assert lines[-1]["loss"] < lines[0]["loss"], "they train all the same"


def test_a_data_set_smaller_than_a_pack(trained: Callable[..., Any]) -> None:
    """Red when a small set is dropped, repeated within a step or filled up: an epoch is one pack."""
    run, lines = trained(["the young eagle", "flies", "over the hills"], pack_tokens=4096)
    data = PreparedData.open(run.train_data)
    receipt = run.receipt("prepare")
    assert receipt is not None
    assert receipt["packs"]["packs"] == 1
    assert [line["tokens"] for line in lines] == [data.num_tokens] * 3
    assert [line["epoch"] for line in lines] == [1, 2, 3]


def test_fewer_packs_than_an_optimizer_step_takes(trained: Callable[..., Any]) -> None:
    """Red when a step ends with the epoch, so that its gradient is of fewer packs than asked for; or N_k forgets a
    sample's second time."""
    answers = ["the young eagle flies over the green hills to find its nest", "a river", "old birds rest while night"]
    run, lines = trained(answers, pack_tokens=64, grad_accumulation=5)
    data = PreparedData.open(run.train_data)
    packs = Packs(data.lengths, pack_tokens=64, seed=0)
    num_packs = len(packs.epoch(0))
    assert 1 < num_packs < 5
    order = [pack for epoch in range(15) for pack in packs.epoch(epoch)]
    for number, line in enumerate(lines):
        group = [data[sample] for pack in order[5 * number : 5 * number + 5] for sample in pack]
        assert line["tokens"] == sum(len(sample.token_ids) for sample in group)
        masks = [torch.from_numpy(sample.loss_mask.copy()) for sample in group]
        assert line["rows"][0] == sum(int(count_rows(mask, [len(mask)], 1)) for mask in masks)
        assert line["epoch"] == 5 * (number + 1) // num_packs


def test_documents_longer_than_the_pack_train_alone(trained: Callable[..., Any]) -> None:
    """Red when a document longer than the pack is cut in silence, shares its row, or stops the run."""
    run, lines = trained(["the young eagle flies over the green hills to find its nest", "a"], pack_tokens=24)
    data = PreparedData.open(run.train_data)
    assert data.lengths.max() > 24
    assert {line["tokens"] for line in lines} <= set(data.lengths.tolist())
    assert lines[0]["tokens"] + lines[1]["tokens"] == data.num_tokens
