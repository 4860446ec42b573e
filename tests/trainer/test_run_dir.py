"""The run directory: continued by the same run only, held by one process only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.trainer.errors import InputError
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir

Values = Callable[..., dict[str, Any]]


def test_the_same_run_continues_and_another_is_refused(recipe_values: Values) -> None:
    """Red when a changed seed trains on in the first run's folder, or a changed cadence is refused."""
    run = RunDir.create(load_config(recipe_values()))
    again = RunDir.create(load_config(recipe_values(train={"checkpoint_every": 1})))
    assert again == run
    assert again.config().train.checkpoint_every == 1
    with pytest.raises(InputError, match=r"train\.seed was 0, now 1"):
        RunDir.create(load_config(recipe_values(train={"seed": 1})))
    assert run.config().train.seed == 0, "the refused run must leave the first one's config"


@pytest.mark.parametrize("where", ["file/run", "s3://bucket/run"])
def test_a_folder_that_cannot_be_written(where: str, recipe_values: Values, tmp_path: Path) -> None:
    """Red when an unwritable run_dir gives a traceback or a half-made run."""
    (tmp_path / "file").write_text("in the way")
    values = recipe_values()
    values["run_dir"] = where if "://" in where else str(tmp_path / where)
    with pytest.raises(InputError, match="run_dir="):
        RunDir.create(load_config(values))


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    """Red when any folder is taken for a run."""
    with pytest.raises(InputError, match="no run directory"):
        RunDir.open(str(tmp_path))


def test_one_process_at_a_time(recipe_values: Values) -> None:
    """Red when two processes can work on one run, or a killed one keeps it locked."""
    run = RunDir.create(load_config(recipe_values()))
    code = (
        "import sys, time; from pathlib import Path; from tasks.trainer.run_dir import RunDir\n"
        "with RunDir(Path(sys.argv[1])).lock(): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run.root)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="another process"), run.lock(patience=0.3):
            pass
        holder.kill()
        holder.wait()
        with run.lock(patience=5.0):
            pass


def test_receipts_come_and_go(recipe_values: Values) -> None:
    """Red when a stage that is being done again still counts as done."""
    run = RunDir.create(load_config(recipe_values()))
    assert run.receipt("train") is None
    run.write_receipt("train", {"steps": 3})
    assert run.receipt("train") == {"steps": 3}
    run.drop_receipt("train")
    assert run.receipt("train") is None
