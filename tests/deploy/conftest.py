"""Prefect's own steps ask a server for blocks and variables, so these tests have one."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _server(prefect_server: None) -> None:
    """The session's server."""
