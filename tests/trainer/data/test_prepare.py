"""The prepare stage as a whole: what it lists is what is trained on, and nothing held out is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.data.vocabulary import Vocabulary
from tasks.trainer.errors import InputError
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import finished, run_stage
from tests.conftest import write_conversations

Values = Callable[..., dict[str, Any]]


def prepare(values: dict[str, Any]) -> tuple[RunDir, dict[str, Any]]:
    run = RunDir.create(load_config(values))
    return run, run_stage("prepare", run, silent)


def test_receipt_counts_what_is_on_disk(recipe_values: Values) -> None:
    """Red when the receipt's counts, which the report shows, are not those of the files."""
    run, receipt = prepare(recipe_values())
    for name, folder in (("train", run.train_data), ("heldout", run.heldout_data)):
        data = PreparedData.open(folder)
        assert receipt[name] == {
            "samples": len(data), "tokens": data.num_tokens, "supervised": data.num_supervised
        }  # fmt: skip
    assert receipt["train"]["samples"] + receipt["heldout"]["samples"] == 24
    vocabulary = Vocabulary.load(run.vocabulary)
    assert len(vocabulary) == receipt["vocabulary_size"] == 200
    assert vocabulary.t2d[1], "the end-of-turn token must be one the draft can propose"


def test_held_out_prompts_that_are_trained_on_are_left_out(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a draft is measured on prompts it was trained on."""
    source = write_conversations(tmp_path / "source.jsonl", 12)
    heldout = write_conversations(tmp_path / "heldout.jsonl", 6, seed=1)
    with heldout.open("a") as file:
        file.writelines(source.read_text().splitlines(keepends=True)[:4])
    run, receipt = prepare(recipe_values(data={"source": str(source), "heldout_source": str(heldout)}))
    assert receipt["refused"]["heldout_prompt_in_training"] == 4
    assert receipt["heldout"]["samples"] == 6
    with pytest.raises(InputError, match="every prompt of data"):
        prepare(recipe_values("same", data={"source": str(source), "heldout_source": str(source)}))
    assert run.receipt("prepare") == receipt


def test_refused_and_cut_samples_are_counted_by_reason(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a sample disappears without a count."""
    source = write_conversations(tmp_path / "source.jsonl", 24)
    first = json.loads(source.read_text().splitlines()[0])
    with source.open("a") as file:
        file.write(json.dumps(first) + "\n")
        file.write(json.dumps({"messages": first["messages"][:1]}) + "\n")
        file.write('{"messages": 3}\n')
    values = recipe_values(data={"source": str(source), "max_tokens": 50, "on_error": "skip"})
    _, receipt = prepare(values)
    assert receipt["refused"]["duplicate"] == 1
    assert receipt["refused"]["nothing_supervised"] == 1
    assert receipt["refused"]["wrong_structure"] == 1
    assert receipt["refused"]["cut_too_long"] > 0
    assert receipt["train"]["samples"] + receipt["heldout"]["samples"] == 24


def test_nothing_supervised_at_all_is_an_error(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a run would train on nothing in silence."""
    source = tmp_path / "source.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(20)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match="nothing is supervised"):
        prepare(recipe_values(data={"source": str(source)}))


def test_changed_source_is_prepared_again(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a run goes on with old samples after its source was edited."""
    source = write_conversations(tmp_path / "source.jsonl", 24)
    run, _ = prepare(recipe_values(data={"source": str(source)}))
    assert finished("prepare", run.config(), run) is not None
    write_conversations(source, 25)
    assert finished("prepare", run.config(), run) is None
