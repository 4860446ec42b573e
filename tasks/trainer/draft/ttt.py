"""Training-time test: K draft steps on every row of a packed batch, aligned by row.

One document, tokens x[0..T-1]; row p at TTT step k:

    token input    x[p+1+k]  (its frozen embedding; teacher forced)
    hidden input   k = 0: fc(aux_hidden[p])        k > 0: the layer output of step k-1 at the same row p
    position       p + k, for query and key
    attends to     step-0 keys of rows 0..p, and its own row's keys of steps 1..k
    soft target    softmax(head(last_hidden[p+1+k])) over the draft vocabulary
    predicts       x[p+2+k]
    counts when    x[p+1] .. x[p+2+k] exist, lie in the same document and are all supervised

                 row p=0    p=1    p=2    p=3          (tokens a b c d e f)
    step 0 reads   b         c      d      e     predicts  c  d  e  f
    step 1 reads   c         d      e      .               d  e  f  .

The base block stays `query row >= key row` at every step. The frequently quoted mask that shrinks by one diagonal per
step belongs to a column-aligned layout; in this layout it is wrong by half the logits' scale at step 2. The proof is
the drafting equivalence test: the unroll equals drafting one token after another with a key/value cache.

Source: EAGLE-3 (arXiv:2503.01840), "training-time test".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.soft_target_loss import soft_target_loss
from kernels.ttt_attention import ttt_attention
from tasks.trainer.draft.eagle3 import Eagle3Draft

if TYPE_CHECKING:
    from tasks.trainer.train.batches import Batch


@dataclass(frozen=True, slots=True)
class Alignment:
    """Where each row of a packed batch reads at each TTT step.

    positions int64 [T]: row within its document. shifted int64 [K, T]: row of x[p+1+k], which is the token input and
    the row of the soft target; clamped to the document's last row where it would leave it (such rows never count).
    counts bool [K, T]: the rows that count at each step.
    """

    positions: Tensor
    shifted: Tensor
    counts: Tensor


def align(loss_mask: Tensor, document_lengths: Sequence[int], ttt_steps: int) -> Alignment:
    """The alignment of a packed batch. loss_mask bool [T]; the lengths sum to T. Works on the mask's device."""
    device = loss_mask.device
    lengths = torch.tensor(document_lengths, dtype=torch.int64)
    ends = lengths.cumsum(0)
    assert int(lengths.sum()) == loss_mask.shape[0], "document lengths must sum to the number of rows"
    last_row = torch.repeat_interleave(ends - 1, lengths).to(device)
    start = torch.repeat_interleave(ends - lengths, lengths).to(device)
    rows = torch.arange(loss_mask.shape[0], device=device)
    # First row at or after p that is not supervised or lies past the document: the supervised run from p ends there.
    breaks = torch.where(loss_mask, last_row + 1, rows)
    run_end = torch.minimum(breaks.flip(0).cummin(0).values.flip(0), last_row + 1)
    steps = torch.arange(ttt_steps, device=device)[:, None]
    next_row = torch.minimum(rows + 1, last_row)
    run_after = torch.where(rows < last_row, run_end[next_row] - (rows + 1), 0)
    return Alignment(
        positions=rows - start,
        shifted=torch.minimum(rows + 1 + steps, last_row),
        counts=run_after >= steps + 2,
    )


def count_rows(loss_mask: Tensor, document_lengths: Sequence[int], ttt_steps: int) -> Tensor:
    """N_k, int64 [K]: rows that count at each step. Known from masks alone, before any forward."""
    return align(loss_mask, document_lengths, ttt_steps).counts.sum(1)


