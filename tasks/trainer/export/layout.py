"""Tensor names of the serving layouts, from a draft's state dict and back.

A draft's own names are those of the `sglang` layout (SpecForge's, too), but for what engines disagree on:

    layout        first layer   norm above the first layer             maps of a draft vocabulary
    sglang        midlayer.     layers.N.hidden_norm, input_layernorm  d2t, t2d
    vllm          layers.0.     layers.N.input_layernorm               d2t
    speculators   layers.0.     layers.N.input_layernorm               d2t, t2d; and the target's embedding (folder.py)

The norm has two names in the first because vLLM, which loads that layout as well, reads the other one. No layout has
maps where the draft vocabulary is the target's: vLLM stops at a tensor that it has no place for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.errors import InputError

MAPS = {"d2t": torch.int64, "t2d": torch.bool}
_FIRST, _FIRST_ELSEWHERE = "midlayer.", "layers.0."
# Of the target, or made anew from config.json; other trainers write them.
_SAYS_NOTHING = re.compile(r"(embed_tokens|verifier_lm_head|verifier_norm)\.weight|.*rotary_emb\.inv_freq")


def layout_tensors(tensors: Mapping[str, Tensor], config: DraftConfig, *, layout: str) -> dict[str, Tensor]:
    """A draft's tensors (state-dict names) under the names of a layout, contiguous on the CPU."""
    found = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    if config.has_full_vocabulary:
        del found["d2t"], found["t2d"]
    elif layout == "vllm":
        del found["t2d"]
    for layer in range(1, config.num_layers):
        # A copy: safetensors refuses two names for one memory.
        found[_input_norm(layer)] = found[_hidden_norm(layer)].clone()
        if layout != "sglang":
            del found[_hidden_norm(layer)]
    if layout != "sglang":
        found = {name.replace(_FIRST, _FIRST_ELSEWHERE): tensor for name, tensor in found.items()}
    return found


def draft_tensors(tensors: Mapping[str, Tensor], config: DraftConfig, path: Path) -> dict[str, Tensor]:
    """A folder's tensors, of any layout, under a draft's names, complete and in its shapes; path: for messages.

    Raises InputError naming the tensor that is missing, unknown, of another shape, or a map that contradicts itself.
    """
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace(_FIRST_ELSEWHERE, _FIRST)
        if not _SAYS_NOTHING.fullmatch(name):
            found[name] = tensor
    for layer in range(1, config.num_layers):
        # Trainers that know one engine write one of the two.
        of_vllm = found.pop(_input_norm(layer), None)
        if of_vllm is not None and not torch.equal(found.setdefault(_hidden_norm(layer), of_vllm), of_vllm):
            raise InputError(
                f"{path}: {_input_norm(layer)} and {_hidden_norm(layer)} differ: vLLM and SGLang would run different "
                "drafts"
            )
    if config.has_full_vocabulary:
        found.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
        found.setdefault("t2d", torch.ones(config.target_vocab_size, dtype=torch.bool))
    elif "d2t" in found and not found["d2t"].is_floating_point():
        found["d2t"] = found["d2t"].to(torch.int64)
        ids = found["d2t"] + torch.arange(len(found["d2t"]))
        found.setdefault("t2d", torch.isin(torch.arange(config.target_vocab_size), ids))
    expected = _expected_shapes(config)
    if missing := sorted(expected.keys() - found.keys()):
        raise InputError(f"{path}: no tensor {missing[0]!r}; export the draft again")
    if unknown := sorted(found.keys() - expected.keys()):
        raise InputError(f"{path}: tensor {unknown[0]!r} belongs to no EAGLE-3 draft of this kind")
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            raise InputError(f"{path}: {name} is {tuple(found[name].shape)}, config.json asks for {shape}")
    _check_maps(found["d2t"], found["t2d"], path)
    return found


def _hidden_norm(layer: int) -> str:
    return f"layers.{layer}.hidden_norm.weight"


def _input_norm(layer: int) -> str:
    return f"layers.{layer}.input_layernorm.weight"


def _expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        draft = Eagle3Draft(
            replace(config, rope_parameters={}),  # no tensor's shape depends on it, and its tables need real memory
            embedding=torch.empty(config.target_vocab_size, config.hidden_size),
            d2t=torch.empty(config.vocab_size),
            t2d=torch.empty(config.target_vocab_size),
        )
    return {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}


def _check_maps(d2t: Tensor, t2d: Tensor, path: Path) -> None:
    """d2t must be offsets to distinct ids inside the target's vocabulary, t2d their membership."""
    for name, tensor in (("d2t", d2t), ("t2d", t2d)):
        if tensor.dtype != MAPS[name]:
            raise InputError(f"{path}: {name} is {tensor.dtype}, not {MAPS[name]}")
    ids = torch.arange(d2t.shape[0]) + d2t
    members = torch.zeros_like(t2d)
    if int(ids.min()) >= 0 and int(ids.max()) < t2d.shape[0]:
        members[ids] = True
    if not torch.equal(members, t2d) or int(members.sum()) != d2t.shape[0]:
        raise InputError(f"{path}: t2d does not mark exactly the target ids i + d2t[i]; export the draft again")
