"""Checkpoints: masters, moments, random state and the place in the data, complete or not there at all.

A checkpoint folder is written under another name, synced and renamed; `state.json` carries the files' digests. The
newest whole one is used; a damaged one is named in a warning and the one before it taken. Kept are the newest few
and the best by the held-out tau that metrics.jsonl tells. The price: 12 bytes a parameter each.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.trainer.draft.eagle3 import DraftConfig
from tasks.trainer.errors import InputError
from tasks.trainer.files import digest, read_json, sync_file, sync_folder, write_json
from tasks.trainer.run_dir import RunDir
from tasks.trainer.train.batches import Position
from tasks.trainer.train.curves import best_steps, read_heldout

logger = logging.getLogger(__name__)

_DRAFT, _OPTIMIZER, _RANDOM = "draft.safetensors", "optimizer.safetensors", "random.safetensors"
_FILES = (_DRAFT, _OPTIMIZER, _RANDOM)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State after `step` optimizer steps, which are metrics.jsonl's first `step` lines of steps, too.

    shape: the draft's. draft: fp32 masters, d2t and t2d by the draft's state-dict names. optimizer: moments by name.
    random: torch's generators by device. position: the next pack. identity: the run's (config and data), so that
    another run never continues a checkpoint; data_hash: of the data alone, to say which of the two changed.
    """

    step: int
    position: Position
    identity: str
    shape: DraftConfig
    draft: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: dict[str, Tensor] = field(default_factory=dict)
    data_hash: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """What writing a checkpoint took, to tell whether there is time for another."""

    num_bytes: int
    seconds: float

    @classmethod
    def of(cls, path: Path) -> Written | None:
        """As a checkpoint on disk tells it."""
        written = read_json(path / "state.json").get("written")
        return cls(**written) if written else None


def save(folder: Path, checkpoint: Checkpoint, *, keep: int, best: int | None = None) -> tuple[Path, Written]:
    """Write `folder/step-NNNNNN`, then delete all but the `keep` newest and the one of step `best`."""
    started = time.monotonic()
    home = folder / f"step-{checkpoint.step:06d}"
    scratch = folder / f".{home.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    digests, num_bytes = {}, 0
    for name, tensors in zip(_FILES, (checkpoint.draft, checkpoint.optimizer, checkpoint.random), strict=True):
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, scratch / name)
        sync_file(scratch / name)
        digests[name] = digest(scratch / name)
        num_bytes += (scratch / name).stat().st_size
    written = Written(num_bytes, time.monotonic() - started)
    state = {
        "step": checkpoint.step,
        "epoch": checkpoint.position.epoch,
        "pack": checkpoint.position.pack,
        "identity": checkpoint.identity,
        "data_hash": checkpoint.data_hash,
        "shape": asdict(checkpoint.shape),
        "digests": digests,
        "written": asdict(written),
    }
    write_json(scratch / "state.json", {**state, "checksum": state_checksum(state)})
    if home.exists():
        # The same step again, after a resume from an older checkpoint: the new one is as good and is whole.
        home.rename(folder / f".old-{home.name}")
    scratch.rename(home)
    sync_folder(folder)
    for old in newest_first(folder)[keep:]:
        if step_of(old) != best:
            # Renamed first: a kill in the middle must not leave half a checkpoint under a good name.
            shutil.rmtree(old.rename(folder / f".old-{old.name}"))
    for left in folder.glob(".old-*"):
        shutil.rmtree(left)
    return home, written


def load_latest(folder: Path, *, identity: str | None = None, data_hash: str = "") -> Checkpoint | None:
    """The newest whole checkpoint, or None when there is none.

    identity: when given, a checkpoint of another run is an InputError; data_hash tells whether it is for its data.
    Damaged checkpoints are named in a warning and passed over; when all are damaged that is an InputError, not a fresh
    start.
    """
    return _first_whole(folder, newest_first(folder), identity=identity, data_hash=data_hash)


def load_chosen(run: RunDir, choice: Literal["best", "last"]) -> Checkpoint | None:
    """The checkpoint that is worth exporting: of the highest held-out tau, or the newest where none was measured."""
    if choice == "best":
        for step in best_steps(read_heldout(run.metrics)):
            path = run.checkpoints / f"step-{step:06d}"
            if path.exists() and (found := _first_whole(run.checkpoints, [path], stop=False)):
                return found
    return load_latest(run.checkpoints)


def state_checksum(state: dict[str, Any]) -> str:
    """Of what state.json holds beside its checksum: a step or place with a flipped bit must not be continued from."""
    text = json.dumps({key: state[key] for key in state.keys() - {"checksum"}}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a folder."""
    return sorted(folder.glob("step-*"), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint's name tells."""
    return int(path.name.removeprefix("step-"))


def random_state(device: str) -> dict[str, Tensor]:
    """torch's generators. Nothing draws from them while training today; a layer that will must resume exactly, too."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if device == "cuda" else {})


def restore_random(states: dict[str, Tensor], device: str) -> None:
    """Continue with saved generators; a run that moved to another kind of device starts that one's afresh."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and device == "cuda":
        torch.cuda.set_rng_state(states["cuda"])


def _first_whole(
    folder: Path, candidates: Sequence[Path], *, identity: str | None = None, data_hash: str = "", stop: bool = True
) -> Checkpoint | None:
    for path in candidates:
        fault = _fault(path)
        if fault:
            logger.warning("checkpoint %s is damaged (%s): using the one before it", path.name, fault)
            continue
        state = read_json(path / "state.json")
        if identity is not None and state["identity"] != identity:
            what = "config" if state.get("data_hash") == data_hash else "data"
            raise InputError(
                f"{path} belongs to another run (its {what} changed since); give another run_dir, or move the "
                "checkpoints away to start over"
            )
        return _read(path, state)
    if candidates and stop:
        raise InputError(f"all {len(candidates)} checkpoints in {folder} are damaged; move them away to start over")
    return None


def _read(path: Path, state: dict[str, Any]) -> Checkpoint:
    try:
        shape = DraftConfig(**{**state["shape"], "aux_layer_ids": tuple(state["shape"]["aux_layer_ids"])})
    except TypeError as error:
        raise InputError(
            f"{path} was written by another version of Eyas ({error}): go on with that, or move the checkpoints away"
        ) from None
    return Checkpoint(
        step=state["step"],
        position=Position(state["epoch"], state["pack"]),
        identity=state["identity"],
        data_hash=state["data_hash"],
        shape=shape,
        draft=load_file(path / _DRAFT),
        optimizer=load_file(path / _OPTIMIZER),
        random=load_file(path / _RANDOM),
    )


def _fault(path: Path) -> str | None:
    try:
        state = read_json(path / "state.json")
        digests = state["digests"]
        if state["checksum"] != state_checksum(state):
            return "state.json has another checksum"
        for name in _FILES:
            if digest(path / name) != digests[name]:
                return f"{name} has another digest"
    except (OSError, json.JSONDecodeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None
