"""An engine whose worker is killed: with real processes, without Prefect around them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from flows import worker_watch

# The worker starts an engine whose output it reads through a pipe, as Prefect's does, and waits.
WORKER = """
import subprocess, sys
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
engine = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
engine.wait()
"""
ENGINE = """
import os, pathlib, signal, sys, threading, time
from flows.worker_watch import _watch

told = pathlib.Path(sys.argv[1])

def stopped(signum, frame):
    print("saved", flush=True)      # into a pipe that nobody reads any more
    told.write_text("stopped in order")
    raise SystemExit(0)

signal.signal(signal.SIGTERM, stopped)
threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
told.write_text("running")
time.sleep(60)
told.write_text("outlived its worker")
"""


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 40
    while not (path.exists() and path.read_text() == text):
        assert time.monotonic() < deadline, path.read_text() if path.exists() else "nothing"
        time.sleep(0.05)


def test_an_engine_stops_when_its_worker_is_killed(tmp_path: Path) -> None:
    """Red when the engine goes on without its worker, or falls over the pipe that the worker leaves broken."""
    told = tmp_path / "told"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, textwrap.dedent(ENGINE), str(told)], cwd=os.getcwd())
    try:
        wait_for_text(told, "running")
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    wait_for_text(told, "stopped in order")


def test_a_run_that_no_worker_started_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when `eyas train` in the background would end with the shell that started it."""
    monkeypatch.setattr(worker_watch, "_watch", lambda parent: pytest.fail("watched"))
    worker_watch.end_with_worker()
    assert not worker_watch._watching.is_set()
