"""The draft that a run starts from (draft.init): which files it is, and their hash.

The hash is a part of the run's identity, so that a folder whose content changed is another parent and a copy of it is
the same one. It reads the files whole, about 1 s per GB and once a process. Free of torch, as the config is that asks
for it; export/warm_start.py reads the tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.trainer.errors import InputError
from tasks.trainer.files import digest, read_json

CHECKPOINT_STATE, CHECKPOINT_DRAFT = "state.json", "draft.safetensors"
SERVING_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class ParentFiles:
    """Where a parent lies."""

    name: str
    """draft.init as the user wrote it, for messages."""
    description: Path
    """A checkpoint's state.json, or a serving folder's config.json."""
    weights: tuple[Path, ...]
    """Safetensors files, sorted by name."""

    @property
    def is_checkpoint(self) -> bool:
        """Whether this is a checkpoint of a run; else it is a serving folder."""
        return self.description.name == CHECKPOINT_STATE

    def read_description(self) -> dict[str, Any]:
        """The JSON object that tells the shape. Raises InputError when it is none."""
        try:
            found = read_json(self.description)
        except OSError as error:
            raise InputError(f"draft.init={self.name!r}: cannot read {self.description}: {error.strerror}") from None
        except ValueError:
            raise InputError(f"draft.init={self.name!r}: {self.description} is not valid JSON") from None
        if not isinstance(found, dict):
            raise InputError(f"draft.init={self.name!r}: {self.description} holds no JSON object")
        return found

    def weight_digests(self) -> list[str]:
        """blake2b of each weights file. Raises InputError when one cannot be read."""
        try:
            stamps = [(path, path.stat()) for path in self.weights]
            return [_digest_once(path, stamp.st_size, stamp.st_mtime_ns) for path, stamp in stamps]
        except OSError as error:
            raise InputError(f"draft.init={self.name!r} cannot be read: {error.strerror}") from None


def find_parent(init: str) -> ParentFiles:
    """What `draft.init` names: a checkpoint's folder, or a serving folder (exported, or in SpecForge's layout).

    Raises InputError when it is neither, or its weights are pickled.
    """
    if "://" in init:
        raise InputError(f"draft.init={init!r}: a parent is read from a local folder; copy it here and give its path")
    folder = Path(init).expanduser().absolute()
    if not folder.is_dir():
        raise InputError(f"draft.init={init!r}: no such folder; give a checkpoint's folder or an exported draft")
    if (folder / CHECKPOINT_STATE).is_file() and (folder / CHECKPOINT_DRAFT).is_file():
        return ParentFiles(init, folder / CHECKPOINT_STATE, (folder / CHECKPOINT_DRAFT,))
    if not (folder / SERVING_CONFIG).is_file():
        raise InputError(
            f"draft.init={init!r} has neither {CHECKPOINT_STATE} nor {SERVING_CONFIG}; give one checkpoint's folder "
            "(checkpoints/step-N of a run) or an exported draft (draft/ of a run, or a download)"
        )
    weights = tuple(sorted(folder.glob("*.safetensors")))
    if not weights:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickled:
            raise InputError(
                f"draft.init={init!r} has only {pickled[0]}, which is pickled: Eyas unpickles no weights, that runs "
                "whatever code is in them. Where you trust it, load it with torch.load(weights_only=True) and save it "
                "with safetensors.torch.save_file as model.safetensors"
            )
        raise InputError(f"draft.init={init!r} has no *.safetensors; give an exported draft")
    return ParentFiles(init, folder / SERVING_CONFIG, weights)


def parent_digest(init: str) -> str:
    """32 hex characters of the parent's shape and weights, wherever they lie. Raises InputError as find_parent does."""
    files = find_parent(init)
    description = files.read_description()
    # The rest of a checkpoint's state is about the run that wrote it, and `eyas` of an export tells what it is worth.
    shape = description.get("shape") if files.is_checkpoint else {**description, "eyas": None}
    text = json.dumps([shape, files.weight_digests()], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@functools.lru_cache(maxsize=64)
def _digest_once(path: Path, size: int, modified_ns: int) -> str:
    return digest(path)