def unroll_hidden(
    draft: Eagle3Draft,
    *,
    aux_hidden: Tensor,
    token_ids: Tensor,
    document_lengths: Sequence[int],
    alignment: Alignment,
    attention: str,
) -> Iterator[Tensor]:
    """The layer output of every row at each TTT step, K tensors [T, D].

    aux_hidden [T, 3D] in the draft's dtype; token_ids int64 [T]; attention: a backend of kernels.ttt_attention.
    """
    hidden = draft.fuse(aux_hidden)
    base_key: Tensor | None = None
    base_value: Tensor | None = None
    step_keys: list[Tensor] = []
    step_values: list[Tensor] = []
    for step, shifted in enumerate(alignment.shifted):
        query, key, value = draft.qkv(draft.embed(token_ids[shifted]), hidden, alignment.positions + step)
        if base_key is None or base_value is None:
            base_key, base_value = key, value
        else:
            step_keys.append(key)
            step_values.append(value)
        attended = ttt_attention(
            query, base_key, base_value, step_keys, step_values, document_lengths=document_lengths, backend=attention
        )
        hidden = draft.finish(attended, hidden)
        yield hidden


@dataclass(frozen=True, slots=True)
class Unrolled:
    """What one packed batch gives.

    loss: scalar fp32, sum_k row_weight[k] * (sum of the row losses of step k); differentiable.
    rows, loss_sums, correct_sums, alpha_sums: float64 [K], sums over the rows that count at each step.
    tau_sum, tau_rows: sum over the rows valid at all K steps of sum_k prod_{j<=k} correct_j, and their number.
    """

    loss: Tensor
    rows: Tensor
    loss_sums: Tensor
    correct_sums: Tensor
    alpha_sums: Tensor
    tau_sum: float
    tau_rows: int


def unroll(
    draft: Eagle3Draft,
    batch: Batch,
    *,
    ttt_steps: int,
    row_weight: Sequence[float],
    head: Tensor,
    draft_ids: Tensor,
    attention: str,
    loss_backend: str,
) -> Unrolled:
    """Run K TTT steps on a batch and sum the weighted losses.

    row_weight [K]: decay^k / K / N_k, with N_k summed over everything that one optimizer step sees: it is known
    before the forward, so a loss kernel may compute its gradient there. head [Vd, D]: the target's head rows of the
    draft vocabulary. draft_ids int64 [V]: `Eagle3Draft.draft_ids()`.
    """
    alignment = align(batch.loss_mask, batch.document_lengths, ttt_steps)
    dtype = draft.fc.weight.dtype
    # The soft targets of all steps are the same rows shifted, so they are projected once.
    needed = torch.zeros_like(batch.loss_mask)
    for shifted, counts in zip(alignment.shifted, alignment.counts, strict=True):
        needed[shifted[counts]] = True
    place = needed.cumsum(0) - 1
    with torch.no_grad():
        target_logits = batch.last_hidden[needed].to(head.dtype) @ head.T
    target_index = draft_ids[batch.target_argmax.long()]

    total = torch.zeros((), dtype=torch.float32, device=batch.token_ids.device)
    sums = torch.zeros(4, ttt_steps, dtype=torch.float64, device=batch.token_ids.device)
    run = torch.ones_like(batch.loss_mask)
    everywhere = alignment.counts[-1]
    tau_sum = torch.zeros((), dtype=torch.float64, device=batch.token_ids.device)
    outputs = unroll_hidden(
        draft,
        aux_hidden=batch.aux_hidden.to(dtype),
        token_ids=batch.token_ids,
        document_lengths=batch.document_lengths,
        alignment=alignment,
        attention=attention,
    )
    for step, hidden in enumerate(outputs):
        rows = alignment.counts[step].nonzero(as_tuple=True)[0]
        target_rows = alignment.shifted[step][rows]
        result = soft_target_loss(
            draft.logits(hidden[rows]),
            target_logits[place[target_rows]],
            target_index=target_index[target_rows],
            target_lse=batch.target_lse[target_rows],
            weight=row_weight[step],
            backend=loss_backend,
        )
        total = total + result.loss
        correct = torch.zeros_like(run)
        correct[rows] = result.correct
        run = run & correct
        tau_sum += (run & everywhere).sum()
        sums[0, step] = rows.shape[0]
        if row_weight[step]:
            sums[1, step] = result.loss.detach().double() / row_weight[step]
        sums[2, step] = result.correct.sum()
        sums[3, step] = result.alpha.double().sum()
    return Unrolled(total, sums[0], sums[1], sums[2], sums[3], float(tau_sum), int(everywhere.sum()))
