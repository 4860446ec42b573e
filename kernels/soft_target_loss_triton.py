"""`soft_target_loss` whose gradient is written over the logits, by the kernel of `soft_target_rows_triton`.

Nothing of size [N, Vd] is allocated: at 16,384 x 32,000 in bf16 that is 1 GiB a TTT step less. The price: the logits
are gone after the forward, and so the backward runs once.

This module imports triton; `soft_target_loss` imports it only when this backend runs.
"""

# mypy: allow-untyped-calls, allow-untyped-defs
# (torch.autograd.Function has no annotations)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.scale_triton import scale_in_place
from kernels.soft_target_rows import Objective, RowResults, TargetRows
from kernels.soft_target_rows_triton import soft_target_rows


class InPlaceSoftTargetLoss(torch.autograd.Function):
    """(loss, correct, alpha, loss_sum) of `soft_target_loss`; with write_gradient the logits become the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: TargetRows,
        target_row: Tensor | None,
        weight: float,
        mixing: float | None,
        objective: Objective,
        write_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_rows = logits.shape[0]
        results = RowResults.empty(num_rows, logits.dtype, logits.device)

        def a_row(value: float) -> Tensor:
            return torch.full((num_rows,), value, dtype=torch.float32, device=logits.device)

        soft_target_rows(
            logits,
            targets,
            results,
            target_row=target_row,
            weight=a_row(weight),
            mixing=None if mixing is None else a_row(mixing),
            objective=objective,
            write_gradient=write_gradient,
        )
        if write_gradient:
            # Autograd cannot see the kernel's writes: without this, another operation that kept these logits for its
            # own backward would read the gradient in their place. Now it raises.
            torch.autograd.graph.increment_version(logits)
            ctx.save_for_backward(logits)
        ctx.spent = False
        is_correct = results.correct.view(torch.bool)
        loss_sum = results.loss.sum()
        ctx.mark_non_differentiable(is_correct, results.alpha, loss_sum)
        return loss_sum * weight, is_correct, results.alpha, loss_sum

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "second backward through soft_target_loss with backend 'triton': its gradient lay in the logits' "
                "storage and was handed out by the first backward; run the forward again, or use backend 'torch'"
            )
        ctx.spent = True
        (logits,) = ctx.saved_tensors
        gradient = logits.detach()
        scale_in_place(gradient, grad_loss)
        return gradient, None, None, None, None, None, None
