"""A Prefect server, a worker and the deployments on this machine: `eyas ui`, and `eyas ui --down` to stop them.

For one person and one machine: the server binds to 127.0.0.1, has no password, and keeps its history in PREFECT_HOME.
A server for several people is deploy/compose.yaml's, which demands one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.deploy import DEPLOYMENTS, HOME, POOL, deploy, environment
from tasks.trainer.errors import InputError

HOST = "127.0.0.1"
PORT = 4200
START_SECONDS = 120.0
# A worker that ends lets its run save a checkpoint, which takes up to 15 s, and Prefect gives it 30.
STOP_SECONDS = 40.0
# The automation that frees a dead worker's place waits for three of these.
HEARTBEAT_SECONDS = 30


def up(folder: Path, *, port: int = PORT, deployments: Path = DEPLOYMENTS) -> Iterator[str]:
    """Start what is not running yet; yields a line for each thing, the URL last.

    folder: of the processes' ids and logs. Raises InputError when the port is another program's, or a process ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    url = f"http://{HOST}:{port}"
    env = {
        **environment(),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # SQLite lets one write at a time; on a busy machine the default of 10 s is answered with "Service Unavailable".
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOME), os.environ.get("PYTHONPATH")])),
    }
    if not _running(folder / "server.json"):
        if _taken(port):
            raise InputError(f"port {port} is taken by another program; use --port, or stop that")
        _start(folder, "server", ["server", "start", "--host", HOST, "--port", str(port)], env)
    _wait_for(f"{url}/api/health", folder)
    yield f"server: {url} (log: {folder / 'server.log'})"
    os.environ["PREFECT_API_URL"] = env["PREFECT_API_URL"]
    with temporary_settings({PREFECT_API_URL: env["PREFECT_API_URL"]}):  # ours were read before there was a server
        yield from deploy(deployments=deployments)
    if not _running(folder / "worker.json"):
        _start(folder, "worker", ["worker", "start", "--pool", POOL, "--name", "local", "--limit", "1"], env)
    yield f"worker: pool {POOL}, one run at once (log: {folder / 'worker.log'})"
    yield f"open {url}/v2/deployments"


def down(folder: Path) -> Iterator[str]:
    """Stop worker and server, in that order; a run that is under way saves a checkpoint."""
    for name in ("worker", "server"):
        record = folder / f"{name}.json"
        process = _running(record)
        if process is None:
            yield f"{name}: not running"
        else:
            os.kill(process, signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS
            while _running(record) and time.monotonic() < deadline:
                time.sleep(0.2)
            if _running(record):
                os.kill(process, signal.SIGKILL)
                yield f"{name}: killed, it did not end in {STOP_SECONDS:.0f} s"
            else:
                yield f"{name}: stopped"
        record.unlink(missing_ok=True)


def _start(folder: Path, name: str, arguments: list[str], env: Mapping[str, str]) -> None:
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(env),
            start_new_session=True,
            # A shell's background jobs ignore SIGINT, and Prefect passes its first SIGTERM on as one.
            preexec_fn=_listen_to_interrupts,
        )
    record = {"pid": process.pid, "started": _started(process.pid)}
    (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")


def _listen_to_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _running(record: Path) -> int | None:
    """The process that a record names, if it still is that process: ids are given again."""
    if not record.is_file():
        return None
    values = json.loads(record.read_text(encoding="utf-8"))
    started = _started(values["pid"])
    return values["pid"] if started is not None and started == values["started"] else None


def _started(process: int) -> str | None:
    """When a process started, in ps's words; None when there is none, or it only waits to be collected."""
    done = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(process)], capture_output=True, text=True, check=False
    )
    state, _, started = done.stdout.strip().partition(" ")
    return started.strip() if started and not state.startswith("Z") else None


def _taken(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex((HOST, port)) == 0


def _wait_for(url: str, folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if _running(folder / "server.json") is None:
            raise InputError(f"the server ended; its last words are in {folder / 'server.log'}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    raise InputError(f"the server did not answer in {START_SECONDS:.0f} s; see {folder / 'server.log'}")
