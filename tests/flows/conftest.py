"""One temporary Prefect server for all flow tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Prefect makes the last folder of PREFECT_HOME at its import, not that folder's parents. `make test` names one in
# runs/, which a fresh clone lacks.
if "PREFECT_HOME" in os.environ:
    Path(os.environ["PREFECT_HOME"]).expanduser().mkdir(parents=True, exist_ok=True)

from prefect.testing.utilities import prefect_test_harness


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A real server with a database of its own; starting it takes 6 to 11 s, so it is started once."""
    with prefect_test_harness(server_startup_timeout=120):
        yield
