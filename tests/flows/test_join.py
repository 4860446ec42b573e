"""What a further machine of a run is told when there is nothing to join. (Taking part: tests/e2e.)"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from flows.join import join, main
from flows.train_draft import train_draft
from tasks.trainer.errors import InputError

pytestmark = pytest.mark.usefixtures("prefect_server")

Values = Callable[..., dict[str, Any]]


def run_of(of: Any, parameters: dict[str, Any]) -> UUID:
    async def create() -> UUID:
        async with get_client() as client:
            return (await client.create_flow_run(of, parameters=parameters)).id

    return asyncio.run(create())


@flow(name="another")
def another() -> None:
    """Not ours."""


def test_refusals_name_what_is_wrong(recipe_values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a pod waits for ever for a run it cannot take part in."""
    for name in ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"is of another; only train-draft"):
        join(run_of(another, {}))
    with pytest.raises(InputError, match=r"train\.nnodes=1"):
        join(run_of(train_draft, recipe_values()))
    two = run_of(train_draft, recipe_values(train={"nnodes": 2, "grad_accumulation": 2}))
    with pytest.raises(InputError, match=r"PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT"):
        join(two)
    monkeypatch.setenv("PET_NODE_RANK", "0")
    monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("PET_MASTER_PORT", "1")
    with pytest.raises(InputError, match=r"PET_NODE_RANK=0"):
        join(two)


def test_without_a_run_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when the command fails with a traceback."""
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    assert main() == 2
    assert capsys.readouterr().err == "error: PREFECT__FLOW_RUN_ID is empty: it names the run to join\n"
