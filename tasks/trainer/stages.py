"""The stages of a run, each a function of (config, run directory, progress) that returns its receipt.

`python -m tasks.trainer.stages STAGE RUN_DIR` runs one as a process of its own: its CUDA memory is freed when it ends,
a retry starts clean. Where it has several ranks, that process is torchrun's launcher (ranks.py). It speaks JSON lines
on stdout (progress, log, receipt, error) and exits 0, 2 (the input is wrong), 75 (stopped by SIGTERM, start again) or
1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from storage.errors import StoreError
from tasks.trainer.config import Auto, Offline, RunConfig, identity_fields
from tasks.trainer.config_evaluate import HELDOUT
from tasks.trainer.errors import InputError
from tasks.trainer.files import digest_url
from tasks.trainer.progress import JsonLines, Progress, emit
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stop import EXIT_INTERRUPTED, interrupted, stop

if TYPE_CHECKING:
    from tasks.trainer.train.parallel import Layout

Stage = Callable[..., dict[str, Any]]
"""(config, run, progress), and for those that run over ranks (ranks.py) this rank's Layout, too."""

EXIT_INPUT = 2


def prepare(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Conversations to samples and the draft vocabulary."""
    from tasks.trainer.data.prepare import prepare_data

    return prepare_data(config, run, progress)


def plan(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Predict what every choice costs; under mode auto, make it."""
    from tasks.trainer.plan_stage import plan_run

    return plan_run(config, run)


def capture(config: RunConfig, run: RunDir, progress: Progress, layout: Layout | None = None) -> dict[str, Any]:
    """Fill the store with the states it lacks."""
    from tasks.trainer.capture import capture_missing

    return capture_missing(config, run, progress, layout=layout)


def train(config: RunConfig, run: RunDir, progress: Progress, layout: Layout | None = None) -> dict[str, Any]:
    """Train the draft, from the target itself (online) or from the store (offline)."""
    from tasks.trainer.train.stage import train_draft

    return train_draft(config, run, progress, layout=layout)


def evaluate(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Measure acceptance by real speculative decoding, and held-out accuracy."""
    from tasks.trainer.acceptance.stage import evaluate_draft

    return evaluate_draft(config, run, progress)


def export(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Write the folder that an engine loads."""
    from tasks.trainer.export.stage import export_run

    return {**export_run(config, run, run.draft), "folder": run.where(run.draft)}


def report(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Tell what happened."""
    from tasks.trainer.report import write_report

    return write_report(config, run)


def measure(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Of a night: what the champion is worth with a target it was not made for."""
    from tasks.trainer.nightly.judge import measure_champion

    return measure_champion(config, run, progress)


def judge(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Of a night: the exported draft against the champion, prompt by prompt."""
    from tasks.trainer.nightly.judge import judge_draft

    return judge_draft(config, run, progress)


STAGES: dict[str, Stage] = {
    "prepare": prepare,
    "plan": plan,
    "capture": capture,
    "train": train,
    "evaluate": evaluate,
    "export": export,
    "report": report,
    "measure": measure,
    "judge": judge,
}


def run_stage(stage: str, run: RunDir, progress: Progress, *, layout: Layout | None = None) -> dict[str, Any]:
    """Run one stage under the run's lock and write its receipt last.

    layout: of the first of several ranks; the others wait until it holds the run.
    """
    with run.lock() as held:
        config = held.config()
        held.drop_receipt(stage)
        inputs = stage_inputs(stage, config, held)
        if layout is None:
            receipt = STAGES[stage](config, held, progress)
        else:
            from tasks.trainer.train.parallel import START_PATIENCE, meet

            meet(layout, "the run's lease", patience=START_PATIENCE)
            receipt = STAGES[stage](config, held, progress, layout)
        receipt = {**receipt, "inputs": inputs}
        held.write_receipt(stage, receipt)
    return receipt


def stage_inputs(stage: str, config: RunConfig, run: RunDir) -> str:
    """A digest of everything that decides what a stage leaves; a receipt with the same one need not be made again."""
    values: dict[str, Any] = {"stage": stage}
    if stage == "prepare":
        from tasks.trainer.data.sources import expand_source

        sources = [*config.data.sources, *([config.data.heldout_source] if config.data.heldout_source else [])]
        urls = [url for source in sources for url in expand_source(source)]
        # Mode auto is decided from what is prepared here, and that stays the same.
        identity = {key: value for key, value in identity_fields(config).items() if key != "hidden_states"}
        values |= {"identity": identity, "sources": [digest_url(url) for url in urls]}
    elif stage == "plan":
        # All ways to have states are in every plan, whichever the run takes.
        values |= {"train": config.train.model_dump(mode="json"), "draft": config.draft.model_dump(mode="json")}
        values |= {"prepare": run.receipt("prepare")}
    elif stage == "train":
        values |= {"identity": identity_fields(config), "prepare": run.receipt("prepare")}
    elif stage == "evaluate":
        values |= {"evaluate": config.evaluate.model_dump(mode="json"), "train": run.receipt("train")}
        values |= {"export": config.train.export}
        values |= {"prompts": [digest_url(url) for url in config.evaluate.prompts if url != HELDOUT]}
    elif stage == "export":
        values |= {"train": run.receipt("train"), "export": config.train.export}
    elif stage == "judge":
        values |= {"evaluate": config.evaluate.model_dump(mode="json"), "export": run.receipt("export")}
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def finished(stage: str, config: RunConfig, run: RunDir) -> dict[str, Any] | None:
    """The receipt of a stage that need not run again, else None.

    capture always runs, for a store can lose samples, and so does report.
    """
    receipt = run.receipt(stage)
    if receipt is None or stage in ("capture", "report"):
        return None
    if stage == "plan" and isinstance(config.hidden_states, Auto):
        return None  # it ended before it had decided
    return receipt if receipt["inputs"] == stage_inputs(stage, config, run) else None


PLANNING = ("prepare", "plan")
"""The stages that every run begins with. After them hidden_states.mode is auto no more: read the run's config again."""


def stages_of(config: RunConfig) -> list[str]:
    """The stages that a run of this config goes through, in order; under mode auto, those that decide it."""
    if isinstance(config.hidden_states, Auto):
        return list(PLANNING)
    offline = isinstance(config.hidden_states, Offline)
    return [*PLANNING, *(["capture"] if offline else []), "train", "evaluate", "export", "report"]


class _EventHandler(logging.Handler):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        emit({"event": "log", "level": record.levelname, "message": f"{self._prefix}{record.getMessage()}"})


def speak_json(prefix: str = "", level: int = logging.INFO) -> None:
    """Logs of this process become JSON lines on stdout. prefix: before each message."""
    logging.basicConfig(level=level, handlers=[_EventHandler(prefix)])
    logging.getLogger("tasks").setLevel(level)
    for noisy in ("httpx", "matplotlib", "transformers", "asyncio", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def follow_parent() -> None:
    """Stop when the process that started us dies without a word (kill -9): nobody would hear our results."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if not stop.asked:  # a second SIGTERM would end a save
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _over_ranks(stage: str, run_dir: str) -> int | None:
    """Run a stage over several ranks, and return its exit code; None when one is enough: this process."""
    from tasks.trainer import ranks  # which imports this module

    run = RunDir.open(run_dir)
    config, prepared = run.config(), run.receipt("prepare")
    if stage not in ranks.RANKED or prepared is None:
        return None
    nproc = ranks.count_ranks(stage, config, prepared["device"])
    machines = ranks.find_machines(config.train.nnodes, os.environ)
    if stage == "train":
        ranks.check_ranks(config.train, nproc * config.train.nnodes)
    if nproc == 1 and machines is None:
        return None
    return ranks.launch(stage, run_dir, nproc=nproc, machines=machines)


def main() -> int:
    """Entry of the stage process."""
    parser = argparse.ArgumentParser(prog="python -m tasks.trainer.stages", description=__doc__)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("run_dir")
    arguments = parser.parse_args()
    follow_parent()
    speak_json()
    try:
        code = _over_ranks(arguments.stage, arguments.run_dir)
        if code is not None:
            return code
        with stop.installed(interrupted(f"stage {arguments.stage}")):
            run = RunDir.open(arguments.run_dir)
            receipt = run_stage(arguments.stage, run, JsonLines(arguments.stage))
            if arguments.stage == "prepare":
                run_stage("plan", run, JsonLines("plan"))  # takes a second here, where all that it needs is loaded
    except (InputError, StoreError) as error:
        emit({"event": "error", "message": str(error)})
        return EXIT_INPUT
    except InterruptedError as error:
        emit({"event": "error", "message": str(error)})
        return EXIT_INTERRUPTED
    emit({"event": "receipt", "receipt": receipt})
    return 0


if __name__ == "__main__":
    code = main()
    if code == EXIT_INTERRUPTED:
        # Threads that still upload or read would be waited for, and the 15 seconds are not ours to spend.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
