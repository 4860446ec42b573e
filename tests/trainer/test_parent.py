"""What draft.init may name, and that its content is a part of the run's identity."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tasks.trainer.config import identity_fields
from tasks.trainer.errors import InputError
from tasks.trainer.parent import find_parent, parent_digest
from tasks.trainer.recipe import load_config


def write_serving(folder: Path, *, value: float = 1.0, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    save_file({"fc.weight": torch.full((2, 2), value)}, folder / "model.safetensors")
    return folder


def write_checkpoint(folder: Path, **state: Any) -> Path:
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"shape": {"hidden_size": 8}, **state}))
    save_file({"fc.weight": torch.ones(2, 2)}, folder / "draft.safetensors")
    return folder


def identity(init: Path | None) -> dict[str, Any]:
    draft = {} if init is None else {"init": str(init)}
    return identity_fields(load_config({"target": {"model": "x"}, "data": {"source": "y"}, "draft": draft}))


def test_identity_is_the_content(tmp_path: Path) -> None:
    """Red when a parent that was replaced under the same path continues a run, or a copy of it makes another run."""
    first = write_serving(tmp_path / "first")
    before = identity(first)
    assert before != identity(None)
    shutil.copytree(first, tmp_path / "copy")
    assert identity(tmp_path / "copy") == before
    assert identity(write_serving(tmp_path / "second", value=2.0)) != before
    assert identity(write_serving(tmp_path / "third", num_hidden_layers=2)) != before
    stamp = (first / "model.safetensors").stat()
    save_file({"fc.weight": torch.full((2, 2), 3.0)}, first / "model.safetensors")
    os.utime(first / "model.safetensors", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert identity(first) != before, "the digest is remembered for a file, not for a path"


def test_a_checkpoints_own_run_is_not_its_content(tmp_path: Path) -> None:
    """Red when equal weights of another step, or of a run elsewhere, are another parent."""
    one = write_checkpoint(tmp_path / "step-000001", step=1, identity="a")
    two = write_checkpoint(tmp_path / "step-000002", step=2, identity="b")
    assert find_parent(str(one)).is_checkpoint
    assert parent_digest(str(one)) == parent_digest(str(two))
    assert parent_digest(str(one)) != parent_digest(str(write_checkpoint(tmp_path / "other", shape={"hidden_size": 4})))


def test_what_is_no_draft_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Red when something else is read, a pickle above all, or the message names neither the folder nor the way out."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")
    pickled = write_serving(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    empty = write_serving(tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    broken = write_serving(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    for init, message in (
        ("s3://bucket/draft", "local folder"),
        (str(tmp_path / "absent"), "no such folder"),
        (str(run), r"checkpoints/step-N of a run.*draft/ of a run"),
        (str(pickled), r"pytorch_model\.bin.*pickled.*save_file"),
        (str(empty), r"no \*\.safetensors"),
        (str(broken), "not valid JSON"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            parent_digest(init)
        assert init in str(caught.value)
        assert "\n" not in str(caught.value)


def test_one_start_only() -> None:
    """Red when draft.start is ignored in silence beside draft.init."""
    with pytest.raises(InputError, match=r"start=target_layer.*init='x'.*start=random"):
        load_config(
            {"target": {"model": "x"}, "data": {"source": "y"}, "draft": {"init": "x", "start": "target_layer"}}
        )
