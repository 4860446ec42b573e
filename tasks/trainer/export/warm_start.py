"""Start a draft from an earlier one: a run's checkpoint, an export of any layout, or a folder that SpecForge, vLLM or
speculators know.

The layers are copied, so their sizes must be the run's. The head is not: tonight's data may choose other draft tokens,
so its rows go by target id, and a token that the parent could not propose gets the target's row, as in a fresh draft.
A file that other trainers wrote leaves out what transformers or the engines have defaults for; those are used, and
logged where a wrong guess would train something else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.export.layout import draft_tensors
from tasks.trainer.export.serving_config import NORM_SWITCHES, draft_config, flat_config, said_layer_ids
from tasks.trainer.parent import ParentFiles, find_parent

logger = logging.getLogger(__name__)

# A field of the shape that must be the parent's, and the setting that makes it so.
_SETTINGS = {
    "variant": "draft.variant",
    "num_layers": "draft.num_layers",
    "num_heads": "draft.num_heads",
    "num_kv_heads": "draft.num_kv_heads",
    "head_dim": "draft.head_dim",
    "intermediate_size": "draft.intermediate_size",
    "aux_layer_ids": "target.aux_layer_ids",
}
# The parent was trained with another value; training goes on with this run's.
_ADAPTED = ("rope_parameters", "rms_norm_eps")
_OF_VOCABULARY = ("lm_head.weight", "d2t", "t2d")


@dataclass(frozen=True, slots=True)
class Parent:
    """An earlier draft. tensors: by a draft's state-dict names, on the CPU, floats in the dtype of the file."""

    name: str
    config: DraftConfig
    tensors: dict[str, Tensor]


def start_from_parent(draft: Eagle3Draft, init: str) -> int:
    """Give a fresh draft (float32, on the CPU) the weights of the parent at `init`.

    Returns the number of the head's rows that are the parent's; the others stay as they are. Raises InputError when the
    parent cannot be read, is damaged, or has other sizes (the message names the settings).
    """
    parent = read_parent(init, draft.config)
    _check_sizes(parent, draft.config)
    own = draft.state_dict()
    with torch.no_grad():
        for name, tensor in parent.tensors.items():
            if name not in _OF_VOCABULARY:
                own[name].copy_(tensor)
        rows = torch.full((parent.config.target_vocab_size,), -1, dtype=torch.int64)
        rows[parent.tensors["d2t"] + torch.arange(parent.config.vocab_size)] = torch.arange(parent.config.vocab_size)
        taken = rows[draft.target_ids]
        known = taken >= 0
        own["lm_head.weight"][known] = parent.tensors["lm_head.weight"][taken[known]].float()
    kept = int(known.sum())
    logger.info(
        "draft.init: layers of %s; %d of %d head rows are its, %d tokens are new and start from the target's head",
        parent.name, kept, draft.config.vocab_size, draft.config.vocab_size - kept,
    )  # fmt: skip
    return kept


def read_parent(init: str, like: DraftConfig) -> Parent:
    """The parent's shape and tensors. like: the run's shape, for what the parent's files do not say."""
    files = find_parent(init)
    if files.is_checkpoint:
        return _read_checkpoint(files)
    folder = files.description.parent
    described = _completed(flat_config(files.read_description(), files.description), like, init)
    config = draft_config(described, files.description)
    tensors = _read_all(files)
    if "lm_head.weight" not in tensors and config.has_full_vocabulary:
        raise InputError(
            f"draft.init={init!r} has no lm_head: it shares the target's, and Eyas trains the draft's own; add the "
            "target's head to its files as lm_head.weight"
        )
    return Parent(init, config, draft_tensors(tensors, config, folder))


def _read_checkpoint(files: ParentFiles) -> Parent:
    state = files.read_description()
    try:
        shape = state["shape"]
        config = DraftConfig(**{**shape, "aux_layer_ids": tuple(shape["aux_layer_ids"])})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"draft.init={files.name!r}: {files.description} tells no draft's shape ({error})") from None
    if files.weight_digests() != [state.get("digests", {}).get(files.weights[0].name)]:
        raise InputError(f"draft.init={files.name!r} is damaged: {files.weights[0].name} is not what was saved; give "
                         "another checkpoint")  # fmt: skip
    return Parent(files.name, config, draft_tensors(_read_all(files), config, files.weights[0]))


def _read_all(files: ParentFiles) -> dict[str, Tensor]:
    tensors = {}
    for path in files.weights:
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"draft.init={files.name!r}: {path.name} is damaged ({reason})") from None
    return tensors


def _completed(config: dict[str, Any], like: DraftConfig, init: str) -> dict[str, Any]:
    """A serving config with the keys that other trainers leave out, or leave null."""
    found = {key: value for key, value in config.items() if value is not None}
    for key in ("hidden_size", "num_attention_heads", "vocab_size"):
        if not isinstance(found.get(key), int):
            raise InputError(f"draft.init={init!r}: its config.json has no {key}")
    unsaid = [switch for switch in NORM_SWITCHES if switch not in found]
    # Our own folders leave one out on purpose (serving_config.py).
    if unsaid and "eyas" not in found:
        logger.warning("draft.init=%r does not say %s: taken as false, as engines do", init, ", ".join(unsaid))
    rope = {"rope_type": "default", "rope_theta": float(found.get("rope_theta", 10000.0))}
    scaling = dict(found.get("rope_scaling", {}))
    if "type" in scaling:  # the key's name before transformers 4.43
        scaling.setdefault("rope_type", scaling.pop("type"))
    usual: dict[str, Any] = {
        "num_key_value_heads": found["num_attention_heads"],
        "head_dim": found["hidden_size"] // found["num_attention_heads"],
        "num_hidden_layers": 1,
        "draft_vocab_size": found["vocab_size"],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": like.max_position_embeddings,
        "rope_parameters": {**rope, **scaling},
    }
    return {**usual, **found, **_layer_ids(found, like, init)}


def _layer_ids(found: dict[str, Any], like: DraftConfig, init: str) -> dict[str, Any]:
    """This run's auxiliary layers, where a folder does not say its own."""
    if any(ids is not None for ids in said_layer_ids(found)):
        return {}
    logger.warning("draft.init=%r does not say its auxiliary layers: taken as this run's %s", init,
                   list(like.aux_layer_ids))  # fmt: skip
    return {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in like.aux_layer_ids]}


def _check_sizes(parent: Parent, config: DraftConfig) -> None:
    for name in ("hidden_size", "target_vocab_size"):
        theirs, ours = getattr(parent.config, name), getattr(config, name)
        if theirs != ours:
            raise InputError(
                f"draft.init={parent.name!r} is of a target with {name} {theirs}, this run's has {ours}; give a draft "
                "of this target"
            )
    differing = [name for name in _SETTINGS if getattr(parent.config, name) != getattr(config, name)]
    if differing:
        theirs_and_ours = ", ".join(
            f"{name} {getattr(parent.config, name)} instead of {getattr(config, name)}" for name in differing
        )
        settings = ", ".join(f"{_SETTINGS[name]}={_shown(getattr(parent.config, name))}" for name in differing)
        raise InputError(f"draft.init={parent.name!r} has {theirs_and_ours}: set {settings}, or give another draft")
    for name in _ADAPTED:
        theirs, ours = getattr(parent.config, name), getattr(config, name)
        if theirs != ours:
            logger.warning("draft.init=%r was trained with %s %s; it goes on with %s", parent.name, name, theirs, ours)


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
