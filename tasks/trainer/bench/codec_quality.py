"""What `eyas bench codec-quality` measures: how much of a draft's tau an encoding costs, when it is trained on it.

For every seed a draft is trained on the target's own states, and one for each encoding on what a store of that encoding
gives back: features and soft targets, from the first step on. Runs of one seed share data, packs, initial weights and
order; nothing differs but the states. The trainer does it with its own means: online, with a store whose budget holds
nothing, every sample takes the way through encoding and decoding and is forgotten.

Each held-out conversation is then measured teacher-forced on the target's exact states, as a served draft sees them.
The loss of tau is relative, 1 - tau(encoding) / tau(exact); its interval is a paired bootstrap over conversations and
seeds. Several runs at once share one GPU, each a process. An interrupted experiment goes on where it was: finished runs
are rows of `results.jsonl`, the others continue from their checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.bench.errors import BenchError
from storage.presets import PRESETS
from tasks.trainer.bench.codec_quality_run import QUALITY
from tasks.trainer.config import identity_fields
from tasks.trainer.errors import InputError
from tasks.trainer.files import read_json, write_text
from tasks.trainer.progress import Progress
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import finished, run_stage

logger = logging.getLogger(__name__)

EXACT = "exact"
"""The baseline: no encoding."""
RESULTS = "results.jsonl"
# No sample fits one byte, so that nothing is stored and everything takes the round trip.
_NO_BUDGET_GB = 1e-9
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: an encoding's preset (or EXACT), and the seed of order and weights."""

    preset: str
    seed: int

    @property
    def name(self) -> str:
        """Its folder, and its label in tables."""
        return f"{self.preset}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Loss:
    """What a preset costs against the exact states; shares, not percent."""

    preset: str
    seeds: int
    """Paired seeds."""
    tau: float
    """Mean over the seeds, all conversations together."""
    acc: float
    """acc_0 likewise."""
    loss: float
    """1 - tau / tau of the exact states."""
    low: float
    """Lower end of its 95% interval (two-sided)."""
    high: float
    """Upper end."""


def trials(presets: Sequence[str], seeds: Sequence[int]) -> list[Trial]:
    """Every run, a seed after the other, each with its baseline. Raises BenchError for an unknown preset."""
    unknown = [preset for preset in presets if preset not in PRESETS]
    if unknown:
        raise BenchError(f"preset {unknown[0]!r} is unknown: use {', '.join(PRESETS)}")
    return [Trial(preset, seed) for seed in seeds for preset in (EXACT, *dict.fromkeys(presets))]


