"""An exported folder as the engines run it.

A twin of their forward, written from what they read in config.json and by the names they load (vLLM 0.33.0 and SGLang
0.5.23), must give the logits of our own drafting.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.export.sglang import export_draft
from tests.trainer.drafts import TARGET_VOCAB, random_draft

# The norm that each engine puts before the attention of layers above the first.
UPPER_NORM = {"SGLang": "hidden_norm", "vLLM": "input_layernorm"}
SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "whole vocabulary": {"vocab_size": TARGET_VOCAB},
    "eagle3.1": {"variant": "eagle3.1"},
    "eagle3.1, two layers": {"variant": "eagle3.1", "num_layers": 2},
}
# float32, some hundred operations on logits of order 10.
TOLERANCE = 1e-3


class Engine:
    """The draft of a serving folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.upper_norm = UPPER_NORM[name]
        self.rotary = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(folder))

    def norm(self, x: Tensor, name: str) -> Tensor:
        wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return wide * self.tensors[f"{name}.weight"]

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        if self.config["fc_norm"]:
            parts = [self.norm(part, f"fc_norm.{number}") for number, part in enumerate(aux_hidden.chunk(3, -1))]
            aux_hidden = torch.cat(parts, -1)
        return linear(aux_hidden, self.tensors["fc.weight"])

    def forward(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Causal rows from position 0: (logits, what the next step reads)."""
        residual = torch.zeros_like(hidden)
        for number in range(self.config["num_hidden_layers"]):
            layer = "midlayer" if number == 0 else f"layers.{number}"
            residual = residual + hidden
            if number == 0:
                inputs = [self.norm(embeds, f"{layer}.input_layernorm"), self.norm(hidden, f"{layer}.hidden_norm")]
            else:
                inputs = [self.norm(residual, f"{layer}.{self.upper_norm}")]
            residual = residual + self.attention(torch.cat(inputs, -1), f"{layer}.self_attn")
            normed = self.norm(residual, f"{layer}.post_attention_layernorm")
            gate, up = (linear(normed, self.tensors[f"{layer}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            hidden = linear(silu(gate) * up, self.tensors[f"{layer}.mlp.down_proj.weight"])
        output = hidden + residual
        normed = self.norm(output, "norm")
        return linear(normed, self.tensors["lm_head.weight"]), normed if self.config["norm_output"] else output

    def attention(self, inputs: Tensor, layer: str) -> Tensor:
        query, key, value = (
            linear(inputs, self.tensors[f"{layer}.{name}_proj.weight"])
            .unflatten(-1, (-1, self.config["head_dim"]))
            .transpose(0, 1)[None]
            for name in "qkv"
        )
        query, key = apply_rotary_pos_emb(query, key, *self.rotary(value, torch.arange(inputs.shape[0])[None]))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return linear(attended[0].transpose(0, 1).flatten(1), self.tensors[f"{layer}.o_proj.weight"])


@pytest.mark.parametrize("name", UPPER_NORM)
@pytest.mark.parametrize("shape", SHAPES)
def test_engines_draft_what_we_trained(shape: str, name: str, tmp_path: Path) -> None:
    """Red when a weight has another name or role than an engine gives it, or a key in config.json tells it of another
    draft: the first and the second drafted token's logits differ."""
    draft = random_draft(torch.float32, **SHAPES[shape])
    export_draft(draft, tmp_path / "out", target_name="t", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(TARGET_VOCAB, (10,), generator=generator)
    aux_hidden = torch.rand(9, 96, generator=generator) - 0.5
    drafter = Drafter(draft)
    drafter.extend(token_ids[:9], aux_hidden)
    expected = drafter.forced_logits(token_ids[9:])
    engine = Engine(tmp_path / "out", name)
    with torch.no_grad():
        fused, embeds = engine.fuse(aux_hidden), draft.embed(token_ids)
        first, fed = engine.forward(fused, embeds[:9])
        second, _ = engine.forward(torch.cat((fused, fed[-1:])), embeds)
    found = torch.stack((first[-1], second[-1]))
    assert float((expected[0] - expected[1]).abs().max()) > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
