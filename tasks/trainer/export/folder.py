"""The serving folder: config.json, model.safetensors and README.md in one of the layouts that engines load.

It is written beside its place and renamed, so that a reader sees all of it or nothing. The target's embedding is left
out: engines share the target's own, and a copy would be the largest tensor of the file. The `speculators` layout has
it, as that package's own drafts do: 0.9.0 under transformers 5 leaves a missing one as uninitialised memory, and says
nothing. What was read can be written again in the same layout, byte for byte, or in another.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.export.about import About
from tasks.trainer.export.card import model_card
from tasks.trainer.export.layout import MAPS, draft_tensors, layout_tensors
from tasks.trainer.export.serving_config import draft_config, flat_config, layout_of, serving_config
from tasks.trainer.files import sync_file, sync_folder

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Exported:
    """A draft as a folder holds it."""

    config: DraftConfig
    tensors: dict[str, Tensor]
    """By a draft's state-dict names, on the CPU, floats in the folder's dtype."""
    about: About
    layout: str
    embedding: Tensor | None = None
    """The target's, [V, D] in the folder's dtype; of the `speculators` layout alone."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.tensors["fc.weight"].dtype


def export_draft(draft: Eagle3Draft, folder: Path, *, about: About, dtype: torch.dtype, layout: str = "sglang") -> None:
    """Write the serving folder: weights in `dtype`, the vocabulary maps as they are.

    An earlier export in `folder` is replaced. Raises InputError when `folder` holds anything else, or cannot be
    written.
    """
    tensors = {name: tensor.detach().to("cpu", MAPS.get(name, dtype)) for name, tensor in draft.state_dict().items()}
    embedding = draft.embedding.detach().to("cpu", dtype) if layout == "speculators" else None
    write_exported(Exported(draft.config, tensors, about, layout, embedding), folder)


def write_exported(exported: Exported, folder: Path) -> None:
    """Write a draft that was read, in its `layout`; as `export_draft`."""
    if not exported.about.target:
        raise InputError("this draft does not say which target it is for; name it (--target)")
    if exported.layout == "speculators" and exported.embedding is None:
        raise InputError(
            "the speculators layout has the target's embedding, which this folder leaves out; export the run itself"
        )
    folder = Path(os.path.abspath(folder))
    _check_place(folder)
    config, layout, dtype = exported.config, exported.layout, exported.dtype
    described = serving_config(config, layout=layout, about=exported.about, dtype=dtype)
    texts = {
        CONFIG_FILE: json.dumps(described, indent=2) + "\n",
        CARD_FILE: model_card(config, exported.about, layout=layout, dtype=str(dtype).removeprefix("torch.")),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise InputError(f"cannot write an export at {str(folder)!r}: {error.strerror}") from None
    try:
        scratch.chmod(0o755)  # mkdtemp makes it private, and the server may run as another user
        tensors = layout_tensors(exported.tensors, config, layout=layout)
        if layout == "speculators" and exported.embedding is not None:
            tensors[EMBEDDING] = exported.embedding.contiguous()
        save_file(tensors, scratch / WEIGHTS_FILE, metadata={"format": "pt"})
        for name, text in texts.items():
            (scratch / name).write_text(text, encoding="utf-8")
        (scratch / WEIGHTS_FILE).chmod((scratch / CONFIG_FILE).stat().st_mode)  # safetensors makes it private, too
        for name in (WEIGHTS_FILE, *texts):
            sync_file(scratch / name)
        sync_folder(scratch)
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_exported(folder: Path) -> Exported:
    """Read a folder of any layout that says everything (warm_start.py reads those that do not).

    Raises InputError naming the file, key or tensor that is missing or does not fit.
    """
    folder = Path(folder)
    path = folder / CONFIG_FILE
    described = _read_config(folder)
    layout = layout_of(described, path)
    config = draft_config(flat_config(described, path), path)
    about = About.of_document(described.get("eyas", {}), path)
    weights = folder / WEIGHTS_FILE
    tensors = _read_tensors(weights)
    embedding = tensors.get(EMBEDDING) if layout == "speculators" else None
    return Exported(config, draft_tensors(tensors, config, weights), about, layout, embedding)


def load_exported(folder: Path, *, embedding: Tensor) -> Eagle3Draft:
    """Load an exported draft in the dtype it was saved in, on the embedding's device.

    embedding [V, D]: the target's, which an export does not carry; it is cast to the weights' dtype.
    Raises InputError naming the file, key or tensor that is missing or does not fit.
    """
    exported = read_exported(folder)
    config, tensors = exported.config, exported.tensors
    if tuple(embedding.shape) != (config.target_vocab_size, config.hidden_size):
        raise InputError(
            f"{folder}: this draft's target has an embedding of {(config.target_vocab_size, config.hidden_size)}, "
            f"the given target one of {tuple(embedding.shape)}; give the target it was trained for"
        )
    draft = Eagle3Draft(config, embedding=embedding.to(exported.dtype), d2t=tensors["d2t"], t2d=tensors["t2d"])
    draft.to(embedding.device, exported.dtype).load_state_dict(tensors)
    return draft


def _check_place(folder: Path) -> None:
    """Only nothing, an empty folder or an earlier export may be written over."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; give another place for the export")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    foreign = sorted(names - {CONFIG_FILE, WEIGHTS_FILE, CARD_FILE})
    if not foreign and CONFIG_FILE in names and "eyas" in _read_config(folder):
        return
    raise InputError(
        f"{str(folder)!r} holds {(foreign or sorted(names))[0]!r}, which Eyas did not export; give another folder"
    )


def _put_in_place(scratch: Path, folder: Path) -> None:
    """Rename into place. An earlier export steps aside first: rename() does not replace a folder that has files. Killed
    between the two renames, the earlier export remains beside its place, whole, under the hidden name."""
    aside = scratch.with_name(scratch.name + "-old")
    replaces = folder.is_dir() and any(folder.iterdir())
    if replaces:
        folder.rename(aside)
    try:
        scratch.rename(folder)
    except OSError:
        if replaces:
            aside.rename(folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}; is it an exported draft?") from None
    except ValueError:
        raise InputError(f"{path}: not valid JSON; export the draft again") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"no file {str(path)!r}; is it an exported draft?")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    except SafetensorError as error:
        raise InputError(f"{path}: damaged ({str(error).splitlines()[0]}); export the draft again") from None
