"""The `eyas` command. It only mounts what each package owns, and prints users' mistakes as one line."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

# A temporary Prefect server needs longer than the default 20 s on a slow or busy machine, and waits all of it when its
# home's parent is missing, which it does not make.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
if "PREFECT_HOME" in os.environ:
    Path(os.environ["PREFECT_HOME"]).expanduser().mkdir(parents=True, exist_ok=True)

import tasks.trainer.cli
from flows.mistakes import log_mistakes_as_one_line
from storage.cli import app as store_app
from storage.errors import StoreError
from tasks.trainer.config_nightly import read_nightly
from tasks.trainer.config_states import nearest
from tasks.trainer.errors import InputError
from tasks.trainer.recipe import read_config
from tasks.trainer.run_dir import RunDir

RECIPES = Path(__file__).parent / "recipes"
EXIT_INPUT = 2
EXIT_INTERRUPTED = 75

app = typer.Typer(
    name="eyas",
    help="Train EAGLE-3 draft models for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
tasks.trainer.cli.mount(app)
app.add_typer(store_app, name="store", help="Look into a hidden-state store.")

Recipe = Annotated[str, typer.Argument(help="YAML recipe: a complete run config.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override, for example train.steps=200.")]
AsJson = Annotated[bool, typer.Option("--json", help="What came out, as JSON, for scripts.")]
RunDirOption = Annotated[str | None, typer.Option("--run-dir", help="Where the run leaves everything.")]


@app.command()
def train(recipe: Recipe, set_: Set = None, run_dir: RunDirOption = None, as_json: AsJson = False) -> None:
    """Run the train-draft flow: prepare, plan, [capture], train, evaluate, export, report.

    The same command again continues a run that was stopped. Exit codes: 2 for wrong input, 75 when it was stopped.
    Examples: eyas train RECIPE.yaml; eyas train RECIPE.yaml --set train.steps=200 --run-dir s3://bucket/run --json
    """
    config = read_config(recipe, set_ or [], run_dir=run_dir)
    from flows.train_draft import train_draft

    RunDir.create(config)  # what is wrong with it is said before a server starts
    log_mistakes_as_one_line()
    receipt = train_draft(**{name: getattr(config, name) for name in type(config).model_fields})
    typer.echo(json.dumps(receipt) if as_json else f"report: {receipt['report']}")


@app.command()
def nightly(
    recipe: Annotated[str, typer.Argument(help="YAML recipe with a `nightly` group; data.source is a glob.")],
    set_: Set = None,
    home: Annotated[str | None, typer.Option("--home", help="In place of nightly.home.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What came out, as one JSON object.")] = False,
) -> None:
    """Retrain on conversations that are new, and promote the draft if it is better (the nightly-retrain flow).

    Exit code 0 whether it was promoted or not; the last line says which.
    Examples: eyas nightly RECIPE.yaml --home s3://models/qwen3-8b; eyas nightly RECIPE.yaml --set nightly.replay=0.3
    """
    config = read_nightly(recipe, set_ or [], home=home)
    from flows.nightly import nightly_retrain

    result = nightly_retrain(**{name: getattr(config, name) for name in type(config).model_fields})
    if as_json:
        typer.echo(json.dumps(result))
        return
    for reason in result["reasons"]:
        typer.echo(f"* {reason}")
    night = "no night" if result["night"] is None else f"night {result['night']}"
    typer.echo(f"{night}: {result['outcome'].replace('_', ' ')}")


@app.command()
def demo(
    run_dir: Annotated[str, typer.Option("--run-dir", help="Folder for both runs.")] = "runs/demo",
    set_: Set = None,
) -> None:
    """Train a draft for a real small model, online and offline, and compare the two.

    Examples: eyas demo; eyas demo --set train.steps=20 --run-dir /tmp/demo
    """
    from flows.demo import run_demo

    log_mistakes_as_one_line()
    run_demo(run_dir, set_ or [])


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one: the start of your own.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes that come with Eyas, or print one.

    Examples: eyas recipes; eyas recipes qwen3-8b-offline > RECIPE.yaml
    """
    files = {path.stem: path.read_text(encoding="utf-8") for path in sorted(RECIPES.glob("*.yaml"))}
    if name is None and as_json:
        typer.echo(json.dumps({stem: text.splitlines()[0].removeprefix("# ") for stem, text in files.items()}))
    elif name is None:
        for stem, text in files.items():
            typer.echo(f"{stem:24}{text.splitlines()[0].removeprefix('# ')}")
    elif name in files:
        typer.echo(files[name], nl=False)
    else:
        raise InputError(f"there is no recipe {name!r}{nearest(name, files)}")


