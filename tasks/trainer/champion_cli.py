"""`eyas champion`: which draft is served, what it was before, and back.

What a command finds goes to standard output, with --json as one JSON object; mistakes are one line on standard error
and exit code 2. Reading needs no lease; a rollback while a night is under way is seen by that night, which then
promotes nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tasks.trainer.champion import Champion, Entry, History, open_home
from tasks.trainer.errors import InputError

app = typer.Typer(
    name="champion",
    help="The draft that nightly retraining promoted last, its history, and the way back.",
    no_args_is_help=True,
)

HomeArgument = Annotated[str, typer.Argument(metavar="HOME", help="nightly.home: a folder or an s3:// URL.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")]


@app.command()
def show(home: HomeArgument, as_json: Json = False) -> None:
    """Print the champion: its folder first, for scripts that start a server.

    Examples: eyas champion show runs/nightly; eyas champion show s3://models/nightly --json
    """
    champion = Champion(open_home(home))
    entry = _current(champion, champion.history())
    if as_json:
        typer.echo(json.dumps(_document(champion, entry)))
        return
    typer.echo(champion.folder(entry).url)
    typer.echo(f"champion {entry.number} of night {entry.night}, promoted {entry.promoted_at}")
    typer.echo(f"target   {entry.target}, fingerprint {entry.fingerprint}")
    typer.echo(f"digest   {entry.digest}")
    for reason in entry.reasons:
        typer.echo(f"         {reason}")


@app.command()
def history(home: HomeArgument, as_json: Json = False) -> None:
    """Print every change of the pointer, oldest first.

    Examples: eyas champion history runs/nightly; eyas champion history runs/nightly --json
    """
    champion = Champion(open_home(home))
    found = champion.history()
    if as_json:
        entries = [_document(champion, entry) for entry in found.entries]
        changes = [asdict(change) for change in found.changes]
        typer.echo(json.dumps({"champion": found.champion, "entries": entries, "changes": changes}))
        return
    if not found.changes:
        raise InputError(f"{champion.home.url} has no champion yet; a nightly run promotes the first")
    for change in found.changes:
        entry = found.entry(change.entry)
        what = {
            "promoted": f"champion {entry.number} promoted (night {entry.night}){_taus(entry.figures)}",
            "rolled_back": f"rolled back from champion {change.before} to {entry.number}",
            "measured": f"champion {entry.number} measured with target {change.note.get('fingerprint')}: tau "
            f"{change.note.get('tau', 0.0):.3f}",
        }[change.kind]
        typer.echo(f"{change.at}  {what}  {entry.digest}")


@app.command()
def rollback(
    home: HomeArgument,
    to: Annotated[
        int | None, typer.Option("--to", metavar="NUMBER", help="Champion to go back to; else the one it replaced.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make an earlier champion the champion again. Nothing is deleted: --to goes forward, too.

    Examples: eyas champion rollback runs/nightly; eyas champion rollback runs/nightly --to 3
    """
    champion = Champion(open_home(home))
    before, now = champion.roll_back(to)
    if as_json:
        typer.echo(json.dumps({"before": before.number, **_document(champion, now)}))
    else:
        typer.echo(f"champion {before.number} was, champion {now.number} is: {champion.folder(now).url}")


def _current(champion: Champion, found: History) -> Entry:
    if found.current is None:
        raise InputError(f"{champion.home.url} has no champion yet; a nightly run promotes the first")
    return found.current


def _document(champion: Champion, entry: Entry) -> dict[str, Any]:
    return {"url": champion.folder(entry).url, **asdict(entry)}


def _taus(figures: Any) -> str:
    return "".join(f", {name}: tau {found['tau']:.3f} against {found['other']:.3f}" for name, found in figures.items())
