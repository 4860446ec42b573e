"""One temporary Prefect server for all flow tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.testing.utilities import prefect_test_harness


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A real server with a database of its own; starting it takes 6 to 11 s, so it is started once."""
    with prefect_test_harness(server_startup_timeout=120):
        yield
