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
    with pytest.raises(InputError, match=r"no conversation leaves a sample for train; refused: \d+ nothing_supervised"):
        prepare(recipe_values(data={"source": str(source)}))


def test_documents_longer_than_a_pack_are_counted(recipe_values: Values, caplog: pytest.LogCaptureFixture) -> None:
    """Red when the receipt does not say what the packs are like, cutting reaches held-out samples, or what it loses is
    not told."""
    whole = {"max_tokens": 256}
    run, receipt = prepare(recipe_values("alone", data={**whole, "long_documents": "alone"}, train={"pack_tokens": 48}))
    data = PreparedData.open(run.train_data)
    packs = receipt["packs"]
    assert (packs["alone"], packs["longest"]) == ((data.lengths > 48).sum(), data.lengths.max())
    assert packs["alone"] > 0
    assert receipt["supervised_cut"] == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING"]

    cut_run, cut = prepare(recipe_values("cut", data={**whole, "long_documents": "cut"}, train={"pack_tokens": 48}))
    long = [sample.loss_mask for sample in data if len(sample.loss_mask) > 48]
    kept = [mask for mask in long if (mask[:47] & mask[1:48]).any()]
    assert PreparedData.open(cut_run.train_data).lengths.max() == 48
    assert cut["packs"]["alone"] == 0
    assert cut["heldout"] == receipt["heldout"]
    assert cut["refused"]["cut_to_pack"] == len(kept) > 0
    assert cut["train"]["samples"] == len(data) - len(long) + len(kept)
    assert cut["supervised_cut"] == sum(int(mask[48:].sum()) for mask in kept) > 0

    _, refused = prepare(recipe_values("refuse", data={**whole, "long_documents": "refuse"}, train={"pack_tokens": 48}))
    assert refused["refused"]["longer_than_pack"] == packs["alone"]
    assert refused["train"]["samples"] == len(data) - packs["alone"]


def test_every_document_longer_than_a_pack_and_refused_is_an_error(recipe_values: Values) -> None:
    """Red when nothing is left and the run goes on, or the reason is not told."""
    values = recipe_values(data={"long_documents": "refuse"}, train={"pack_tokens": 8})
    with pytest.raises(InputError, match=r"no conversation leaves a sample for train; refused: \d+ longer_than_pack"):
        prepare(values)


def test_fewer_packs_than_a_step_takes_is_said(recipe_values: Values, caplog: pytest.LogCaptureFixture) -> None:
    """Red when a step that sees its samples several times is not mentioned."""
    _, receipt = prepare(recipe_values(train={"pack_tokens": 4096, "grad_accumulation": 4}))
    assert receipt["packs"]["packs"] == 1
    assert (
        "train.grad_accumulation=4 packs and an epoch has 1: every sample is in a step about 4.0 times" in caplog.text
    )


def test_changed_source_is_prepared_again(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a run goes on with old samples after its source was edited."""
    source = write_conversations(tmp_path / "source.jsonl", 24)
    run, _ = prepare(recipe_values(data={"source": str(source)}))
    assert finished("prepare", run.config(), run) is not None
    write_conversations(source, 25)
    assert finished("prepare", run.config(), run) is None
