"""The draft's layers as training runs them: fewer matrix products than `Eagle3Draft.qkv`, compiled in pieces.

    q, k, v of row p at step k  =  W_e norm(embedding of x[p+1+k])  +  W_h norm(hidden of row p)

The first half is the first layer's alone. It depends on the token only, and K steps read the same tokens, one further
each: it is computed once a token and taken K times, which saves a tenth of the layer's FLOPs. Its price is one more
rounding of a partial sum in low precision; its gradient is summed over the steps in float32.

The pieces are plain functions on rows [n, ...], so that torch.compile takes each without a graph break, once for all n
(attention and loss are kernels of their own and stay outside). Activation checkpointing is here too: nothing, the MLP,
or a whole TTT step is computed again in the backward.

Shapes: n rows, D hidden, H query heads, G key/value heads, Dh head dim, I MLP width, T tokens.
"""

# mypy: allow-untyped-calls
# (torch.autograd.Function.apply has no annotations)
from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, rms_norm, silu
from torch.utils.checkpoint import checkpoint

from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.rope import turn


def attention_inputs(
    hidden: Tensor,
    projected: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    weight: Tensor,
    heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of n rows, RoPE applied.

    hidden [n, D]; projected [n, (H + 2G) Dh], the embedding's half, None above the first layer; cos, sin float32
    [n, Dh/2]; norm [D]; weight [(H + 2G) Dh, D]; heads: H. Returns q [n, H, Dh], k and v [n, G, Dh], contiguous.
    """
    mixed = _mixed(hidden, projected, norm, weight, eps).unflatten(-1, (-1, 2 * cos.shape[-1]))
    groups = (mixed.shape[1] - heads) // 2
    query, key, value = mixed.split((heads, groups, groups), dim=1)
    return turn(query, cos, sin), turn(key, cos, sin), value.contiguous()


def keys_and_values(
    hidden: Tensor, projected: Tensor | None, cos: Tensor, sin: Tensor, norm: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Keys and values alone: weight [2G Dh, D], projected [n, 2G Dh] -> two [n, G, Dh]."""
    mixed = _mixed(hidden, projected, norm, weight, eps)
    key, value = mixed.unflatten(-1, (-1, 2 * cos.shape[-1])).chunk(2, dim=1)
    return turn(key, cos, sin), value.contiguous()


def queries(
    hidden: Tensor, projected: Tensor | None, cos: Tensor, sin: Tensor, norm: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """Queries alone: weight [H Dh, D], projected [n, H Dh] -> [n, H, Dh]."""
    mixed = _mixed(hidden, projected, norm, weight, eps)
    return turn(mixed.unflatten(-1, (-1, 2 * cos.shape[-1])), cos, sin)


def _mixed(hidden: Tensor, projected: Tensor | None, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    of_hidden = linear(rms_norm(hidden, hidden.shape[-1:], norm, eps), weight)
    return of_hidden if projected is None else of_hidden + projected


def attention_output(attended: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """attended [n, H, Dh], hidden [n, D] (the residual), weight [D, H Dh] -> [n, D]."""
    return hidden + linear(attended.flatten(1), weight)


def mlp(hidden: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
    """hidden [n, D] plus its SwiGLU; gate, up [I, D], down [D, I] -> [n, D]."""
    normed = rms_norm(hidden, hidden.shape[-1:], norm, eps)
    return hidden + linear(silu(linear(normed, gate)) * linear(normed, up), down)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The five functions above, plain or compiled."""

    attention_inputs: Callable[..., tuple[Tensor, Tensor, Tensor]] = attention_inputs
    keys_and_values: Callable[..., tuple[Tensor, Tensor]] = keys_and_values
    queries: Callable[..., Tensor] = queries
    attention_output: Callable[..., Tensor] = attention_output
    mlp: Callable[..., Tensor] = mlp


# The pieces in the order of Pieces, and how many of their first arguments have rows.
_NUM_ROWWISE: dict[Callable[..., Any], int] = {
    attention_inputs: 4,
    keys_and_values: 4,
    queries: 4,
    attention_output: 2,
    mlp: 1,
}


@functools.cache
def compiled_pieces(backend: Any = "inductor") -> Pieces:
    """The pieces through torch.compile: one graph for all numbers of rows, every other size a constant; a graph break
    is an error."""
    # Dynamo looks at the .grad of every tensor it is given, and torch warns of that where the tensor is no leaf.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor", category=UserWarning)
    return Pieces(*(_compiled(piece, backend) for piece in _NUM_ROWWISE))


def _compiled(piece: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    compiled = torch.compile(piece, fullgraph=True, backend=backend)
    num_rowwise = _NUM_ROWWISE[piece]

    def call(*arguments: Any) -> Any:
        for rows in arguments[:num_rowwise]:
            if rows is None:
                continue
            # Not dynamic=True: that would leave the widths symbolic too, and reductions slow.
            torch._dynamo.maybe_mark_dynamic(rows, 0)
        return compiled(*arguments)

    return call


@dataclass(frozen=True, slots=True)
class Memory:
    """What is kept for the backward. checkpointing: "none", "mlp" or "step"; mlp_chunk_rows: rows of the MLP at once,
    all when None (chunks bound what the MLP needs beside its inputs when it is computed again)."""

    checkpointing: str = "none"
    mlp_chunk_rows: int | None = None


class Layer:
    """One forward's view of one of the draft's layers: its projections fused into one, its pieces plain or compiled.

    number: 0 is the layer that reads tokens. Make one a batch: the fused weights are part of that batch's graph.
    """

    def __init__(self, draft: Eagle3Draft, number: int, *, pieces: Pieces, memory: Memory) -> None:
        config = draft.config
        self._draft, self._pieces, self._memory = draft, pieces, memory
        self._weights = draft.decoder_layers[number]
        self._eps, self._heads = config.rms_norm_eps, config.num_heads
        self.query_columns = config.num_heads * config.head_dim  # of the fused projection, the first ones
        attention = self._weights.self_attn
        fused = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
        self._embed_weight: Tensor | None = None
        self._hidden_weight = fused
        if number == 0:
            self._embed_weight, self._hidden_weight = fused.split(config.hidden_size, dim=1)

    def project_tokens(self, token_ids: Tensor, *, keys_only: bool = False) -> Tensor:
        """W_e norm(embedding), of the first layer: int64 [n] -> [n, (H + 2G) Dh], with keys_only [n, 2G Dh]."""
        assert self._embed_weight is not None, "only the first layer reads tokens"
        embeds = self._draft.embed(token_ids)
        normed = rms_norm(embeds, embeds.shape[-1:], self._weights.input_layernorm.weight, self._eps)
        return linear(normed, self._embed_weight[self.query_columns :] if keys_only else self._embed_weight)

    def keys_and_values(
        self, hidden: Tensor, projected: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values without queries: hidden [n, D], projected [n, 2G Dh] -> two [n, G, Dh]."""
        weight = self._hidden_weight[self.query_columns :]
        return self._pieces.keys_and_values(hidden, projected, cos, sin, self._norm, weight, self._eps)

    def queries(self, hidden: Tensor, projected: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries without keys and values: hidden [n, D], projected [n, H Dh] -> [n, H, Dh]."""
        weight = self._hidden_weight[: self.query_columns]
        return self._pieces.queries(hidden, projected, cos, sin, self._norm, weight, self._eps)

    def attention_inputs(
        self, hidden: Tensor, projected: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [n, H, Dh], k and v [n, G, Dh] of a step."""
        return self._pieces.attention_inputs(
            hidden, projected, cos, sin, self._norm, self._hidden_weight, self._heads, self._eps
        )

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Output projection and MLP, as `Eagle3Draft.finish`: [n, H, Dh], [n, D] -> [n, D]."""
        layer = self._weights
        hidden = self._pieces.attention_output(attended, hidden, layer.self_attn.o_proj.weight)
        weights = (
            layer.post_attention_layernorm.weight,
            layer.mlp.gate_proj.weight,
            layer.mlp.up_proj.weight,
            layer.mlp.down_proj.weight,
        )
        rows = self._memory.mlp_chunk_rows or hidden.shape[0]
        chunks = [hidden] if hidden.shape[0] <= rows else hidden.split(rows)
        again = self._memory.checkpointing == "mlp"
        outputs = [
            checkpointed(self._pieces.mlp, chunk, *weights, self._eps) if again else
            self._pieces.mlp(chunk, *weights, self._eps)
            for chunk in chunks
        ]  # fmt: skip
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @property
    def _norm(self) -> Tensor:
        return self._weights.hidden_norm.weight


def checkpointed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), computed again in the backward instead of keeping what it saved. It draws no random
    numbers, so no generator state is kept."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


# --- rows taken K times ------------------------------------------------------------------------------------------
# Each step takes rows of the projected tokens. Plain indexing would give, in the backward, K gradients of the whole
# tensor to be summed in its own dtype. Here one float32 sum is passed from the last step to the first:
#
#     handle -> take(step 0) -> handle -> take(step 1) -> ... -> handle          (a float32 tensor without storage)
#               |                         |
#               rows of step 0            rows of step 1
#
# The handle's gradient is that sum, so the order of the backward is autograd's own business.


class _OpenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor) -> Tensor:
        ctx.dtype = source.dtype
        wide = torch.promote_types(source.dtype, torch.float32)
        return source.new_zeros(1, 1, dtype=wide).expand(source.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, source: Tensor, index: Tensor | slice, columns: int) -> tuple[Tensor, Tensor]:
        ctx.index, ctx.shape, ctx.dtype, ctx.columns = index, source.shape, handle.dtype, columns
        ctx.set_materialize_grads(False)
        rows = source[index] if isinstance(index, slice) else source.index_select(0, index)
        return handle.view_as(handle), rows[:, :columns]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_handle: Tensor | None, of_rows: Tensor | None) -> tuple[Any, ...]:
        if of_rows is None:
            return of_handle, None, None, None
        if of_handle is None:
            of_handle = of_rows.new_zeros(ctx.shape, dtype=ctx.dtype)
        place = of_handle[:, : ctx.columns]
        if isinstance(ctx.index, slice):
            place[ctx.index] += of_rows
        else:
            # Rows that are taken twice are a document's last ones, which never count: their gradients are zero.
            place.index_add_(0, ctx.index, of_rows.to(ctx.dtype))
        return of_handle, None, None, None


class SharedRows:
    """Rows of one tensor, taken step after step; see the picture above. source [n, m]."""

    def __init__(self, source: Tensor) -> None:
        self._source = source.detach()
        self.handle: Tensor = _OpenRows.apply(source)

    def take(self, handle: Tensor, index: Tensor | slice, columns: int | None = None) -> tuple[Tensor, Tensor]:
        """(the next handle, rows [len(index), columns]); columns: only the first ones."""
        taken: tuple[Tensor, Tensor] = _TakeRows.apply(handle, self._source, index, columns or self._source.shape[1])
        return taken


def step_rows(
    shifted: Tensor, rows: Tensor | None, document_lengths: Sequence[int], *, at_first: Tensor | None = None
) -> tuple[Tensor, list[Tensor | slice]]:
    """The tokens that the steps read, and where in them each step's rows lie.

    shifted int64 [K, T] on the host (Alignment); rows int64 [A], None for all T. at_first: the rows that step 0
    reads for, if they are others. Returns token rows int64 [n], and K indices of A (or T) rows into them: slices for
    one document whole (nothing is copied), else int64.
    """
    ttt_steps, num_tokens = shifted.shape
    if rows is not None:
        reads = [shifted[0, rows if at_first is None else at_first], *shifted[1:, rows]]
        is_read = torch.zeros(num_tokens, dtype=torch.bool)
        is_read[torch.cat(reads)] = True
        number = is_read.cumsum(0) - 1
        return is_read.nonzero().flatten(), [number[read] for read in reads]
    if len(document_lengths) > 1:
        return torch.arange(num_tokens), list(shifted)
    # The last token K times more, for the rows whose token would lie past the end.
    tokens = torch.arange(num_tokens + ttt_steps).clamp(max=num_tokens - 1)
    return tokens, [slice(1 + step, 1 + step + num_tokens) for step in range(ttt_steps)]
