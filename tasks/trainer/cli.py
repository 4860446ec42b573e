"""The trainer's own commands: evaluate, export, config. They need no Prefect."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tasks.trainer.champion_cli import app as champion_app
from tasks.trainer.config import RunConfig
from tasks.trainer.config_nightly import NightlyConfig, read_nightly
from tasks.trainer.data.cli import app as data_app
from tasks.trainer.export.commands import Layout
from tasks.trainer.parent import SERVING_CONFIG
from tasks.trainer.recipe import dump_config, load_config, read_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import run_stage

console = Console(stderr=True)

RunDirArgument = Annotated[str, typer.Argument(help="A run directory, as `eyas train` leaves it.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override, for example evaluate.num_prompts=16.")]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")]


def mount(app: typer.Typer) -> None:
    """Add the trainer's commands to the `eyas` command."""
    app.command()(plan)
    app.command()(evaluate)
    app.command()(export)
    app.command()(config)
    app.add_typer(champion_app, name="champion")
    app.add_typer(data_app, name="data")


def plan(
    recipe: Annotated[str, typer.Argument(help="YAML recipe: a complete run config.")],
    set_: Set = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Plan for a device of the table, h200, not the one found.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what each choice would store, need on the GPU and take, and which to take. Trains nothing.

    Of the target only config and tokenizer are read, of the conversations a part.
    Examples: eyas plan RECIPE.yaml; eyas plan RECIPE.yaml --device h200 --set train.checkpointing=step --json
    """
    from tasks.trainer.plan_markdown import render_plan
    from tasks.trainer.plan_stage import plan_recipe

    config = read_config(recipe, set_ or [])
    with console.status("planning"):
        made = plan_recipe(config, device=device)
    if as_json:
        typer.echo(json.dumps(made.document()))
    else:
        Console().print(Markdown(render_plan(made, target=config.target.model)))


def evaluate(run_dir: RunDirArgument, set_: Set = None, as_json: AsJson = False) -> None:
    """Measure acceptance again, with the run's or other evaluate.* values, and renew the report.

    Examples: eyas evaluate runs/mine; eyas evaluate runs/mine --set evaluate.num_prompts=64 --json
    """
    run = RunDir.open(run_dir)
    values = run.config().model_dump(mode="json")
    changed = read_overrides(values, set_ or [])
    RunDir.create(changed)  # refuses a change that would make it another run
    _run_with_bar(run, "evaluate")
    receipt = _run_with_bar(run, "report")
    typer.echo(json.dumps(receipt) if as_json else f"report: {receipt['report']}")


def export(
    source: Annotated[str, typer.Argument(help="A run directory, or an exported draft to write in another layout.")],
    out: Annotated[str, typer.Argument(help="New folder.")],
    layout: Annotated[
        Layout | None, typer.Option("--layout", help="Default: the run's train.export_layout, or the folder's own.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the folder as its engines do, and compare logits with the draft.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--target", help="How engines name the target, where it is not target.model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the trained draft as a folder that engines load: SGLang and vLLM, vLLM alone, or the package speculators.

    Examples: eyas export runs/mine OUT --check; eyas export s3://bucket/run OUT --layout vllm --json;
    eyas export runs/mine/draft OUT --layout speculators --target Qwen/Qwen3-8B
    """
    from tasks.trainer.export.stage import export_folder, export_run

    if "://" not in source and (Path(source) / SERVING_CONFIG).is_file():
        receipt = export_folder(Path(source), Path(out), layout=layout, target_name=target, check=check)
    else:
        run = RunDir.open(source)
        receipt = export_run(run.config(), run, Path(out), layout=layout, target_name=target, check=check)
    if as_json:
        typer.echo(json.dumps(receipt))
        return
    typer.echo(f"draft: {receipt['folder']} ({receipt['layout']} layout, {receipt['dtype']})")
    if check:
        found = receipt["check"]
        typer.echo(
            f"check: {' and '.join(found['engines'])} would draft what was trained: {found['logits']} logits within "
            f"{found['difference']:.1e} of their spread (the data type moves them by {found['rounding']:.1e})"
        )


def config(
    recipe: Annotated[str | None, typer.Argument(help="YAML recipe.")] = None,
    set_: Set = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of every option.")] = False,
    nightly: Annotated[bool, typer.Option("--nightly", help="Of `eyas nightly` instead of `eyas train`.")] = False,
) -> None:
    """Check a recipe and print it with every default written out, or print the schema.

    Examples: eyas config RECIPE.yaml --set train.steps=200; eyas config --schema; eyas config RECIPE.yaml --nightly
    """
    if schema:
        typer.echo(json.dumps((NightlyConfig if nightly else RunConfig).model_json_schema(), indent=1))
    elif recipe is None:
        raise typer.BadParameter("give a RECIPE, or --schema")
    else:
        found = read_nightly(recipe, set_ or []) if nightly else read_config(recipe, set_ or [])
        typer.echo(dump_config(found), nl=False)


def read_overrides(values: dict[str, object], overrides: list[str]) -> RunConfig:
    """A run's own config with overrides applied."""
    from tasks.trainer.recipe import apply_override

    for override in overrides:
        apply_override(values, override)
    return load_config(values)


def _run_with_bar(run: RunDir, stage: str) -> dict[str, object]:
    logging.basicConfig(level=logging.WARNING, handlers=[RichHandler(console=console)])
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(stage, total=None, note="")

        def progress(done: int, total: int, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        return run_stage(stage, run, progress)
