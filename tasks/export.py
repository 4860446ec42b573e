"""The export node of the DAG."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.launch import launch


@task(name="export", cache_policy=NO_CACHE)
def export(run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Write the folder that a serving engine loads. Returns the stage's receipt."""
    return launch("export", run_dir, in_process=in_process)
