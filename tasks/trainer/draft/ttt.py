"""Training-time test: K draft steps on every row of a packed batch, aligned by row.

One document, tokens x[0..T-1]; row p at TTT step k:

    token input    x[p+1+k]  (alignment.py)
    hidden input   k = 0: fc(aux_hidden[p])        k > 0: the output of step k-1 at the same row p
    position       p + k, for query and key
    attends to     step-0 keys of rows 0..p, and its own row's keys of steps 1..k

The base block stays `query row >= key row` at every step. The frequently quoted mask that shrinks by one diagonal per
step belongs to a column-aligned layout; in this layout it is wrong by half the logits' scale at step 2. The proof is
the drafting equivalence test: the unroll equals drafting one token after another with a key/value cache.

With several layers, each attends to its own keys by the same rule. Ranks that share a pack do so too, after step 0's
keys have been exchanged (context.py).

Only active rows are computed (alignment.py); the others give their step-0 key and value, and for that the layers below
the last run step 0 on all rows.

Source: EAGLE-3 (arXiv:2503.01840), "training-time test".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.ttt_attention import ttt_attention
from tasks.trainer.draft.alignment import Alignment, active_runs, align, moved
from tasks.trainer.draft.context import ContextShare, KeyExchange, indices, own_rows_only
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.layer import Layer, Memory, Pieces, SharedRows, checkpointed, step_rows
from tasks.trainer.draft.losses import Pairs, compute_losses, targets_of

if TYPE_CHECKING:
    from tasks.trainer.train.batches import Batch


@dataclass(frozen=True, slots=True)
class Objective:
    """What the rows' losses are: see kernels.linear_soft_target_loss.

    name: soft_cross_entropy, lk_alpha, lk_lambda or total_variation. mixing: lambda of each step, [K], or None for each
    row's own. lk_decay: eta in lambda = exp(-eta * alpha).
    """

    name: str = "soft_cross_entropy"
    temperature: float = 1.0
    lk_decay: float = 3.0
    mixing: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Computation:
    """How the unroll is computed; none of it changes what is computed.

    attention: a backend of kernels.ttt_attention. loss: "linear" (no logits are stored), or a backend of
    kernels.soft_target_loss, which takes logits. loss_backend: "triton" or "torch", for "linear". context_group: the
    ranks that share a pack, for batches that are a rank's share (draft/context.py).
    """

    attention: str
    loss: str
    loss_backend: str = "torch"
    pieces: Pieces = field(default_factory=Pieces)
    memory: Memory = field(default_factory=Memory)
    context_group: dist.ProcessGroup | None = None


def unroll_hidden(
    draft: Eagle3Draft,
    *,
    aux_hidden: Tensor,
    token_ids: Tensor,
    document_lengths: Sequence[int],
    alignment: Alignment,
    computation: Computation,
    runs: Sequence[tuple[int, int]] | None = None,
    share: ContextShare | None = None,
) -> Iterator[Tensor]:
    """What the head reads of the computed rows at each TTT step, K tensors [A, D].

    aux_hidden [T, 3D] in the draft's dtype; token_ids int64 [T]; alignment: on the host. runs: the row ranges to
    compute (active_runs), A rows in all; None for all T. share: of a rank that owns L rows: aux_hidden is then theirs
    alone, [L, 3D], and runs are among them.
    """
    steps = _Steps(draft, token_ids, document_lengths, alignment, computation, runs, share)
    hidden, handle = draft.fuse(aux_hidden), steps.handle
    known = steps.no_keys
    for number in range(alignment.shifted.shape[0]):
        if number == 0 and share is not None:
            output, handle, known = steps.first_of_share(hidden, handle)
        elif number == 0 and steps.some_rows:
            output, handle, known = steps.first_of_some(hidden, handle)
        else:
            output, handle, known = steps.run(number, hidden, handle, known)
        hidden, read_by_head = draft.outputs(output)
        yield read_by_head


_Known = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # a layer's keys and values so far
_Taken = tuple[Tensor, Tensor, list[_Known]]  # a step's output, the next handle (SharedRows), keys and values of layers


class _Steps:
    """The TTT steps of one batch through the draft's layers; shapes and arguments are unroll_hidden's."""

    def __init__(
        self,
        draft: Eagle3Draft,
        token_ids: Tensor,
        document_lengths: Sequence[int],
        alignment: Alignment,
        computation: Computation,
        runs: Sequence[tuple[int, int]] | None,
        share: ContextShare | None,
    ) -> None:
        self._draft, self._computation, self._document_lengths = draft, computation, document_lengths
        self._layers = [
            Layer(draft, number, pieces=computation.pieces, memory=computation.memory)
            for number in range(draft.config.num_layers)
        ]
        device = token_ids.device
        # First the rows whose keys step 0 makes, then the rows that are computed, as numbers of the pack's.
        first, rows = torch.arange(token_ids.shape[0]), None
        if share is not None:
            assert computation.context_group is not None, "a share of a pack needs the group that it is shared with"
            assert runs is not None
            self._exchange = KeyExchange(share, computation.context_group, device)
            self._first_runs, first = share.own, share.own_rows
        if runs is not None and (share is not None or sum(end - start for start, end in runs) < first.shape[0]):
            rows = indices(runs)
        self.some_rows = rows is not None
        self._runs = None if rows is None else runs
        self._all_positions = self._positions = moved(alignment.positions[first], device)
        if rows is not None:
            self._rows = moved(torch.searchsorted(first, rows), device)
            self._positions = self._all_positions[self._rows]
            self._tokens = token_ids[moved(alignment.shifted[0, first], device)]
        at_first = first if draft.config.num_layers > 1 else rows
        read, takes = step_rows(alignment.shifted, rows, document_lengths, at_first=at_first)
        self._shared = SharedRows(self._layers[0].project_tokens(token_ids[moved(read, device)]))
        self._takes = [index if isinstance(index, slice) else moved(index, device) for index in takes]
        self.handle = self._shared.handle
        self.no_keys: list[_Known] = [((), ())] * draft.config.num_layers

    def run(self, number: int, hidden: Tensor, handle: Tensor, known: list[_Known]) -> _Taken:
        """Step `number` of the computed rows through all layers. hidden [A, D]."""
        taken: _Taken = self._again(
            self._through, self._layers, number, hidden, handle, known, self._positions, self._runs
        )
        return taken

    def first_of_some(self, hidden: Tensor, handle: Tensor) -> _Taken:
        """Step 0 where not all rows are computed: all of them have keys. hidden [T, D] -> output [A, D]."""
        *below, last = self._layers
        known: list[_Known] = []
        if below:
            no_keys = self.no_keys[:-1]
            hidden, handle, known = self._again(
                self._through, below, 0, hidden, handle, no_keys, self._all_positions, None
            )
        projected = None if below else last.project_tokens(self._tokens, keys_only=True)
        key, value = last.keys_and_values(hidden, projected, *self._draft.rope.angles(self._all_positions))
        # index_select: the backward of hidden[rows] would sort the rows before adding them.
        hidden = hidden.index_select(0, self._rows)
        output, handle = self._again(
            self._finish_first, last, hidden, handle, ((key,), (value,)), self._positions, self._runs
        )
        return output, handle, [*known, ((key,), (value,))]

    def first_of_share(self, hidden: Tensor, handle: Tensor) -> _Taken:
        """Step 0 of a rank that owns some rows: each layer's keys and values are exchanged before anyone attends, and
        outside of what runs again in the backward. hidden [L, D] -> output [A, D]."""
        known: list[_Known] = []
        angles = self._draft.rope.angles(self._all_positions)
        for number, layer in enumerate(self._layers):
            projected = None if number else layer.project_tokens(self._tokens, keys_only=True)
            key, value = self._exchange.gather(*layer.keys_and_values(hidden, projected, *angles))
            known.append(((key,), (value,)))
            positions = self._all_positions
            runs: Sequence[tuple[int, int]] | None = self._first_runs
            if layer is self._layers[-1]:
                positions, runs = self._positions, self._runs
                if positions.shape[0] < hidden.shape[0]:
                    hidden = hidden.index_select(0, self._rows)
            hidden, handle = self._again(self._finish_first, layer, hidden, handle, known[-1], positions, runs)
        return hidden, handle, known

    def _again(self, function: Callable[..., Any], *arguments: Any) -> Any:
        run_again = self._computation.memory.checkpointing == "step"
        return checkpointed(function, *arguments) if run_again else function(*arguments)

    def _through(
        self,
        layers: Sequence[Layer],
        number: int,
        hidden: Tensor,
        handle: Tensor,
        known: Sequence[_Known],
        positions: Tensor,
        query_runs: Sequence[tuple[int, int]] | None,
    ) -> _Taken:
        """Step `number` through the first layers. known: of each of them; positions: of the rows of hidden, at step
        0; query_runs: where these rows lie, None for all."""
        cos, sin = self._draft.rope.angles(positions + number)
        projected: Tensor | None
        handle, projected = self._shared.take(handle, self._takes[number])
        after = []
        for layer, (keys, values) in zip(layers, known, strict=True):
            query, key, value = layer.attention_inputs(hidden, projected, cos, sin)
            after.append(((*keys, key), (*values, value)))
            hidden = layer.finish(self._attend(query, after[-1], query_runs), hidden)
            projected = None
        return hidden, handle, after

    def _finish_first(
        self,
        layer: Layer,
        hidden: Tensor,
        handle: Tensor,
        known: _Known,
        positions: Tensor,
        query_runs: Sequence[tuple[int, int]] | None,
    ) -> tuple[Tensor, Tensor]:
        """Step 0 of one layer, whose keys and values are known, for the rows of hidden."""
        projected = None
        if layer is self._layers[0]:
            handle, projected = self._shared.take(handle, self._takes[0], layer.query_columns)
        query = layer.queries(hidden, projected, *self._draft.rope.angles(positions))
        return layer.finish(self._attend(query, known, query_runs), hidden), handle

    def _attend(self, query: Tensor, known: _Known, query_runs: Sequence[tuple[int, int]] | None) -> Tensor:
        (base_key, *step_keys), (base_value, *step_values) = known
        return ttt_attention(
            query,
            base_key,
            base_value,
            step_keys,
            step_values,
            document_lengths=self._document_lengths,
            query_runs=query_runs,
            backend=self._computation.attention,
        )


@dataclass(frozen=True, slots=True)
class Unrolled:
    """What one packed batch gives.

    loss: scalar fp32, sum_k row_weight[k] * (sum of the row losses of step k); differentiable.
    rows, loss_sums, correct_sums, alpha_sums: float64 [K], sums over the rows that count at each step.
    tau_sum, tau_rows: sum over the rows valid at all K steps of sum_k prod_{j<=k} correct_j (an integer scalar), and
    their number. Tensors stay on the device: reading one here would keep the host from queueing the backward.
    """

    loss: Tensor
    rows: Tensor
    loss_sums: Tensor
    correct_sums: Tensor
    alpha_sums: Tensor
    tau_sum: Tensor
    tau_rows: int


def unroll(
    draft: Eagle3Draft,
    batch: Batch,
    *,
    ttt_steps: int,
    row_weight: Sequence[float],
    head: Tensor,
    draft_ids: Tensor,
    computation: Computation,
    objective: Objective | None = None,
    draft_head: Tensor | None = None,
) -> Unrolled:
    """Run K TTT steps on a batch and sum the weighted losses.

    row_weight [K]: decay^k / K / N_k, with N_k summed over everything that one optimizer step sees: it is known
    before the forward, so a loss kernel may compute its gradient there. head [Vd, D]: the target's head rows of the
    draft vocabulary. draft_ids int64 [V]: `Eagle3Draft.draft_ids()`. draft_head [Vd, D]: takes the head's gradient in
    place of draft.lm_head.weight, of which it is the float32 master (loss "linear" only): no rounding, no copy.
    """
    device = batch.token_ids.device
    objective = objective or Objective()
    alignment = align(batch.loss_mask, batch.document_lengths, ttt_steps)
    if batch.share is None:
        expected = alignment.counts[0].nonzero().flatten() + 1
        assert torch.equal(expected, batch.target_rows), "the batch's target rows are not those of its mask"
        runs = active_runs(alignment.counts, batch.document_lengths)
    else:
        alignment, runs = own_rows_only(alignment, batch.document_lengths, batch.share.own)
    rows, target_rows = _rows_of_steps(alignment, runs, batch.target_rows)
    target_index = draft_ids[batch.target_argmax.long()]
    hidden = list(
        unroll_hidden(
            draft,
            aux_hidden=batch.aux_hidden.to(draft.fc.weight.dtype),
            token_ids=batch.token_ids,
            document_lengths=batch.document_lengths,
            alignment=alignment,
            computation=computation,
            runs=runs,
            share=batch.share,
        )
    )
    pairs = Pairs(
        hidden, targets_of(batch, head, draft_ids), rows, target_rows, target_index, batch.target_lse, row_weight
    )
    total, loss_sums, correct, alpha = compute_losses(draft, pairs, computation, objective, draft_head)
    # Simulated tau: over the rows valid at all K steps, which are the last step's; their places among each step's rows.
    last = alignment.counts[-1].nonzero().flatten()
    first = torch.tensor([0, *(index.shape[0] for index in rows[:-1])]).cumsum(0)
    places = (alignment.counts.cumsum(1) - 1)[:, last] + first[:, None]
    tau_sum = torch.cat(list(correct))[moved(places, device)].to(torch.int32).cumprod(0).sum()
    sums = torch.stack(
        [
            loss_sums.double(),
            torch.stack([hits.sum() for hits in correct]).double(),
            torch.stack([overlap.double().sum() for overlap in alpha]),
        ]
    )
    num_rows = torch.tensor([index.shape[0] for index in rows], dtype=torch.float64)
    return Unrolled(total, num_rows, sums[0], sums[1], sums[2], tau_sum, rows[-1].shape[0])


def _rows_of_steps(
    alignment: Alignment, runs: Sequence[tuple[int, int]], target_rows: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The rows that count at each step, as numbers among the computed rows, and their soft targets, as numbers among
    the target rows, of which some may be nobody's. int64, ascending, on the host."""
    num_tokens = alignment.positions.shape[0]
    computed = torch.zeros(num_tokens, dtype=torch.bool)
    for start, end in runs:
        computed[start:end] = True
    number = computed.cumsum(0) - 1
    counting = [of_step.nonzero().flatten() for of_step in alignment.counts]
    target_number = torch.full((num_tokens,), -1)
    target_number[target_rows] = torch.arange(target_rows.shape[0])
    read = [target_number[shifted[index]] for shifted, index in zip(alignment.shifted, counting, strict=True)]
    assert bool((torch.cat(read) >= 0).all()), "the batch lacks target rows of its mask"
    return [number[index] for index in counting], read
