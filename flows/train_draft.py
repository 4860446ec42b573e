"""The train-draft flow: prepare > [capture] > train > evaluate > export > report.

`python -m flows.train_draft RECIPE.yaml [--set key=value ...] [--run-dir DIR]` runs it without a server, as does
`eyas train`. A stage whose receipt is there is done; running the flow again on the same run directory continues it.
"""

from __future__ import annotations

import sys
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from tasks.capture import capture
from tasks.evaluate import evaluate as evaluate_task
from tasks.export import export
from tasks.prepare import prepare
from tasks.report import report
from tasks.train import train as train_task
from tasks.trainer.config import Data, Draft, Evaluate, HiddenStates, Offline, Online, RunConfig, Target, Train
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import finished, stages_of

NODES = {
    "prepare": prepare,
    "capture": capture,
    "train": train_task,
    "evaluate": evaluate_task,
    "export": export,
    "report": report,
}


@flow(name="train-draft", log_prints=False)
def train_draft(
    target: Target,
    data: Data,
    hidden_states: HiddenStates = Online(),  # noqa: B008 - frozen
    draft: Draft = Draft(),  # noqa: B008
    train: Train = Train(),  # noqa: B008
    evaluate: Evaluate = Evaluate(),  # noqa: B008
    run_dir: str = "runs/default",
    scratch_dir: str | None = None,
) -> dict[str, Any]:
    """Train an EAGLE-3 draft for a target and measure what it is worth.

    Args:
        target: The frozen model the draft learns to predict.
        data: Conversations, and how they are cut and regenerated.
        hidden_states: Online (target beside the draft) or Offline (captured once into a store).
        draft: Shape of the draft; what is empty follows the target.
        train: Optimisation, and the choices that trade memory for speed.
        evaluate: Acceptance measured by real speculative decoding.
        run_dir: Folder or fsspec URL for everything the run leaves.
        scratch_dir: Local folder that a run with a remote run_dir works in.
    """
    config = RunConfig(
        target=target,
        data=data,
        hidden_states=hidden_states,
        draft=draft,
        train=train,
        evaluate=evaluate,
        run_dir=run_dir,
        scratch_dir=scratch_dir,
    )
    run = RunDir.create(config)
    where = str(run.root)
    # What lies in memory:// lives and dies with one process, so all stages must share this one.
    in_process = config.run_dir.startswith("memory:") or (
        isinstance(config.hidden_states, Offline) and config.hidden_states.store_url.startswith("memory:")
    )
    logger = get_run_logger()
    for stage in stages_of(config):
        if finished(stage, config, run):
            logger.info("%s: done before", stage)
        else:
            receipt = NODES[stage](where, in_process=in_process)
    return receipt


if __name__ == "__main__":
    from flows.cli import main

    main(["train", *sys.argv[1:]])