@app.command()
def ui(
    down: Annotated[
        bool, typer.Option("--down", help="Stop the server and the worker that `eyas ui` started.")
    ] = False,
    port: Annotated[int, typer.Option("--port", help="Of the server, on 127.0.0.1.")] = 4200,
    folder: Annotated[str, typer.Option("--folder", help="For logs and process ids.")] = "runs/ui",
    prefect_file: Annotated[
        str | None, typer.Option("--prefect-file", help="Deployments; deploy/prefect.yaml without.")
    ] = None,
) -> None:
    """Start a Prefect server, a worker and the deployments on this machine, and print the URL.

    Examples: eyas ui; eyas ui --port 4300; eyas ui --down
    """
    from flows import ui as local
    from flows.deploy import DEPLOYMENTS

    place = Path(folder).absolute()
    deployments = Path(prefect_file).absolute() if prefect_file else DEPLOYMENTS
    for line in local.down(place) if down else local.up(place, port=port, deployments=deployments):
        typer.echo(line)


@app.command()
def deploy(
    pool_type: Annotated[
        Literal["process", "kubernetes"],
        typer.Option("--pool-type", help="Workers run runs themselves, or as Kubernetes Jobs."),
    ] = "process",
    pool_limit: Annotated[
        int | None, typer.Option("--pool-limit", min=1, help="Runs at once in the pool; a new pool gets 1.")
    ] = None,
    prefect_file: Annotated[
        str | None, typer.Option("--prefect-file", help="Deployments; deploy/prefect.yaml without.")
    ] = None,
) -> None:
    """Put work pool, automations and deployments on the Prefect server at PREFECT_API_URL; again changes what differs.

    Example: PREFECT_API_URL=http://127.0.0.1:4200/api eyas deploy --pool-limit 2
    """
    from flows.deploy import DEPLOYMENTS
    from flows.deploy import deploy as apply

    if not os.environ.get("PREFECT_API_URL"):
        raise InputError("PREFECT_API_URL is empty: name the server, or start one on this machine with `eyas ui`")
    deployments = Path(prefect_file).absolute() if prefect_file else DEPLOYMENTS
    for line in apply(pool_type=pool_type, pool_limit=pool_limit, deployments=deployments):
        typer.echo(line)


def _check_kernels() -> None:
    """`kernels` is also the name of a package on the registry, which would be imported in place of ours."""
    spec = importlib.util.find_spec("kernels")
    found = Path(spec.origin).parent if spec and spec.origin else None
    if found is None or found.parent != Path(__file__).parent.parent:
        raise InputError(
            f"the Python package `kernels` at {found} is not Eyas's; install Eyas in an environment of its own"
        )


@functools.cache
def _mount_bench() -> None:
    """Only once `kernels` is known to be ours: what it mounts lies in there."""
    import tasks.trainer.bench.cli
    from kernels.bench.cli import app as bench_app

    tasks.trainer.bench.cli.mount(bench_app)
    app.add_typer(bench_app, name="bench", help="Measure the kernels and the training step, and show the results.")


def _run(arguments: list[str] | None) -> None:
    """The command; a mistake in asking for a benchmark is a user's mistake like any other."""
    _mount_bench()
    from kernels.bench.errors import BenchError

    try:
        app(arguments)
    except BenchError as error:
        raise InputError(str(error)) from None


def main(arguments: list[str] | None = None) -> None:
    """Entry of the `eyas` command; exits 2 when the input is wrong, 75 when it was stopped and may be continued."""
    try:
        _check_kernels()
        _run(arguments)
    except (InputError, StoreError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_INPUT)
    except InterruptedError as error:
        sys.stderr.write(f"stopped: {error}\n")
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
