"""Two workers fill one store, and one of them is lost on the way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.index import read_entries, stored_fingerprints
from storage.location import locate
from storage.verify import verify
from tests.conftest import write_conversations
from tests.e2e.conftest import Server, trainers, wait_for

# So many that a capture takes long enough to be interrupted, and two can share it.
NUM_SAMPLES = 4000


@pytest.fixture
def second_worker(server: Server) -> Iterator[subprocess.Popen[bytes]]:
    """One more worker of the pool, which has two places meanwhile."""
    server.call("/work_pools/gpu", {"concurrency_limit": 2}, method="PATCH")
    with (server.folder / "worker-2.log").open("ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", "gpu", "--name", "second", "--limit", "1"],
            env={**server.environment, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"},
            cwd=server.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    yield worker
    if worker.poll() is None:
        worker.kill()
    worker.wait()
    server.call("/work_pools/gpu", {"concurrency_limit": 1}, method="PATCH")


def segments(store: Path) -> dict[str, int]:
    """Committed samples by writer; empty while there is no store yet."""
    found: dict[str, int] = {}
    with contextlib.suppress(StoreError, OSError):  # a writer is just making it
        root = locate(str(store))
        for fingerprint in stored_fingerprints(root):
            for entry in read_entries(root.child(fingerprint)):
                found[entry.segment] = found.get(entry.segment, 0) + 1
    return found


def worker_log(server: Server) -> str:
    """What the second worker has said: it names the runs that it took."""
    return (server.folder / "worker-2.log").read_text()


def test_two_workers_one_store_and_one_is_lost(server: Server, second_worker: subprocess.Popen[bytes]) -> None:
    """Red when the survivor does not complete the store, the store does not verify, or a sample is in it twice."""
    source = write_conversations(server.folder / "many.jsonl", NUM_SAMPLES, seed=5)
    store = server.folder / "runs" / "shared"
    changes = {
        "data": {"source": str(source), "heldout_fraction": 0.005},
        "hidden_states": {"store_url": str(store), "calibration_tokens": 512},
    }
    runs = [
        server.start("offline", **changes, train={"steps": 4, "warmup_steps": 1, "evaluate_every": 0, "seed": seed})
        for seed in (11, 12)
    ]
    wait_for(lambda: len(segments(store)) == 2, 180, "two writers in one store")
    held = sum(segments(store).values())
    assert held < NUM_SAMPLES * 0.9, "nothing left to lose"
    # The machine of the second worker is lost: the worker, its engine, its capture.
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(second_worker.pid)], capture_output=True, text=True,
                              check=False).stdout.split()  # fmt: skip
    (lost,) = [run for run in runs if run in worker_log(server)]
    engines = [int(child) for child in children]
    stages = trainers(server.run_dir(lost))
    assert engines
    assert stages
    for process in (second_worker.pid, *engines, *stages):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    (left,) = [run for run in runs if run != lost]
    server.wait(left, "COMPLETED", seconds=400)
    root = locate(str(store))
    (fingerprint,) = stored_fingerprints(root)
    entries = read_entries(root.child(fingerprint))
    ids = [entry.sample_id for entry in entries]
    assert len(ids) == len(set(ids)), "a sample twice"
    assert not verify(str(store), fingerprint).faults
    # A run that may capture nothing trains: nothing is missing.
    again = server.start(
        "offline", data=changes["data"],
        hidden_states={**changes["hidden_states"], "on_missing": "refuse"},
        train={"steps": 4, "warmup_steps": 1, "evaluate_every": 0, "seed": 13},
    )  # fmt: skip
    server.wait(again, "COMPLETED", seconds=240)
    assert len(read_entries(root.child(fingerprint))) == len(ids)
