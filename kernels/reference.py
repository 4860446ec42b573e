"""The eager twins: plain torch in the dtype of the inputs, one line of code a line of formula.

They define what the fused kernels must compute. Run them in float64 for the truth, in the kernel's own dtype for
the error that a naive implementation makes. The price is memory: attention holds the dense [H, A, T + k] scores,
the loss holds several [N, Vd] tensors in float32.

Shapes: T tokens, A active rows, H query heads, G key/value heads, Dh head dim, N rows, Vd draft vocabulary, k TTT step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OBJECTIVES = ("soft_cross_entropy", "lk_alpha", "lk_lambda", "total_variation")

# alpha in -log(alpha), and the draft's mass on a tail, are raised to this: a row without any overlap costs 69, not inf.
PROBABILITY_FLOOR = 1e-30


@dataclass(frozen=True, slots=True)
class SoftTargetLoss:
    """What one TTT step's rows give."""

    loss: Tensor
    """Scalar, float32 (float64 for float64 logits): weight times the sum of the row losses; differentiable."""
    correct: Tensor
    """bool [N]: the draft's argmax is the target's; false where that lies outside the draft vocabulary."""
    alpha: Tensor
    """float32 (float64) [N]: sum(min(p, q)), p over the target's full vocabulary, q the draft's; no gradient."""
    loss_sum: Tensor
    """Scalar, in loss's dtype: the sum of the row losses, without the weight; no gradient."""


@dataclass(frozen=True, slots=True)
class HiddenTargets:
    """Soft targets as the target's last hidden states, projected when they are needed; no gradient."""

    last_hidden: Tensor
    """[M, D], after the target's final norm."""
    head: Tensor
    """[Vd, D]: the rows of the target's head that belong to the draft vocabulary."""


@dataclass(frozen=True, slots=True)
class TopKTargets:
    """Soft targets as the target's k most probable tokens.

    What is not stored, 1 - sum(exp(log_probability)), is one lumped class, the tail. The soft target of a row is
    its stored tokens inside the draft vocabulary and the tail, renormalised to sum 1; the draft's probability of the
    tail is its mass on the tokens not stored. alpha counts the stored tokens only: too low by the tail at most. A row
    that stores the whole draft vocabulary has no tail: what is left lies outside.
    """

    index: Tensor
    """int32 or int64 [M, k]: draft-vocabulary indices, each once a row; -1: outside the draft vocabulary."""
    log_probability: Tensor
    """float32 [M, k], over the target's full vocabulary."""


