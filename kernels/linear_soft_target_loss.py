"""The loss of all K TTT steps from hidden states, without ever holding the logits of more than a chunk.

    logits[k] = hidden[k][rows[k]] @ head.T;    target_logits = targets.last_hidden @ targets.head.T
    loss = sum(row_weight[k] * row_loss(logits[k], target_logits[target_rows[k]]).sum() for k in range(K))

The rows of all steps that share a chunk of target rows go through one product: the chunk's soft targets are projected
once, and the products are large although the chunk is small. Gradients are computed in the forward, where the logits
are, so the row weights (decay, 1/K, 1/N_k) must be known by then, and a backward only multiplies by the incoming
scalar. The price: one backward. The head's gradient is accumulated in float32.

Extra memory is a chunk of logits and of soft targets, its hidden states, and, for a head below float32, the float32
accumulator [Vd, D]. `linear_soft_target_chunks` has the loop.

Backends:
    torch    row maths in plain torch, without autograd; float64 too; made for the CPU.
    triton   row maths in one kernel (`soft_target_rows_triton`).

Shapes: K steps, A rows of hidden states, n_k rows of step k that count, M target rows, D hidden, Vd draft vocabulary.
"""

# mypy: allow-untyped-calls
# (torch.autograd.Function.apply has no annotations)
from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.linear_soft_target_chunks import Call, compute, scale_in_place
from kernels.reference import HiddenTargets, LinearSoftTargetLoss, TopKTargets
from kernels.soft_target_loss import LOSS_BACKENDS, check_mixing, check_triton_runs_on
from kernels.soft_target_rows import Objective

__all__ = [
    "HiddenTargets",
    "LinearSoftTargetLoss",
    "TopKTargets",
    "linear_soft_target_loss",
]


