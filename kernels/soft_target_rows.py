"""What one row of the draft's logits gives: its loss, its metrics and, in place, its gradient; in plain torch.

    p, q = softmax(target / temperature), softmax(logits / temperature)     # over the draft vocabulary
    full_p = exp(target - target_lse)                                       # over the target's full vocabulary
    alpha = minimum(full_p, softmax(logits)).sum()
    soft_cross_entropy   -(p * log q).sum()
    lk_alpha             -log(alpha)
    total_variation      1 - alpha
    lk_lambda            lam * soft_cross_entropy + (1 - lam) * total_variation,  lam = exp(-lk_decay * alpha) or given

The last three are the LK losses of arXiv:2602.23881. With z the logits:

    d soft_cross_entropy / dz = (q - p) / temperature
    d alpha / dz              = q * ((q < full_p) - A),   A = q[q < full_p].sum()

Where q equals full_p exactly, alpha is taken to follow full_p, which does not move. lam is a constant to the gradient.

No autograd here: the gradient is written over the logits. This is what the torch backend of `linear_soft_target_loss`
runs and `soft_target_rows_triton` computes in one kernel; `reference` has the same formulas under autograd.

Shapes: R rows of logits, M target rows, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import OBJECTIVES, PROBABILITY_FLOOR, accumulation_dtype

# Elements of one block of rows: on the CPU its temporaries stay in the cache, on a GPU they stay small.
_CPU_BLOCK = 2**18
_GPU_BLOCK = 2**26


@dataclass(frozen=True, slots=True)
class Objective:
    """Which row loss, and its settings."""

    name: str = "soft_cross_entropy"
    """One of OBJECTIVES."""
    lk_decay: float = 3.0
    """eta in lam = exp(-eta * alpha) of lk_lambda."""
    temperature: float = 1.0
    """Divides both logits in the soft cross-entropy; alpha and the argmax stay at temperature 1."""

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            raise ValueError(f"objective {self.name!r} is unknown: use {', '.join(OBJECTIVES)}")
        if not (math.isfinite(self.lk_decay) and self.lk_decay >= 0):
            raise ValueError(f"lk_decay must be finite and not negative, got {self.lk_decay}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature must be finite and positive, got {self.temperature}")
        if self.temperature != 1 and self.name != "soft_cross_entropy":
            raise ValueError(
                f"temperature {self.temperature} goes with soft_cross_entropy only, not {self.name}: alpha needs "
                "target_lse, which is known at temperature 1 only"
            )

    @property
    def uses_alpha(self) -> bool:
        """Its gradient needs alpha and A before the first element can be written."""
        return self.name != "soft_cross_entropy"


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The target's side of M rows."""

    logits: Tensor
    """[M, Vd], a float dtype: its logits over the draft vocabulary, or its log-probabilities; -inf: not stored."""
    index: Tensor
    """int64 [M]: its argmax as a draft-vocabulary index; -1 outside it: such a row does not count."""
    lse: Tensor
    """float32 [M]: log-sum-exp over its full vocabulary."""
    draft_lse: Tensor | None
    """float32 [M]: log-sum-exp of logits / temperature over the draft vocabulary, and the tail; None: not known yet."""
    tail: Tensor | None = None
    """float32 [M]: probability of everything that is not stored, as one class; None: every column is stored."""


@dataclass(frozen=True, slots=True)
class RowResults:
    """What R rows give; written in place."""

    loss: Tensor
    """float32 (float64) [R]: the row loss, without its weight; 0 where the row does not count."""
    correct: Tensor
    """uint8 [R]: 1 where the draft's argmax is the target's."""
    alpha: Tensor
    """float32 (float64) [R]."""

    @classmethod
    def empty(cls, num_rows: int, dtype: torch.dtype, device: torch.device) -> RowResults:
        loss, alpha = (torch.empty(num_rows, dtype=accumulation_dtype(dtype), device=device) for _ in range(2))
        return cls(loss=loss, correct=torch.empty(num_rows, dtype=torch.uint8, device=device), alpha=alpha)

    def rows(self, start: int, stop: int) -> RowResults:
        """A view of some rows."""
        return RowResults(self.loss[start:stop], self.correct[start:stop], self.alpha[start:stop])


def log_sum_exp(logits: Tensor, temperature: float) -> Tensor:
    """[M] float32 (float64): log-sum-exp of each row of logits / temperature."""
    return (logits.to(accumulation_dtype(logits.dtype)) / temperature).logsumexp(-1)