@dataclass(frozen=True, slots=True)
class LinearSoftTargetLoss:
    """What the rows of all K steps give; step k has n_k rows."""

    loss: Tensor
    """Scalar, float32 (float64 for float64 hidden states): sum over k of row_weight[k] * loss_sums[k]; differentiable
    once."""
    loss_sums: Tensor
    """float32 (float64) [K]: sums of the row losses, without weights."""
    correct: tuple[Tensor, ...]
    """K bool tensors [n_k]: the draft's argmax is the target's."""
    alpha: tuple[Tensor, ...]
    """K float32 (float64) tensors [n_k]: sum(min(p, q))."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums, softmaxes and log-sum-exps are carried in: float64 for float64, float32 below it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ttt_attention(
    query: Tensor,
    base_key: Tensor,
    base_value: Tensor,
    step_keys: Sequence[Tensor] = (),
    step_values: Sequence[Tensor] = (),
    *,
    document_lengths: Sequence[int],
    query_runs: Sequence[tuple[int, int]] | None = None,
    scale: float,
) -> Tensor:
    """Dense TTT attention; arguments and result as `kernels.ttt_attention.ttt_attention`.

    The scores of row p, for two documents of two tokens at step 2 (x: attended), all rows active:

        base keys    step 1    step 2
        x . . .      x . . .   x . . .
        x x . .      . x . .   . x . .
        . . x .      . . x .   . . x .
        . . x x      . . . x   . . . x

    The diagonal blocks are stored as one column a step.
    """
    num_tokens = base_key.shape[0]
    queries_per_key = query.shape[1] // base_key.shape[1]

    def by_head(rows: Tensor) -> Tensor:  # [.., G, Dh] -> [H, .., Dh]
        return rows.repeat_interleave(queries_per_key, dim=1).transpose(0, 1)

    q = query.transpose(0, 1)
    document = torch.repeat_interleave(
        torch.arange(len(document_lengths), device=query.device),
        torch.tensor(document_lengths, dtype=torch.int64, device=query.device),
    )
    column = torch.arange(num_tokens, device=query.device)
    row = column if query_runs is None else torch.cat([column[:0], *(column[start:end] for start, end in query_runs)])
    attended = (document[row][:, None] == document[None, :]) & (row[:, None] >= column[None, :])
    base_scores = (q @ by_head(base_key).transpose(1, 2) * scale).masked_fill(~attended, float("-inf"))
    step_scores = [(q * by_head(key)).sum(-1, keepdim=True) * scale for key in step_keys]
    probabilities = torch.cat([base_scores, *step_scores], dim=-1).softmax(dim=-1)
    attended_values = probabilities[..., :num_tokens] @ by_head(base_value)
    for step, value in enumerate(step_values):
        share = probabilities[..., num_tokens + step, None]
        attended_values = attended_values + share * by_head(value)
    return attended_values.transpose(0, 1).contiguous()


def soft_target_loss(
    logits: Tensor,
    target_logits: Tensor,
    *,
    target_index: Tensor,
    target_lse: Tensor,
    weight: float,
    target_row: Tensor | None = None,
    objective: str = "soft_cross_entropy",
    mixing: float | None = None,
    lk_decay: float = 3.0,
    temperature: float = 1.0,
) -> SoftTargetLoss:
    """Loss against the target's distribution; arguments and result as `kernels.soft_target_loss`.

    Row loss of soft_cross_entropy: -sum_j p_j log q_j, p = softmax(target_logits) and q = softmax(logits), both over
    the draft vocabulary. Its gradient is q * sum(p) - p.
    """
    dtype = accumulation_dtype(logits.dtype)
    if target_row is not None:
        target_logits, target_index, target_lse = (
            rows[target_row] for rows in (target_logits, target_index, target_lse)
        )
    p = (target_logits.detach().to(dtype) / temperature).softmax(dim=-1)
    log_q = (logits.to(dtype) / temperature).log_softmax(dim=-1)
    full_p = (target_logits.detach().to(dtype) - target_lse.to(dtype)[:, None]).exp()
    cross_entropy = -(p * log_q).sum(-1)
    if temperature != 1:
        log_q = logits.to(dtype).log_softmax(dim=-1)
    loss, correct, alpha = _rows(logits, log_q, cross_entropy, full_p, target_index, objective, mixing, lk_decay)
    total = loss.sum()
    return SoftTargetLoss(loss=weight * total, correct=correct, alpha=alpha, loss_sum=total.detach())


def linear_soft_target_loss(
    hidden: Sequence[Tensor],
    head: Tensor,
    targets: HiddenTargets | TopKTargets,
    *,
    rows: Sequence[Tensor],
    target_rows: Sequence[Tensor],
    target_index: Tensor,
    target_lse: Tensor,
    row_weight: Sequence[float],
    objective: str = "soft_cross_entropy",
    mixing: Sequence[float] | None = None,
    lk_decay: float = 3.0,
    temperature: float = 1.0,
) -> LinearSoftTargetLoss:
    """The loss of K steps from hidden states; arguments and result as `kernels.linear_soft_target_loss`.

    A step at a time, all of its logits at once, under autograd.
    """
    dtype = accumulation_dtype(hidden[0].dtype)
    sums, correct, alpha = [], [], []
    for step, (states, own, others) in enumerate(zip(hidden, rows, target_rows, strict=True)):
        logits = states[own] @ head.to(states.dtype).T
        log_q = (logits.to(dtype) / temperature).log_softmax(-1)
        if isinstance(targets, HiddenTargets):
            target_logits = (targets.last_hidden[others].to(targets.head.dtype) @ targets.head.T).detach().to(dtype)
            cross_entropy = -((target_logits / temperature).softmax(-1) * log_q).sum(-1)
            full_p = (target_logits - target_lse[others].to(dtype)[:, None]).exp()
        else:
            full_p, cross_entropy = _top_k(targets, others, log_q)
        loss, hits, overlap = _rows(
            logits,
            log_q if temperature == 1 else logits.to(dtype).log_softmax(-1),
            cross_entropy,
            full_p,
            target_index[others],
            objective,
            None if mixing is None else mixing[step],
            lk_decay,
        )
        sums.append(loss.sum())
        correct.append(hits)
        alpha.append(overlap)
    loss_sums = torch.stack(sums)
    total = sum(weight * row_losses for weight, row_losses in zip(row_weight, sums, strict=True))
    assert isinstance(total, Tensor)
    return LinearSoftTargetLoss(loss=total, loss_sums=loss_sums.detach(), correct=tuple(correct), alpha=tuple(alpha))


def _top_k(targets: TopKTargets, target_rows: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """(probabilities [N, Vd], cross entropy [N]) of stored tokens and tail; log_q [N, Vd] of the draft."""
    num_columns = log_q.shape[1]
    index, probability = targets.index[target_rows].long(), targets.log_probability[target_rows].to(log_q.dtype).exp()
    tail = (1 - probability.sum(-1)).clamp(min=0)
    # Tokens outside the draft vocabulary go to a column of their own, which is then cut off.
    place = torch.where(index < 0, num_columns, index)
    full_p = log_q.new_zeros(len(index), num_columns + 1).scatter(1, place, probability)[:, :-1]
    stored = torch.zeros(full_p.shape[0], num_columns + 1, dtype=torch.bool, device=full_p.device)
    stored = stored.scatter(1, place, True)[:, :-1]
    tail = torch.where(stored.all(-1), 0, tail)
    total = full_p.sum(-1) + tail
    # A row whose tokens all lie outside has no soft target: it costs nothing (and cannot count).
    total = torch.where(total > 0, total, 1)
    tail_q = (log_q.exp() * ~stored).sum(-1).clamp(min=PROBABILITY_FLOOR)
    return full_p, -((full_p * log_q).sum(-1) + tail * tail_q.log()) / total


def _rows(
    logits: Tensor,
    log_q: Tensor,
    cross_entropy: Tensor,
    full_p: Tensor,
    target_index: Tensor,
    objective: str,
    mixing: float | None,
    lk_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(row loss, correct, alpha) [N]; the row loss is 0 where the row does not count. log_q at temperature 1."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and objective != "soft_cross_entropy"):
        alpha = torch.minimum(full_p, log_q.exp()).sum(dim=-1)
    if objective == "soft_cross_entropy":
        row_loss = cross_entropy
    elif objective == "lk_alpha":
        row_loss = -alpha.clamp(min=PROBABILITY_FLOOR).log()
    elif objective == "total_variation":
        row_loss = 1 - alpha
    elif objective == "lk_lambda":
        lam = (-lk_decay * alpha.detach()).exp() if mixing is None else mixing
        row_loss = lam * cross_entropy + (1 - lam) * (1 - alpha)
    else:
        raise ValueError(f"objective {objective!r} is unknown: use {', '.join(OBJECTIVES)}")
    # A product, not where(): a row that does not count is 0 when finite, and NaN when its logits are not.
    row_loss = row_loss * (target_index >= 0).to(row_loss.dtype)
    # argmax() takes the lowest index of a tie. A row with a NaN is a miss whatever argmax() makes of it.
    correct = (logits.argmax(dim=-1) == target_index) & ~log_q.isnan().any(dim=-1)
    return row_loss, correct.detach(), alpha.detach()
