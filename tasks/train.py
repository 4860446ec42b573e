"""The train node of the DAG: the same for online and offline runs."""

from __future__ import annotations

from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from tasks.launch import launch
from tasks.trainer.errors import InputError


async def _worth_a_retry(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Wrong input stays wrong, and a stop was meant; a crash continues from its checkpoint."""
    failure = await state.aresult(raise_on_failure=False)
    return not isinstance(failure, InputError | InterruptedError)


@task(name="train", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5, retry_condition_fn=_worth_a_retry)
def train(run_dir: str, *, in_process: bool = False) -> dict[str, Any]:
    """Train the draft, continuing the newest checkpoint. Returns the stage's receipt."""
    return launch("train", run_dir, in_process=in_process)
