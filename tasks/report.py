"""The report node of the DAG: report.md, report.json and a Prefect markdown artifact."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tasks.launch import launch
from tasks.trainer.report_markdown import with_embedded_plots
from tasks.trainer.run_dir import RunDir


@task(name="report", cache_policy=NO_CACHE)
def report(run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Write the report; its artifact has one key for all runs, so that the UI shows the history."""
    receipt = launch("report", run_dir, in_process=in_process)
    markdown = with_embedded_plots(RunDir.open(run_dir).report_markdown)
    create_markdown_artifact(markdown, key="train-draft-report", description=f"Draft trained in {run_dir}")
    return receipt
