"""The report of a run: report.json for programs, report.md with plots for people."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from storage.schema import raw_bytes, target_rows
from tasks.trainer.capture import store_spec
from tasks.trainer.config import Offline, RunConfig
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.files import read_json, write_json, write_text
from tasks.trainer.report_markdown import render
from tasks.trainer.report_plan import against_plan
from tasks.trainer.report_plots import draw
from tasks.trainer.run_dir import RunDir
from tasks.trainer.train.curves import read_heldout, read_metrics


def write_report(config: RunConfig, run: RunDir) -> dict[str, Any]:
    """Gather what the stages left and write report.json, plots/ and report.md. Returns the receipt."""
    facts = gather(config, run)
    write_json(run.report_json, facts)
    draw(facts, run.plots)
    write_text(run.report_markdown, render(facts, config))
    return {"report": str(run.report_markdown), "tau": facts["tau"], "lossless": facts["lossless"]}


def gather(config: RunConfig, run: RunDir) -> dict[str, Any]:
    """Everything the report tells, as plain JSON.

    tau, tau_ngram, tau_untrained, lossless: measured by decoding. acc: held-out, teacher-forced, one a depth. losses:
    one an optimizer step. tokens: read by the trainer, prompts included. data_wait_seconds: of train_seconds, what
    steps waited for their data. stored_bytes_per_token: of the store (0 without one); raw_bytes_per_token: the same
    states as plain bfloat16, ids and statistics included. store: what the capture, or training that fills a store, says
    of it. heldout_curve: what training measured on held-out samples, by step; empty when it did not look.
    against_plan: what was predicted and what came out.
    """
    prepared, trained = run.receipt("prepare"), run.receipt("train")
    exported = run.receipt("export")
    assert prepared is not None, "the report comes last"
    assert trained is not None, "the report comes last"
    evaluation = read_json(run.evaluation)
    acceptance = evaluation["acceptance"]
    lines = read_metrics(run.metrics)
    captured = run.receipt("capture") if isinstance(config.hidden_states, Offline) else trained.get("store")
    per_token = _bytes_per_token(config, run, prepared, captured)
    plan = run.receipt("plan")
    return {
        "tau": acceptance["tau"],
        "tau_interval": acceptance["tau_interval"],
        "tau_ngram": acceptance["tau_ngram"],
        "tau_untrained": acceptance["tau_untrained"],
        "lossless": acceptance["lossless"],
        "acc": evaluation["heldout"]["acc"],
        "alpha": evaluation["heldout"]["alpha"],
        "simulated_tau": evaluation["heldout"]["tau"],
        "losses": [line["loss"] for line in lines],
        "tokens": sum(line["tokens"] for line in lines),
        "train_seconds": sum(line["seconds"] for line in lines),
        "data_wait_seconds": sum(line["data_wait_s"] for line in lines),
        "h2d_bytes": sum(line["h2d_bytes"] for line in lines),
        **per_token,
        "mode": config.hidden_states.mode,
        "heldout_curve": [{"step": step, **measured} for step, measured in read_heldout(run.metrics).items()],
        "curves": {key: [line[key] for line in lines] for key in ("acc", "alpha", "tau", "learning_rate")},
        "acceptance": acceptance,
        "evaluation": {key: evaluation[key] for key in ("step", "dtype", "heldout", "heldout_samples")},
        "prepare": prepared,
        "capture": run.receipt("capture"),
        "store": captured,
        "train": trained,
        "export": exported,
        "plan": plan,
        "against_plan": against_plan(
            plan,
            lines,
            trained=trained,
            captured=captured,
            stored_bytes_per_token=per_token["stored_bytes_per_token"],
        ),
        "config": config.model_dump(mode="json"),
        "commit": source_commit(),
        "versions": {
            "eyas": version("eyas"),
            "torch": version("torch"),
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "run_dir": run.url,
    }


def source_commit() -> str | None:
    """The commit of the checkout that this code is run from, "-dirty" behind it when files differ; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    described = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None


def _bytes_per_token(
    config: RunConfig, run: RunDir, prepared: dict[str, Any], store: dict[str, Any] | None
) -> dict[str, float]:
    if store is not None and store["store_tokens"]:
        tokens = store["store_tokens"]
        return {
            "stored_bytes_per_token": store["stored_bytes"] / tokens,
            "raw_bytes_per_token": store["raw_bytes"] / tokens,
        }
    data = PreparedData.open(run.train_data)
    tokens, targets = int(data.lengths.sum()), sum(len(target_rows(sample.loss_mask)) for sample in data)
    raw = raw_bytes(store_spec(config, prepared), num_tokens=tokens, num_targets=targets)
    return {"stored_bytes_per_token": 0.0, "raw_bytes_per_token": raw / tokens}