def linear_soft_target_loss(
    hidden: Sequence[Tensor],
    head: Tensor,
    targets: HiddenTargets | TopKTargets,
    *,
    rows: Sequence[Tensor],
    target_rows: Sequence[Tensor],
    target_index: Tensor,
    target_lse: Tensor | None,
    row_weight: Sequence[float],
    head_compute: Tensor | None = None,
    objective: str = "soft_cross_entropy",
    mixing: Sequence[float] | Tensor | None = None,
    lk_decay: float = 3.0,
    temperature: float = 1.0,
    overwrite_hidden: bool = False,
    chunk_rows: int | None = None,
    backend: str = "triton",
) -> LinearSoftTargetLoss:
    """Losses, metrics and gradients of K steps.

    Args:
        hidden: K tensors [A, D], the draft's normed hidden states; one float dtype. Rows that are not in rows get a
            zero gradient.
        head: [Vd, D], the draft's head, in hidden's dtype or a float32 master. It is multiplied in hidden's dtype; its
            gradient comes in its own, so a master's is not rounded.
        targets: the soft targets of M rows. HiddenTargets are multiplied in their head's dtype; TopKTargets may hold
            any k.
        rows: K int64 tensors [n_k], strictly ascending: the rows of hidden[k] that count. May be empty. On the CPU,
            best: on the device, the call waits for it once.
        target_rows: K int64 tensors [n_k], where rows are: their rows of targets. Target rows that nobody names cost
            nothing.
        target_index: int64 [M], the target's argmax as a draft-vocabulary index; -1 outside it: such a row adds 0 to
            the loss, is a miss and has a zero gradient.
        target_lse: float32 [M], log-sum-exp of the target's logits over its full vocabulary. TopKTargets hold
            log-probabilities and do not read it: None is allowed.
        row_weight: K finite numbers, decay^k / (K * N_k) in training.
        head_compute: head in hidden's dtype if the caller has it already: saves a copy [Vd, D] a call.
        objective, lk_decay, temperature: as in `soft_target_loss`. TopKTargets are known at temperature 1 only.
        mixing: lam of lk_lambda for each step (a tensor [K] is not read by the host); None: from alpha, a row.
        overwrite_hidden: write the gradients of hidden over it, which saves K * A * D elements. Only for tensors that
            nobody else reads any more: autograd refuses whoever saved them for its backward, but a later reader of
            their values would find gradients. hidden that needs no gradient is left as it is.
        chunk_rows: target rows a chunk; None: what fits (`default_chunk_rows`).
        backend: "triton" or "torch"; `soft_target_loss.choose_loss_backend` chooses.

    Nothing waits for the device when rows and target_rows are on the CPU. A target_index out of range is refused on the
    CPU, where looking costs nothing; elsewhere it is a row that is never correct. Of equal logits the lowest index is
    the argmax. What is not finite is not hidden (see `soft_target_loss`).

    Raises: ValueError if shapes, dtypes, devices, indices or settings do not fit, a leaf is to be overwritten, or
        triton cannot run; RuntimeError from a second backward, or one that would retain the graph.
    """
    settings = Objective(objective, lk_decay, temperature)
    if backend not in LOSS_BACKENDS:
        raise ValueError(f"linear loss backend {backend!r} is unknown: use {', '.join(LOSS_BACKENDS)}")
    _check_hidden(hidden, head, head_compute, backend)
    _check_targets(targets, target_index, target_lse, head, settings)
    _check_steps(len(hidden), rows, target_rows, row_weight, head.device)
    if isinstance(mixing, Tensor):
        check_mixing(objective, [])
        if mixing.shape != (len(hidden),):
            raise ValueError(f"mixing must be [{len(hidden)}], one a step, got {tuple(mixing.shape)}")
    elif mixing is not None:
        check_mixing(objective, mixing)
        if len(mixing) != len(hidden):
            raise ValueError(f"mixing must have one number a step, {len(hidden)}, got {len(mixing)}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be positive, got {chunk_rows}")

    graph = torch.is_grad_enabled()
    needs_hidden = tuple(graph and states.requires_grad for states in hidden)
    if overwrite_hidden:
        _check_overwritable([states for states, needed in zip(hidden, needs_hidden, strict=True) if needed])
    call = Call(
        targets=targets,
        rows=tuple(rows),
        target_rows=tuple(target_rows),
        target_index=target_index,
        target_lse=target_lse,
        row_weight=tuple(float(weight) for weight in row_weight),
        mixing=mixing if mixing is None or isinstance(mixing, Tensor) else tuple(float(share) for share in mixing),
        objective=settings,
        head_compute=head_compute,
        needs_hidden=needs_hidden,
        needs_head=graph and head.requires_grad,
        overwrite_hidden=overwrite_hidden,
        chunk_rows=chunk_rows,
        backend=backend,
    )
    loss, loss_sums, correct, alpha = _LinearSoftTargetLoss.apply(call, head, *hidden)
    counts = [step_rows.shape[0] for step_rows in rows]
    return LinearSoftTargetLoss(
        loss=loss, loss_sums=loss_sums, correct=correct.split(counts), alpha=alpha.split(counts)
    )


