"""The loss of one TTT step against the target's distribution, with the step's metrics.

    p, q = softmax(target_logits, -1), softmax(logits, -1)                    # over the draft vocabulary
    loss = weight * -(p * log q).sum(-1)[target_index >= 0].sum()
    correct = logits.argmax(-1) == target_index
    alpha = minimum(exp(target_logits - target_lse), q).sum(-1)               # p over the target's full vocabulary

That is the objective soft_cross_entropy; `soft_target_rows` has the others, which are functions of alpha.

Backends:
    torch    the reference, under autograd: several [N, Vd] float32 tensors live until the backward.
    triton   one kernel, which writes the gradient into the logits' storage (`soft_target_loss_triton`): no further
             memory, one backward, and the logits are gone. The weight must therefore be known before the forward.

`linear_soft_target_loss` starts from hidden states instead, for all K steps, and stores no logits.

Shapes: N rows, M target rows, Vd draft vocabulary.
"""

# mypy: allow-untyped-calls
# (torch.autograd.Function.apply has no annotations)
from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import reference
from kernels.reference import OBJECTIVES, SoftTargetLoss
from kernels.soft_target_rows import Objective, TargetRows

__all__ = [
    "LOSS_BACKENDS",
    "OBJECTIVES",
    "SoftTargetLoss",
    "check_triton_runs_on",
    "choose_loss_backend",
    "soft_target_loss",
    "triton_obstacle",
]

LOSS_BACKENDS = ("triton", "torch")


def choose_loss_backend(requested: str, device: torch.device | str) -> tuple[str, str]:
    """Resolve "auto", or check a named backend, and say why: (name, why), why for a log line.

    Raises ValueError for an unknown name, or for "triton" where it cannot run.
    """
    device = torch.device(device)
    if requested == "auto":
        if device.type != "cuda":
            return "torch", f"triton kernels do not run on device {device.type}"
        obstacle = triton_obstacle(device)
        return ("torch", obstacle) if obstacle else ("triton", "gradient in place, on a CUDA device")
    if requested not in LOSS_BACKENDS:
        raise ValueError(f"loss backend {requested!r} is unknown: use auto, {', '.join(LOSS_BACKENDS)}")
    if requested == "triton":
        check_triton_runs_on(device)
    return requested, "asked for"


def soft_target_loss(
    logits: Tensor,
    target_logits: Tensor,
    *,
    target_index: Tensor,
    target_lse: Tensor,
    weight: float,
    backend: str,
    target_row: Tensor | None = None,
    target_draft_lse: Tensor | None = None,
    objective: str = "soft_cross_entropy",
    mixing: float | None = None,
    lk_decay: float = 3.0,
    temperature: float = 1.0,
) -> SoftTargetLoss:
    """Loss, argmax agreement and acceptance estimate of N rows.

    Args:
        logits: [N, Vd] of the draft, a float dtype (triton: not float64), of rows that count. triton overwrites them
            if they require a gradient: use them for nothing else.
        target_logits: [M, Vd], the target's logits over the draft vocabulary, a float dtype; no gradient.
        target_index: int64 [M], the target's argmax as a draft-vocabulary index; -1 when it lies outside: that row adds
            0 to the loss, is a miss and has a zero gradient. Its alpha is computed like any other's.
        target_lse: float32 [M], log-sum-exp of the target's logits over its full vocabulary.
        weight: multiplies the sum of the row losses: in training decay^k / (K * N_k).
        backend: "torch" or "triton".
        target_row: int64 [N], each row's row of the target; None: M is N, and each row has its own. Saves the caller
            a copy of target rows that several steps share.
        target_draft_lse: float32 [M], log-sum-exp of target_logits / temperature over the draft vocabulary, if the
            caller has it (steps share it): saves triton a pass over the target's rows. torch does not need it.
        objective: one of OBJECTIVES.
        mixing: lam of lk_lambda, in [0, 1]; None: exp(-lk_decay * alpha), of each row.
        lk_decay: of lk_lambda.
        temperature: divides both logits in the soft cross-entropy (no factor temperature^2). correct and alpha are
            those of temperature 1.

    The loss, sums and metrics are float32 (torch backend on float64 logits: float64). Of equal logits the lowest
    index is the argmax. A NaN or infinity is not hidden: it makes the loss NaN or infinite, also in a row that does
    not count; a row whose q is NaN is a miss. lk_alpha raises alpha to PROBABILITY_FLOOR, below which a row has no
    gradient.

    Raises: ValueError if shapes, dtypes, devices or settings do not fit (temperature goes with soft_cross_entropy only,
        mixing with lk_lambda), the weight is not finite, or triton cannot run; RuntimeError from a second backward
        through the triton backend.
    """
    settings = Objective(objective, lk_decay, temperature)
    check_mixing(objective, None if mixing is None else [mixing])
    _check_inputs(logits, target_logits, target_index, target_lse, weight, target_row, target_draft_lse)
    if backend == "torch":
        return reference.soft_target_loss(
            logits,
            target_logits,
            target_index=target_index,
            target_lse=target_lse,
            weight=weight,
            target_row=target_row,
            objective=objective,
            mixing=mixing,
            lk_decay=lk_decay,
            temperature=temperature,
        )
    if backend == "triton":
        check_triton_runs_on(logits.device)
        targets = TargetRows(
            logits=target_logits.detach(),
            index=target_index.contiguous(),
            lse=target_lse.float().contiguous(),
            draft_lse=None if target_draft_lse is None else target_draft_lse.float().contiguous(),
        )
        return _triton_loss(logits, targets, target_row, weight, mixing, settings)
    raise ValueError(f"loss backend {backend!r} is unknown: use {', '.join(LOSS_BACKENDS)}")


