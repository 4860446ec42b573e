"""What the linear loss is tested on, and the plain formula in float64 that it is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.reference import HiddenTargets, LinearSoftTargetLoss, TopKTargets

WEIGHTS = (0.5, 0.3, 0.2)

Case = dict[str, Any]


def make_case(
    device: torch.device | str,
    dtype: torch.dtype = torch.float64,
    *,
    num_columns: int = 37,
    rows: Sequence[Sequence[int]] = ((0, 1, 2, 4, 5, 8), (0, 3, 8), (1,)),
    seed: int = 0,
) -> Case:
    """Three steps of 9 rows, D 8; row r of step k has target row r + k + 1. A third of the targets lies outside."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int, bound: float = 1.0) -> Tensor:
        return ((torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1) * bound).to(dtype)

    hidden = [uniform(9, 8) for _ in rows]
    head, target_head, last_hidden = uniform(num_columns, 8, bound=2), uniform(num_columns, 8, bound=2), uniform(13, 8)
    own = [torch.tensor(of_step, dtype=torch.int64) for of_step in rows]
    others = [of_step + step + 1 for step, of_step in enumerate(own)]
    target_logits = last_hidden.double() @ target_head.double().T
    # Every other row is made correct at step 0, or at this size none would be.
    index = target_logits.argmax(-1)
    for row, other in list(zip(own[0].tolist(), others[0].tolist(), strict=True))[::2]:
        index[other] = int((hidden[0][row].double() @ head.double().T).argmax())
    index[::3] = -1
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    lse = (target_logits.logsumexp(-1) + torch.rand(13, generator=generator, dtype=torch.float64)).to(lse_dtype)
    return {
        "hidden": [states.to(device) for states in hidden],
        "head": head.to(device),
        "targets": HiddenTargets(last_hidden=last_hidden.to(device), head=target_head.to(device)),
        "rows": [of_step.to(device) for of_step in own],
        "target_rows": [of_step.to(device) for of_step in others],
        "target_index": index.to(device),
        "target_lse": lse.to(device),
        "row_weight": WEIGHTS[: len(rows)],
    }


def top_k(case: Case, k: int) -> TopKTargets:
    """The case's targets as stored: each row's k best over the draft vocabulary, the third of them "outside" it."""
    targets = case["targets"]
    logits = targets.last_hidden.double() @ targets.head.double().T
    stored = (logits - case["target_lse"].double()[:, None]).topk(k, -1)
    index = stored.indices.to(torch.int32)
    index[:, 2] = -1
    dtype = torch.float64 if case["head"].dtype == torch.float64 else torch.float32
    return TopKTargets(index=index, log_probability=stored.values.to(dtype))


def converted(case: Case, dtype: torch.dtype, device: torch.device | str | None = None) -> Case:
    """The same values in another dtype, on another device."""
    device = case["head"].device if device is None else device
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    targets = case["targets"]
    if isinstance(targets, HiddenTargets):
        targets = HiddenTargets(targets.last_hidden.to(device, dtype), targets.head.to(device, dtype))
    else:
        targets = TopKTargets(targets.index.to(device), targets.log_probability.to(device, wide))
    return case | {
        "hidden": [states.to(device, dtype) for states in case["hidden"]],
        "head": case["head"].to(device, dtype),
        "targets": targets,
        "rows": [rows.to(device) for rows in case["rows"]],
        "target_rows": [rows.to(device) for rows in case["target_rows"]],
        "target_index": case["target_index"].to(device),
        "target_lse": case["target_lse"].to(device, wide),
    }


def run(
    function: Callable[..., LinearSoftTargetLoss], case: Case, factor: float = 1.0, **settings: Any
) -> tuple[LinearSoftTargetLoss, list[Tensor]]:
    """The result, and the gradients of the head and of each step's hidden states."""
    leaves = [tensor.clone().requires_grad_() for tensor in (case["head"], *case["hidden"])]
    arguments = case | {"hidden": [leaf.clone() for leaf in leaves[1:]], "head": leaves[0]} | settings
    result = function(**arguments)
    gradients = torch.autograd.grad(result.loss * factor, leaves, allow_unused=True)
    return result, [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]


