"""The notices of deploy/automations.yaml, received by a real web hook."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.e2e.conftest import Server, eyas, wait_for


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A web hook on this machine: its URL, and what it has received."""
    received: list[dict[str, str]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/", received
        listening.shutdown()
        thread.join()


def test_a_failure_and_a_promotion_are_told(server: Server, hook: tuple[str, list[dict[str, str]]]) -> None:
    """Red when a failed run or a promoted draft is told to nobody, or the notice does not say which and why."""
    url, received = hook
    with temporary_settings({PREFECT_API_URL: server.environment["PREFECT_API_URL"]}):
        block = CustomWebhookNotificationBlock(
            name="eyas", url=url, json_data={"subject": "{{subject}}", "body": "{{body}}"}
        )
        block.save("eyas", overwrite=True, _sync=True)  # playwright leaves an event loop, which makes it a coroutine
    environment = {**server.environment, "EYAS_NOTIFY_BLOCK": "custom-webhook/eyas"}
    said = eyas("deploy", "--prefect-file", str(server.folder / "prefect.yaml"), cwd=server.folder,
                environment=environment)  # fmt: skip
    assert "automation eyas-failure-notice: made" in said
    run = server.start("online", train={"steps": 5, "warmup_steps": 100})
    server.wait(run, "FAILED")
    name = server.call(f"/flow_runs/{run}")["name"]
    told = wait_for(lambda: [each for each in received if name in each["subject"]], 60, "a notice of the failure")
    assert "train-draft" in told[0]["subject"]
    assert "warmup_steps=100 is more than steps=5" in told[0]["body"]
    assert run in told[0]["body"], "the notice has no link to the run"
    event = {
        "occurred": "2030-01-01T00:00:00Z", "event": "draft.promoted",
        "resource": {"prefect.resource.id": "eyas.champion"}, "payload": {"url": "s3://bucket/draft-7"},
        "id": "00000000-0000-4000-8000-000000000007",
    }  # fmt: skip
    server.call("/events", [event])
    wait_for(lambda: [each for each in received if "s3://bucket/draft-7" in each["body"]], 60, "a notice of promotion")
