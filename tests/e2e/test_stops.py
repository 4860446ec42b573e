"""Runs that are stopped: cancelled by a person, orphaned by a killed worker, cut off in the middle of a capture."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import Server, eyas, trainers, wait_for

# As many steps as no run of these tests reaches: it ends when it is stopped, and nothing before that saves it.
LONG = {"steps": 1_000_000, "evaluate_every": 0}


@pytest.fixture(autouse=True)
def _no_run_is_left(server: Server) -> Iterator[None]:
    """Cancels what a failed test leaves behind: the pool has one place."""
    yield
    under_way = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "SCHEDULED"]}}}}
    for run in server.call("/flow_runs/filter", under_way):
        if run["state_name"] != "Scheduled" or not run["auto_scheduled"]:
            server.call(f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})


def steps_of(run_dir: Path) -> int:
    """Optimizer steps in the metrics."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines() if (run_dir / "metrics.jsonl").exists() else []
    return max((json.loads(line)["step"] for line in lines if '"heldout"' not in line), default=0)


def checkpoint_of(run_dir: Path) -> int:
    """The newest checkpoint's step; 0 without one."""
    return max((int(path.name.split("-")[1]) for path in (run_dir / "checkpoints").glob("step-*")), default=0)


def started(server: Server, run: str) -> Path:
    """The folder of a run that is well into its training."""
    server.wait(run, "RUNNING")
    run_dir: Path = wait_for(lambda: run_folder(server, run), 90, "a run directory")
    wait_for(lambda: steps_of(run_dir) > 20, 120, "20 steps")
    return run_dir


def run_folder(server: Server, run: str) -> Path | None:
    """The folder of a run, once there is one."""
    try:
        return server.run_dir(run)
    except AssertionError:
        return None


def test_a_cancelled_run_saves_a_checkpoint_and_a_rerun_continues(server: Server) -> None:
    """Red when a cancelled run's trainer lives on, saves nothing, or the rerun starts from the first step."""
    run = server.start("online", train={**LONG, "seed": 1})
    run_dir = started(server, run)
    assert checkpoint_of(run_dir) == 0
    cancelled = time.monotonic()
    server.call(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    # The worker asks the server for cancelled runs now and then; the 15 s count from the trainer's SIGTERM, which the
    # run's state tells.
    wait_for(lambda: not trainers(run_dir), 60, "the trainer gone")
    assert server.wait(run, "CANCELLED", seconds=60)
    saved = checkpoint_of(run_dir)
    assert saved > 20, f"no checkpoint {time.monotonic() - cancelled:.0f} s after cancelling"
    again = server.start("online", train={**LONG, "seed": 1})
    wait_for(lambda: steps_of(run_dir) > saved, 120, "the rerun to go on")
    assert run_folder(server, again) == run_dir
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line and "heldout" not in line]
    assert steps == sorted(set(steps)), "steps twice"
    server.call(f"/flow_runs/{again}/set_state", {"state": {"type": "CANCELLING"}})
    server.wait(again, "CANCELLED", seconds=60)


@contextmanager
def second_worker(server: Server, pool: str, *, limit: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """One more worker, of a pool of its own, in a session of its own."""
    with (server.folder / f"worker-{pool}.log").open("ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process",
             "--limit", str(limit)],
            env={**server.environment, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"},
            cwd=server.folder, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield worker
    finally:
        if worker.poll() is None:
            worker.send_signal(signal.SIGINT)
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def test_a_killed_worker_leaves_no_trainer_and_its_run_is_crashed(server: Server) -> None:
    """Red when the trainer outlives its worker by 60 s, the automation does not mark the run as crashed, or the place
    in the pool stays taken."""
    local = json.loads((server.folder / "worker.json").read_text())["pid"]
    run = server.start("online", train={**LONG, "seed": 2})
    run_dir = started(server, run)
    os.kill(local, signal.SIGKILL)
    wait_for(lambda: not trainers(run_dir), 60, "the trainer gone")
    assert checkpoint_of(run_dir) > 20
    server.wait(run, "CRASHED", seconds=200)
    assert "heartbeat" in server.state(run)["message"]
    # `eyas ui` again starts what is missing; the place is free, for the next run starts.
    port = server.url.rpartition(":")[2]
    prefect_file = server.folder / "prefect.yaml"
    eyas("ui", "--port", port, "--folder", str(server.folder), "--prefect-file", str(prefect_file),
         cwd=server.folder, environment=server.environment)  # fmt: skip
    again = server.start("online", train={**LONG, "seed": 2})
    server.wait(again, "RUNNING", seconds=60)
    saved = checkpoint_of(run_dir)
    wait_for(lambda: steps_of(run_dir) > saved, 120, "the rerun to go on")
    server.call(f"/flow_runs/{again}/set_state", {"state": {"type": "CANCELLING"}})
    server.wait(again, "CANCELLED", seconds=60)
