"""`python -m flows.join`: one more machine of a run whose train.nnodes is more than one.

The flow runs on machine 0, and only there. This process, on each of the others, asks the Prefect server for the run's
parameters, and takes part in the stages that run over ranks whenever machine 0 listens. It knows no more of the run:
when the run has ended, so does this. Environment: PREFECT__FLOW_RUN_ID, PREFECT_API_URL, and torchrun's PET_NODE_RANK,
PET_MASTER_ADDR and PET_MASTER_PORT.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from types import FrameType
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun

from tasks.trainer.config import RunConfig
from tasks.trainer.errors import InputError
from tasks.trainer.ranks import RANKED, Machines, find_machines
from tasks.trainer.recipe import config_from_form
from tasks.trainer.stages import stages_of

_POLL_SECONDS = 1.0
_FLOW = "train-draft"


def join(run_id: UUID) -> int:
    """Take part in a run until it has ended. Returns 0, or 75 when this process was asked to stop.

    Raises InputError when the run is not of train-draft, is of one machine, or the rendezvous is not known.
    """
    config, run = _config(run_id)
    machines = find_machines(config.train.nnodes, os.environ)
    if machines is None:
        raise InputError(f"train.nnodes=1: run {run.name} is of one machine; there is nothing to join")
    if machines.node_rank == 0:
        raise InputError("PET_NODE_RANK=0 is the machine that runs the flow; others have 1 and up")
    stages = [stage for stage in stages_of(config) if stage in RANKED]
    while stages and not _ended(run_id):
        if not _listens(machines):
            time.sleep(_POLL_SECONDS)
            continue
        code = _take_part(stages[0], config.run_dir)
        if code == 0:
            del stages[0]
        elif code == 75:
            return code
        # Otherwise machine 0 decides whether the stage is tried again.
    while not _ended(run_id):  # Kubernetes counts a run's pods as one job; they end together
        time.sleep(_POLL_SECONDS)
    return 0


def _config(run_id: UUID) -> tuple[RunConfig, FlowRun]:
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(run_id)
        flow = client.read_flow(run.flow_id)
    if flow.name != _FLOW:
        raise InputError(f"run {run.name} is of {flow.name}; only {_FLOW} runs over several machines")
    return config_from_form(run.parameters), run


def _ended(run_id: UUID) -> bool:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run_id).state
    return state is not None and state.is_final()


def _listens(machines: Machines) -> bool:
    host, _, port = machines.address.rpartition(":")
    with closing(socket.socket()) as probe:
        probe.settimeout(5.0)
        try:
            return probe.connect_ex((host, int(port))) == 0
        except OSError:  # the name is not known yet: machine 0 is being started
            return False


def _take_part(stage: str, run_dir: str) -> int:
    """Run a stage as this machine's part; a SIGTERM goes on to it."""
    process = subprocess.Popen([sys.executable, "-m", "tasks.trainer.stages", stage, run_dir], start_new_session=True)

    def pass_on(signum: int, frame: FrameType | None) -> None:
        process.send_signal(signum)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> int:
    """Entry of the command."""
    named = os.environ.get("PREFECT__FLOW_RUN_ID")
    if not named:
        sys.stderr.write("error: PREFECT__FLOW_RUN_ID is empty: it names the run to join\n")
        return 2
    try:
        return join(UUID(named))
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