def run_all(
    values: Mapping[str, Any], planned: Sequence[Trial], folder: Path, *, jobs: int, progress: Progress
) -> list[dict[str, Any]]:
    """Run what `folder` has no result of, `jobs` processes at once; values: a recipe's. Returns the rows of the plan.

    Raises BenchError when a run fails (its log's last line says why) or the folder holds another experiment;
    InterruptedError on SIGTERM, after all runs have saved their checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prepared = prepare_data(values, folder)
    done = {(row["preset"], row["seed"]): row for row in read_results(folder)}
    configs = {trial: make_run(values, trial, folder, prepared) for trial in planned}
    for trial, (_, identity) in configs.items():
        row = done.get((trial.preset, trial.seed))
        if row is not None and row["identity"] != identity:
            raise BenchError(f"{folder / RESULTS} holds {trial.name} of another recipe; give another folder")
    waiting = [trial for trial in planned if (trial.preset, trial.seed) not in done]
    running: dict[Trial, subprocess.Popen[bytes]] = {}
    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        while (waiting and not stop.is_set()) or running:
            while waiting and len(running) < jobs and not stop.is_set():
                trial = waiting.pop(0)
                running[trial] = start_run(configs[trial][0])
            for trial, process in list(running.items()):
                if stop.is_set():
                    process.terminate()
                if process.poll() is None:
                    continue
                del running[trial]
                if process.returncode == 0:
                    row = _keep_result(folder, trial, configs[trial])
                    done[trial.preset, trial.seed] = row
                elif not stop.is_set():
                    log = (configs[trial][0].root / "log.txt").read_text(encoding="utf-8", errors="replace").strip()
                    raise BenchError(f"run {trial.name} failed: {(log.splitlines() or ['no word'])[-1]}")
            progress(len(planned) - len(waiting) - len(running), len(planned), ", ".join(t.name for t in running))
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        signal.signal(signal.SIGTERM, before)
    if stop.is_set():
        raise InterruptedError("stopped by SIGTERM; start it again to go on")
    return [done[trial.preset, trial.seed] for trial in planned]


def losses(rows: Sequence[Mapping[str, Any]], *, samples: int = 10_000, seed: int = 0) -> list[Loss]:
    """The loss of each preset, with paired bootstrap intervals over conversations and seeds.

    Only seeds that have both the preset and the exact run count. Raises BenchError when the runs were measured on
    different conversations.
    """
    by_trial = {(row["preset"], row["seed"]): row for row in rows}
    if len({tuple(row["sample_ids"]) for row in rows}) > 1:
        raise BenchError("the runs were measured on different held-out conversations and cannot be paired")
    found = []
    for preset in dict.fromkeys(row["preset"] for row in rows):
        seeds = sorted(s for p, s in by_trial if p == preset and (EXACT, s) in by_trial)
        if not seeds:
            continue
        sums = [np.array([[by_trial[name, s][key] for s in seeds] for key in ("tau_sum", "tau_rows")], dtype=float)
                for name in (preset, EXACT)]  # fmt: skip
        accuracy = [accuracies(by_trial[preset, s])[0] for s in seeds]
        num_seeds, num_prompts = sums[0].shape[1:]
        everyone = np.ones((num_seeds, num_prompts))
        draws = np.random.default_rng(seed)
        resampled = np.empty(samples)
        for sample in range(samples):
            # How often each conversation and each seed is drawn: the same for both drafts of a pair.
            prompts = np.bincount(draws.integers(0, num_prompts, num_prompts), minlength=num_prompts)
            of_seeds = np.bincount(draws.integers(0, num_seeds, num_seeds), minlength=num_seeds)
            resampled[sample] = _loss(sums, prompts[None] * everyone, of_seeds)
        low, high = np.nanpercentile(resampled, [2.5, 97.5])
        found.append(
            Loss(
                preset=preset,
                seeds=num_seeds,
                tau=float(_taus(sums[0], everyone).mean()),
                acc=float(np.mean(accuracy)),
                loss=float(_loss(sums, everyone, np.ones(num_seeds))),
                low=float(low),
                high=float(high),
            )
        )
    return found


def accuracies(row: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """acc_k of all conversations together, [K]. row: as `Quality` is written."""
    shares: npt.NDArray[np.float64] = np.sum(row["correct"], 0) / np.sum(row["rows"], 0)
    return shares


def table(found: Sequence[Loss]) -> str:
    """The losses as a markdown table."""
    lines = ["| states trained on | tau | acc_0 | loss of tau | 95% interval | seeds |", "|---|---|---|---|---|---|"]
    for row in found:
        loss = ["-", "-"] if row.preset == EXACT else [f"{row.loss:+.2%}", f"{row.low:+.2%} to {row.high:+.2%}"]
        lines.append(f"| {row.preset} | {row.tau:.4f} | {row.acc:.4f} | {loss[0]} | {loss[1]} | {row.seeds} |")
    return "\n".join(lines)


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The finished runs. A line that a kill cut off is no result."""
    path = folder / RESULTS
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _taus(sums: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """tau of each seed; sums [2, seeds, conversations], weight [seeds, conversations]."""
    total = (sums * weight).sum(-1)
    taus: npt.NDArray[np.float64] = 1.0 + total[0] / total[1]
    return taus


def _loss(sums: Sequence[npt.NDArray[np.float64]], weight: npt.NDArray[Any], of_seeds: npt.NDArray[Any]) -> float:
    ours, exact = (float(_taus(part, weight) @ of_seeds) for part in sums)
    return 1.0 - ours / exact


def prepare_data(values: Mapping[str, Any], folder: Path) -> RunDir:
    """The run that holds the data of all; it is never trained."""
    config = load_config({**values, "hidden_states": {"mode": "online"}, "run_dir": str(folder / "prepared")})
    run = RunDir.create(config)
    if finished("prepare", config, run) is None:
        run_stage("prepare", run, lambda done, total, note="": None)
    return run


def make_run(values: Mapping[str, Any], trial: Trial, folder: Path, prepared: RunDir) -> tuple[RunDir, dict[str, Any]]:
    """The run's folder, with the data linked in, and its identity."""
    states: dict[str, Any] = {"mode": "online"}
    if trial.preset != EXACT:
        states |= {
            "store_url": str(folder / "stores" / trial.name),
            "store_budget_gb": _NO_BUDGET_GB,
            "preset": trial.preset,
        }
    train = {**values.get("train", {}), "seed": trial.seed}
    root = folder / "runs" / trial.name
    config = load_config({**values, "hidden_states": states, "train": train, "run_dir": str(root)})
    run = RunDir.create(config)
    receipt = prepared.receipt("prepare")
    assert receipt is not None
    for name in ("train", "heldout"):
        link = run.data / name
        if not link.exists():
            link.symlink_to(os.path.relpath(prepared.data / name, run.data))
    if not run.vocabulary.exists():
        run.vocabulary.symlink_to(os.path.relpath(prepared.vocabulary, run.root))
    if run.receipt("prepare") is None:
        run.write_receipt("prepare", receipt)
    return run, identity_fields(config)


def start_run(run: RunDir) -> subprocess.Popen[bytes]:
    with (run.root / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.trainer.bench.codec_quality_run", str(run.root)], stdout=log, stderr=log
        )


def _keep_result(folder: Path, trial: Trial, made: tuple[RunDir, dict[str, Any]]) -> dict[str, Any]:
    run, identity = made
    try:
        quality = read_json(run.root / QUALITY)
    except OSError as error:
        raise InputError(f"run {trial.name} left no {QUALITY}: {error.strerror}") from None
    row = {"preset": trial.preset, "seed": trial.seed, "identity": identity, **quality}
    # Whole, not appended to: a kill leaves no half line for the next row to follow.
    write_text(folder / RESULTS, "".join(json.dumps(one) + "\n" for one in (*read_results(folder), row)))
    return row
