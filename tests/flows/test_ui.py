"""Which processes `eyas ui` takes for its own. (Starting and stopping them: tests/e2e.)"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows import ui
from tasks.trainer.errors import InputError


def record(path: Path, process: int, started: str | None) -> Path:
    path.write_text(json.dumps({"pid": process, "started": started}))
    return path


def test_a_process_that_got_the_same_number_is_not_ours(tmp_path: Path) -> None:
    """Red when `eyas ui --down` would end a stranger's process whose number once was our server's."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = ui._started(process.pid)
        assert started
        ours = record(tmp_path / "ours.json", process.pid, started)
        assert ui._running(ours) == process.pid
        assert ui._running(record(tmp_path / "stranger.json", process.pid, "Thu Jan  1 00:00:00 1970")) is None
        assert ui._running(tmp_path / "missing.json") is None
    finally:
        process.kill()
        process.wait()
    assert ui._running(ours) is None


def test_a_port_of_another_program_is_named(tmp_path: Path) -> None:
    """Red when a taken port ends in two minutes of waiting, or the UI is opened on a stranger's server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} is taken"):
            list(ui.up(tmp_path, port=port))


def test_down_without_anything_says_so(tmp_path: Path) -> None:
    """Red when stopping twice fails."""
    assert list(ui.down(tmp_path)) == ["worker: not running", "server: not running"]
