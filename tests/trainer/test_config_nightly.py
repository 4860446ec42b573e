"""The nightly config: as strict as a run's, and a run's config comes out of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.trainer.config import RunConfig
from tasks.trainer.config_nightly import Nightly, NightlyConfig, load_nightly, nightly_from_form, read_nightly
from tasks.trainer.errors import InputError

Values = dict[str, Any]


@pytest.fixture
def values(tmp_path: Path) -> Values:
    return {
        "target": {"model": "tiny"},
        "data": {"source": "logs/*.jsonl", "heldout_source": "fixed.jsonl"},
        "nightly": {"home": "runs/nights", "replay": 0.25},
    }


def test_every_group_is_there_with_title_and_help() -> None:
    """Red when a field of the form has no title or help, or a night lacks a group that a run has."""
    assert set(NightlyConfig.model_fields) == set(RunConfig.model_fields) - {"run_dir"} | {"nightly"}
    for name, field in Nightly.model_fields.items():
        assert field.title, name
        assert field.description, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"source": "a"}}, r"data\.heldout_source is missing"),
        ({"nightly": {"replay": 1.0}}, r"nightly\.replay=1\.0: "),
        ({"nightly": {"recent_heldot": 0.1}}, r"unknown key 'nightly\.recent_heldot'; did you mean 'recent_heldout'"),
        ({"nightly": [1]}, "nightly"),
        ({"nightly": {"recent_heldout": 0.5}, "data": {"source": "a", "heldout_source": "b", "heldout_fraction": 0.6}},
         "together less than 1"),
        ({"data": {"source": "a", "heldout_source": "b", "heldout_fraction": 0.0}}, "must be more than 0"),
        ({"train": {"stpes": 3}}, r"unknown key 'train\.stpes'; did you mean 'steps'"),
        ({"hidden_states": {"mode": "offline", "store_url": "s", "store_budget_gb": 1}}, "belongs to mode online"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_in_a_recipe_and_in_the_form(values: Values, changes: Values, message: str) -> None:
    """Red when a mistake passes, or is told in pydantic's words. (The form drops keys of the other mode.)"""
    loads: list[Callable[[Values], NightlyConfig]] = [load_nightly]
    if "hidden_states" not in changes:
        loads.append(nightly_from_form)
    for load in loads:
        with pytest.raises(InputError, match=message) as refused:
            load({**values, **changes})
        assert "\n" not in str(refused.value)


def test_a_recipe_of_a_run_becomes_one_of_nights(
    values: Values, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when overrides or --home do not reach the nightly group, or run_dir is dropped without a word."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**values, "run_dir": "runs/single"}))
    with caplog.at_level(logging.WARNING):
        config = read_nightly(
            str(path), ["nightly.replay=0.5", "train.steps=7", "train.warmup_steps=0"], home="elsewhere"
        )
    assert "run_dir='runs/single'" in caplog.text
    assert (config.nightly.replay, config.nightly.home, config.train.steps) == (0.5, "elsewhere", 7)
    assert nightly_from_form(config.model_dump(mode="json")) == config


def test_a_run_config_has_what_a_night_changes(values: Values) -> None:
    """Red when a group is lost on the way to the run, or a change that does not fit is a traceback."""
    config = load_nightly({**values, "evaluate": {"num_prompts": 5}})
    run = config.run_config(run_dir="runs/1", data={"source": "night.jsonl", "heldout_source": "v.jsonl"})
    assert (run.run_dir, run.data.source, run.evaluate.num_prompts) == ("runs/1", "night.jsonl", 5)
    with pytest.raises(InputError, match="warmup_steps"):
        config.run_config(train={"steps": 1, "warmup_steps": 9})
