"""The loss kernel: one program a row, two passes over the vocabulary, the gradient written over the logits.

    p, q = softmax(target_logits, -1), softmax(logits, -1)
    loss = weight * -(p * log q)[target_index >= 0].sum();  logits = weight * (q - p), 0 where target_index < 0

Pass 1 finds both log-sum-exps (online softmax) and the draft's argmax; pass 2 has them and computes the row loss as a
sum of p * (lse - logit), which does not cancel, sum(min(p, q)) and the gradient. Nothing of size [N, Vd] is
allocated: at 16,384 x 32,000 in bf16 that is 1 GiB a TTT step less. The price: the logits are gone after the forward,
and so the backward runs once.

The gradient's factor sum(p) is 1 here, and left out, because p is normalised over the same vocabulary as q.

Rows are addressed in 64 bits (16,384 x 151,936 exceeds 2^31 elements); a block of columns at a time, so any width.
This module imports triton; `soft_target_loss` imports it only when this backend runs.
"""

# mypy: allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (triton has no annotations, and its kernels take pointers, which have no type here)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# The kernels run in Python, on any device: TRITON_INTERPRET=1 was set before triton was imported (which decides for its
# own functions, as tl.sum) and before this module was (which decides for the kernels here).
INTERPRETED: bool = triton.knobs.runtime.interpret and not isinstance(tl.sum, triton.JITFunction)

_MAX_BLOCK = 4096
_NUM_WARPS = 8


