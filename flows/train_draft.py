"""The train-draft flow: prepare > plan > [capture] > train > evaluate > export > report.

`python -m flows.train_draft RECIPE.yaml [--set key=value ...] [--run-dir DIR]` runs it without a server, as does
`eyas train`. A stage whose receipt is there is done; running the flow again on the same run directory continues it.

The signature is the run form: its order, its titles and its help. Prefect would check the values before the flow
starts, too, and say what is wrong in pydantic's words; they are checked here instead, in the sentences of a recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from flows.mistakes import log_mistakes_as_one_line
from flows.worker_watch import end_with_worker
from tasks.capture import capture
from tasks.evaluate import evaluate as evaluate_task
from tasks.export import export
from tasks.plan import plan
from tasks.prepare import prepare
from tasks.report import report
from tasks.train import train as train_task
from tasks.trainer.config import Auto, Data, Draft, Evaluate, HiddenStates, Offline, Online, RunConfig, Target, Train
from tasks.trainer.recipe import config_from_form
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import PLANNING, finished, stages_of

NODES = {
    "prepare": prepare,
    "plan": plan,
    "capture": capture,
    "train": train_task,
    "evaluate": evaluate_task,
    "export": export,
    "report": report,
}


@flow(name="train-draft", log_prints=False, validate_parameters=False)
def train_draft(
    *,
    target: Target,
    hidden_states: HiddenStates = Online(),  # noqa: B008 - frozen
    train: Train = Train(),  # noqa: B008
    data: Data,
    evaluate: Evaluate = Evaluate(),  # noqa: B008
    draft: Draft = Draft(),  # noqa: B008
    run_dir: str = "runs/{identity}",
    scratch_dir: str | None = None,
) -> dict[str, Any]:
    """Train an EAGLE-3 draft for a target and measure what it is worth.

    Args:
        target (Target): The frozen model the draft learns to predict.
        hidden_states (HiddenStates): Where the target's hidden states come from. Online: the target runs beside the
            draft. Offline: captured once into a store, which training reads. Auto: what the plan recommends.
        train (Train): Optimisation, and the choices that trade memory for speed.
        data (Data): Conversations, and how they are cut and regenerated.
        evaluate (Evaluate): Acceptance, measured by real speculative decoding on held-out prompts.
        draft (Draft): Shape of the draft; what is empty follows the target.
        run_dir (str): Folder or URL (s3://, gs://) for everything the run leaves. {identity} stands for a hash of the
            fields that decide the result, so the same run again continues, and another one gets its own place.
        scratch_dir (str): Local folder that a run with a remote run_dir works in. Empty for the worker's own.

    Raises InputError, in one line, for values that cannot be meant.
    """
    log_mistakes_as_one_line()
    end_with_worker()
    config = config_from_form(
        {
            "target": target,
            "hidden_states": hidden_states,
            "train": train,
            "data": data,
            "evaluate": evaluate,
            "draft": draft,
            "run_dir": run_dir,
            "scratch_dir": scratch_dir,
        }
    )
    run = RunDir.create(config)
    where = str(run.root)
    in_process = runs_in_process(config)
    logger = get_run_logger()
    receipt: dict[str, Any] = {}

    def go(stages: Iterable[str]) -> None:
        nonlocal receipt
        for stage in stages:
            if finished(stage, config, run) and stage != "plan":  # its task shows it again
                logger.info("%s: done before", stage)
            else:
                receipt = NODES[stage](where, in_process=in_process)

    go(PLANNING)
    config = run.config()  # hidden_states.mode=auto is decided by now
    go(stage for stage in stages_of(config) if stage not in PLANNING)
    return receipt


def runs_in_process(config: RunConfig) -> bool:
    """Whether all stages must share this process: what lies in memory:// lives and dies with it."""
    return config.run_dir.startswith("memory:") or (
        isinstance(config.hidden_states, Offline | Auto) and config.hidden_states.store_url.startswith("memory:")
    )


if __name__ == "__main__":
    from flows.cli import main

    main(["train", *sys.argv[1:]])
