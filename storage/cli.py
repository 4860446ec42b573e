"""`eyas store`: what a store holds, whether it still is what was written, and how to keep it in order.

What a command finds goes to standard output, with --json as one JSON object a line; progress bars and errors to
standard error. Exit 1: something is wrong with the store, or the command could not do what was asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from storage.convert import convert
from storage.errors import StoreError, one_line
from storage.gc import MIN_AGE_S, collect
from storage.index import read_index, stored_fingerprints
from storage.inventory import Inventory, take_inventory
from storage.location import locate
from storage.presets import PRESETS, Encoding, preset_name
from storage.verify import verify

app = typer.Typer(name="store", help="Look into a store of hidden states, and keep it in order.", no_args_is_help=True)

StoreUrl = Annotated[str, typer.Argument(metavar="URL", help="The store: a local path or any fsspec URL.")]
Fingerprint = Annotated[
    str | None, typer.Option("--fingerprint", help="One fingerprint of the store; all of them when not given.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line, for scripts.")]
Preset = Literal["lossless", "near", "compact", "small", "tiny"]


@app.command("ls")
def list_store(
    url: StoreUrl,
    fingerprint: Fingerprint = None,
    samples: Annotated[bool, typer.Option("--samples", help="A line for each sample instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what a store holds, one fingerprint (or sample) a line.

    Examples: eyas store ls runs/store; eyas store ls s3://bucket/store --samples --json
    """
    with _errors():
        failed = False
        for name in _fingerprints(url, fingerprint):
            try:
                if samples:
                    for entry in sorted(
                        read_index(locate(url).child(name)).values(), key=lambda entry: entry.sample_id
                    ):
                        size = sum(entry.chunk_bytes(array) for array in entry.chunks)
                        if as_json:
                            found = {name: getattr(entry, name) for name in ("sample_id", "num_tokens", "num_targets")}
                            typer.echo(json.dumps({**found, "bytes": size, "segment": entry.segment}))
                            continue
                        typer.echo(
                            f"{entry.sample_id}  {entry.num_tokens:,} tokens  {entry.num_targets:,} target rows  "
                            f"{size:,} bytes  {entry.segment}"
                        )
                    continue
                held = take_inventory(url, name)
            except (StoreError, OSError) as error:
                told = {"fingerprint": name, "error": one_line(error)}
                typer.echo(json.dumps(told) if as_json else f"{name}  {one_line(error)}")
                failed = True
                continue
            if as_json:
                typer.echo(json.dumps(held.document()))
                continue
            spec = held.spec
            typer.echo(
                f"{name}  {spec.target}  layers {'/'.join(map(str, spec.aux_layer_ids))}  D={spec.hidden_size}  "
                f"{preset_name(spec.encoding)}  {held.num_samples:,} samples  {held.num_tokens:,} tokens  "
                f"{held.total_bytes / 1e6:,.1f} MB, {held.ratio:.2f} x smaller than raw"
            )
        if failed:
            raise typer.Exit(1)


@app.command("info")
def info(
    url: StoreUrl,
    fingerprint: Fingerprint = None,
    as_json: AsJson = False,
) -> None:
    """Say what a store holds and takes, by array.

    Examples: eyas store info runs/store; eyas store info runs/store --json
    """
    with _errors():
        for name in _fingerprints(url, fingerprint):
            held = take_inventory(url, name)
            typer.echo(json.dumps(held.document()) if as_json else "\n".join(_description(held)))


