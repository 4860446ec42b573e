"""The prepare node of the DAG."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.launch import launch


@task(name="prepare", cache_policy=NO_CACHE)
def prepare(run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Conversations to samples and the draft vocabulary. Returns the stage's receipt."""
    return launch("prepare", run_dir, in_process=in_process)
