"""Checkpoints: masters, moments, random state and the place in the data, complete or not there at all.

A checkpoint folder is written under another name, synced and renamed; `state.json` carries the files' digests. The
newest whole one is used; a damaged one is named in a warning and the one before it taken. Kept are the newest few
and the best by the held-out tau that metrics.jsonl tells. The price: 12 bytes a parameter each.

A run goes on with any number of ranks, for what is read are whole tensors. The draft is one file always: evaluation,
export and warm starts read it. So are the moments of ranks that hold all of them, which leave the writing to the first;
of a sharded draft torch.distributed.checkpoint writes each rank's share of them, as safetensors (nothing is pickled),
and puts them together when they are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from tasks.trainer.draft.eagle3 import DraftConfig
from tasks.trainer.errors import InputError
from tasks.trainer.files import digest, read_json, sync_file, sync_folder, write_json
from tasks.trainer.run_dir import RunDir
from tasks.trainer.train.batches import Position
from tasks.trainer.train.curves import best_steps, read_heldout
from tasks.trainer.train.parallel import Layout, from_first, meet, tensors_from_first
from tasks.trainer.train.sharding import whole_tensor

logger = logging.getLogger(__name__)

_DRAFT, _OPTIMIZER, _RANDOM = "draft.safetensors", "optimizer.safetensors", "random.safetensors"

# What ranks wait for one that writes: a slow disk is no dead rank.
PATIENCE = timedelta(minutes=10)


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


def save(
    folder: Path, checkpoint: Checkpoint, *, keep: int, best: int | None = None, layout: Layout | None = None
) -> tuple[Path, Written] | None:
    """Write `folder/step-NNNNNN`, then delete all but the `keep` newest and the one of step `best`.

    layout: of several ranks, which all call this. Returns None on those that are not the first. Raises InputError when
    the ranks of a sharded draft do not see one folder.
    """
    layout = layout or Layout()
    started = time.monotonic()
    home = folder / f"step-{checkpoint.step:06d}"
    scratch = folder / f".{home.name}"
    if layout.is_first:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
    draft = {name: whole_tensor(tensor) for name, tensor in checkpoint.draft.items()}
    files = [_DRAFT, _RANDOM]
    if any(isinstance(tensor, DTensor) for tensor in checkpoint.optimizer.values()):
        files += _save_shares(scratch, checkpoint.optimizer, layout)
    elif layout.is_first:
        _save_file(checkpoint.optimizer, scratch / _OPTIMIZER)
        files.append(_OPTIMIZER)
    if not layout.is_first:
        return None
    _save_file(draft, scratch / _DRAFT)
    _save_file(checkpoint.random, scratch / _RANDOM)
    digests, num_bytes = {}, 0
    for name in files:
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


def _save_file(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)


def _save_shares(scratch: Path, tensors: dict[str, Tensor], layout: Layout) -> list[str]:
    """Write every rank's share of the moments; returns the files' names."""
    meet(layout, "a sharded checkpoint", patience=PATIENCE)  # the folder is there
    parts = scratch / "parts"
    if not scratch.is_dir():
        raise InputError(
            f"{scratch.parent} is not the same folder on every machine, and of a sharded draft every rank writes its "
            "share: give a run_dir that all see, or use train.sharding=ddp"
        )
    writer = HuggingFaceStorageWriter(str(parts), save_distributed=True)
    save_distributed(dict(tensors), storage_writer=writer, process_group=layout.host_group)
    if not layout.is_first:
        return []
    names: list[str] = []
    for part in sorted(parts.glob("*.safetensors")):
        names.append(f"optimizer-{len(names) + 1:05d}.safetensors")
        part.rename(scratch / names[-1])
    shutil.rmtree(parts)
    return names


def _load_shares(path: Path) -> dict[str, Tensor]:
    """The moments, whole, from the shares of however many ranks."""
    reader = HuggingFaceStorageReader(str(path))
    found = reader.read_metadata().state_dict_metadata
    # The reader sees the folder's other files, too; moments are named PARAMETER.MOMENT.
    with safe_open(path / _DRAFT, framework="pt") as draft:
        parameters = set(draft.keys())
    tensors = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in found.items()
        if isinstance(metadata, TensorStorageMetadata) and name.rpartition(".")[0] in parameters
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load_distributed(tensors, storage_reader=reader, no_dist=True)
    return tensors


def from_first_rank(layout: Layout, found: Checkpoint | None) -> Checkpoint | None:
    """The checkpoint that rank 0 found, on every rank; others give None."""
    if layout.host_group is None:
        return found
    told = None
    if found is not None:
        told = {
            "step": found.step,
            "position": [found.position.epoch, found.position.pack],
            "identity": found.identity,
            "shape": asdict(found.shape),
            "data_hash": found.data_hash,
        }
    told = from_first(layout, told, "the checkpoint to continue")
    if told is None:
        return None
    tensors = {
        part: tensors_from_first(layout, getattr(found, part) if found else {}, "the checkpoint to continue")
        for part in ("draft", "optimizer", "random")
    }
    return Checkpoint(
        step=told["step"],
        position=Position(*told["position"]),
        identity=told["identity"],
        shape=DraftConfig(**{**told["shape"], "aux_layer_ids": tuple(told["shape"]["aux_layer_ids"])}),
        data_hash=told["data_hash"],
        **tensors,
    )


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
        optimizer=load_file(path / _OPTIMIZER) if _OPTIMIZER in state["digests"] else _load_shares(path),
        random=load_file(path / _RANDOM),
    )


def _fault(path: Path) -> str | None:
    try:
        state = read_json(path / "state.json")
        digests = state["digests"]
        if state["checksum"] != state_checksum(state):
            return "state.json has another checksum"
        for name, expected in digests.items():
            if digest(path / name) != expected:
                return f"{name} has another digest"
    except (OSError, json.JSONDecodeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None
