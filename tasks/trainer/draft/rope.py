"""Rotary position embedding with the target's scaling, tables always in fp32 and for the positions really used.

A table made in bf16, or cast with the model, gives neighbouring positions the same angle: of 4,096 rows 769 stay
distinct. So the frequencies live outside the module tree and cos/sin are computed for each call. transformers' own
initialisers give the frequencies of every scaling type it knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from tasks.trainer.draft.eagle3 import DraftConfig


class Rope:
    """RoPE for one draft shape; `rope(positions, q, k)` turns queries and keys.

    Raises ValueError when the scaling type is unknown to the installed transformers.
    """

    def __init__(self, config: DraftConfig) -> None:
        parameters = dict(config.rope_parameters)
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "default":
            theta = float(parameters.get("rope_theta", 10000.0))
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            self.inverse_frequencies = 1.0 / theta**exponents
            self.scale = 1.0
            return
        if rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rope_type={rope_type!r} is unknown; this transformers has {sorted(ROPE_INIT_FUNCTIONS)}")
        shape = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=parameters,
        )
        # Types whose frequencies depend on the length (dynamic, longrope) get the longest that is served, as the
        # engines do when they build their table.
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](
            shape, torch.device("cpu"), seq_len=config.max_position_embeddings
        )
        self.inverse_frequencies = frequencies.to(torch.float32)
        self.scale = float(scale)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions int64 [n], scaled: float32 [n, Dh/2] each."""
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale

    def __call__(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [n]; query [n, H, Dh], key [n, G, Dh] -> the same shapes and dtypes, turned."""
        cos, sin = self.angles(positions)
        return turn(query, cos, sin), turn(key, cos, sin)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """LLaMA's layout: dimension i is paired with i + Dh/2. x [n, heads, Dh]; cos, sin float32 [n, Dh/2]."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
