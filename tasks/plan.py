"""The plan node of the DAG: what each choice would cost, as the run's first artifact."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tasks.launch import launch
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import finished


@task(name="plan", cache_policy=NO_CACHE)
def plan(run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Make the plan, unless preparing the data did already. Its artifact has one key for all runs, as the report's."""
    run = RunDir.open(run_dir)
    receipt = finished("plan", run.config(), run) or launch("plan", run_dir, in_process=in_process)
    markdown = run.plan_markdown.read_text(encoding="utf-8")
    create_markdown_artifact(markdown, key="train-draft-plan", description=receipt["recommendation"])
    return receipt
