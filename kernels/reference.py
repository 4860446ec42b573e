"""The eager twins: plain torch in the dtype of the inputs, one line of code a line of formula.

They define what the fused kernels must compute. Run them in float64 for the truth, in the kernel's own dtype for
the error that a naive implementation makes. The price is memory: attention holds the dense [H, T, T + k] scores,
the loss holds several [N, Vd] tensors in float32.

Shapes: T tokens, H query heads, G key/value heads, Dh head dim, N rows, Vd draft vocabulary, k TTT step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SoftTargetLoss:
    """What one TTT step's rows give."""

    loss: Tensor
    """Scalar, float32 (float64 for float64 logits): weight times the sum of the row losses; differentiable."""
    correct: Tensor
    """bool [N]: the draft's argmax is the target's; false where that lies outside the draft vocabulary."""
    alpha: Tensor
    """float32 (float64) [N]: sum(min(p, q)), p over the target's full vocabulary, q the draft's; no gradient."""


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
    scale: float,
) -> Tensor:
    """Dense TTT attention; arguments and result as `kernels.ttt_attention.ttt_attention`.

    The scores of row p, for two documents of two tokens at step 2 (x: attended):

        base keys    step 1    step 2
        x . . .      x . . .   x . . .
        x x . .      . x . .   . x . .
        . . x .      . . x .   . . x .
        . . x x      . . . x   . . . x

    The diagonal blocks are stored as one column a step.
    """
    num_tokens, num_heads, _ = query.shape
    queries_per_key = num_heads // base_key.shape[1]

    def by_head(rows: Tensor) -> Tensor:  # [T, G, Dh] -> [H, T, Dh]
        return rows.repeat_interleave(queries_per_key, dim=1).transpose(0, 1)

    q = query.transpose(0, 1)
    document = torch.repeat_interleave(
        torch.arange(len(document_lengths), device=query.device),
        torch.tensor(document_lengths, dtype=torch.int64, device=query.device),
    )
    row = torch.arange(num_tokens, device=query.device)
    attended = (document[:, None] == document[None, :]) & (row[:, None] >= row[None, :])
    base_scores = (q @ by_head(base_key).transpose(1, 2) * scale).masked_fill(~attended, float("-inf"))
    step_scores = [(q * by_head(key)).sum(-1, keepdim=True) * scale for key in step_keys]
    probabilities = torch.cat([base_scores, *step_scores], dim=-1).softmax(dim=-1)
    attended_values = probabilities[..., :num_tokens] @ by_head(base_value)
    for step, value in enumerate(step_values):
        column = num_tokens + step
        attended_values = attended_values + probabilities[..., column : column + 1] * by_head(value)
    return attended_values.transpose(0, 1).contiguous()


def soft_target_loss(
    logits: Tensor,
    target_logits: Tensor,
    *,
    target_index: Tensor,
    target_lse: Tensor,
    weight: float,
) -> SoftTargetLoss:
    """Cross entropy against the target's distribution; arguments and result as `kernels.soft_target_loss`.

    Row loss: -sum_j p_j log q_j, p = softmax(target_logits) and q = softmax(logits), both over the draft
    vocabulary. Its gradient is q * sum(p) - p.
    """
    dtype = accumulation_dtype(logits.dtype)
    counts = target_index >= 0
    p = target_logits.detach().to(dtype).softmax(dim=-1)
    log_q = logits.to(dtype).log_softmax(dim=-1)
    row_loss = -(p * log_q).sum(dim=-1)
    # A product, not where(): a row that does not count is 0 when finite, and NaN when its logits are not.
    loss = weight * (row_loss * counts.to(dtype)).sum()
    with torch.no_grad():
        full_p = (target_logits.to(dtype) - target_lse.to(dtype)[:, None]).exp()
        alpha = torch.minimum(full_p, log_q.exp()).sum(dim=-1)
        # argmax() takes the lowest index of a tie. A row with a NaN is a miss whatever argmax() makes of it.
        correct = (logits.argmax(dim=-1) == target_index) & ~log_q.isnan().any(dim=-1)
    return SoftTargetLoss(loss=loss, correct=correct, alpha=alpha)
