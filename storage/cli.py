"""`ls` and `verify`: what a store holds, and whether it still is what was written.

`verify` reads and decompresses everything, at the speed of `StoreReader.read`: hours for terabytes, but there is no
cheaper way to know. Findings go to standard output, the progress bar to standard error.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from storage.errors import StoreError
from storage.index import STATES_FOLDER, read_spec, stored_fingerprints
from storage.location import Location, locate
from storage.reader import StoreReader

app = typer.Typer(name="store", help="Look into a store of hidden states.", no_args_is_help=True)

StoreUrl = Annotated[str, typer.Argument(metavar="URL", help="The store: a local path or file:// URL.")]


@app.command("ls")
def list_store(url: StoreUrl) -> None:
    """List what a store holds, one fingerprint a line."""
    failed = False
    for fingerprint in _fingerprints(url):
        try:
            reader = _open(url, fingerprint)
            statistics = reader.statistics()
        except (StoreError, OSError) as error:
            typer.echo(f"{fingerprint}  {error}")
            failed = True
            continue
        spec = reader.spec
        ratio = statistics.raw_bytes / statistics.stored_bytes
        typer.echo(
            f"{fingerprint}  {spec.target}  layers {'/'.join(map(str, spec.aux_layer_ids))}  D={spec.hidden_size}  "
            f"{spec.codec}  {statistics.num_samples:,} samples  {statistics.num_tokens:,} tokens  "
            f"{statistics.stored_bytes / 1e6:,.1f} MB, {ratio:.2f} x smaller than raw"
        )
    if failed:
        raise typer.Exit(1)


@app.command("verify")
def verify_store(url: StoreUrl) -> None:
    """Read every committed sample; name each damaged one and exit 1 if there are any."""
    num_bad = num_samples = 0
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    fingerprints = _fingerprints(url)
    with Progress(*columns, console=console, transient=True) as progress:
        for fingerprint in fingerprints:
            try:
                reader = _open(url, fingerprint)
            except StoreError as error:
                typer.echo(str(error))
                num_bad += 1
                continue
            for sample_id in progress.track(sorted(reader.sample_ids()), description=fingerprint[:16]):
                num_samples += 1
                try:
                    reader.read(sample_id)
                except StoreError as error:
                    typer.echo(str(error))
                    num_bad += 1
    typer.echo(f"{num_samples:,} samples of {len(fingerprints)} fingerprints read, {num_bad} errors")
    if num_bad:
        raise typer.Exit(1)


def _fingerprints(url: str) -> list[str]:
    try:
        root: Location = locate(url)
        found = stored_fingerprints(root)
    except (StoreError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if not found:
        typer.echo(f"error: there is no store of hidden states at {root.url}", err=True)
        raise typer.Exit(1)
    return found


def _open(url: str, fingerprint: str) -> StoreReader:
    spec = read_spec(locate(url).child(fingerprint).child(STATES_FOLDER))
    if spec is None:
        raise StoreError(f"fingerprint {fingerprint} vanished from {url} while it was read")
    return StoreReader(url, spec)
