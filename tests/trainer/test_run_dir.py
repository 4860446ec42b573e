"""The run directory: continued by the same run only, held by one process only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from storage.location import Location, locate
from tasks.trainer.errors import InputError
from tasks.trainer.lease import LEASE, Holder, Lease, hold
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir

Values = Callable[..., dict[str, Any]]


def test_the_same_run_continues_and_another_is_refused(recipe_values: Values) -> None:
    """Red when a changed seed trains on in the first run's folder, or a changed cadence is refused."""
    run = RunDir.create(load_config(recipe_values()))
    changed = {"checkpoint_every": 1, "evaluate_every": 3, "evaluate_tokens": 64, "export": "last"}
    again = RunDir.create(load_config(recipe_values(train=changed)))
    assert again == run
    assert again.config().train.checkpoint_every == 1
    with pytest.raises(InputError, match=r"train\.seed was 0, now 1"):
        RunDir.create(load_config(recipe_values(train={"seed": 1})))
    assert run.config().train.seed == 0, "the refused run must leave the first one's config"


@pytest.mark.parametrize(
    ("where", "why"),
    [("file/run", "cannot be written"), ("s3://me:secret@bucket/run", "user info"), ("nfs://host/run", "not served")],
)
def test_a_folder_that_cannot_be_written(where: str, why: str, recipe_values: Values, tmp_path: Path) -> None:
    """Red when an unwritable run_dir gives a traceback or a half-made run, or a password in a URL is repeated."""
    (tmp_path / "file").write_text("in the way")
    values = recipe_values()
    values["run_dir"] = where if "://" in where else str(tmp_path / where)
    with pytest.raises(InputError, match=rf"run_dir.*{why}") as caught:
        RunDir.create(load_config(values))
    assert "secret" not in str(caught.value)


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    """Red when any folder is taken for a run."""
    with pytest.raises(InputError, match="no run directory"):
        RunDir.open(str(tmp_path))


def test_one_process_at_a_time(recipe_values: Values) -> None:
    """Red when two processes can work on one run, the refusal does not say who holds it, or a killed one keeps it."""
    run = RunDir.create(load_config(recipe_values()))
    code = (
        "import sys, time; from pathlib import Path; from tasks.trainer.run_dir import RunDir\n"
        "with RunDir(Path(sys.argv[1])).lock(): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run.root)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        why = rf"another process works on this run: process {holder.pid} on .*since"
        with pytest.raises(InputError, match=why), run.lock(patience=0.3):
            pass
        holder.kill()
        holder.wait()
        assert (run.root / LEASE).exists(), "a killed process leaves its lease file behind"
        with run.lock(patience=0.0):
            assert json.loads((run.root / LEASE).read_text())["pid"] == os.getpid()
        assert not (run.root / LEASE).exists()


@pytest.fixture(params=["shared folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """Where machines meet."""
    return locate(str(tmp_path) if request.param == "shared folder" else f"memory://leases/{tmp_path.name}")


def elsewhere(place: Location, **changes: Any) -> Holder:
    """A lease that a process of another machine left."""
    holder = replace(Holder.here(), host="node-7", machine="another boot", **changes)
    place.write_bytes(LEASE, json.dumps(asdict(holder)).encode())
    return holder


def test_a_holder_on_another_machine_is_waited_for_until_it_is_silent(place: Location, tmp_path: Path) -> None:
    """Red when a lease of another machine is taken while it is fresh, or never runs out."""
    elsewhere(place)
    started = time.time()
    with hold(tmp_path, place, patience=0.0, valid=1.0):
        assert time.time() - started >= 1.0 - 0.1  # the clock that dates heartbeats
    elsewhere(place, since=0.0, heartbeat=time.time() - 100.0)
    with hold(tmp_path, place, patience=0.0):
        pass


def test_a_living_holder_on_another_machine_is_named(place: Location, tmp_path: Path) -> None:
    """Red when a heartbeat that goes on does not refuse the second process, or the message does not say whose it is."""
    holder = elsewhere(place)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            place.write_bytes(LEASE, json.dumps(asdict(replace(holder, heartbeat=time.time()))).encode())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        why = rf"process {holder.pid} on node-7, since 20"
        with pytest.raises(InputError, match=why), hold(tmp_path, place, patience=0.2, valid=5.0):
            pass
    finally:
        ended.set()
        thread.join()


def check_for_a_while(lease: Lease) -> None:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        lease.check()
        time.sleep(0.02)


def test_a_lost_lease_stops_its_holder(place: Location, tmp_path: Path) -> None:
    """Red when a process that was suspended too long goes on writing beside the one that took its run."""
    with hold(tmp_path, place, valid=0.3) as lease:
        lease.check()
        taken = elsewhere(place)
        with pytest.raises(InputError, match=r"took this run meanwhile .*node-7"):
            check_for_a_while(lease)
    content = place.read_bytes(LEASE)
    assert content is not None
    assert json.loads(content)["token"] == taken.token, "the new holder's lease must stay"


def test_a_lease_is_renewed(place: Location, tmp_path: Path) -> None:
    """Red when a long run looks dead to others."""
    with hold(tmp_path, place, valid=0.3):
        first = place.read_bytes(LEASE)
        deadline = time.monotonic() + 20.0
        while place.read_bytes(LEASE) == first:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_receipts_come_and_go(recipe_values: Values) -> None:
    """Red when a stage that is being done again still counts as done."""
    run = RunDir.create(load_config(recipe_values()))
    assert run.receipt("train") is None
    run.write_receipt("train", {"steps": 3})
    assert run.receipt("train") == {"steps": 3}
    run.drop_receipt("train")
    assert run.receipt("train") is None
