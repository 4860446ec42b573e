"""deploy/prefect.yaml, as Prefect reads it: its steps are run, its templates filled, its values held to the flows."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.steps.core import run_steps
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.server.schemas.schedules import CronSchedule as ServerCron
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate
from prefect.utilities.templating import apply_values, find_placeholders
from pydantic import BaseModel

from flows.deploy import DEPLOYMENTS, environment
from tasks.trainer.config_nightly import load_nightly
from tasks.trainer.config_states import modes
from tasks.trainer.recipe import load_config

FILE: dict[str, Any] = yaml.safe_load(DEPLOYMENTS.read_text())
NAMES = [entry["name"] for entry in FILE["deployments"]]


def resolved(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A deployment as `prefect deploy` makes it: steps run, placeholders filled."""
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    entry = copy.deepcopy(next(entry for entry in FILE["deployments"] if entry["name"] == name))
    entry = apply_values(entry, os.environ, remove_notset=False)
    outputs = asyncio.run(run_steps(entry.pop("build"), print_function=lambda *_, **__: None))
    filled: dict[str, Any] = apply_values(entry, outputs)
    return filled


def strictly(parameters: dict[str, Any], flow: Flow[..., Any]) -> None:
    """Fails unless these are the flow's parameters, all of them, in full, and nothing else."""
    signature = inspect.signature(flow.fn)
    assert set(parameters) == set(signature.parameters)
    assert not validate(parameters, parameter_schema(flow).model_dump_for_openapi(), preprocess=True)
    # Read as strictly as a recipe: a misspelt key, or one of another mode, is refused.
    config = (load_nightly if "nightly" in parameters else load_config)(parameters)
    for group, values in parameters.items():
        model = getattr(config, group)
        if isinstance(model, BaseModel):
            assert set(values) == set(type(model).model_fields), group


@pytest.mark.parametrize("name", NAMES)
def test_every_deployment_gives_its_flow_full_and_right_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a parameter is misspelt, missing, out of range or not written out, or a placeholder is left."""
    entry = resolved(name, monkeypatch)
    flow = load_flow_from_entrypoint(entry["entrypoint"])
    strictly(entry["parameters"], flow)
    assert not find_placeholders(entry)
    assert entry["version"]
    assert entry["work_pool"]["name"] == "gpu"
    assert Path(entry["work_pool"]["job_variables"]["working_dir"]).is_absolute()


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_a_slug_and_parameters_that_validate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a schedule is no schedule, would be made anew by a redeploy, or gives wrong parameters."""
    entry = resolved(name, monkeypatch)
    flow = load_flow_from_entrypoint(entry["entrypoint"])
    for schedule in entry["schedules"]:
        known = {"slug", "cron", "timezone", "active", "parameters"}
        assert set(schedule) <= known
        assert schedule["slug"]
        made = DeploymentScheduleCreate(
            schedule=CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]),
            active=schedule["active"],
            parameters=schedule.get("parameters", {}),
            slug=schedule["slug"],
        )
        # Prefect merges them one level deep over the deployment's.
        strictly({**entry["parameters"], **made.parameters}, flow)


def test_strictness_is_no_formality(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the check above takes a misspelt key, a key of the other mode, or a value out of range."""
    entry = resolved("offline", monkeypatch)
    flow = load_flow_from_entrypoint(entry["entrypoint"])
    wrong = [
        ("train", {"stepz": 5}),
        ("train", {"steps": 0}),
        ("hidden_states", {"prefetch": 1}),
        ("hidden_states", {"store_budget_gb": 5}),
        ("hidden_states", {"mode": "online"}),
        ("draft", {"vocab_size": 3}),
    ]
    for group, change in wrong:
        changed = {**entry["parameters"], group: {**entry["parameters"][group], **change}}
        with pytest.raises((AssertionError, ValueError)):
            strictly(changed, flow)
    partial = {**entry["parameters"], "train": {"steps": 500}}
    with pytest.raises(AssertionError):
        strictly(partial, flow)


def test_the_presets_are_what_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a preset trains in another mode, or a mode of the form has no deployment that opens it."""
    found = {name: resolved(name, monkeypatch)["parameters"]["hidden_states"]["mode"] for name in NAMES}
    assert found["online"] == "online"
    assert found["offline"] == "offline"
    assert set(found.values()) <= set(modes())


def test_the_night_begins_at_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the nightly schedule is missing or its next run is another one; a second night must not join a first."""
    entry = resolved("nightly", monkeypatch)
    (schedule,) = entry["schedules"]
    assert schedule["active"] is True
    cron = ServerCron(cron=schedule["cron"], timezone=schedule["timezone"])
    after = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    dates = asyncio.run(cron.get_dates(2, after))
    assert [date.astimezone(UTC) for date in dates] == [
        datetime(2026, 3, 2, 2, 0, tzinfo=UTC),
        datetime(2026, 3, 3, 2, 0, tzinfo=UTC),
    ]
    assert entry["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


def test_one_deployment_starts_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when two different runs of a form get one directory, or the same run again gets another."""
    parameters = resolved("offline", monkeypatch)["parameters"]
    first = load_config(parameters).run_dir
    assert "{" not in first
    assert load_config(copy.deepcopy(parameters)).run_dir == first
    longer = {**parameters, "train": {**parameters["train"], "steps": 77_000}}
    assert load_config(longer).run_dir != first
    watched = {**parameters, "train": {**parameters["train"], "checkpoint_every": 7}}
    assert load_config(watched).run_dir == first, "what does not change the draft continues the run"
