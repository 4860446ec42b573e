"""The trainer's commands of `eyas bench`, beside the kernels' own."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

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
from storage.errors import StoreError
from tasks.trainer.bench import packed as packed_work
from tasks.trainer.bench import ranks as ranks_work
from tasks.trainer.bench import step as step_work
from tasks.trainer.bench import store as store_work
from tasks.trainer.files import write_json
from tasks.trainer.stop import EXIT_INTERRUPTED


def mount(app: typer.Typer) -> None:
    """Add the trainer's commands to a bench command."""
    app.command()(step)
    app.command()(plan)
    app.command()(store_step)
    app.command()(store_work.store)
    app.command("store-goals")(store_work.print_goals)
    app.command("store-plot")(store_work.store_plot)
    app.command()(codec_quality)
    app.command()(quality)
    app.command()(ranks)


def step(
    tokens: Tokens = None,
    longest: Annotated[bool, typer.Option("--longest", help="The longest context that trains, instead.")] = False,
    cap: Annotated[int, typer.Option("--cap", min=1, help="With --longest: do not try more tokens.")] = 262144,
    packed: Annotated[
        bool, typer.Option("--packed", help="Packs of chat-like documents against padded batches of them, instead.")
    ] = False,
    against: Against = None,
    peer_path: PeerPath = None,
    peer_python: PeerPython = None,
    out: Out = results.RESULTS,
    rounds: Rounds = 5,
    try_: Try = False,
    device: Device = "cuda",
    tiny: Tiny = False,
) -> None:
    """The whole training step: forward, backward, clipping, AdamW.

    Examples: eyas bench step; eyas bench step --longest; eyas bench step --packed --try
    """
    if packed and (longest or tokens or against):
        raise BenchError("--packed measures one set of documents, ours alone: leave out --longest, --tokens, --against")
    journal = Journal.open(out, record=not try_)
    if packed:
        with Pool(packed_work.groups(), device) as pool:
            step_work.measure(Bench(pool, journal, rounds), packed_work.cases(device=device, tiny=tiny))
        return
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


def plan(
    only: Annotated[
        str | None, typer.Option("--only", help="Cases by number, for example 1,3; all when not given.")
    ] = None,
    out: Out = results.RESULTS,
    try_: Try = False,
    device: Device = "cuda",
    tiny: Tiny = False,
) -> None:
    """GPU memory of real steps against what `eyas plan` predicts.

    Examples: eyas bench plan; eyas bench plan --only 1,3 --try
    """
    from tasks.trainer.bench import plan as work

    found = work.cases(device=device, tiny=tiny)
    if only is not None:
        numbers = read_sizes(only, ())
        if any(number > len(found) for number in numbers):
            raise BenchError(f"--only {only}: there are {len(found)} cases")
        found = [found[number - 1] for number in numbers]
    journal = Journal.open(out, record=not try_)
    with Pool(work.GROUPS, device) as pool:
        pairs = work.measure(Bench(pool, journal, 1), found)
    if device == "cuda":
        typer.echo(f"largest error of the predicted peak: {work.worst_error(pairs):.1%}")


def store_step(
    presets: Annotated[str, typer.Option("--presets", help="Encodings, separated by commas.")] = "near,lossless",
    url: Annotated[str, typer.Option("--url", help="Store to fill and to read; kept.")] = "bench/store",
    tokens: Tokens = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples in the store.")] = 6,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps.")] = 20,
    device: Device = "cuda",
    tiny: Tiny = False,
) -> None:
    """How long the training step waits for a store, and how many bytes go to the GPU.

    Examples: eyas bench store-step; eyas bench store-step --presets near,small --url s3://bucket/store
    """
    from tasks.trainer.bench import store_step as work

    table = Table("preset", "tokens", "step ms", "waiting ms", "waiting", "MB to the GPU", "of bf16", "MB stored")
    for length in read_sizes(tokens, (64,) if tiny else (16384,)):
        found = work.measure(
            url,
            presets.split(","),
            tokens=length,
            samples=samples,
            steps=steps,
            device=device,
            draft=step_work.TINY if tiny else step_work.DRAFT,
        )
        for row in found:
            typer.echo(json.dumps(dataclasses.asdict(row)))
            table.add_row(
                row.preset, f"{row.tokens:,}", f"{row.step_ms:.1f}", f"{row.wait_ms:.1f}",
                f"{row.wait_ms / row.step_ms:.1%}", f"{row.h2d_mb:,.1f}", f"{row.h2d_share:.3f}",
                f"{row.stored_mb:,.1f}",
            )  # fmt: skip
    Console(stderr=True).print(table)


