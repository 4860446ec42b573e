"""Checkpoints on disk: what is kept, what is passed over, and what a kill in the middle leaves."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from tasks.trainer.draft.eagle3 import DraftConfig
from tasks.trainer.errors import InputError
from tasks.trainer.train import checkpoint
from tasks.trainer.train.batches import Position
from tasks.trainer.train.checkpoint import Checkpoint

SHAPE = DraftConfig(
    hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24, vocab_size=20,
    target_vocab_size=20, rms_norm_eps=1e-5, max_position_embeddings=64, aux_layer_ids=(1, 2, 3),
)  # fmt: skip


def save(folder: Path, step: int, *, best: int | None = None, keep: int = 2) -> Path:
    tensors = {"fc.weight": torch.full((4,), float(step))}
    state = Checkpoint(step, Position(1, step), "run", SHAPE, tensors, tensors, checkpoint.random_state("cpu"), "data")
    return checkpoint.save(folder, state, keep=keep, best=best)[0]


def steps(folder: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.newest_first(folder)]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    """Red when the best is deleted, an old best stays, or steps are sorted as text."""
    for step in (2, 4, 6):
        save(tmp_path, step, best=2)
    assert steps(tmp_path) == [6, 4, 2]
    save(tmp_path, 1_000_000, best=4)
    assert steps(tmp_path) == [1_000_000, 6, 4]
    save(tmp_path, 1_000_002)
    assert steps(tmp_path) == [1_000_002, 1_000_000]
    assert {path.name[0] for path in tmp_path.iterdir()} == {"s"}, "nothing half deleted stays"


def test_what_a_kill_left_is_cleared_and_never_read(tmp_path: Path) -> None:
    """Red when half a save or half a deletion is taken for a checkpoint, or stays for good."""
    save(tmp_path, 2)
    for left in (".step-000004", ".old-step-000001"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "draft.safetensors").write_bytes(b"half")
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert found.step == 2
    save(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000004"]


@pytest.mark.parametrize("file", ["draft.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_any_damage_is_named_and_the_one_before_used(
    file: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when a flipped bit, half a file or a missing one of any part is read, or a good checkpoint is not."""
    save(tmp_path, 2)
    path = save(tmp_path, 4) / file
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        # Step 4 becomes 5; elsewhere a weight or a moment's last bits.
        at = content.index(b'"step": ') + len('"step": ') if file == "state.json" else len(content) - 3
        content[at] ^= 1
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert found.step == 2
    assert "step-000004 is damaged" in caplog.text


def test_round_trip_with_what_it_took(tmp_path: Path) -> None:
    """Red when a field is lost, or the next process cannot tell how long a save takes."""
    torch.manual_seed(3)
    path = save(tmp_path, 2)
    drawn = torch.rand(3)
    found = checkpoint.load_latest(tmp_path, identity="run", data_hash="data")
    assert found is not None
    assert (found.position, found.shape, found.data_hash) == (Position(1, 2), SHAPE, "data")
    checkpoint.restore_random(found.random, "cpu")
    assert torch.equal(torch.rand(3), drawn)
    written = checkpoint.Written.of(path)
    assert written is not None
    assert written.num_bytes == sum(file.stat().st_size for file in path.glob("*.safetensors"))


def test_another_run_and_another_version_are_told(tmp_path: Path) -> None:
    """Red when a checkpoint of other data or another config is continued, the message does not say which it is, or
    another version's ends in a traceback."""
    path = save(tmp_path, 2)
    with pytest.raises(InputError, match="its config changed"):
        checkpoint.load_latest(tmp_path, identity="other", data_hash="data")
    with pytest.raises(InputError, match="its data changed"):
        checkpoint.load_latest(tmp_path, identity="other", data_hash="other")
    state = json.loads((path / "state.json").read_text())
    state["shape"]["num_wings"] = 2
    state["checksum"] = checkpoint.state_checksum(state)
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"another version of Eyas .*num_wings"):
        checkpoint.load_latest(tmp_path)
