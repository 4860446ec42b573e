"""Runs that are stopped: cancelled by a person, orphaned by a killed worker, cut off in the middle of a capture."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
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
    before = steps_of(run_dir)
    wait_for(lambda: steps_of(run_dir) > before + 20, 120, "20 steps")
    assert trainers(run_dir), server.state(run)
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


def engines_of(run_dir: Path) -> list[int]:
    """Process ids of the engines that started the stages of a run."""
    assert trainers(run_dir)
    listed = subprocess.run(
        ["ps", "-o", "ppid=", "-p", ",".join(map(str, trainers(run_dir)))], capture_output=True, text=True, check=True
    )
    return sorted({int(line) for line in listed.stdout.split()})


def worker_of(server: Server) -> int:
    """Process id of the worker that `eyas ui` started."""
    return int(json.loads((server.folder / "worker.json").read_text())["pid"])


def start_what_is_missing(server: Server) -> None:
    """`eyas ui` again."""
    port = server.url.rpartition(":")[2]
    options = ("--port", port, "--folder", str(server.folder), "--prefect-file", str(server.folder / "prefect.yaml"))
    eyas("ui", *options, cwd=server.folder, environment=server.environment)


def rerun_continues(server: Server, run_dir: Path, seed: int) -> None:
    """The same run again gets the pool's one place, and goes on from the checkpoint."""
    saved = checkpoint_of(run_dir)
    assert saved > 20
    again = server.start("online", train={**LONG, "seed": seed})
    server.wait(again, "RUNNING", seconds=60)
    wait_for(lambda: steps_of(run_dir) > saved, 120, "the rerun to go on")
    server.call(f"/flow_runs/{again}/set_state", {"state": {"type": "CANCELLING"}})
    server.wait(again, "CANCELLED", seconds=60)


def test_a_killed_worker_leaves_no_trainer(server: Server) -> None:
    """Red when the trainer outlives its worker by 60 s or saves nothing, the run stays Running, or the place in the
    pool stays taken."""
    run = server.start("online", train={**LONG, "seed": 2})
    run_dir = started(server, run)
    os.kill(worker_of(server), signal.SIGKILL)
    wait_for(lambda: not trainers(run_dir), 60, "the trainer gone")
    server.wait(run, "CRASHED", seconds=60)
    start_what_is_missing(server)
    rerun_continues(server, run_dir, 2)


def test_a_lost_machine_is_noticed_by_its_heartbeats(server: Server) -> None:
    """Red when a run whose worker and engine died without a word is not marked as crashed by the automation, or its
    trainer lives on."""
    run = server.start("online", train={**LONG, "seed": 3})
    run_dir = started(server, run)
    engines = engines_of(run_dir)
    assert engines
    time.sleep(5)  # the first heartbeat must have reached the server: the automation waits for the next
    for process in (worker_of(server), *engines):
        os.kill(process, signal.SIGKILL)
    wait_for(lambda: not trainers(run_dir), 60, "the trainer gone")
    assert server.state(run)["type"] == "RUNNING"
    server.wait(run, "CRASHED", seconds=180)
    assert "heartbeat" in server.state(run)["message"]
    start_what_is_missing(server)
    rerun_continues(server, run_dir, 3)
