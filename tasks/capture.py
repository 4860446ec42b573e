"""The capture node of the DAG."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.launch import launch


@task(name="capture", cache_policy=NO_CACHE)
def capture(run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Fill the store with the target's hidden states it lacks. Returns the stage's receipt."""
    return launch("capture", run_dir, in_process=in_process)
