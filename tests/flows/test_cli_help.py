"""What every command owes its users: help with examples, and JSON where it has something to tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from flows.cli import _mount_bench, app

_mount_bench()
# Their output is a file, a schema or a server.
_NO_JSON = {"config", "demo", "ui", "deploy", "join", "bench"}


def leaves(command: Any, path: str = "eyas") -> Iterator[tuple[str, Any]]:
    for name, child in getattr(command, "commands", {}).items():
        if hasattr(child, "commands"):
            yield from leaves(child, f"{path} {name}")
        else:
            yield f"{path} {name}", child


COMMANDS = dict(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_help_has_examples_that_exist(path: str) -> None:
    """Red when a command says nothing of itself, or its examples are of another one."""
    help_text = " ".join(str(COMMANDS[path].help).split())
    found = re.search(r"Examples?: (.*)", help_text)
    assert found, f"{path} has no examples"
    assert path in found[1], f"the examples of {path} are of another command"


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_what_a_command_finds_can_be_had_as_json(path: str) -> None:
    """Red when a script has to read a table."""
    if path.split()[1] in _NO_JSON:
        return
    options = {option for parameter in COMMANDS[path].params for option in parameter.opts}
    assert "--json" in options, path
