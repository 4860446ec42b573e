"""Several sources: shares by weight, the same draw on every pass, and prepared data that do not depend on processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tasks.trainer.config import Data
from tasks.trainer.data.conversation import Refusals
from tasks.trainer.data.mask import ChatRenderer
from tasks.trainer.data.mixing import draw_limits, stream_sources
from tasks.trainer.data.prepared import PROVENANCE, PreparedData
from tasks.trainer.data.read import read_conversations
from tasks.trainer.data.rendering import render_all
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage, stage_inputs
from tests.conftest import write_conversations
from tests.trainer.data.families import family_tokenizer

Values = Callable[..., dict[str, object]]


def sources(folder: Path, *sizes: int) -> list[str]:
    return [str(write_conversations(folder / f"{n}.jsonl", size, seed=n)) for n, size in enumerate(sizes)]


def taken(settings: Data) -> Counter[str]:
    stream = stream_sources(settings, draw_limits(settings), Refusals())
    return Counter(Path(conversation.source).stem for conversation in stream)


def test_weights_are_shares_and_none_is_taken_twice(tmp_path: Path) -> None:
    """Red when shares are not those asked for, the smallest source for its weight is not whole, or draws change."""
    first, *rest = sources(tmp_path, 100, 400, 60)
    settings = Data(source=first, more_sources=tuple(rest), weights=(2.0, 1.0, 1.0))
    assert taken(settings) == {"0": 100, "1": 50, "2": 50}
    again = [c.where for c in stream_sources(settings, draw_limits(settings), Refusals())]
    assert again == [c.where for c in stream_sources(settings, draw_limits(settings), Refusals())]
    assert len(set(again)) == 200
    scaled = settings.model_copy(update={"weights": (20.0, 10.0, 10.0)})
    assert [c.where for c in stream_sources(scaled, draw_limits(scaled), Refusals())] == again
    assert taken(settings.model_copy(update={"weights": ()})) == {"0": 100, "1": 400, "2": 60}


def test_wrong_weights_are_refused() -> None:
    """Red when weights that name other sources than there are pass."""
    with pytest.raises(ValueError, match=r"weights=\[1.0\] are 1 for 2 sources"):
        Data(source="a", more_sources=("b",), weights=(1.0,))
    with pytest.raises(ValueError, match="greater than 0"):
        Data(source="a", weights=(0.0,))


def test_processes_change_nothing(tmp_path: Path) -> None:
    """Red when samples of a pool come in another order, or a refusal in it is lost."""
    path = write_conversations(tmp_path / "a.jsonl", 150)
    with path.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "assistant", "content": "first"}]}) + "\n")
    conversations, _ = read_conversations([str(path)])
    tokenizer = family_tokenizer("chatml")
    renderer = ChatRenderer(tokenizer, (tokenizer.eos_token_id,))
    alone = list(render_all(renderer, conversations, workers=1))
    pooled = list(render_all(renderer, iter(conversations), workers=2))
    assert [conversation for conversation, _ in pooled] == [conversation for conversation, _ in alone]
    for (_, one), (_, other) in zip(alone, pooled, strict=True):
        if isinstance(one, str):
            assert one == other == "starts_with_answer"
            continue
        assert [[part.tolist() for part in row] for row in one] == [[part.tolist() for part in row] for row in other]


def prepare(values: dict[str, object]) -> tuple[RunDir, dict[str, object]]:
    run = RunDir.create(load_config(values))
    return run, run_stage("prepare", run, silent)


def test_a_run_of_several_sources(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a source is left out, samples do not say where they are from, or a changed source goes unnoticed."""
    first, second = sources(tmp_path, 40, 40)
    data = {"source": first, "more_sources": [second], "weights": [1, 1], "heldout_fraction": 0.25}
    run, receipt = prepare(recipe_values(data=data))
    lines = [json.loads(line) for line in (run.train_data / PROVENANCE).read_text().splitlines()]
    prepared = PreparedData.open(run.train_data)
    assert [line["sample_id"] for line in lines] == [sample.sample_id for sample in prepared]
    assert {line["domain"] for line in lines} == {"0.jsonl", "1.jsonl"}
    assert all(line["from"].startswith((f"{first}, line", f"{second}, line")) for line in lines)
    assert all(line["answers"] is None for line in lines)
    assert "eagle" not in (run.train_data / PROVENANCE).read_text()
    assert receipt["vocabulary_unseen"] == int(200 - (prepared.count_supervised(300) > 0).sum())
    before = stage_inputs("prepare", run.config(), run)
    write_conversations(Path(second), 41, seed=1)
    assert stage_inputs("prepare", run.config(), run) != before


def test_supervise_last_reaches_the_samples(recipe_values: Values, tmp_path: Path) -> None:
    """Red when data.supervise=last trains on earlier answers."""
    path = tmp_path / "two.jsonl"
    with path.open("w") as file:
        for n in range(12):
            turns = [("user", f"{n} a"), ("assistant", "the nest"), ("user", "b"), ("assistant", "old birds")]
            file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    counts = {}
    for supervise in ("all", "last"):
        run, _ = prepare(recipe_values(supervise, data={"source": str(path), "supervise": supervise}))
        data = PreparedData.open(run.train_data)
        counts[supervise] = [int((np.diff(sample.loss_mask.astype(np.int8)) == 1).sum()) for sample in data]
    assert set(counts["all"]) == {2}
    assert set(counts["last"]) == {1}
