"""The plan: its recommendation, what mode auto makes of it, and a run that was planned and reported for real."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from flows.cli import main
from storage.presets import PRESETS
from tasks.trainer.config import Offline, Online, RunConfig
from tasks.trainer.draft.eagle3 import DraftConfig
from tasks.trainer.plan import decide, make_plan
from tasks.trainer.plan_data import active_parameters, data_rows, target_size
from tasks.trainer.plan_markdown import render_plan
from tasks.trainer.plan_memory import PARTS
from tasks.trainer.plan_options import Facts, Held
from tasks.trainer.plan_storage import Bandwidth
from tasks.trainer.plan_time import DEVICES
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.report_markdown import render
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import PLANNING, finished, run_stage, stages_of

Values = Callable[..., dict[str, Any]]
GB = 10**9
LARGE = LlamaConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=32768,
)  # fmt: skip


def config_of(**groups: dict[str, Any]) -> RunConfig:
    return load_config({"target": {"model": "t"}, "data": {"source": "s"}, **groups})


def facts_of(*, samples: int = 400, free: int | None = 10**15, read: float = 3e9, **changes: Any) -> Facts:
    """A large target on an H200 of the table; documents of 8,192 tokens, the last half of each supervised."""
    mask = np.arange(8192) >= 4096
    rows = data_rows([mask] * 4, [[0], [1], [2], [3]], ttt_steps=7, source="test", share=4 / samples)
    shape = DraftConfig(
        hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=11008, vocab_size=32000,
        target_vocab_size=32000, rms_norm_eps=1e-6, max_position_embeddings=32768, aux_layer_ids=(1, 15, 28),
    )  # fmt: skip
    facts = Facts(
        data=rows, shape=shape, target_config=LARGE, target=target_size(LARGE, itemsize=2),
        target_active=active_parameters(LARGE), device=DEVICES["h200"],
        place=Bandwidth(read=read, write=read, free=free), store_url="store",
    )  # fmt: skip
    return dataclasses.replace(facts, **changes)


AUTO = {"mode": "auto", "preset": "compact"}


def test_many_epochs_are_stored_one_is_not() -> None:
    """Red when a store is recommended that is read once, or the target is run again every epoch."""
    once, often = ({"steps": 400, "warmup_steps": 1}, {"steps": 4000, "warmup_steps": 1})
    plan = make_plan(config_of(hidden_states=AUTO, train=once), facts_of())
    assert plan.recommended == "online", plan.recommendation
    plan = make_plan(config_of(hidden_states=AUTO, train=often), facts_of())
    assert plan.recommended == "offline lossless", plan.recommendation
    assert "online would take" in plan.recommendation


def test_the_budget_bounds_the_store_and_exactness_bounds_the_preset() -> None:
    """Red when auto stores more than it may, or coarser than it may."""
    train = {"steps": 4000, "warmup_steps": 1}
    sizes = {option.name: option.stored_bytes for option in make_plan(config_of(train=train), facts_of()).states}
    between = (sizes["offline near"] + sizes["offline compact"]) / 2 / GB
    tight = config_of(hidden_states={**AUTO, "store_budget_gb": between}, train=train)
    plan = make_plan(tight, facts_of())
    assert plan.chosen == "offline compact"
    states = decide(tight, plan)
    assert isinstance(states, Offline)
    assert states.preset == "compact"
    exact = config_of(hidden_states={**AUTO, "preset": "near", "store_budget_gb": between}, train=train)
    plan = make_plan(exact, facts_of())
    assert plan.chosen == "online"
    assert decide(exact, plan) == Online()
    full = make_plan(config_of(hidden_states=AUTO, train=train), facts_of(free=GB))
    assert full.chosen == "online"
    assert any("GB where" in problem for problem in full.option("offline near").problems)


def test_a_slow_store_is_waited_for() -> None:
    """Red when the wait for data leaves the bandwidth out."""
    config = config_of(hidden_states={"mode": "offline"}, train={"steps": 4000, "warmup_steps": 1})
    fast, slow = (make_plan(config, facts_of(read=read)).option("offline near") for read in (3e9, 3e7))
    assert fast.wait_seconds < 0.2 * fast.step_seconds
    assert slow.wait_seconds > 0.5 * slow.step_seconds
    assert make_plan(config, facts_of(read=3e7)).recommended == "online"


def test_a_store_that_is_there_is_used_as_it_is() -> None:
    """Red when the plan adds a preset beside another one, or captures what is there."""
    held = Held(PRESETS["near"], tokens=400 * 8192, bytes_per_token=7000.0)
    plan = make_plan(config_of(hidden_states=AUTO, train={"steps": 400, "warmup_steps": 1}), facts_of(held=held))
    assert plan.recommended == "offline near"
    assert plan.option("offline near").capture_seconds == 0
    assert plan.option("offline near").stored_bytes == 7000 * 400 * 8192
    assert "as near" in plan.option("offline lossless").problems[0]


def test_what_does_not_fit_names_the_way_out() -> None:
    """Red when a run that needs checkpointing is recommended as it is, or nothing is said of what would help."""
    small = dataclasses.replace(DEVICES["h200"], memory=10 * 2**30)
    config = config_of(hidden_states={"mode": "offline"}, train={"steps": 4000, "warmup_steps": 1})
    plan = make_plan(config, facts_of(device=small))
    assert "train.checkpointing=" in plan.recommendation, plan.recommendation
    tiny = dataclasses.replace(DEVICES["h200"], memory=2 * 2**30)
    assert "larger GPU" in make_plan(config, facts_of(device=tiny)).recommendation
    assert all(option.problems for option in make_plan(config, facts_of(device=tiny)).states)


def test_every_choice_is_in_the_plan() -> None:
    """Red when a preset, a soft target or a compute choice is left out, of the document or of its tables."""
    plan = make_plan(config_of(), facts_of())
    names = {option.name for option in plan.states}
    assert {"online", *(f"offline {preset}" for preset in PRESETS), "offline near, top-256"} <= names
    ways = {way.name for way in plan.compute}
    assert {"checkpointing=mlp", "checkpointing=step", "attention=flex", "loss=triton", "loss=torch"} <= ways
    document = json.loads(json.dumps(plan.document()))
    assert all(one["memory"]["peak"] == sum(one["memory"][part] for part in PARTS) for one in document["states"])
    text = render_plan(plan, target="org/target")
    assert all(name in text for name in names | ways)
    only_hidden = make_plan(config_of(train={"temperature": 2.0}), facts_of())
    assert not any(option.last == "topk" for option in only_hidden.states)


def test_auto_is_decided_once_and_the_report_tells(recipe_values: Values, tmp_path: Path) -> None:
    """Red when auto is decided anew by a rerun, trains something else than it says, or the report lacks the plan."""
    values = recipe_values(
        hidden_states={"mode": "auto", "store_url": str(tmp_path / "store"), "preset": "lossless"},
        train={"steps": 60, "warmup_steps": 2, "evaluate_every": 0},
    )
    config = load_config(values)
    assert stages_of(config) == list(PLANNING)
    run = RunDir.create(config)
    for stage in PLANNING:
        receipt = run_stage(stage, run, silent)
    decided = run.config()
    assert decided.hidden_states.mode in ("online", "offline")
    assert receipt["chosen"] == ("online" if decided.hidden_states.mode == "online" else "offline lossless")
    assert receipt["asked"] == "auto"
    # The same recipe again: the run keeps what was decided, and nothing is planned or prepared anew.
    again = RunDir.create(config)
    assert again.config() == decided
    assert finished("prepare", decided, again)
    assert finished("plan", decided, again)
    for stage in stages_of(decided):
        if stage not in PLANNING:
            run_stage(stage, run, silent)
    facts = json.loads(run.report_json.read_text())
    assert facts["mode"] == decided.hidden_states.mode
    rows = {row["what"]: row for row in facts["against_plan"]}
    assert rows["a step"]["predicted"] > 0
    assert rows["a step"]["measured"] > 0
    if decided.hidden_states.mode == "offline":
        assert rows["stored"]["measured"] == facts["stored_bytes_per_token"]
    text = render(facts, decided)
    for section in ("## Against the plan", "## Serve it", "--speculative-config", "## Lineage", "`hidden_states.mode"):
        assert section in text
    assert facts["config"]["hidden_states"]["mode"] == decided.hidden_states.mode


def test_a_run_that_was_decided_is_no_other(recipe_values: Values) -> None:
    """Red when an undecided run cannot be given a mode by hand, or a decided one changes it."""
    values = recipe_values(hidden_states={"mode": "auto"})
    run = RunDir.create(load_config(values))
    assert run.config().hidden_states.mode == "auto"
    by_hand = load_config({**values, "hidden_states": {"mode": "online"}})
    assert RunDir.create(by_hand).config().hidden_states.mode == "online"
    assert RunDir.create(load_config(values)).config().hidden_states.mode == "online"
    with pytest.raises(Exception, match=r"hidden_states\.mode was 'online'"):
        RunDir.create(load_config({**values, "hidden_states": {"mode": "offline"}}))


def test_the_command_plans_a_recipe(recipe_values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when `eyas plan` needs a run, leaves files, or its JSON is none."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_values(hidden_states={"mode": "online"})))
    before = sorted(path.name for path in tmp_path.iterdir())
    for options in (["--json"], ["--device", "h200", "--json"], ["--set", "data.regenerate=true", "--json"]):
        with pytest.raises(SystemExit) as exit_:
            main(["plan", str(recipe), "--set", f"hidden_states.store_url={tmp_path / 'store'}", *options])
        assert not exit_.value.code
        plan = json.loads(capsys.readouterr().out)
        assert plan["facts"]["data"]["samples"] > 0
        assert plan["chosen"]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    with pytest.raises(SystemExit) as exit_:
        main(["plan", str(recipe), "--device", "toaster"])
    assert exit_.value.code == 2
    assert "known are h200" in capsys.readouterr().err
