"""The draft's shape from the target's config and the user's choices; drafts made fresh or from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasks.trainer.config import Draft
from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.export.warm_start import start_from_parent
from tasks.trainer.target_ends import TargetEnds


def draft_shape(
    target_config: Any, chosen: Draft, *, vocab_size: int, target_vocab_size: int, aux_layer_ids: tuple[int, int, int]
) -> DraftConfig:
    """What the user left empty follows the target (transformers text config).

    vocab_size Vd; target_vocab_size V: rows of the target's head. Raises InputError when the target's config lacks a
    width and none was chosen, or the shape is impossible.
    """
    num_heads = chosen.num_heads or _from_target(target_config, "num_attention_heads", "num_heads")
    num_kv_heads = chosen.num_kv_heads or getattr(target_config, "num_key_value_heads", None) or num_heads
    head_dim = chosen.head_dim or getattr(target_config, "head_dim", None) or target_config.hidden_size // num_heads
    try:
        return DraftConfig(
            hidden_size=int(target_config.hidden_size),
            num_heads=int(num_heads),
            num_kv_heads=int(num_kv_heads),
            head_dim=int(head_dim),
            intermediate_size=int(
                chosen.intermediate_size or _from_target(target_config, "intermediate_size", "intermediate_size")
            ),
            vocab_size=vocab_size,
            target_vocab_size=target_vocab_size,
            rms_norm_eps=float(getattr(target_config, "rms_norm_eps", 1e-6)),
            max_position_embeddings=int(_from_target(target_config, "max_position_embeddings", "")),
            aux_layer_ids=aux_layer_ids,
            rope_parameters=_rope_parameters(target_config),
            num_layers=chosen.num_layers,
            variant=chosen.variant,
        )
    except ValueError as error:
        raise InputError(f"draft: {error}") from None


def _from_target(target_config: Any, name: str, key: str) -> int:
    value = getattr(target_config, name, None)
    if value is None:
        way_out = f"; set draft.{key}" if key else ""
        raise InputError(f"the target's config ({target_config.model_type}) has no {name}{way_out}")
    return int(value)


def _rope_parameters(target_config: Any) -> dict[str, Any]:
    """The target's RoPE, the one of its full-attention layers where it has several; the draft turns whole heads."""
    parameters = dict(getattr(target_config, "rope_parameters", None) or {})
    if "full_attention" in parameters:
        parameters = dict(parameters["full_attention"])
    parameters.pop("partial_rotary_factor", None)
    parameters.setdefault("rope_type", "default")
    if "rope_theta" not in parameters:
        parameters["rope_theta"] = float(getattr(target_config, "rope_theta", 10000.0))
    return parameters


def fresh_draft(
    shape: DraftConfig, chosen: Draft, ends: TargetEnds, *, d2t: Tensor, t2d: Tensor, seed: int
) -> tuple[Eagle3Draft, int | None]:
    """A draft before training as `draft.start` and `draft.init` say, float32 on the CPU.

    Returns it and how many rows of its head are those of draft.init, None without one. Raises InputError when it cannot
    start so.
    """
    try:
        draft = Eagle3Draft.initialise(
            shape,
            embedding=ends.embedding,
            head=ends.head,
            d2t=d2t,
            t2d=t2d,
            seed=seed,
            last_layer=ends.last_layer if chosen.start == "target_layer" else None,
        )
    except ValueError as error:
        raise InputError(
            f"draft.start=target_layer: {error}; leave the draft's sizes empty, or use draft.start=random"
        ) from None
    return draft, None if chosen.init is None else start_from_parent(draft, chosen.init)


def trained_draft(
    shape: DraftConfig, tensors: dict[str, Tensor], *, embedding: Tensor, dtype: torch.dtype
) -> Eagle3Draft:
    """A draft from a checkpoint's tensors (state-dict names), frozen, on the embedding's device."""
    draft = Eagle3Draft(shape, embedding=embedding, d2t=tensors["d2t"], t2d=tensors["t2d"])
    draft.load_state_dict(tensors)
    return draft.to(embedding.device, dtype).eval().requires_grad_(False)