def ranks(
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="The most ranks; also taken: 1, 2, 4, ... below.")] = 2,
    variants: Annotated[
        str, typer.Option("--variants", help="online, offline, context, separated by commas.")
    ] = "online,offline,context",
    target: Annotated[str, typer.Option("--target", help="Shape: qwen3-8b, qwen3-4b or qwen3-1.7b.")] = "qwen3-8b",
    pack_tokens: Annotated[int, typer.Option("--pack-tokens", min=8, help="Tokens of a pack.")] = 8192,
    packs: Annotated[int, typer.Option("--packs", min=1, help="Packs of a rank in a step.")] = 2,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps a turn.")] = 3,
    context_tokens: Annotated[
        int, typer.Option("--context-tokens", min=64, help="context: tokens of one GPU; n ranks take n times these.")
    ] = 32768,
    context_checkpointing: Annotated[
        str, typer.Option("--context-checkpointing", help="context: none, mlp or step.")
    ] = "none",
    out: Out = results.RESULTS,
    rounds: Rounds = 2,
    try_: Try = False,
    device: Device = "cuda",
    tiny: Tiny = False,
) -> None:
    """Training throughput of 1 to n ranks of this machine, online and offline; a context shared by ranks.

    Examples: eyas bench ranks; eyas bench ranks --try
    """
    chosen = [variant.strip() for variant in variants.split(",")]
    unknown = [variant for variant in chosen if variant not in ranks_work.VARIANTS]
    if unknown:
        raise BenchError(f"--variants {','.join(unknown)} is unknown: use {', '.join(ranks_work.VARIANTS)}")
    settings = ranks_work.settings_of(
        target=target, pack_tokens=pack_tokens, packs=packs, steps=steps, rounds=rounds, device=device, tiny=tiny,
        context_tokens=context_tokens, context_checkpointing=context_checkpointing,
    )  # fmt: skip
    journal = Journal.open(out, record=not try_)
    try:
        rows = ranks_work.measure(journal, settings, variants=chosen, nproc=nproc)
    except InterruptedError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    for line in ranks_work.describe(rows):
        journal.say(line)


def codec_quality(
    recipe: Annotated[str, typer.Argument(help="YAML recipe of the runs; its hidden_states are replaced.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of runs and results; the same again goes on.")],
    presets: Annotated[
        str, typer.Option("--presets", help="Encodings, separated by commas.")
    ] = "near,compact,small,tiny",
    seeds: Annotated[str, typer.Option("--seeds", help="A pair of runs for each, separated by commas.")] = "0,1,2",
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at once.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, for example train.steps=2000.")] = None,
) -> None:
    """What encodings cost a draft that is trained on them: paired runs, and the loss of tau with its interval.

    Examples: eyas bench codec-quality RECIPE.yaml --out quality --presets near,small --seeds 0,1,2
    """
    from tasks.trainer.bench import codec_quality as work
    from tasks.trainer.errors import InputError
    from tasks.trainer.recipe import read_config

    numbers = seeds.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise BenchError(f"--seeds {seeds} must be whole numbers separated by commas, for example 0,1,2")
    planned = work.trials([preset.strip() for preset in presets.split(",")], [int(number) for number in numbers])
    shown: list[object] = []

    def progress(done: int, total: int, note: str = "") -> None:
        if [done, note] != shown:
            shown[:] = [done, note]
            sys.stderr.write(f"{done} of {total} runs{f', running {note}' if note else ''}\n")

    try:
        values = read_config(recipe, set_ or []).model_dump(mode="json")
        rows = work.run_all(values, planned, out, jobs=jobs, progress=progress)
    except (InputError, StoreError) as error:
        raise BenchError(str(error)) from None
    except InterruptedError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    found = work.losses(rows)
    write_json(out / "losses.json", [dataclasses.asdict(row) for row in found])
    typer.echo(work.table(found))


def quality(
    recipe: Annotated[str, typer.Argument(help="YAML recipe of the runs; its hidden_states are online.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of runs and results; the same again goes on.")],
    against: Against = None,
    peer_path: PeerPath = None,
    peer_python: PeerPython = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of order and weights.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, for example train.steps=2000.")] = None,
) -> None:
    """A draft trained here and one by a peer: same data, shape, tokens; one evaluator.

    Examples: eyas bench quality RECIPE.yaml --out quality --against specforge --peer-path FOLDER
    """
    from tasks.trainer.bench import quality as work
    from tasks.trainer.errors import InputError
    from tasks.trainer.recipe import read_config

    peer = peer_group(against, str(work.SCRIPT), peer_path, peer_python)
    try:
        values = read_config(recipe, set_ or []).model_dump(mode="json")
        rows = work.measure(values, out, peer=peer, seed=seed)
    except InputError as error:
        raise BenchError(str(error)) from None
    typer.echo(work.table(rows))


def main(arguments: list[str] | None = None) -> None:
    """Entry of `python -m tasks.trainer.bench`; exits 2 when the benchmark cannot run as asked."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    mount(app)
    try:
        app(arguments)
    except BenchError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_INPUT)
