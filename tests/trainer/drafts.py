"""Small drafts of any shape for tests, with weights of order 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft

HIDDEN, TARGET_VOCAB, DRAFT_VOCAB = 32, 80, 48
# Drafts that the unroll must be right for, as keyword arguments of random_draft.
VARIANTS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "eagle3.1": {"variant": "eagle3.1"},
    "eagle3.1, two layers": {"variant": "eagle3.1", "num_layers": 2},
}


def draft_config(**changes: Any) -> DraftConfig:
    """The shape of a small draft; keyword arguments replace its fields."""
    shape: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 40,
        "vocab_size": DRAFT_VOCAB,
        "target_vocab_size": TARGET_VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "aux_layer_ids": (0, 1, 2),
    }
    return DraftConfig(**{**shape, **changes})


def vocabulary_maps(config: DraftConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """d2t and t2d of a random draft vocabulary; all tokens in order where it is the whole one."""
    chosen = torch.randperm(config.target_vocab_size, generator=generator)[: config.vocab_size].sort().values
    t2d = torch.zeros(config.target_vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return {"d2t": chosen - torch.arange(config.vocab_size), "t2d": t2d}


def random_draft(dtype: torch.dtype = torch.float64, **changes: Any) -> Eagle3Draft:
    """A draft whose weights are larger than an initial one's: attention must be sharp, so that a wrong key or position
    shows."""
    config = draft_config(**changes)
    generator = torch.Generator().manual_seed(0)
    maps = vocabulary_maps(config, generator)
    embedding = torch.rand(config.target_vocab_size, config.hidden_size, generator=generator) - 0.5
    draft = Eagle3Draft(config, embedding=embedding, **maps)
    with torch.no_grad():
        for parameter in draft.parameters():
            low, high = (0.5, 1.5) if parameter.ndim == 1 else (-0.4, 0.4)
            parameter.uniform_(low, high, generator=generator)
    return draft.to(dtype)
