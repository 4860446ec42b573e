"""GPU memory of training a draft, predicted: every tensor that the trainer keeps, by what it is for.

The account follows the code line by line (draft/layer.py, draft/ttt.py, the chunks of kernels' linear loss, optim.py),
so it holds for shapes that nobody has measured; the price is that whoever changes what is kept for the backward changes
it here, too. `eyas bench plan` holds it against the allocator's peak on a GPU.

The peak lies at one of three places, and the largest counts:

    loss       all that the forward kept, the head's float32 gradient, and the buffers of one chunk of rows
    backward   all that the forward kept, the head's gradient, and what one MLP (or, checkpointed, one TTT step) needs
    update     no activations, a float32 gradient of every parameter

Letters: T tokens of a pack, A active rows, R target rows, n rows that count, summed over K steps; D hidden size, I MLP
width, Vd draft vocabulary, V the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

GIB = 2**30
# cuBLAS keeps a workspace of 32 MiB for each thread that multiplies: the forward's and the backward's.
_WORKSPACES = 2 * 32 * 2**20
_FLOAT32 = 4


class Shape(Protocol):
    """The fields of a DraftConfig that decide memory."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def target_vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PackRows:
    """What of one pack decides its memory."""

    tokens: int
    """T."""
    active: int
    """A: rows that count at one TTT step at least."""
    targets: int
    """R: rows that are soft targets."""
    counted: int
    """n: rows that count, summed over the TTT steps."""
    documents: int = 1
    """Documents in the pack."""

    def __add__(self, other: PackRows) -> PackRows:
        return PackRows(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Choices:
    """The train settings that decide memory, "auto" resolved."""

    ttt_steps: int = 7
    """K."""
    attention: str = "fused"
    """fused, flex or eager."""
    loss: str = "linear"
    """linear, triton or torch."""
    checkpointing: str = "none"
    """none, mlp or step."""
    mlp_chunk_rows: int | None = None
    """Rows of the MLP at once; None for all."""
    compiled: bool = True
    """Whether the layer's pieces are compiled."""
    optimizer: str = "adamw"
    """adamw or muon."""
    grad_accumulation: int = 1
    """Packs an optimizer step."""
    itemsize: int = 2
    """Bytes of an element of the draft's type."""
    shards: int = 1
    """Ranks that masters and moments are divided over (train.sharding=fsdp)."""


@dataclass(frozen=True, slots=True)
class TargetSize:
    """What an online run's target needs beside the draft."""

    weights: int
    """Bytes of its weights."""
    row: int
    """Bytes a token of the widest moment of its forward."""
    vocab_size: int
    """V: its logits are made 512 rows at once."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the GPU at the peak of a step, by what they are for; they sum to `peak`."""

    draft: int
    """The draft's weights in its own type, and its vocabulary maps."""
    optimizer: int
    """Masters and moments, float32; with gradient accumulation, the gradients between packs."""
    target_ends: int
    """The target's embedding and its head's rows of the draft vocabulary."""
    target: int
    """Online: the target's weights, and what its forward needs beside them."""
    states: int
    """Hidden states of the pack, and of the one made ahead."""
    activations: int
    """What the forward keeps for the backward."""
    step: int
    """At the peak, beyond all that: the loss's buffers, a step computed again, or the gradients."""
    peak_at: str
    """loss, backward or update."""

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return sum(value for name in PARTS if isinstance(value := getattr(self, name), int))


PARTS = tuple(field.name for field in fields(Memory) if field.name != "peak_at")


def num_parameters(shape: Shape) -> int:
    """Trainable parameters of a draft, norms included."""
    return (
        _inner_matrices(shape) + shape.vocab_size * shape.hidden_size + shape.hidden_size * (2 + 2 * shape.num_layers)
    )


def _inner_matrices(shape: Shape) -> int:
    size, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    a_layer = size * (queries + 2 * keys) + queries * size + 3 * size * shape.intermediate_size
    # The first layer reads the embedding, too.
    return 3 * size * size + size * (queries + 2 * keys) + shape.num_layers * a_layer


def step_memory(
    shape: Shape,
    pack: PackRows,
    choices: Choices,
    *,
    top_k: int | None = None,
    stored: int = 0,
    ahead: int = 1,
    target: TargetSize | None = None,
) -> Memory:
    """The peak of one optimizer step on packs like this one, from the second step on (the first has no moments yet).

    top_k: tokens of a soft target, None for last hidden states. stored: bytes of the pack's codes on the device, of a
    run that reads a store. ahead: packs of states that are there besides the one in use. target: of an online run.
    """
    size, item = shape.hidden_size, choices.itemsize
    parameters = num_parameters(shape)
    moments = 2 * parameters - (_inner_matrices(shape) if choices.optimizer == "muon" else 0)
    accumulated = parameters if choices.grad_accumulation > 1 else 0
    ends = (shape.target_vocab_size + shape.vocab_size) * size * item
    of_target = 0 if target is None else target.weights + _target_forward(target, pack, size)
    kept = _kept(shape, pack, choices)
    at = {
        "loss": kept + _loss(shape, pack, choices, top_k=top_k),
        "backward": kept + max(_mlp_backward(shape, pack, choices), _attention_backward(shape, pack, choices)),
        "update": _FLOAT32 * (parameters - accumulated),
    }
    where = max(at, key=at.__getitem__)
    return Memory(
        draft=parameters * item + 8 * shape.vocab_size + 9 * shape.target_vocab_size,
        optimizer=_FLOAT32 * (parameters + moments + accumulated) // choices.shards,
        target_ends=ends,
        target=of_target,
        states=pack_bytes(size, pack, top_k=top_k) * (1 if stored else 1 + ahead) + stored * (1 + ahead),
        activations=kept if where != "update" else 0,
        step=at[where] - (kept if where != "update" else 0) + _WORKSPACES,
        peak_at=where,
    )


def pack_bytes(hidden_size: int, pack: PackRows, *, top_k: int | None = None) -> int:
    """Bytes of one pack's batch on the device: bfloat16 states, token ids, what is known of the target rows."""
    soft_target = 2 * hidden_size if top_k is None else (4 + 4) * top_k
    return pack.tokens * (2 * 3 * hidden_size + 8) + pack.targets * (soft_target + 8)


def _kept(shape: Shape, pack: PackRows, choices: Choices) -> int:
    """What the forward leaves for the backward."""
    size, item, active, steps = shape.hidden_size, choices.itemsize, pack.active, choices.ttt_steps
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    checkpointed, some = choices.checkpointing == "step", active < pack.tokens
    fused = size * (queries + 2 * keys) * (1 + shape.num_layers) * item
    a_token = item * size  # fused from the auxiliary states
    # Of the tokens that steps read, the embedding and its norm, and as long as something may run again, their
    # projection.
    a_row = item * (2 * size + (queries + 2 * keys if checkpointed else 0))
    if some:
        # Every token has a step-0 key and value, made apart from the active rows' queries.
        a_token += item * (3 * size + 2 * keys) + 4 * shape.head_dim
        a_row += item * (size - 2 * keys)
    a_step = item * size  # the head's input
    if checkpointed:
        a_step += shape.num_layers * item * (size + 2 * keys)
    else:
        a_step += shape.num_layers * (_attention_row(shape, choices) + item * size)
        if choices.checkpointing == "none":
            a_step += shape.num_layers * _mlp_row(shape, choices)
    # The row's place, its target row, step and weight, and its results.
    a_counted = 8 * 4 + 4 + 9
    rows = a_token * pack.tokens + (a_row + steps * a_step) * active + a_counted * pack.counted
    # The layers below the last run step 0 on all rows.
    below = item * (size + 2 * keys) if checkpointed else _attention_row(shape, choices) + item * size
    if choices.checkpointing == "none":
        below += _mlp_row(shape, choices)
    return fused + rows + (shape.num_layers - 1) * below * (pack.tokens - active)


def _attention_row(shape: Shape, choices: Choices) -> int:
    """Bytes that attention of one layer keeps of a row and TTT step, its output's residual included."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    columns = 2 * queries + 2 * keys + 2 * shape.hidden_size  # q, out; k, v; the norm and the residual
    if choices.attention == "flex":
        columns += queries  # the base block's own output
    if not choices.compiled:
        columns += queries + 2 * keys  # before RoPE
    narrow = 4 * shape.num_heads + 4 * shape.head_dim + 4  # log-sum-exp; cos, sin; the norm's scale
    return choices.itemsize * columns + narrow


def _mlp_row(shape: Shape, choices: Choices) -> int:
    """Bytes that one MLP keeps of a row: its norm, gate, up and their product (uncompiled, silu(gate) as well)."""
    wide = 3 if choices.compiled else 4
    return choices.itemsize * (shape.hidden_size + wide * shape.intermediate_size) + 8


def _loss(shape: Shape, pack: PackRows, choices: Choices, *, top_k: int | None) -> int:
    """What the loss needs beyond what the forward kept."""
    from kernels.linear_soft_target_chunks import default_chunk_rows

    size, item, columns, steps = shape.hidden_size, choices.itemsize, shape.vocab_size, choices.ttt_steps
    soft = item if top_k is None else _FLOAT32
    eager = _eager_scores(shape, pack, choices)
    if choices.loss == "linear":
        rows = default_chunk_rows(max(1, pack.targets), steps, columns, size, item, soft)
        rows = min(rows, pack.targets)
        product = min(rows * steps, pack.counted)
        return product * (columns + size) * item + rows * (columns * soft + size * item) + _head_gradient(shape) + eager
    # Logits of every step, over which their gradient is written, and the target's; hidden rows taken for each product.
    logits = pack.counted * (columns + size) * item + pack.targets * columns * item
    if choices.loss == "torch":
        logits += pack.counted * columns * _FLOAT32 + 3 * pack.active * columns * _FLOAT32
    return logits + eager


def _head_gradient(shape: Shape) -> int:
    return _FLOAT32 * shape.vocab_size * shape.hidden_size


def _mlp_backward(shape: Shape, pack: PackRows, choices: Choices) -> int:
    """What the backward needs beyond what the forward kept, in the last TTT step's MLP."""
    size, item, active, layers = shape.hidden_size, choices.itemsize, pack.active, shape.num_layers
    chunk = min(choices.mlp_chunk_rows or active, active)
    product = item * shape.intermediate_size
    if choices.checkpointing == "step":
        # The step again, its output too, and the gradients of the output and of the product.
        again = _attention_row(shape, choices) + _mlp_row(shape, choices)
        needed = (layers * again + (layers + 1) * item * size) * active + product * chunk
    elif choices.checkpointing == "mlp":
        needed = (_mlp_row(shape, choices) + product // 2) * chunk
    else:
        needed = product // 2 * chunk  # the product's gradient comes while the product goes
    return needed + item * _inner_matrices(shape) // 2 + _after_loss(shape, pack, choices)


def _attention_backward(shape: Shape, pack: PackRows, choices: Choices) -> int:
    """The same in the attention of the step before, where all weights have gradients, and the keys and values of every
    earlier step have one and get another."""
    item, active, steps = choices.itemsize, pack.active, choices.ttt_steps
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    last = item * shape.hidden_size * (1 + shape.num_layers)
    last += shape.num_layers * (2 * item * keys if choices.checkpointing == "step" else _attention_row(shape, choices))
    if choices.checkpointing == "none":
        last += shape.num_layers * _mlp_row(shape, choices)
    a_row = 2 * item * queries + 4 * item * keys * max(0, steps - 2) + _FLOAT32 * (queries + 2 * keys) - last
    if choices.checkpointing == "step":
        a_row += _attention_row(shape, choices)
    of_weights = item * _inner_matrices(shape)
    return a_row * active + 4 * item * keys * pack.tokens + of_weights + _after_loss(shape, pack, choices)


def _after_loss(shape: Shape, pack: PackRows, choices: Choices) -> int:
    """What the loss leaves for the backward: the head's gradient, and without the linear loss the logits'."""
    logits = 0
    if choices.loss != "linear":
        logits = pack.counted * (shape.vocab_size + shape.hidden_size) * choices.itemsize
    return logits + _head_gradient(shape) + _eager_scores(shape, pack, choices)


def _eager_scores(shape: Shape, pack: PackRows, choices: Choices) -> int:
    """The dense reference keeps scores and probabilities of every pair of rows, all steps."""
    if choices.attention != "eager":
        return 0
    steps = 1 if choices.checkpointing == "step" else choices.ttt_steps
    return 8 * shape.num_heads * pack.active * pack.tokens * steps


def _target_forward(target: TargetSize, pack: PackRows, hidden_size: int) -> int:
    """The widest moment of the target's forward on a pack: a layer, a chunk of logits, or the states put together."""
    from tasks.trainer.target import HEAD_CHUNK_ROWS

    collected = 2 * 3 * hidden_size * pack.tokens
    layer = target.row * pack.tokens + collected
    logits = 2 * collected + min(HEAD_CHUNK_ROWS, pack.targets) * target.vocab_size * (2 + _FLOAT32)
    return max(layer, logits)