@triton.jit
def _soft_target_loss_kernel(
    logits_pointer,
    target_logits_pointer,
    target_index_pointer,
    target_lse_pointer,
    loss_pointer,
    correct_pointer,
    alpha_pointer,
    weight,
    num_columns,
    logits_row_stride,
    logits_column_stride,
    target_row_stride,
    target_column_stride,
    WRITE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The lowest float32, not -inf: a block that is -inf throughout would give -inf - -inf = NaN.
    LOWEST = -3.4028234663852886e38
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_pointer + row * logits_row_stride
    target_row = target_logits_pointer + row * target_row_stride
    target_index = tl.load(target_index_pointer + row)
    target_lse = tl.load(target_lse_pointer + row)

    # Column offsets in 64 bits too: a transposed tensor's column stride is its number of rows.
    block_columns = tl.arange(0, BLOCK).to(tl.int64)
    draft_max, target_max = LOWEST, LOWEST
    draft_sum, target_sum = 0.0, 0.0
    best = float("-inf")
    best_column = tl.zeros((), tl.int64)
    for start in range(0, num_columns, BLOCK):
        columns = start + block_columns
        inside = columns < num_columns
        draft = tl.load(logits_row + columns * logits_column_stride, mask=inside, other=float("-inf")).to(tl.float32)
        target = tl.load(target_row + columns * target_column_stride, mask=inside, other=float("-inf")).to(tl.float32)
        block_best = tl.max(draft, 0)
        block_best_column = tl.min(tl.where(draft == block_best, columns, num_columns), 0)
        # Strictly greater: of a tie the lowest column stays.
        best_column = tl.where(block_best > best, block_best_column, best_column)
        best = tl.maximum(best, block_best)
        new_draft_max = tl.maximum(draft_max, block_best)
        new_target_max = tl.maximum(target_max, tl.max(target, 0))
        # A NaN logit passes by the maxima and enters here; the row's loss and alpha are then NaN.
        draft_sum = draft_sum * tl.exp(draft_max - new_draft_max) + tl.sum(tl.exp(draft - new_draft_max), 0)
        target_sum = target_sum * tl.exp(target_max - new_target_max) + tl.sum(tl.exp(target - new_target_max), 0)
        draft_max, target_max = new_draft_max, new_target_max
    draft_lse = draft_max + tl.log(draft_sum)
    target_draft_lse = target_max + tl.log(target_sum)

    # A product, not a branch: a row that does not count is 0 when finite, and NaN when its logits are not.
    row_weight = tl.where(target_index >= 0, weight, 0.0)
    row_loss, row_alpha = 0.0, 0.0
    for start in range(0, num_columns, BLOCK):
        columns = start + block_columns
        inside = columns < num_columns
        draft_pointers = logits_row + columns * logits_column_stride
        draft = tl.load(draft_pointers, mask=inside, other=0.0).to(tl.float32)
        target = tl.load(target_row + columns * target_column_stride, mask=inside, other=0.0).to(tl.float32)
        p = tl.exp(target - target_draft_lse)
        q = tl.exp(draft - draft_lse)
        full_p = tl.exp(target - target_lse)
        row_loss += tl.sum(tl.where(inside, p * (draft_lse - draft), 0.0), 0)
        smaller = tl.minimum(full_p, q, propagate_nan=tl.PropagateNan.ALL)
        row_alpha += tl.sum(tl.where(inside, smaller, 0.0), 0)
        if WRITE_GRADIENT:
            gradient = row_weight * (q - p)
            tl.store(draft_pointers, gradient.to(logits_pointer.dtype.element_ty), mask=inside)
    tl.store(loss_pointer + row, row_weight * row_loss)
    tl.store(alpha_pointer + row, row_alpha)
    # A row with a NaN is a miss: its log-sum-exp is no number.
    is_correct = (best_column == target_index) & (draft_lse == draft_lse)
    tl.store(correct_pointer + row, is_correct.to(tl.uint8))


@triton.jit
def _scale_kernel(gradient_pointer, factor_pointer, num_columns, row_stride, column_stride, BLOCK: tl.constexpr):
    """gradient *= factor, the product in float32; nothing is read or written when the factor is 1, as in training."""
    factor = tl.load(factor_pointer)
    if factor != 1.0:
        gradient_row = gradient_pointer + tl.program_id(0).to(tl.int64) * row_stride
        block_columns = tl.arange(0, BLOCK).to(tl.int64)
        for start in range(0, num_columns, BLOCK):
            columns = start + block_columns
            inside = columns < num_columns
            pointers = gradient_row + columns * column_stride
            gradient = tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * factor
            tl.store(pointers, gradient.to(gradient_pointer.dtype.element_ty), mask=inside)


def _block(num_columns: int) -> int:
    block: int = triton.next_power_of_2(num_columns)
    return min(block, _MAX_BLOCK)


class InPlaceSoftTargetLoss(torch.autograd.Function):
    """(loss, correct, alpha) of `soft_target_loss`; with write_gradient the logits become weight * (q - p)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target_logits: Tensor,
        target_index: Tensor,
        target_lse: Tensor,
        weight: float,
        write_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, num_columns = logits.shape
        row_loss = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        correct = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
        alpha = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        if num_rows:
            with torch.cuda.device_of(logits):
                _soft_target_loss_kernel[(num_rows,)](
                    logits,
                    target_logits,
                    target_index,
                    target_lse,
                    row_loss,
                    correct,
                    alpha,
                    weight,
                    num_columns,
                    *logits.stride(),
                    *target_logits.stride(),
                    WRITE_GRADIENT=write_gradient,
                    BLOCK=_block(num_columns),
                    num_warps=_NUM_WARPS,
                )
        if write_gradient:
            # Autograd cannot see the kernel's writes: without this, another operation that kept these logits for its
            # own backward would read the gradient in their place. Now it raises.
            torch.autograd.graph.increment_version(logits)
            ctx.save_for_backward(logits)
        ctx.spent = False
        is_correct = correct.view(torch.bool)
        ctx.mark_non_differentiable(is_correct, alpha)
        return row_loss.sum(), is_correct, alpha

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
        num_rows, num_columns = gradient.shape
        if num_rows:
            with torch.cuda.device_of(gradient):
                _scale_kernel[(num_rows,)](
                    gradient,
                    grad_loss.to(torch.float32),
                    num_columns,
                    *gradient.stride(),
                    BLOCK=_block(num_columns),
                    num_warps=_NUM_WARPS,
                )
        return gradient, None, None, None, None, None
