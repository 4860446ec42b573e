"""The loss of one TTT step against the target's distribution, with the step's metrics.

    p, q = softmax(target_logits, -1), softmax(logits, -1)                    # over the draft vocabulary
    loss = weight * -(p * log q).sum(-1)[target_index >= 0].sum()
    correct = logits.argmax(-1) == target_index
    alpha = minimum(exp(target_logits - target_lse), q).sum(-1)               # p over the target's full vocabulary

Backends:
    torch    the reference, under autograd: several [N, Vd] float32 tensors live until the backward.
    triton   one kernel, which writes the gradient into the logits' storage (`soft_target_loss_triton`): no further
             memory, one backward, and the logits are gone. The weight must therefore be known before the forward.

Shapes: N rows, Vd draft vocabulary.
"""

# mypy: allow-untyped-calls
# (torch.autograd.Function.apply has no annotations)
from __future__ import annotations

import importlib.util
import math
import os

import torch
from torch import Tensor

from kernels import reference
from kernels.reference import SoftTargetLoss

__all__ = ["LOSS_BACKENDS", "SoftTargetLoss", "choose_loss_backend", "soft_target_loss"]

LOSS_BACKENDS = ("triton", "torch")


def choose_loss_backend(requested: str, device: torch.device | str) -> tuple[str, str]:
    """Resolve "auto", or check a named backend, and say why: (name, why), why for a log line.

    Raises ValueError for an unknown name, or for "triton" where it cannot run.
    """
    device = torch.device(device)
    if requested == "auto":
        if device.type != "cuda":
            return "torch", f"triton kernels do not run on device {device.type}"
        obstacle = _triton_obstacle(device)
        return ("torch", obstacle) if obstacle else ("triton", "gradient in place, on a CUDA device")
    if requested not in LOSS_BACKENDS:
        raise ValueError(f"loss backend {requested!r} is unknown: use auto, {', '.join(LOSS_BACKENDS)}")
    if requested == "triton":
        _check_triton_runs_on(device)
    return requested, "asked for"


def soft_target_loss(
    logits: Tensor,
    target_logits: Tensor,
    *,
    target_index: Tensor,
    target_lse: Tensor,
    weight: float,
    backend: str,
) -> SoftTargetLoss:
    """Loss, argmax agreement and acceptance estimate of N rows.

    Args:
        logits: [N, Vd] of the draft, a float dtype (triton: not float64). triton overwrites them if they require a
            gradient: use them for nothing else.
        target_logits: [N, Vd], the target's logits over the draft vocabulary, a float dtype; no gradient.
        target_index: int64 [N], the target's argmax as a draft-vocabulary index; -1 when it lies outside: that row adds
            0 to the loss, is a miss and has a zero gradient. Its alpha is computed like any other's.
        target_lse: float32 [N], log-sum-exp of the target's logits over its full vocabulary.
        weight: multiplies the sum of the row losses: in training decay^k / (K * N_k).
        backend: "torch" or "triton".

    The loss, sums and metrics are float32 (torch backend on float64 logits: float64). Of equal logits the lowest
    index is the argmax. A NaN or infinity is not hidden: it makes the loss NaN or infinite, also in a row that does
    not count; a row whose q is NaN is a miss.

    Raises: ValueError if shapes, dtypes or devices do not fit, the weight is not finite, or triton cannot run;
        RuntimeError from a second backward through the triton backend.
    """
    _check_inputs(logits, target_logits, target_index, target_lse, weight)
    if backend == "torch":
        return reference.soft_target_loss(
            logits, target_logits, target_index=target_index, target_lse=target_lse, weight=weight
        )
    if backend == "triton":
        return _triton_loss(logits, target_logits, target_index, target_lse, weight)
    raise ValueError(f"loss backend {backend!r} is unknown: use {', '.join(LOSS_BACKENDS)}")


def _check_inputs(
    logits: Tensor, target_logits: Tensor, target_index: Tensor, target_lse: Tensor, weight: float
) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [N, Vd] with Vd positive, got {tuple(logits.shape)}")
    num_rows, num_columns = logits.shape
    if target_logits.shape != logits.shape:
        raise ValueError(f"target_logits must be {tuple(logits.shape)} like logits, got {tuple(target_logits.shape)}")
    for name, rows in (("target_index", target_index), ("target_lse", target_lse)):
        if rows.shape != (num_rows,):
            raise ValueError(f"{name} must be [{num_rows}], one a row of logits, got {tuple(rows.shape)}")
    for name, rows in (("logits", logits), ("target_logits", target_logits), ("target_lse", target_lse)):
        if not rows.is_floating_point():
            raise ValueError(f"{name} must be of a float dtype, got {rows.dtype}")
    if target_index.dtype != torch.int64:
        raise ValueError(f"target_index must be int64, got {target_index.dtype}")
    for name, rows in (("target_logits", target_logits), ("target_index", target_index), ("target_lse", target_lse)):
        if rows.device != logits.device:
            raise ValueError(f"{name} is on {rows.device}, logits on {logits.device}: move one of them")
    if not math.isfinite(weight):
        raise ValueError(f"weight must be finite, got {weight}: a step without rows adds nothing, leave it out")
    # Only where looking costs no synchronisation; elsewhere such an index is a row that is never correct.
    if target_index.device.type == "cpu" and num_rows:
        lowest, highest = int(target_index.min()), int(target_index.max())
        if lowest < -1 or highest >= num_columns:
            wrong = lowest if lowest < -1 else highest
            raise ValueError(f"target_index {wrong} is no draft-vocabulary index: use 0 .. {num_columns - 1}, or -1")


def _triton_obstacle(device: torch.device) -> str | None:
    """What keeps triton from running on the device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"triton needs a CUDA device, not {device.type} (set TRITON_INTERPRET=1 to interpret its kernels)"
    return None


def _check_triton_runs_on(device: torch.device) -> None:
    obstacle = _triton_obstacle(device)
    if obstacle:
        raise ValueError(f"loss backend 'triton' cannot run: {obstacle}; use 'torch'")


def _triton_loss(
    logits: Tensor, target_logits: Tensor, target_index: Tensor, target_lse: Tensor, weight: float
) -> SoftTargetLoss:
    _check_triton_runs_on(logits.device)
    # Loaded only here: everything else works where triton is not installed.
    from kernels.soft_target_loss_triton import INTERPRETED, InPlaceSoftTargetLoss

    if logits.device.type != "cuda" and not INTERPRETED:
        raise ValueError("loss backend 'triton' cannot run: TRITON_INTERPRET=1 came after its import; use 'torch'")
    for name, rows in (("logits", logits), ("target_logits", target_logits)):
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
    loss, correct, alpha = InPlaceSoftTargetLoss.apply(
        logits,
        target_logits.detach(),
        target_index.contiguous(),
        target_lse.float().contiguous(),
        float(weight),
        write_gradient,
    )
    return SoftTargetLoss(loss=loss, correct=correct, alpha=alpha)