class _LinearSoftTargetLoss(torch.autograd.Function):
    """(loss, loss_sums [K], correct [n], alpha [n]); the gradients are ready after the forward."""

    @staticmethod
    def forward(ctx: Any, call: Call, head: Tensor, *hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        computed = compute(call, [states.detach() for states in hidden], head.detach())
        ctx.call = call
        # The gradients only: a context that held its own outputs would be a cycle, and keep them all.
        ctx.gradients = [computed.grad_head, *computed.grad_hidden]
        ctx.mark_non_differentiable(computed.loss_sums, computed.correct, computed.alpha)
        if call.overwrite_hidden:
            overwritten = [states for states, needed in zip(hidden, call.needs_hidden, strict=True) if needed]
            # Autograd has seen the writes, as detach() shares the version counter: another operation that kept these
            # states for its own backward now raises, rather than read gradients. Saved here, so that ours raises if
            # someone writes later.
            ctx.save_for_backward(*overwritten)
        return computed.loss, computed.loss_sums, computed.correct, computed.alpha

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "second backward through linear_soft_target_loss: its gradients were computed in the forward and "
                "handed out by the first backward; run the forward again"
            )
        # A kept graph is meant to run again, but the gradients are handed out below. Private to torch, and so asked for
        # with care: where it is gone, the second run is what raises.
        keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
        if keeps_graph is not None and keeps_graph():
            raise RuntimeError(
                "linear_soft_target_loss runs backward once, so its graph cannot be kept: leave retain_graph and "
                "create_graph out, and add losses up before the backward"
            )
        call: Call = ctx.call
        gradients: list[Tensor | None] = ctx.gradients
        ctx.gradients = None
        # Read for its check: raises if an overwritten tensor was written again.
        saved = ctx.saved_tensors
        assert len(saved) == (sum(call.needs_hidden) if call.overwrite_hidden else 0)
        for gradient in gradients:
            if gradient is not None:
                scale_in_place(gradient, grad_loss, call.backend)
        return None, *gradients


def _check_hidden(hidden: Sequence[Tensor], head: Tensor, head_compute: Tensor | None, backend: str) -> None:
    if not hidden:
        raise ValueError("hidden must have one tensor a step, got none")
    if head.dim() != 2 or 0 in head.shape:
        raise ValueError(f"head must be [Vd, D] with Vd and D positive, got {tuple(head.shape)}")
    shape, dtype, device = hidden[0].shape, hidden[0].dtype, hidden[0].device
    if len(shape) != 2 or shape[1] != head.shape[1]:
        raise ValueError(f"hidden must be [A, {head.shape[1]}] like head, got {tuple(shape)}")
    if not dtype.is_floating_point:
        raise ValueError(f"hidden must be of a float dtype, got {dtype}")
    for step, states in enumerate(hidden):
        if states.shape != shape or states.dtype != dtype:
            raise ValueError(
                f"hidden must be {tuple(shape)} {dtype} at every step, got {tuple(states.shape)} {states.dtype} at "
                f"step {step}"
            )
    if head.dtype not in (dtype, torch.float32):
        raise ValueError(f"head must be {dtype} like hidden, or a float32 master, got {head.dtype}")
    if dtype == torch.float64 and head.dtype != dtype:
        raise ValueError("hidden is float64, and so must be head: a float32 master would be less exact than hidden")
    if head_compute is not None and (head_compute.shape != head.shape or head_compute.dtype != dtype):
        raise ValueError(
            f"head_compute must be {tuple(head.shape)} {dtype}, got {tuple(head_compute.shape)} {head_compute.dtype}"
        )
    for name, tensor in (("head", head), ("head_compute", head_compute), *(("hidden", states) for states in hidden)):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, hidden[0] on {device}: move one of them")
    if backend == "triton":
        check_triton_runs_on(device)
        if dtype == torch.float64:
            raise ValueError("linear loss backend 'triton' computes in float32, hidden is float64: use 'torch'")