def soft_target_rows(
    logits: Tensor,
    targets: TargetRows,
    results: RowResults,
    *,
    target_row: Tensor | None,
    weight: Tensor,
    mixing: Tensor | None,
    objective: Objective,
    write_gradient: bool,
) -> None:
    """Compute R rows into results; with write_gradient logits become weight * d row loss / d logits.

    logits [R, Vd]; target_row int64 [R]: each row's row in targets (None: the same); weight float32 [R]; mixing float32
    [R]: lam of lk_lambda (None: from alpha).
    """
    num_rows, num_columns = logits.shape
    dtype = accumulation_dtype(logits.dtype)
    draft_lse = targets.draft_lse
    if draft_lse is None:
        draft_lse = log_sum_exp(targets.logits, objective.temperature)
    block_rows = max(1, (_CPU_BLOCK if logits.device.type == "cpu" else _GPU_BLOCK) // num_columns)
    for start in range(0, num_rows, block_rows):
        stop = min(start + block_rows, num_rows)
        chosen: slice | Tensor = slice(start, stop) if target_row is None else target_row[start:stop]
        _block(
            logits[start:stop],
            TargetRows(
                logits=targets.logits[chosen].to(dtype),
                index=targets.index[chosen],
                lse=targets.lse[chosen].to(dtype),
                draft_lse=draft_lse[chosen].to(dtype),
                tail=None if targets.tail is None else targets.tail[chosen].to(dtype),
            ),
            results.rows(start, stop),
            weight[start:stop].to(dtype),
            None if mixing is None else mixing[start:stop].to(dtype),
            objective,
            write_gradient,
        )


def _block(
    logits: Tensor,
    targets: TargetRows,
    results: RowResults,
    weight: Tensor,
    mixing: Tensor | None,
    objective: Objective,
    write_gradient: bool,
) -> None:
    """soft_target_rows of a block; targets has a row for each of logits."""
    z = logits.to(targets.logits.dtype)
    best, best_column = z.max(dim=-1)
    q = (z - best[:, None]).exp_()
    mass = q.sum(-1)
    q /= mass[:, None]
    lse = best + mass.log()
    assert targets.draft_lse is not None
    if objective.temperature == 1:
        p = (targets.logits - targets.draft_lse[:, None]).exp_()
        full_p = p * (targets.draft_lse - targets.lse).exp_()[:, None]
        surprise, loss_q = lse[:, None] - z, q
    else:
        p = (targets.logits / objective.temperature - targets.draft_lse[:, None]).exp_()
        full_p = (targets.logits - targets.lse[:, None]).exp_()
        z = z / objective.temperature
        surprise = z.logsumexp(-1, keepdim=True) - z
        loss_q = surprise.neg().exp_()

    alpha = torch.minimum(full_p, q).sum(-1)
    cross_entropy = surprise.mul_(p).sum(-1)
    if targets.tail is not None:
        in_tail = targets.logits == float("-inf")
        tail_q = torch.where(in_tail, q, 0.0).sum(-1).clamp_(min=PROBABILITY_FLOOR)
        cross_entropy = cross_entropy - targets.tail * tail_q.log()
        # The tail's share of a column that is not stored: as the draft itself spreads it.
        p = torch.where(in_tail, q * (targets.tail / tail_q)[:, None], p)

    counts = (targets.index >= 0).to(z.dtype)
    lam = (-objective.lk_decay * alpha).exp() if mixing is None else mixing
    if objective.name == "soft_cross_entropy":
        loss = cross_entropy
    elif objective.name == "lk_alpha":
        loss = -alpha.clamp(min=PROBABILITY_FLOOR).log()
    elif objective.name == "total_variation":
        loss = 1 - alpha
    else:
        loss = lam * cross_entropy + (1 - lam) * (1 - alpha)
    results.alpha.copy_(alpha)
    # A product, not where(): a row that does not count is 0 when finite, and NaN when its logits are not.
    results.loss.copy_(loss * counts)
    results.correct.copy_((best_column == targets.index) & lse.isfinite())
    if not write_gradient:
        return

    weight = weight * counts
    if not objective.uses_alpha:
        logits.copy_(loss_q.sub(p).mul_((weight / objective.temperature)[:, None]))
        return
    below = torch.where(q < full_p, q, 0.0)
    alpha_gradient = below - q * below.sum(-1, keepdim=True)
    if objective.name == "lk_alpha":
        # The derivative of the clamped logarithm: nothing below the floor.
        scale = torch.where(alpha < PROBABILITY_FLOOR, 0.0, -1 / alpha)
    elif objective.name == "total_variation":
        scale = torch.full_like(alpha, -1.0)
    else:
        scale = lam - 1
    gradient = alpha_gradient.mul_((weight * scale)[:, None])
    if objective.name == "lk_lambda":
        gradient += q.sub_(p).mul_((weight * lam)[:, None])
    logits.copy_(gradient)
