"""From what the head reads at each TTT step to losses and metrics: one call for all steps, or logits step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.linear_soft_target_loss import HiddenTargets, TopKTargets, linear_soft_target_loss
from kernels.soft_target_loss import soft_target_loss
from tasks.trainer.draft.alignment import moved
from tasks.trainer.draft.eagle3 import Eagle3Draft

if TYPE_CHECKING:
    from tasks.trainer.draft.ttt import Computation, Objective
    from tasks.trainer.train.batches import Batch


def targets_of(batch: Batch, head: Tensor, draft_ids: Tensor) -> HiddenTargets | TopKTargets:
    """The soft targets as the loss takes them: stored tokens as draft-vocabulary indices."""
    if batch.last_hidden is not None:
        return HiddenTargets(last_hidden=batch.last_hidden, head=head)
    assert batch.top_k is not None
    return TopKTargets(index=draft_ids[batch.top_k.ids.long()], log_probability=batch.top_k.log_probabilities)


@dataclass(frozen=True, slots=True)
class Pairs:
    """What the losses of all K steps compare.

    hidden: K [A, D], what the head reads. rows, target_rows: K int64 [n_k] on the host, the rows that count and their
    rows of the targets. target_index int64 [M], target_lse fp32 [M]: of the targets. row_weight [K].
    """

    hidden: list[Tensor]
    targets: HiddenTargets | TopKTargets
    rows: Sequence[Tensor]
    target_rows: Sequence[Tensor]
    target_index: Tensor
    target_lse: Tensor
    row_weight: Sequence[float]


Losses = tuple[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]]
"""The loss, a scalar; of each step the sum of its rows' losses, [K]; correct [n_k] and alpha [n_k] of its rows."""


def compute_losses(
    draft: Eagle3Draft, pairs: Pairs, computation: Computation, objective: Objective, draft_head: Tensor | None
) -> Losses:
    """The losses and metrics of all steps. draft_head: see `ttt.unroll`."""
    if computation.loss == "linear":
        return _linear(draft, pairs, computation, objective, draft_head)
    assert draft_head is None, "only the linear loss takes the head's master"
    return _from_logits(draft, pairs, computation, objective)


def _linear(
    draft: Eagle3Draft, pairs: Pairs, computation: Computation, objective: Objective, draft_head: Tensor | None
) -> Losses:
    weight = draft.lm_head.weight
    result = linear_soft_target_loss(
        pairs.hidden,
        weight if draft_head is None else draft_head,
        pairs.targets,
        head_compute=None if draft_head is None else weight.detach(),
        rows=pairs.rows,  # on the host, where the loss plans its products
        target_rows=pairs.target_rows,
        target_index=pairs.target_index,
        target_lse=pairs.target_lse,
        row_weight=pairs.row_weight,
        objective=objective.name,
        mixing=objective.mixing,
        lk_decay=objective.lk_decay,
        temperature=objective.temperature,
        # The norm's output: nobody else reads it, unless it is what the next step reads.
        overwrite_hidden=torch.is_grad_enabled() and not draft.config.norm_output,
        backend=computation.loss_backend,
    )
    return result.loss, result.loss_sums, result.correct, result.alpha


def _from_logits(draft: Eagle3Draft, pairs: Pairs, computation: Computation, objective: Objective) -> Losses:
    targets, device = pairs.targets, pairs.target_lse.device
    if isinstance(targets, TopKTargets):
        raise ValueError(f"train.loss={computation.loss} reads last hidden states, not top-k tokens; use linear")
    # The soft targets of all steps are the same rows shifted, so they are projected once.
    with torch.no_grad():
        target_logits = targets.last_hidden.to(targets.head.dtype) @ targets.head.T
    total = torch.zeros((), dtype=torch.float32, device=device)
    sums, correct, alpha = [], [], []
    for step, of_step in enumerate(pairs.hidden):
        result = soft_target_loss(
            draft.lm_head(of_step[moved(pairs.rows[step], device)]),
            target_logits,
            target_row=moved(pairs.target_rows[step], device),
            target_index=pairs.target_index,
            target_lse=pairs.target_lse,
            weight=pairs.row_weight[step],
            objective=objective.name,
            mixing=None if objective.mixing is None else objective.mixing[step],
            lk_decay=objective.lk_decay,
            temperature=objective.temperature,
            backend=computation.loss,
        )
        total = total + result.loss
        sums.append(result.loss_sum)
        correct.append(result.correct)
        alpha.append(result.alpha)
    return total, torch.stack(sums), correct, alpha