def _check_targets(
    targets: HiddenTargets | TopKTargets,
    target_index: Tensor,
    target_lse: Tensor | None,
    head: Tensor,
    objective: Objective,
) -> None:
    tensors: dict[str, Tensor] = {"target_index": target_index}
    if target_index.dim() != 1 or target_index.dtype != torch.int64:
        raise ValueError(f"target_index must be int64 [M], got {target_index.dtype} {tuple(target_index.shape)}")
    num_targets = target_index.shape[0]
    if isinstance(targets, HiddenTargets):
        tensors |= {"targets.last_hidden": targets.last_hidden, "targets.head": targets.head}
        if targets.head.dim() != 2 or targets.head.shape[0] != head.shape[0]:
            raise ValueError(f"targets.head must be [{head.shape[0]}, D] like head, got {tuple(targets.head.shape)}")
        expected: tuple[int, ...] = (num_targets, targets.head.shape[1])
        if targets.last_hidden.shape != expected:
            raise ValueError(f"targets.last_hidden must be {expected}, got {tuple(targets.last_hidden.shape)}")
        if target_lse is None:
            raise ValueError("target_lse is None: only TopKTargets, which hold log-probabilities, go without it")
    else:
        tensors |= {"targets.index": targets.index, "targets.log_probability": targets.log_probability}
        if targets.index.dim() != 2 or targets.index.shape[0] != num_targets:
            raise ValueError(f"targets.index must be [{num_targets}, k], got {tuple(targets.index.shape)}")
        if targets.log_probability.shape != targets.index.shape:
            raise ValueError(
                f"targets.log_probability must be {tuple(targets.index.shape)} like index, got "
                f"{tuple(targets.log_probability.shape)}"
            )
        if targets.index.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"targets.index must be int32 or int64, got {targets.index.dtype}")
        if objective.temperature != 1:
            raise ValueError(
                f"temperature {objective.temperature} needs HiddenTargets: the tail of TopKTargets is known at "
                "temperature 1 only"
            )
    if target_lse is not None:
        tensors["target_lse"] = target_lse
        if target_lse.shape != (num_targets,):
            raise ValueError(f"target_lse must be [{num_targets}] like target_index, got {tuple(target_lse.shape)}")
    for name, tensor in tensors.items():
        if tensor.device != head.device:
            raise ValueError(f"{name} is on {tensor.device}, head on {head.device}: move one of them")


def _check_steps(
    num_steps: int,
    rows: Sequence[Tensor],
    target_rows: Sequence[Tensor],
    row_weight: Sequence[float],
    device: torch.device,
) -> None:
    for name, sequence in (("rows", rows), ("target_rows", target_rows), ("row_weight", row_weight)):
        if len(sequence) != num_steps:
            raise ValueError(f"{name} must have one entry a step, {num_steps}, got {len(sequence)}")
    for step, (own, others) in enumerate(zip(rows, target_rows, strict=True)):
        for name, index in (("rows", own), ("target_rows", others)):
            if index.dim() != 1 or index.dtype != torch.int64:
                raise ValueError(f"{name}[{step}] must be int64 [n], got {index.dtype} {tuple(index.shape)}")
            if index.device not in (device, torch.device("cpu")):
                raise ValueError(f"{name}[{step}] is on {index.device}, head on {device}: leave it on the CPU")
            if index.device != rows[0].device:
                raise ValueError(f"{name}[{step}] is on {index.device}, rows[0] on {rows[0].device}: move one of them")
        if own.shape != others.shape:
            raise ValueError(f"rows[{step}] has {own.shape[0]} rows, target_rows[{step}] {others.shape[0]}")
    for step, weight in enumerate(row_weight):
        if not math.isfinite(weight):
            raise ValueError(f"row_weight[{step}] must be finite, got {weight}: give a step without rows 0")


def _check_overwritable(hidden: Sequence[Tensor]) -> None:
    ranges = []
    for states in hidden:
        if states.is_leaf:
            raise ValueError("overwrite_hidden overwrites hidden, and this is a leaf: pass hidden.clone()")
        if any(stride == 0 and size > 1 for stride, size in zip(states.stride(), states.shape, strict=True)):
            raise ValueError("overwrite_hidden overwrites hidden, whose rows share memory: pass hidden.contiguous()")
        if states.numel():
            reach = sum((size - 1) * stride for size, stride in zip(states.shape, states.stride(), strict=True)) + 1
            ranges.append((states.data_ptr(), states.data_ptr() + reach * states.element_size()))
    ranges.sort()
    for (_, end), (start, _) in pairwise(ranges):
        if start < end:
            raise ValueError("overwrite_hidden overwrites hidden, whose steps share memory: clone one of them")
