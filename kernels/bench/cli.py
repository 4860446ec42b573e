"""`eyas bench` and `python -m kernels.bench`: the commands. Torch is loaded by the workers only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kernels.bench import attention as attention_work
from kernels.bench import loss as loss_work
from kernels.bench import plot as plots
from kernels.bench import results
from kernels.bench.errors import BenchError
from kernels.bench.goals import GOALS, Outcome
from kernels.bench.goals import evaluate as evaluate_goal
from kernels.bench.runner import Bench, Group, Journal, Pool

PEERS = ("specforge",)
EXIT_INPUT = 2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Out = Annotated[Path, typer.Option("--out", help="CSV that the rows are added to; the iterations go beside it.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Turns of every variant; medians are taken.")]
Try = Annotated[bool, typer.Option("--try", help="Measure and print, record nothing; the tree may be uncommitted.")]
Device = Annotated[str, typer.Option("--device", help="cuda or cpu.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Shapes for a test of the benchmark itself.")]
Against = Annotated[str | None, typer.Option("--against", help="A peer: specforge.")]
PeerPath = Annotated[Path | None, typer.Option("--peer-path", help="Folder that holds the peer's package.")]
PeerPython = Annotated[
    str | None, typer.Option("--peer-python", help="Interpreter of the environment the peer is installed in.")
]
Tokens = Annotated[str | None, typer.Option("--tokens", help="Sizes, for example 8192,16384.")]


@app.command()
def attention(
    tokens: Tokens = None,
    out: Out = results.RESULTS,
    rounds: Rounds = 5,
    try_: Try = False,
    device: Device = "cuda",
    tiny: Tiny = False,
) -> None:
    """TTT attention: fused, flex, flex over concatenated K/V, plain causal calls, dense softmax.

    Examples: eyas bench attention; eyas bench attention --tokens 8192,16384 --try
    """
    journal = Journal.open(out, record=not try_)
    sizes = read_sizes(tokens, (32,) if tiny else attention_work.TOKENS)
    with Pool(attention_work.GROUPS, device) as pool:
        attention_work.measure(Bench(pool, journal, rounds), attention_work.cases(sizes, device=device, tiny=tiny))


@app.command()
def loss(
    part: Annotated[str | None, typer.Option("--part", help="logits or linear; both when not given.")] = None,
    against: Against = None,
    peer_path: PeerPath = None,
    peer_python: PeerPython = None,
    out: Out = results.RESULTS,
    rounds: Rounds = 5,
    try_: Try = False,
    device: Device = "cuda",
    tiny: Tiny = False,
) -> None:
    """The loss from logits and from hidden states, against torch.compile and a peer.

    Examples: eyas bench loss; eyas bench loss --part linear --against specforge --peer-path FOLDER
    """
    if part not in (None, "logits", "linear"):
        raise BenchError(f"--part {part} is unknown: use logits or linear")
    journal = Journal.open(out, record=not try_)
    peer = peer_group(against, loss_work.specforge_file(), peer_path, peer_python)
    cases = loss_work.cases(against=peer is not None, parts=[part] if part else ["logits", "linear"], tiny=tiny)
    with Pool(loss_work.groups(peer), device) as pool:
        loss_work.measure(Bench(pool, journal, rounds), cases)


@app.command()
def plot(
    out: Out = results.RESULTS,
    folder: Annotated[Path, typer.Option("--folder", help="Where the PNG files go.")] = plots.FOLDER,
) -> None:
    """Draw the newest runs of a results file.

    Examples: eyas bench plot; eyas bench plot --folder /tmp/plots
    """
    for path in plots.draw(results.read(out), folder):
        typer.echo(str(path))


@app.command()
def goals(out: Out = results.RESULTS) -> None:
    """Print every goal with what the newest runs of a results file measured.

    Examples: eyas bench goals
    """
    rows = results.read(out)
    table = Table("goal", "bound", "measured", "worst at", "met")
    for outcome in (evaluate_goal(goal, rows) for goal in GOALS):
        table.add_row(*_cells(outcome))
    Console().print(table)


def _cells(outcome: Outcome) -> list[str]:
    goal = outcome.goal
    bound = f"{'<=' if goal.at == 'most' else '>='} {goal.bound:.6g}"
    if outcome.value is None:
        return [
            goal.name,
            bound,
            "-",
            outcome.why,
            f"not measured: {goal.unmeasured}" if goal.unmeasured else "no rows",
        ]
    met = "yes" if outcome.met else f"no: {goal.missed}" if goal.missed else "no"
    return [goal.name, bound, f"{outcome.value:.6g}", outcome.case, met]


def read_sizes(text: str | None, default: Sequence[int]) -> tuple[int, ...]:
    """Comma-separated token counts. Raises BenchError for what is no positive number."""
    if text is None:
        return tuple(default)
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise BenchError(f"--tokens {text} must be positive numbers separated by commas, for example 8192,16384")
    return tuple(int(size) for size in sizes)


def peer_group(against: str | None, load: str, path: Path | None, python: str | None) -> Group | None:
    """The peer's process: its own interpreter when one is named, and its folder first on the path."""
    if against is None:
        return None
    if against not in PEERS:
        raise BenchError(f"--against {against} is unknown: use {', '.join(PEERS)}")
    if path is not None and not path.is_dir():
        raise BenchError(f"--peer-path {path} is no folder: name the one that holds the package {against}")
    return Group(load, path=() if path is None else (str(path.resolve()),), python=python or sys.executable)


def main(arguments: list[str] | None = None) -> None:
    """Entry of `python -m kernels.bench`; exits 2 when the benchmark cannot run as asked."""
    try:
        app(arguments)
    except BenchError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_INPUT)
