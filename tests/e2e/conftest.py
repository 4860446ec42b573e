"""A real Prefect server, a real worker and, for the form, headless Chromium: what `eyas ui` starts, with a tiny target.

The deployments are those of deploy/prefect.yaml, with the recipe replaced by one that runs in seconds. Screenshots stay
in tests/e2e/output, for people to look at.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import write_conversations

HOME = Path(__file__).parents[2]
OUTPUT = Path(__file__).parent / "output"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@dataclass(frozen=True, slots=True)
class Server:
    """A running `eyas ui`."""

    url: str
    folder: Path
    """Of the process ids and logs; relative paths of runs lie in here, too."""
    environment: dict[str, str]
    auth: str | None = None
    """user:password, of a server that asks for one."""

    def call(self, path: str, body: Any = None, *, method: str | None = None) -> Any:
        """The server's answer. Raises urllib's HTTPError, whose body is the server's reason."""
        headers = {"content-type": "application/json"}
        if self.auth is not None:
            headers["authorization"] = f"Basic {base64.b64encode(self.auth.encode()).decode()}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api{path}", data=data, headers=headers, method=method)
        for attempt in range(5):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                # SQLite takes one writer at a time; Prefect's own client asks again, too.
                if error.code != 503 or attempt == 4:
                    raise
                time.sleep(1 + attempt)
        raise AssertionError

    def deployment(self, name: str) -> dict[str, Any]:
        """A deployment of train-draft."""
        flow = "nightly-retrain" if name == "nightly" else "train-draft"
        found: dict[str, Any] = self.call(f"/deployments/name/{flow}/{name}")
        return found

    def start(self, deployment: str, **changes: dict[str, Any]) -> str:
        """Start a run of a deployment, groups changed; returns its id."""
        found = self.deployment(deployment)
        parameters = {
            **found["parameters"],
            **{group: {**found["parameters"][group], **values} for group, values in changes.items()},
        }
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        run: dict[str, Any] = self.call(f"/deployments/{found['id']}/create_flow_run", body)
        return str(run["id"])

    def state(self, run: str) -> dict[str, Any]:
        """A run's state: type, name, message."""
        state: dict[str, Any] = self.call(f"/flow_runs/{run}")["state"]
        return state

    def wait(self, run: str, *types: str, seconds: float = 240) -> dict[str, Any]:
        """Wait until a run is in one of these states; fails when it takes longer, or ends otherwise."""
        ends = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
        state = self.state(run)
        deadline = time.monotonic() + seconds
        while state["type"] not in types:
            assert state["type"] not in ends, state
            assert time.monotonic() < deadline, f"still {state} after {seconds} s"
            time.sleep(0.5)
            state = self.state(run)
        return state

    def run_dir(self, run: str) -> Path:
        """Where a run lies: the one folder of its store of runs whose config has its seed."""
        seed = self.call(f"/flow_runs/{run}")["parameters"]["train"]["seed"]
        for config in self.folder.glob("runs/*/config.yaml"):
            if yaml.safe_load(config.read_text())["train"]["seed"] == seed:
                return config.parent
        raise AssertionError(f"no run directory of {run}")


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until the condition is true; returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)
    return value


def trainers(run_dir: Path) -> list[int]:
    """Process ids of the stages that work on a run, in the process table's own words."""
    listed = subprocess.run(["ps", "-ewwo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [
        int(line.split()[0])
        for line in listed.splitlines()
        if "tasks.trainer.stages" in line and str(run_dir) in line and "ps -ewwo" not in line
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tiny_prefect_file(folder: Path, target: Path) -> Path:
    """deploy/prefect.yaml with recipes of seconds in place of those of a GPU."""
    recipe = {
        "target": {"model": str(target), "dtype": "bfloat16"},
        "data": {
            "source": str(write_conversations(folder / "source.jsonl", 40)),
            "heldout_fraction": 0.25,
            "max_tokens": 96,
        },
        "draft": {"vocab_size": 200},
        "train": {
            "steps": 8, "ttt_steps": 3, "pack_tokens": 128, "learning_rate": 3e-3, "warmup_steps": 2,
            "checkpoint_every": 1000, "evaluate_every": 4, "device": "cpu", "dtype": "float32", "trackers": [],
        },
        "evaluate": {
            "num_prompts": 3, "max_new_tokens": 12, "draft_tokens": 3, "bootstrap_samples": 100, "dtype": "float32",
        },
    }  # fmt: skip
    deployments = yaml.safe_load((HOME / "deploy" / "prefect.yaml").read_text())
    for entry in deployments["deployments"]:
        mode = "offline" if entry["name"] in ("offline", "nightly") else "online"
        states = {"mode": mode, **({"store_url": "runs/store"} if mode == "offline" else {})}
        path = folder / f"{entry['name']}.yaml"
        path.write_text(yaml.safe_dump({**recipe, "hidden_states": states}))
        for step in entry["build"]:
            if "flows.deploy.recipe" in step:
                step["flows.deploy.recipe"].update(recipe=str(path), set=[], run_dir="runs/{identity}")
            elif "flows.deploy.nightly_recipe" in step:
                heldout = write_conversations(folder / "heldout.jsonl", 20, seed=7)
                step["flows.deploy.nightly_recipe"].update(recipe=str(path), set=[f"data.heldout_source={heldout}"])
    path = folder / "prefect.yaml"
    path.write_text(yaml.safe_dump(deployments))
    return path


def eyas(*arguments: str, cwd: Path, environment: dict[str, str]) -> str:
    """Run the `eyas` command; returns what it printed. Fails when it does."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Iterator[Server]:
    """`eyas ui` with the tiny deployments; stopped with `eyas ui --down`."""
    folder = tmp_path_factory.mktemp("ui")
    port = _free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PYTHONPATH": str(HOME),
        "OMP_NUM_THREADS": "1",
        "EYAS_WORKDIR": str(folder),
    }
    prefect_file = tiny_prefect_file(folder, target_folder)
    options = ("ui", "--port", str(port), "--folder", str(folder), "--prefect-file", str(prefect_file))
    try:
        said = eyas(*options, cwd=folder, environment=environment)
        url = f"http://127.0.0.1:{port}"
        assert f"open {url}" in said
        environment["PREFECT_API_URL"] = f"{url}/api"
        yield Server(url, folder, environment)
    finally:
        eyas("ui", "--down", "--folder", str(folder), cwd=folder, environment=environment)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium of the system."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the form's tests need `pip install playwright`")
    if CHROMIUM is None:
        pytest.skip("the form's tests need Chromium: `apt-get install chromium`")
    OUTPUT.mkdir(exist_ok=True)
    with playwright.sync_playwright() as started:
        # Chromium refuses to run as root in its sandbox, which containers are.
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()
