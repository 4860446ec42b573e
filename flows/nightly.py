"""The nightly-retrain flow: discover > train_draft (warm start) > judge > promote, or nothing.

`eyas nightly RECIPE.yaml` runs it without a server. One process at a time works on a home. A start after a crash goes
on with the night that was under way, from the stage that was not done, and promotes its draft once.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from flows.mistakes import log_mistakes_as_one_line
from flows.train_draft import runs_in_process, train_draft
from flows.worker_watch import end_with_worker
from tasks.discover import discover
from tasks.judge import judge, measure_champion
from tasks.promote import promote, report_night, report_quiet_night
from tasks.trainer.config import Data, Draft, Evaluate, HiddenStates, Online, Target, Train
from tasks.trainer.config_nightly import Nightly, NightlyConfig, nightly_from_form
from tasks.trainer.nightly.home import Home, Plan, Verdict, training_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import finished


@flow(name="nightly-retrain", log_prints=False, validate_parameters=False)
def nightly_retrain(
    *,
    target: Target,
    hidden_states: HiddenStates = Online(),  # noqa: B008 - frozen
    nightly: Nightly = Nightly(),  # noqa: B008
    train: Train = Train(),  # noqa: B008
    data: Data,
    evaluate: Evaluate = Evaluate(),  # noqa: B008
    draft: Draft = Draft(),  # noqa: B008
    scratch_dir: str | None = None,
) -> dict[str, Any]:
    """Train the champion on, with conversations that are new, and replace it if the result is better.

    Args:
        target (Target): The frozen model the draft learns to predict. A new revision is captured and judged anew.
        hidden_states (HiddenStates): Where the target's hidden states come from. A store keeps those of nights before.
        nightly (Nightly): What a night trains on, and what its draft must show to become the champion.
        train (Train): Optimisation of one night.
        data (Data): Conversations. The source is a glob of JSONL files on any fsspec URL, the held-out source the fixed
            held-out set; the held-out share chooses the checkpoint.
        evaluate (Evaluate): How drafts are measured.
        draft (Draft): Shape of the first draft; later ones start from the champion, with its vocabulary.
        scratch_dir (str): Local folder that nights of a remote home work in. Empty for the worker's own.

    Raises InputError, in one line, for values that cannot be meant, and when another night is under way.
    """
    log_mistakes_as_one_line()
    end_with_worker()
    config = nightly_from_form(
        {
            "target": target,
            "hidden_states": hidden_states,
            "nightly": nightly,
            "train": train,
            "data": data,
            "evaluate": evaluate,
            "draft": draft,
            "scratch_dir": scratch_dir,
        }
    )
    logger = get_run_logger()
    with Home.open(config.nightly.home, config.scratch_dir).hold() as home:
        found = discover(config, home)
        logger.info("%s", found.message)
        if found.plan is None:
            report_quiet_night(config, home, found.message, found.counts)
            return {"outcome": "nothing_to_do", "night": None, "reasons": [found.message], "counts": found.counts}
        verdict = _night(config, home, found.plan)
    for reason in verdict.reasons:
        logger.info("%s", reason)
    return {**asdict(verdict), "night": verdict.number, "counts": found.counts}


def _night(config: NightlyConfig, home: Home, plan: Plan) -> Verdict:
    """Each step is left out, or done again without harm, when it was done before a crash."""
    history = home.champion.history()
    if history.of_night(plan.number) is None:
        run_config = training_config(config, plan, home)
        run = RunDir.create(run_config)
        where, in_process = str(run.root), runs_in_process(run_config)
        if history.current is not None and not history.is_measured(history.current, plan.fingerprint):
            measure_champion(home, plan, where, in_process=in_process)
        train_draft(**{name: getattr(run_config, name) for name in type(run_config).model_fields})
        if not finished("judge", run_config, run):
            judge(where, in_process=in_process)
    verdict = promote(config, home, plan)
    report_night(config, home, plan, verdict)
    return verdict