def check_mixing(objective: str, mixing: Sequence[float] | None) -> None:
    """Raises ValueError if lam is given to another objective than lk_lambda, or is no share."""
    if mixing is None:
        return
    if objective != "lk_lambda":
        raise ValueError(f"mixing is lam of lk_lambda, the objective is {objective}: leave it out")
    for share in mixing:
        if not 0 <= share <= 1:
            raise ValueError(f"mixing must be in [0, 1], got {share}")


def _check_inputs(
    logits: Tensor,
    target_logits: Tensor,
    target_index: Tensor,
    target_lse: Tensor,
    weight: float,
    target_row: Tensor | None,
    target_draft_lse: Tensor | None,
) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [N, Vd] with Vd positive, got {tuple(logits.shape)}")
    num_rows, num_columns = logits.shape
    if target_row is None and target_logits.shape != logits.shape:
        raise ValueError(f"target_logits must be {tuple(logits.shape)} like logits, got {tuple(target_logits.shape)}")
    if target_logits.dim() != 2 or target_logits.shape[1] != num_columns:
        raise ValueError(f"target_logits must be [M, {num_columns}] like logits, got {tuple(target_logits.shape)}")
    num_targets = target_logits.shape[0]
    vectors = {"target_index": target_index, "target_lse": target_lse}
    if target_draft_lse is not None:
        vectors["target_draft_lse"] = target_draft_lse
    for name, rows in vectors.items():
        if rows.shape != (num_targets,):
            raise ValueError(f"{name} must be [{num_targets}], one a row of target_logits, got {tuple(rows.shape)}")
    if target_row is not None:
        if target_row.shape != (num_rows,):
            raise ValueError(f"target_row must be [{num_rows}], one a row of logits, got {tuple(target_row.shape)}")
        vectors["target_row"] = target_row
    for name, rows in ({"logits": logits, "target_logits": target_logits} | vectors).items():
        if name in ("target_index", "target_row"):
            if rows.dtype != torch.int64:
                raise ValueError(f"{name} must be int64, got {rows.dtype}")
        elif not rows.is_floating_point():
            raise ValueError(f"{name} must be of a float dtype, got {rows.dtype}")
    for name, rows in ({"target_logits": target_logits} | vectors).items():
        if rows.device != logits.device:
            raise ValueError(f"{name} is on {rows.device}, logits on {logits.device}: move one of them")
    if not math.isfinite(weight):
        raise ValueError(f"weight must be finite, got {weight}: a step without rows adds nothing, leave it out")
    # Only where looking costs no synchronisation; elsewhere such an index is a row that is never correct.
    if target_row is not None and target_row.device.type == "cpu" and num_rows:
        lowest, highest = int(target_row.min()), int(target_row.max())
        if lowest < 0 or highest >= num_targets:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"target_row {wrong} is no row of target_logits: use 0 .. {num_targets - 1}")
    if target_index.device.type == "cpu" and num_targets:
        lowest, highest = int(target_index.min()), int(target_index.max())
        if lowest < -1 or highest >= num_columns:
            wrong = lowest if lowest < -1 else highest
            raise ValueError(f"target_index {wrong} is no draft-vocabulary index: use 0 .. {num_columns - 1}, or -1")


def triton_obstacle(device: torch.device) -> str | None:
    """What keeps triton from running on the device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"triton needs a CUDA device, not {device.type} (set TRITON_INTERPRET=1 to interpret its kernels)"
    return None


def check_triton_runs_on(device: torch.device) -> None:
    obstacle = triton_obstacle(device)
    if obstacle:
        raise ValueError(f"loss backend 'triton' cannot run: {obstacle}; use 'torch'")
    if device.type != "cuda":
        # Loaded only here: everything else works where triton is not installed.
        from kernels.soft_target_rows_triton import INTERPRETED

        if not INTERPRETED:
            raise ValueError("loss backend 'triton' cannot run: TRITON_INTERPRET=1 came after its import; use 'torch'")


def _triton_loss(
    logits: Tensor,
    targets: TargetRows,
    target_row: Tensor | None,
    weight: float,
    mixing: float | None,
    objective: Objective,
) -> SoftTargetLoss:
    from kernels.soft_target_loss_triton import InPlaceSoftTargetLoss

    for name, rows in (("logits", logits), ("target_logits", targets.logits)):
        if rows.dtype == torch.float64:
            raise ValueError(f"loss backend 'triton' computes in float32, {name} are float64: use 'torch'")
    write_gradient = torch.is_grad_enabled() and logits.requires_grad
    if write_gradient and logits.is_leaf:
        raise ValueError("loss backend 'triton' overwrites the logits, and these are a leaf: pass logits.clone()")
    if write_gradient and any(
        stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)
    ):
        raise ValueError(
            "loss backend 'triton' overwrites the logits, whose rows share memory: pass logits.contiguous()"
        )
    loss, correct, alpha, loss_sum = InPlaceSoftTargetLoss.apply(
        logits,
        targets,
        None if target_row is None else target_row.contiguous(),
        float(weight),
        None if mixing is None else float(mixing),
        objective,
        write_gradient,
    )
    return SoftTargetLoss(loss=loss, correct=correct, alpha=alpha, loss_sum=loss_sum)
