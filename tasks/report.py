"""The report node of the DAG: report.md, report.json and Prefect artifacts."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks.launch import launch
from tasks.trainer.files import read_json
from tasks.trainer.report_markdown import depth_table, with_embedded_plots
from tasks.trainer.run_dir import RunDir


@task(name="report", cache_policy=NO_CACHE)
def report(run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Write the report; its artifacts have one key for all runs, so that the UI shows the history."""
    receipt = launch("report", run_dir, in_process=in_process)
    run = RunDir.open(run_dir)
    markdown = with_embedded_plots(run.report_markdown)
    create_markdown_artifact(markdown, key="train-draft-report", description=f"Draft trained in {run.url}")
    table = depth_table(read_json(run.report_json))
    create_table_artifact(table, key="train-draft-depths", description=f"Acceptance by draft depth, {run.url}")
    return receipt
