"""Automations on a real server: applied again they are the same ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client

from flows import deploy
from flows.deploy import AUTOMATIONS, NOTIFY_BLOCK, automations_of
from tasks.trainer.errors import InputError


def apply(automations: list[dict[str, Any]]) -> dict[str, str]:
    """What was done, by name."""
    lines = asyncio.run(deploy._apply_automations(automations))
    return {line.split()[1].rstrip(":"): line.partition(": ")[2] for line in lines}


def on_server() -> list[str]:
    async def read() -> list[str]:
        async with get_client() as client:
            return sorted(automation.name for automation in await client.read_automations())

    return asyncio.run(read())


def test_applying_again_changes_nothing_and_a_change_changes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a second `eyas deploy` doubles an automation, or the file's change does not reach the server."""
    monkeypatch.delenv(NOTIFY_BLOCK, raising=False)
    automations = automations_of(AUTOMATIONS)
    first = apply(automations)
    assert first["eyas-zombie-runs"] == "made"
    assert first["eyas-failure-notice"].startswith("left out")
    assert apply(automations)["eyas-zombie-runs"] == "as it is"
    automations[0]["trigger"]["within"] = 300
    assert apply(automations)["eyas-zombie-runs"] == "changed"
    assert on_server().count("eyas-zombie-runs") == 1
    block = CustomWebhookNotificationBlock(name="eyas", url="http://127.0.0.1:9/")
    block.save("eyas", overwrite=True)
    monkeypatch.setenv(NOTIFY_BLOCK, "custom-webhook/eyas")
    done = apply(automations)
    assert done["eyas-failure-notice"] == done["eyas-promoted-draft"] == "made"
    assert set(apply(automations).values()) == {"as it is"}
    assert len(on_server()) == len(automations)


def test_a_block_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a misspelt notification block leaves runs unnoticed."""
    monkeypatch.setenv(NOTIFY_BLOCK, "slack-webhook/nobody")
    with pytest.raises(InputError, match=r"slack-webhook/nobody.*no such block"):
        apply(automations_of(AUTOMATIONS))