def formula(case: Case, **settings: Any) -> tuple[LinearSoftTargetLoss, list[Tensor]]:
    """A row at a time, a class at a time, in float64 under autograd; shares no code with the kernels' twin."""

    def compute(hidden: Sequence[Tensor], head: Tensor, **_: Any) -> LinearSoftTargetLoss:
        objective, temperature = settings.get("objective", "soft_cross_entropy"), settings.get("temperature", 1.0)
        sums, correct, alphas = [], [], []
        for step, states in enumerate(hidden):
            total, hits, overlaps = 0 * (states.sum() + head.sum()), [], []
            for row, other in zip(case["rows"][step].tolist(), case["target_rows"][step].tolist(), strict=True):
                z = head @ states[row]
                q = z.exp() / z.exp().sum()
                tempered_q = (z / temperature).exp() / (z / temperature).exp().sum()
                targets, index = case["targets"], int(case["target_index"][other])
                if isinstance(targets, HiddenTargets):
                    t = targets.head @ targets.last_hidden[other]
                    p = list((t / temperature).exp() / (t / temperature).exp().sum())
                    full_p, classes = (t - case["target_lse"][other]).exp(), list(tempered_q)
                else:
                    full_p, stored = torch.zeros_like(q), []
                    for token, log_p in zip(targets.index[other], targets.log_probability[other], strict=True):
                        if token >= 0:
                            full_p[int(token)] = log_p.exp()
                            stored.append(int(token))
                    rest = [column for column in range(len(q)) if column not in stored]
                    tail = 1 - targets.log_probability[other].exp().sum() if rest else torch.zeros(())
                    p = [full_p[column] for column in stored] + [tail]
                    p = [share / sum(p) for share in p]
                    classes = [q[column] for column in stored] + [q[rest].sum() if rest else torch.ones(())]
                cross_entropy = -sum(share * of_draft.log() for share, of_draft in zip(p, classes, strict=True))
                alpha = sum(torch.minimum(a, b) for a, b in zip(full_p.detach(), q, strict=True))
                mixing = settings.get("mixing")
                lam = (-settings.get("lk_decay", 3.0) * alpha.detach()).exp() if mixing is None else mixing[step]
                loss = {
                    "soft_cross_entropy": cross_entropy,
                    "lk_alpha": -alpha.log(),
                    "total_variation": 1 - alpha,
                    "lk_lambda": lam * cross_entropy + (1 - lam) * (1 - alpha),
                }[objective]
                total = total + (loss if index >= 0 else 0 * loss)
                hits.append(int(z.argmax()) == index)
                overlaps.append(alpha.detach())
            sums.append(total)
            correct.append(torch.tensor(hits, dtype=torch.bool))
            alphas.append(torch.tensor(overlaps, dtype=torch.float64))
        weighted = sum(weight * of_step for weight, of_step in zip(case["row_weight"], sums, strict=True))
        assert isinstance(weighted, Tensor)
        return LinearSoftTargetLoss(weighted, torch.stack(sums).detach(), tuple(correct), tuple(alphas))

    return run(compute, case)


def assert_same(
    got: tuple[LinearSoftTargetLoss, list[Tensor]], truth: tuple[LinearSoftTargetLoss, list[Tensor]], tolerance: float
) -> None:
    """Losses, metrics and gradients; the tolerance is relative to each one's largest value."""

    def close(a: Tensor, b: Tensor) -> None:
        assert a.shape == b.shape
        if b.numel():
            largest = b.abs().max().item()
            torch.testing.assert_close(a.double().cpu(), b.double().cpu(), rtol=0, atol=tolerance * max(largest, 1e-3))

    (result, gradients), (true_result, true_gradients) = got, truth
    close(result.loss.detach(), true_result.loss.detach())
    close(result.loss_sums, true_result.loss_sums)
    for step in range(len(result.alpha)):
        assert result.correct[step].tolist() == true_result.correct[step].tolist()
        close(result.alpha[step], true_result.alpha[step])
    for gradient, true_gradient in zip(gradients, true_gradients, strict=True):
        close(gradient, true_gradient)
