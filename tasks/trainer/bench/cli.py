"""The `step` command of `eyas bench`, beside the kernels' own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kernels.bench import results
from kernels.bench.cli import (
    EXIT_INPUT,
    Against,
    Device,
    Out,
    PeerPath,
    PeerPython,
    Rounds,
    Tiny,
    Tokens,
    Try,
    peer_group,
    read_sizes,
)
from kernels.bench.errors import BenchError
from kernels.bench.runner import Bench, Journal, Pool
from tasks.trainer.bench import step as step_work


def mount(app: typer.Typer) -> None:
    """Add `step` to a bench command."""
    app.command()(step)


def step(
    tokens: Tokens = None,
    longest: Annotated[bool, typer.Option("--longest", help="The longest context that trains, instead.")] = False,
    cap: Annotated[int, typer.Option("--cap", min=1, help="With --longest: do not try more tokens.")] = 262144,
    against: Against = None,
    peer_path: PeerPath = None,
    peer_python: PeerPython = None,
    out: Out = results.RESULTS,
    rounds: Rounds = 5,
    try_: Try = False,
    device: Device = "cuda",
    tiny: Tiny = False,
) -> None:
    """The whole training step: forward, backward, clipping, AdamW."""
    journal = Journal.open(out, record=not try_)
    sizes = read_sizes(tokens, (64,) if tiny else step_work.TOKENS)
    peer = peer_group(against, step_work.specforge_file(), peer_path, peer_python)
    with Pool(step_work.groups(peer), device) as pool:
        bench = Bench(pool, journal, rounds)
        if longest:
            start, grain = (64, 16) if tiny else (32768, 16384)
            step_work.measure_longest(
                bench, against=peer is not None, start=start, cap=cap, grain=grain, device=device, tiny=tiny
            )
        else:
            step_work.measure(bench, step_work.cases(sizes, against=peer is not None, device=device, tiny=tiny))


def main(arguments: list[str] | None = None) -> None:
    """Entry of `python -m tasks.trainer.bench`; exits 2 when the benchmark cannot run as asked."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # or the only command would have no name
    mount(app)
    try:
        app(arguments)
    except BenchError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_INPUT)
