"""A serving folder as an engine runs it: written from what vLLM 0.33.0 and SGLang 0.5.23 read, not from our draft.

It takes each weight by the name, and each switch by the key and the default, that the engine's own loader has: a name
or key that both our ways (out and back) have wrong does not pass. Plain torch in float32, one sequence, no cache:
for `eyas export --check` and for tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ENGINES_OF = {"sglang": ("SGLang", "vLLM"), "vllm": ("vLLM",), "speculators": ("vLLM",)}
# The norm that each puts before the attention of layers above the first.
_UPPER_NORM = {"SGLang": "hidden_norm", "vLLM": "input_layernorm"}


class EngineDraft:
    """The draft of a serving folder in one engine."""

    def __init__(self, folder: Path, engine: str) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "speculators_config" in config:  # what vLLM makes of it
            layer = config["transformer_layer_config"]
            config = {**layer, **{key: config[key] for key in config.keys() - {"transformer_layer_config"}}}
            config.setdefault("norm_before_residual", True)
        self._config: dict[str, Any] = config
        self._engine = engine
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            name = name.replace("midlayer.", "layers.0.")
            self._tensors[name] = tensor if name in ("d2t", "t2d") else tensor.float()
        self._frequencies, self._scale = _rope(LlamaConfig(**_shape_keys(config)))

    @property
    def aux_layer_ids(self) -> list[int]:
        """The layers whose outputs the engine feeds to this draft, 0-based."""
        key = "eagle_aux_hidden_state_layer_ids"
        if self._engine == "SGLang":
            return list(self._config["eagle_config"][key])
        return [layer - 1 for layer in sorted(self._config[key])]

    @property
    def target_ids(self) -> Tensor:
        """int64 [Vd]: the target id of each column of the logits."""
        size: int = self._config["draft_vocab_size"]
        return torch.arange(size) + self._tensors.get("d2t", torch.zeros(size, dtype=torch.int64))

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """aux_hidden float32 [n, 3D] -> [n, D]."""
        if self._config.get("fc_norm", False):
            parts = [self._norm(part, f"fc_norm.{number}") for number, part in enumerate(aux_hidden.chunk(3, -1))]
            aux_hidden = torch.cat(parts, -1)
        return linear(aux_hidden, self._tensors["fc.weight"])

    def forward(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Causal rows from position 0; hidden, embeds float32 [n, D].

        Returns the logits [n, Vd] and what the next step reads [n, D].
        """
        residual = torch.zeros_like(hidden)
        for number in range(self._config["num_hidden_layers"]):
            layer = f"layers.{number}"
            if number == 0:
                normed = self._norm(hidden, f"{layer}.hidden_norm")
                residual = normed if self._config.get("norm_before_residual", False) else hidden
                inputs = torch.cat([self._norm(embeds, f"{layer}.input_layernorm"), normed], -1)
            else:
                residual = residual + hidden
                inputs = self._norm(residual, f"{layer}.{_UPPER_NORM[self._engine]}")
            residual = residual + self._attention(inputs, f"{layer}.self_attn")
            normed = self._norm(residual, f"{layer}.post_attention_layernorm")
            gate, up = (linear(normed, self._tensors[f"{layer}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            hidden = linear(silu(gate) * up, self._tensors[f"{layer}.mlp.down_proj.weight"])
        output = hidden + residual
        normed = self._norm(output, "norm")
        return linear(normed, self._tensors["lm_head.weight"]), normed if self._config.get("norm_output") else output

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"])
        return wide * self._tensors[f"{name}.weight"]

    def _attention(self, inputs: Tensor, layer: str) -> Tensor:
        query, key, value = (
            linear(inputs, self._tensors[f"{layer}.{name}_proj.weight"])
            .unflatten(-1, (-1, self._config["head_dim"]))
            .transpose(0, 1)[None]
            for name in "qkv"
        )
        angles = torch.arange(inputs.shape[0])[:, None] * self._frequencies
        cos, sin = (torch.cat((half, half), -1) * self._scale for half in (angles.cos(), angles.sin()))
        query, key = (x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin for x in (query, key))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return linear(attended[0].transpose(0, 1).flatten(1), self._tensors[f"{layer}.o_proj.weight"])


def _shape_keys(config: dict[str, Any]) -> dict[str, Any]:
    """What LlamaConfig knows; of the rope's two spellings the one that transformers 5 reads."""
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
            "rope_parameters")  # fmt: skip
    return {key: config[key] for key in keys}


def _rope(config: LlamaConfig) -> tuple[Tensor, float]:
    """Frequencies [Dh/2] and the scale of cos and sin, for the longest context, as engines build their table."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        config, torch.device("cpu"), seq_len=config.max_position_embeddings
    )
    return frequencies, float(scale)
