"""The target's two ends, read alone from its checkpoint: embedding, head, and what the draft may start from.

Offline training needs nothing else of the target, so a draft for a 235B model trains where its layers would not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.trainer.config import Target as TargetChoice
from tasks.trainer.errors import InputError
from tasks.trainer.target import decoder_layers
from tasks.trainer.target_files import resolve, unpacked
from tasks.trainer.target_text import files_dtype

# A draft's decoder layer has the same tensors under the same names (hidden_norm being its name for input_layernorm).
LAYER_TENSORS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """embedding, head [V, D]. last_layer: LAYER_TENSORS of the last decoder layer, and `norm.weight` [D], the final
    norm; empty unless asked for. config: transformers' text config."""

    config: Any
    embedding: Tensor
    head: Tensor
    last_layer: dict[str, Tensor]


def load_ends(chosen: TargetChoice, *, device: str, with_last_layer: bool = False) -> TargetEnds:
    """Read the ends (single or sharded safetensors, tied or untied), in the target's dtype.

    Raises InputError when the checkpoint holds no tensor of such a name, or, with_last_layer, when the target's layers
    are not built like the draft's.
    """
    files = resolve(chosen.model, revision=chosen.revision)
    torch_dtype = files_dtype(files, chosen.dtype, device)
    folder = unpacked(files, str(torch_dtype).removeprefix("torch."))
    config = AutoConfig.from_pretrained(folder)
    text_config = config.get_text_config()
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    names: dict[int, str] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)  # tied weights are stored under their first name

    def read(parameter: Tensor) -> Tensor:
        return _read_tensor(folder, names[id(parameter)], tuple(parameter.shape)).to(device, torch_dtype)

    embedding = read(skeleton.get_input_embeddings().weight)
    head = embedding if text_config.tie_word_embeddings else read(skeleton.get_output_embeddings().weight)
    last_layer = {}
    if with_last_layer:
        parameters = _last_layer(skeleton.get_decoder(), int(text_config.num_hidden_layers), chosen.model)
        last_layer = {name: read(parameter) for name, parameter in parameters.items()}
    return TargetEnds(text_config, embedding, head, last_layer)


def _last_layer(decoder: nn.Module, num_layers: int, model: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(decoder_layers(decoder, num_layers, model)[-1].named_parameters())
    norm = getattr(decoder, "norm", None)
    missing = [name for name in LAYER_TENSORS if name not in found] + ([] if norm is not None else ["norm.weight"])
    if missing:
        raise InputError(
            f"draft.start=target_layer: the layers of target {model!r} have no {missing[0]}, so a draft cannot start "
            "from one; use draft.start=random"
        )
    assert norm is not None
    return {**{name: found[name] for name in LAYER_TENSORS}, "norm.weight": norm.weight}


def _read_tensor(folder: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a checkpoint by its module name; some checkpoints differ from it in the prefix only."""
    parts = name.split(".")
    tail = ".".join(parts[parts.index("layers") :] if "layers" in parts else parts[-2:])
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                if key == name or key.endswith(f".{tail}"):
                    tensor: Tensor = file.get_tensor(key)
                    if tuple(tensor.shape) != shape:
                        raise InputError(f"{path}: {key} has shape {tuple(tensor.shape)}, the config says {shape}")
                    return tensor
    raise InputError(f"{folder}: no tensor {name!r} in its safetensors files")
