"""A stage's progress in the UI, against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from tasks import progress_artifact
from tasks.progress_artifact import ProgressArtifact


def artifacts(key: str) -> list[Any]:
    async def read() -> list[Any]:
        async with get_client() as client:
            return await client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))

    return asyncio.run(read())


@pytest.mark.usefixtures("prefect_server")
def test_one_artifact_is_updated_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when every step is a request, a short stage leaves an artifact, or the last state is not shown."""
    requests: list[float] = []
    update = progress_artifact.update_progress_artifact
    monkeypatch.setattr(
        progress_artifact, "update_progress_artifact", lambda *a, **k: (requests.append(a[1]), update(*a, **k))
    )

    @flow
    def shows() -> None:
        short = ProgressArtifact("short")
        for done in range(50):
            short.show(done, 50)
        short.close()
        long = ProgressArtifact("long")
        monkeypatch.setattr(progress_artifact, "EVERY_SECONDS", 0.0)
        long.show(1, 10, "first")
        monkeypatch.setattr(progress_artifact, "EVERY_SECONDS", 1000.0)
        for done in range(2, 11):
            long.show(done, 10, f"at {done}")
        long.close()

    shows()
    assert artifacts("short-progress") == []
    [found] = artifacts("long-progress")
    assert float(found.data) == 100.0
    assert found.description == "long 10 of 10  at 10"
    assert requests == [100.0]
