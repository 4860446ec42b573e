"""The report of a run: report.json for programs, report.md with plots for people."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from tasks.trainer.config import RunConfig
from tasks.trainer.files import read_json, write_json, write_text
from tasks.trainer.report_markdown import render
from tasks.trainer.report_plots import draw
from tasks.trainer.run_dir import RunDir
from tasks.trainer.train.curves import read_metrics


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
    one an optimizer step. tokens: read by the trainer, prompts included. stored_bytes_per_token: of the store (0
    online); raw_bytes_per_token: the same states as plain bfloat16, ids and statistics included.
    """
    prepared, trained = run.receipt("prepare"), run.receipt("train")
    exported, captured = run.receipt("export"), run.receipt("capture")
    assert prepared is not None, "the report comes last"
    assert trained is not None, "the report comes last"
    evaluation = read_json(run.evaluation)
    acceptance = evaluation["acceptance"]
    lines = read_metrics(run.metrics)
    stored = captured["stored_bytes"] / captured["store_tokens"] if captured else 0.0
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
        "stored_bytes_per_token": stored,
        "raw_bytes_per_token": (
            captured["raw_bytes"] / captured["store_tokens"]
            if captured
            else raw_bytes_per_token(prepared["hidden_size"])
        ),
        "mode": config.hidden_states.mode,
        "curves": {key: [line[key] for line in lines] for key in ("acc", "tau", "learning_rate")},
        "acceptance": acceptance,
        "evaluation": {key: evaluation[key] for key in ("step", "dtype", "heldout", "heldout_samples")},
        "prepare": prepared,
        "capture": captured,
        "train": trained,
        "export": exported,
        "versions": {
            "eyas": version("eyas"),
            "torch": version("torch"),
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "run_dir": str(run.root),
    }


def raw_bytes_per_token(hidden_size: int) -> int:
    """Four bfloat16 states, token id, mask, argmax and log-sum-exp."""
    return 4 * hidden_size * 2 + 4 + 1 + 4 + 4
