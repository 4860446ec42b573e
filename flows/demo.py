"""`eyas demo`: one recipe, trained online and offline, compared in a table."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tasks.trainer.config import RunConfig
from tasks.trainer.recipe import read_config

RECIPE = "recipes/demo.yaml"


def demo_configs(folder: str, overrides: list[str]) -> dict[str, RunConfig]:
    """The online and the offline run of the demo recipe, sharing regenerated answers."""
    package = files("flows")
    shared = [
        f"data.source={package / 'recipes/demo/prompts.jsonl'}",
        f"data.heldout_source={package / 'recipes/demo/heldout.jsonl'}",
        f"data.regenerate_dir={folder}/answers",
    ]
    # Lossless, so that both runs must agree in every bit; everywhere else the default is a store half as large.
    offline = [
        "hidden_states.mode=offline",
        f"hidden_states.store_url={folder}/store",
        "hidden_states.preset=lossless",
    ]
    return {
        mode: read_config(
            str(package / RECIPE), [*shared, *(offline if mode == "offline" else []), *overrides],
            run_dir=f"{folder}/{mode}",
        )
        for mode in ("online", "offline")
    }  # fmt: skip


def run_demo(folder: str, overrides: list[str]) -> None:
    """Run both, then print what came out. Exits 1 when the two runs did not train identically."""
    # Unpacking the target's GGUF once serves both runs; it stays in the demo's folder.
    os.environ.setdefault("EYAS_CACHE", str(Path(folder).absolute() / "cache"))
    console = Console()
    reports = {}
    from flows.train_draft import train_draft

    for mode, config in demo_configs(folder, overrides).items():
        console.rule(f"[bold]{mode}")
        train_draft(**{name: getattr(config, name) for name in type(config).model_fields})
        reports[mode] = json.loads((Path(config.run_dir) / "report.json").read_text(encoding="utf-8"))
    console.print(comparison(reports))
    same = reports["online"]["losses"] == reports["offline"]["losses"]
    console.print(
        f"losses of the two runs, step by step: {'identical, bit for bit' if same else '[bold red]DIFFERENT'}"
    )
    for mode, report in reports.items():
        console.print(f"{mode}: {report['run_dir']}/report.md, draft in {report['export']['folder']}", soft_wrap=True)
    if not same:
        raise SystemExit("online and offline-lossless must train identically on the CPU; please report this")


def comparison(reports: dict[str, dict[str, Any]]) -> Table:
    """Both runs side by side."""
    table = Table(title="One recipe, both ways", title_justify="left")
    table.add_column("")
    for mode in reports:
        table.add_column(mode, justify="right")

    def row(name: str, show: Any) -> None:
        table.add_row(name, *(show(report) for report in reports.values()))

    row("training loss, first to last", lambda r: f"{r['losses'][0]:.4f} to {r['losses'][-1]:.4f}")
    row("tokens read by the trainer", lambda r: f"{r['tokens']:,}")
    row("training seconds", lambda r: f"{r['train_seconds']:.0f}")
    row("  of these waiting for data", lambda r: f"{r['data_wait_seconds']:.0f}")
    for depth in range(len(next(iter(reports.values()))["acc"])):
        row(f"held-out acc_{depth}", lambda r, depth=depth: f"{r['acc'][depth]:.3f}")
    row("tau (tokens per target forward)", lambda r: f"{r['tau']:.3f}")
    row("  95% interval", lambda r: f"{r['tau_interval'][0]:.3f} to {r['tau_interval'][1]:.3f}")
    row("  n-gram lookup, same answers", lambda r: f"{r['tau_ngram']:.3f}")
    row("  untrained draft, same answers", lambda r: f"{r['tau_untrained']:.3f}")
    row("lossless", lambda r: str(r["lossless"]).lower())
    row("bytes stored per token", lambda r: f"{r['stored_bytes_per_token']:,.0f}")
    row("  raw would be", lambda r: f"{r['raw_bytes_per_token']:,.0f}")
    return table