@app.command("verify")
def verify_store(
    url: StoreUrl,
    fingerprint: Fingerprint = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Drop what is damaged, so that the next capture fills it in; nobody may write."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every committed sample; name each damaged one and exit 1 if there are any (left).

    Examples: eyas store verify runs/store; eyas store verify runs/store --repair
    """
    with _errors():
        fingerprints = _fingerprints(url, fingerprint)
        num_faults = num_samples = 0
        is_sound = True
        for name in fingerprints:
            with _progress(name[:16]) as progress:
                verified = verify(url, name, repair=repair, progress=progress)
            if as_json:
                typer.echo(json.dumps({"fingerprint": name, **dataclasses.asdict(verified)}))
            for fault in () if as_json else verified.faults:
                typer.echo(fault.message)
            for line in () if as_json else verified.dropped:
                typer.echo(f"dropped from the index: {line}")
            num_samples += verified.num_samples
            num_faults += len(verified.faults)
            is_sound = is_sound and (verified.is_repaired or not verified.faults)
        if not as_json:
            typer.echo(f"{num_samples:,} samples of {len(fingerprints)} fingerprints read, {num_faults} errors")
        if not is_sound:
            raise typer.Exit(1)


@app.command("gc")
def collect_garbage(
    url: StoreUrl,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="FINGERPRINT", help="Give up its samples, but those that a keep list names."),
    ] = None,
    min_age: Annotated[
        float, typer.Option("--min-age", min=0.0, help="Hours a file must be old: a writer may be about to commit it.")
    ] = MIN_AGE_S / 3600,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, say what would be.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete files that no committed sample needs: of killed writers, dropped samples, fingerprints given up.

    Examples: eyas store gc runs/store --dry-run; eyas store gc runs/store --drop FINGERPRINT
    """
    with _errors(), _progress("deleting") as progress:
        found = collect(url, drop=drop or (), min_age_s=3600 * min_age, dry_run=dry_run, progress=progress)
    would = "would be " if dry_run else ""
    for garbage in found:
        if as_json:
            typer.echo(json.dumps({**dataclasses.asdict(garbage), "dry_run": dry_run}))
            continue
        given_up = f"{len(garbage.dropped):,} samples {would}given up, {garbage.kept:,} kept; "
        typer.echo(
            f"{garbage.fingerprint}  {given_up if garbage.fingerprint in (drop or ()) else ''}"
            f"{len(garbage.files):,} files, {garbage.num_bytes / 1e6:,.1f} MB, {would}deleted"
            + (f"; {garbage.num_young:,} more are younger than {min_age:g} hours" if garbage.num_young else "")
        )


@app.command("convert")
def convert_store(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The store to read.")],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="The store to write; made when missing.")],
    preset: Annotated[Preset, typer.Option("--preset", help="How the new store encodes states.")],
    fingerprint: Annotated[
        str | None, typer.Option("--fingerprint", help="Which, when the source holds several.")
    ] = None,
    aux_step: Annotated[
        float | None, typer.Option("--aux-step", help="Step of the aux states instead; 0: lossless.")
    ] = None,
    last: Annotated[
        Literal["hidden", "topk"] | None, typer.Option("--last", help="Form of the soft targets instead.")
    ] = None,
    last_step: Annotated[float | None, typer.Option("--last-step", help="Step of the last state; 0: lossless.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Tokens kept of each soft target instead.")] = None,
    codec: Annotated[Literal["zstd", "blosc", "raw"] | None, typer.Option("--codec", help="Codec instead.")] = None,
    level: Annotated[int | None, typer.Option("--level", help="The codec's level instead.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option("--chunk-tokens", help="Rows of a chunk instead.")] = None,
    shard_tokens: Annotated[int | None, typer.Option("--shard-tokens", help="Rows of a shard instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Encode a store's samples anew, into another store. Goes on where it stopped.

    Examples: eyas store convert runs/store runs/small --preset small; --preset near --last topk --top-k 128
    """
    with _errors():
        encoding = _changed(
            PRESETS[preset], aux_step=aux_step, last=last, last_step=last_step, top_k=top_k, codec=codec, level=level
        )
        with _progress("converting") as progress:
            done = convert(
                source,
                destination,
                encoding=encoding,
                fingerprint=fingerprint,
                chunk_tokens=chunk_tokens,
                shard_tokens=shard_tokens,
                progress=progress,
            )
    if as_json:
        typer.echo(json.dumps({"destination": destination, **dataclasses.asdict(done)}))
        return
    typer.echo(
        f"{done.num_samples:,} samples of {done.spec.fingerprint} written to {destination} as "
        f"{preset_name(done.spec.encoding)}, {done.num_before:,} were there already"
    )


def _changed(preset: Encoding, **changes: Any) -> Encoding:
    """The preset with what was given by hand; what no longer goes with it follows."""
    given = {name: value for name, value in changes.items() if value is not None}
    fields = dataclasses.asdict(preset)
    if given.get("last", preset.last) != preset.last:
        fields |= {"last_step": PRESETS["near"].last_step, "top_k": None}
        if given["last"] == "topk":
            fields |= {"last_step": None, "top_k": PRESETS["small"].top_k}
    if given.get("codec") == "raw":
        fields["level"] = 0
    fields |= given
    for name in ("aux_step", "last_step"):
        fields[name] = fields[name] or None
    return Encoding(**fields)


def _description(held: Inventory) -> Iterator[str]:
    spec, encoding = held.spec, held.spec.encoding
    aux = "lossless" if encoding.aux_step is None else f"step {encoding.aux_step:g}"
    last = f"top {encoding.top_k}" if encoding.last == "topk" else (
        "lossless" if encoding.last_step is None else f"step {encoding.last_step:g}"
    )  # fmt: skip
    yield f"fingerprint  {spec.fingerprint}"
    layers = "/".join(map(str, spec.aux_layer_ids))
    yield f"target       {spec.target}, layers {layers}, D={spec.hidden_size}, V={spec.vocab_size}"
    yield f"preset       {preset_name(encoding)}: aux {aux}, target {last}, {encoding.codec}-{encoding.level}"
    yield f"samples      {held.num_samples:,} of {held.num_segments:,} writers"
    yield f"tokens       {held.num_tokens:,}, {held.num_targets:,} target rows, {held.num_exceptions:,} exceptions"
    yield f"bytes        {held.total_bytes:,}, {held.ratio:.2f} x smaller than raw ({held.raw_bytes:,})"
    ratios = held.state_ratios
    for name, size in held.array_bytes.items():
        ratio = f", {ratios[name]:.2f} x smaller than bfloat16" if name in ratios else ""
        yield f"  {name:<12} {size:,}{ratio}"
    yield f"  {'else':<12} {held.total_bytes - sum(held.array_bytes.values()):,}"


def _fingerprints(url: str, wanted: str | None) -> list[str]:
    root = locate(url)
    found = stored_fingerprints(root)
    if not found:
        raise StoreError(f"there is no store of hidden states at {root.url}")
    if wanted is None:
        return found
    if wanted not in found:
        raise StoreError(f"store {root.url} holds no fingerprint {wanted}; it holds {', '.join(found)}")
    return [wanted]


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """A user's mistakes and a file system's refusals are one line and exit 1."""
    try:
        yield
    except (StoreError, OSError) as error:
        typer.echo(f"error: {one_line(error)}", err=True)
        raise typer.Exit(1) from error


@contextlib.contextmanager
def _progress(description: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
