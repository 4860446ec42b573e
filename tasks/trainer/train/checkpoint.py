"""Checkpoints: masters, moments and the place in the data, complete or not there at all.

A checkpoint folder is written under another name, synced and renamed; `state.json` carries the files' digests. The
newest whole one is used; a damaged one is named in a warning and the one before it taken.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.trainer.draft.eagle3 import DraftConfig
from tasks.trainer.errors import InputError
from tasks.trainer.files import digest, read_json, sync_file, sync_folder, write_json
from tasks.trainer.train.batches import Position

logger = logging.getLogger(__name__)

_FILES = ("draft.safetensors", "optimizer.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State after `step` optimizer steps.

    shape: the draft's. draft: fp32 masters, d2t and t2d by the draft's state-dict names. optimizer: moments by name.
    position: the next pack. identity: the run's (config and data), so that another run never continues a checkpoint.
    """

    step: int
    position: Position
    identity: str
    shape: DraftConfig
    draft: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write `folder/step-NNNNNN`, then delete all but the `keep` newest. Returns the new path."""
    home = folder / f"step-{checkpoint.step:06d}"
    scratch = folder / f".{home.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for name, tensors in zip(_FILES, (checkpoint.draft, checkpoint.optimizer), strict=True):
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, scratch / name)
        sync_file(scratch / name)
    state = {
        "step": checkpoint.step,
        "epoch": checkpoint.position.epoch,
        "pack": checkpoint.position.pack,
        "identity": checkpoint.identity,
        "shape": asdict(checkpoint.shape),
        "digests": {name: digest(scratch / name) for name in _FILES},
    }
    write_json(scratch / "state.json", state)
    if home.exists():
        # The same step again, after a resume from an older checkpoint: the new one is as good and is whole.
        shutil.rmtree(home)
    scratch.rename(home)
    sync_folder(folder)
    for old in _newest_first(folder)[keep:]:
        shutil.rmtree(old)
    return home


def load_latest(folder: Path, *, identity: str | None = None) -> Checkpoint | None:
    """The newest whole checkpoint, or None when there is none.

    identity: when given, a checkpoint of another run is an InputError. Damaged checkpoints are named in a warning and
    passed over; when all are damaged that is an InputError, not a fresh start.
    """
    candidates = _newest_first(folder)
    for path in candidates:
        fault = _fault(path)
        if fault:
            logger.warning("checkpoint %s is damaged (%s): using the one before it", path.name, fault)
            continue
        state = read_json(path / "state.json")
        if identity is not None and state["identity"] != identity:
            raise InputError(
                f"{path} belongs to another run (its data or config changed since); give another run_dir, or move the "
                "checkpoints away to start over"
            )
        return Checkpoint(
            step=state["step"],
            position=Position(state["epoch"], state["pack"]),
            identity=state["identity"],
            shape=DraftConfig(**{**state["shape"], "aux_layer_ids": tuple(state["shape"]["aux_layer_ids"])}),
            draft=load_file(path / _FILES[0]),
            optimizer=load_file(path / _FILES[1]),
        )
    if candidates:
        raise InputError(f"all {len(candidates)} checkpoints in {folder} are damaged; move them away to start over")
    return None


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _fault(path: Path) -> str | None:
    try:
        digests = read_json(path / "state.json")["digests"]
        for name in _FILES:
            if digest(path / name) != digests[name]:
                return f"{name} has another digest"
    except (OSError, json.JSONDecodeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None
