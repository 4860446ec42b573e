"""The EAGLE-3 draft: `fc`, one or more LLaMA-style decoder layers, a head over the draft vocabulary.

The parts are separate methods (`fuse`, `qkv`, `finish`, `outputs`) instead of one `forward`, because the same weights
run under two attention patterns: the TTT unroll in training (draft/ttt.py) and a key/value cache when drafting
(acceptance/drafter.py). Parameter names are those of the SGLang checkpoint layout, so that export copies tensors.

EAGLE-3.1 differs in two places: each auxiliary layer's part of fc's input has a norm of its own, which takes the
layers' different scales away, and the next step reads the normed output, whose scale cannot drift over the steps.

Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from tasks.trainer.draft.rope import Rope

T = TypeVar("T")

VARIANTS = ("eagle3", "eagle3.1")


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Shape of a draft.

    hidden_size: D, the target's. vocab_size: Vd, tokens the draft can propose. target_vocab_size: V.
    rope_parameters: rope_type, rope_theta and the scaling's own keys, as transformers 5 writes them.
    max_position_embeddings: the target's: serving stops there. aux_layer_ids: 0-based output layers of the target.
    num_layers: decoder layers; the first alone reads the token's embedding. variant: one of VARIANTS.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    target_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    aux_layer_ids: tuple[int, int, int]
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    num_layers: int = 1
    variant: str = "eagle3"

    @property
    def has_full_vocabulary(self) -> bool:
        """Whether draft ids are target ids."""
        return self.vocab_size == self.target_vocab_size

    @property
    def fc_norm(self) -> bool:
        """Whether each auxiliary layer is normed before `fc`."""
        return self.variant == "eagle3.1"

    @property
    def norm_output(self) -> bool:
        """Whether the next step reads the normed output."""
        return self.variant == "eagle3.1"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant={self.variant!r} is unknown: use {' or '.join(VARIANTS)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: query heads share "
                "key/value heads in equal groups"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE turns pairs")


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), the mean in fp32 (fp64 for fp64). x [n, D] -> [n, D], dtype kept."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    """The projections of grouped-query attention. width: of what q, k and v read."""

    def __init__(self, config: DraftConfig, *, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). x [n, D] -> [n, D]."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class DecoderLayer(nn.Module):
    """A LLaMA layer that reads hidden [n, D] through `hidden_norm`; the first reads 2D, the embedding through
    `input_layernorm` before it."""

    def __init__(self, config: DraftConfig, *, first: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, width=(2 if first else 1) * config.hidden_size)
        self.mlp = MLP(config)
        if first:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Draft(nn.Module):
    """The draft with its vocabulary maps and the target's frozen embedding.

    embedding [V, D]: the target's, shared with it and not a part of the checkpoint. d2t int64 [Vd]: target id of
    draft id i is i + d2t[i]. t2d bool [V]: whether a target id is in the draft vocabulary.
    """

    embedding: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig, *, embedding: Tensor, d2t: Tensor, t2d: Tensor) -> None:
        super().__init__()
        assert embedding.shape == (config.target_vocab_size, config.hidden_size)
        assert d2t.shape == (config.vocab_size,)
        assert t2d.shape == (config.target_vocab_size,)
        self.config = config
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DecoderLayer(config, first=True)
        # By number, so that the names are the checkpoint's: layers.1, layers.2, ... behind midlayer.
        self.layers = nn.ModuleDict(
            {str(number): DecoderLayer(config, first=False) for number in range(1, config.num_layers)}
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("d2t", d2t.to(torch.int64))
        self.register_buffer("t2d", t2d.to(torch.bool))
        # Not a buffer: Module.to(bfloat16) would cast its fp32 frequencies and corrupt positions past a few hundred.
        self.rope = Rope(config)

    @classmethod
    def initialise(
        cls,
        config: DraftConfig,
        *,
        embedding: Tensor,
        head: Tensor,
        d2t: Tensor,
        t2d: Tensor,
        seed: int,
        last_layer: Mapping[str, Tensor] | None = None,
    ) -> Eagle3Draft:
        """A fresh draft: projections N(0, 0.02) from `seed` on the CPU, the head from the target's rows.

        embedding, head [V, D] of the target. last_layer: the target's last decoder layer and final norm
        (target_ends); given, the draft's first layer starts as that one reading the highest auxiliary state, and
        layers above it as the identity. Returns a float32 draft on the CPU, embedding included. Raises ValueError when
        the layer's shapes are not the draft's.
        """
        draft = cls(config, embedding=embedding.float().cpu(), d2t=d2t, t2d=t2d)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                if parameter.ndim == 2 and name != "lm_head.weight":
                    parameter.normal_(0.0, 0.02, generator=generator)
            draft.lm_head.weight.copy_(head.cpu()[draft.target_ids].float())
            if last_layer:
                draft._start_from(last_layer)
        return draft

    def forward(self, body: Callable[[Eagle3Draft], T]) -> T:
        """body(self): FSDP2 acts around a call of the module, and the draft is called in parts."""
        return body(self)

    def _start_from(self, layer: Mapping[str, Tensor]) -> None:
        """Become the target's last layer on the highest auxiliary state; the embedding's half of q, k, v stays random.

        The layer's output then lies in the basis that the head reads, which a random draft first has to learn.
        """
        size = self.config.hidden_size
        own: dict[str, Tensor] = dict(self.named_parameters())
        for name, tensor in layer.items():
            if name == "norm.weight":
                place = own[name]
            elif name == "input_layernorm.weight":
                place = own["midlayer.hidden_norm.weight"]
            else:
                place = own[f"midlayer.{name}"]
                if name.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
                    place = place[:, size:]
            if place.shape != tensor.shape:
                raise ValueError(
                    f"{name} of the target's last layer is {tuple(tensor.shape)}, the draft's {tuple(place.shape)}"
                )
            place.copy_(tensor.float())
        self.fc.weight.zero_()
        self.fc.weight[:, 2 * size :] = torch.eye(size)
        for upper in self.decoder_layers[1:]:
            upper.self_attn.o_proj.weight.zero_()
            upper.mlp.down_proj.weight.zero_()

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """All layers, the first one first."""
        return [self.midlayer, *cast("Iterable[DecoderLayer]", self.layers.values())]

    @property
    def target_ids(self) -> Tensor:
        """int64 [Vd]: the target id of each draft id."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def draft_ids(self) -> Tensor:
        """int64 [V]: the draft id of each target id, -1 outside the draft vocabulary."""
        ids = torch.full((self.t2d.shape[0],), -1, dtype=torch.int64, device=self.t2d.device)
        ids[self.target_ids] = torch.arange(self.d2t.shape[0], device=self.t2d.device)
        return ids

    def target_head(self, head: Tensor) -> Tensor:
        """The target's rows of the draft vocabulary: head [V, D] -> [Vd, D]; no copy when that is all of them."""
        return head if self.config.has_full_vocabulary else head[self.target_ids.to(head.device)]

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's frozen embedding. token_ids int64 [n] -> [n, D]."""
        return nn.functional.embedding(token_ids, self.embedding)

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """Three layers of the target into one hidden state. aux_hidden [n, 3D] -> [n, D]."""
        if self.config.fc_norm:
            parts = zip(self.fc_norm, aux_hidden.chunk(3, dim=-1), strict=True)
            aux_hidden = torch.cat([norm(part) for norm, part in parts], dim=-1)
        fused: Tensor = self.fc(aux_hidden)
        return fused

    def qkv(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, *, layer: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of n rows, RoPE applied.

        embeds, hidden [n, D]; positions int64 [n], relative to the document's start. layer: the layers above the first
        read `hidden` alone. Returns q [n, H, Dh], k and v [n, G, Dh].
        """
        weights, config = self.decoder_layers[layer], self.config
        inputs = weights.hidden_norm(hidden)
        if layer == 0:
            inputs = torch.cat((weights.input_layernorm(embeds), inputs), dim=-1)
        attention = weights.self_attn
        query = attention.q_proj(inputs).unflatten(-1, (config.num_heads, config.head_dim))
        key = attention.k_proj(inputs).unflatten(-1, (config.num_kv_heads, config.head_dim))
        value = attention.v_proj(inputs).unflatten(-1, (config.num_kv_heads, config.head_dim))
        query, key = self.rope(positions, query, key)
        return query, key, value

    def finish(self, attended: Tensor, hidden: Tensor, *, layer: int = 0) -> Tensor:
        """Output projection and MLP. attended [n, H, Dh], hidden [n, D] (un-normed: it is the residual) -> [n, D]."""
        weights = self.decoder_layers[layer]
        hidden = hidden + weights.self_attn.o_proj(attended.flatten(-2))
        output: Tensor = hidden + weights.mlp(weights.post_attention_layernorm(hidden))
        return output

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the last layer's output [n, D] is to others: (hidden input of the next step, input of `lm_head`).

        The head reads the norm, the next step the output itself, or with norm_output the norm, too.
        """
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed
