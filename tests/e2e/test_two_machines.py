"""One run over two machines: the flow on the first, `python -m flows.join` on the second, both here, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.e2e.conftest import Server, wait_for
from tests.storage.s3_server import free_ports


def test_a_second_machine_joins_a_run(server: Server) -> None:
    """Red when the second machine does not find the run, its stage or the rendezvous, or does not end with the run."""
    (port,) = free_ports(1)
    rendezvous = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    found = server.deployment("online")
    parameters = found["parameters"]
    train = {**parameters["train"], "nnodes": 2, "nproc": 1, "grad_accumulation": 2, "seed": 21, "evaluate_every": 0}
    body = {
        "parameters": {**parameters, "train": train},
        "job_variables": {**found["job_variables"], "env": {**rendezvous, "PET_NODE_RANK": "0"}},
        "state": {"type": "SCHEDULED"},
    }
    run = server.call(f"/deployments/{found['id']}/create_flow_run", body)["id"]
    with (server.folder / "join.log").open("ab") as log:
        second = subprocess.Popen(
            [sys.executable, "-m", "flows.join"], cwd=server.folder, stdout=log, stderr=log, start_new_session=True,
            env={**server.environment, **rendezvous, "PET_NODE_RANK": "1", "PREFECT__FLOW_RUN_ID": run},
        )  # fmt: skip
    try:
        server.wait(run, "COMPLETED", seconds=240)
        assert wait_for(lambda: second.poll() is not None, 60, "the second machine to end") is True
        assert second.returncode == 0, (server.folder / "join.log").read_text()[-2000:]
    finally:
        second.kill()
        second.wait()
    lines = (server.run_dir(run) / "metrics.jsonl").read_text().splitlines()
    assert len([line for line in lines if "loss" in json.loads(line)]) == 8
