"""The evaluate node of the DAG."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.launch import launch


@task(name="evaluate", cache_policy=NO_CACHE)
def evaluate(run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Measure acceptance by real speculative decoding on held-out prompts. Returns the stage's receipt."""
    return launch("evaluate", run_dir, in_process=in_process)
