"""The measuring nodes of a night: the champion with a target that is new to it, and tonight's draft against it."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.launch import launch
from tasks.trainer.nightly.home import Home, Plan


@task(name="measure-champion", cache_policy=NO_CACHE)
def measure_champion(home: Home, plan: Plan, run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Measure the champion with tonight's target and note it in its history. Returns the stage's receipt."""
    assert plan.champion is not None, "there is a champion to measure"
    champion = home.champion
    entry = champion.history().entry(plan.champion)
    receipt = launch("measure", run_dir, in_process=in_process)
    champion.record_measurement(entry, {name: receipt[name] for name in receipt if name != "inputs"})
    return receipt


@task(name="judge", cache_policy=NO_CACHE)
def judge(run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Decode the held-out prompts with tonight's draft and with what it must beat. Returns the stage's receipt."""
    return launch("judge", run_dir, in_process=in_process)
