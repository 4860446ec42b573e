"""`eyas data`: look at conversations before a run trains on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tasks.trainer.errors import InputError
from tasks.trainer.recipe import apply_override, load_config, read_values

app = typer.Typer(no_args_is_help=True)


@app.callback()
def data() -> None:
    """Look at conversations before a run trains on them."""


@app.command()
def inspect(
    files: Annotated[list[str] | None, typer.Argument(help="Files, globs or folders; the recipe's without.")] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Take target and data.* from this recipe.")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Model whose tokenizer and template to use.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, such as data.max_tokens=8192.")] = None,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Conversations shown.")] = 3,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Conversations read; all without.")] = None,
    page: Annotated[str | None, typer.Option("--html", help="Write a page with plots, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The figures alone, for scripts; no text.")] = False,
) -> None:
    """Show what is supervised and what is cut, lengths, tokens by role, vocabulary coverage, duplicates, bad records.

    Terminal and page show text of the conversations. Bad records are counted, unless data.on_error=stop is set.
    Examples: eyas data inspect chats.json.gz --target Qwen/Qwen3-8B --html OUT.html; eyas data inspect --recipe R.yaml
    """
    from tasks.trainer.data.inspect import inspect_data
    from tasks.trainer.data.inspect_views import print_inspection, render_html

    config = load_config(_values(files or [], recipe, target, set_ or []), where=recipe or "eyas data inspect")
    console = Console(stderr=True)
    with console.status("reading"):
        found = inspect_data(config, num_shown=samples, limit=limit)
    if page is not None:
        try:
            Path(page).write_text(render_html(found), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--html {page}: {error.strerror}") from None
    if as_json:
        typer.echo(json.dumps(found.document()))
    else:
        print_inspection(found, Console())
        if page is not None:
            typer.echo(f"page: {page}")


def _values(files: list[str], recipe: str | None, target: str | None, overrides: list[str]) -> dict[str, Any]:
    """The config to look with: a recipe's, or the defaults, with what the command line says."""
    values: dict[str, Any] = read_values(recipe) if recipe else {}
    if not recipe and (not files or not target):
        raise InputError("eyas data inspect needs --recipe RECIPE.yaml, or files and --target MODEL")
    data = dict(values.get("data") or {})
    if not recipe:
        data |= {"on_error": "skip", "on_truncated": "keep"}
    if files:
        data |= {"source": files[0], "more_sources": files[1:], "weights": []}
    values = {**values, "data": data}
    if target:
        values["target"] = {**(values.get("target") or {}), "model": target}
    for override in overrides:
        apply_override(values, override)
    return values
