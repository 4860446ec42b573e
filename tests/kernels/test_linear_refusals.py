"""What the linear loss refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.linear_soft_target_loss import (
    HiddenTargets,
    LinearSoftTargetLoss,
    linear_soft_target_loss,
)
from tests.kernels.linear_case import make_case, top_k


def call(backend: str = "torch", **changed: Any) -> LinearSoftTargetLoss:
    return linear_soft_target_loss(**make_case("cpu", torch.float32) | changed, backend=backend)


def spoiled(name: str, step: int, value: Tensor | float) -> LinearSoftTargetLoss:
    entries = list(make_case("cpu", torch.float32)[name])
    entries[step] = value
    return call(**{name: entries})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: call(hidden=[], rows=[], target_rows=[], row_weight=[]), "hidden must have one tensor a step"),
        (lambda: spoiled("hidden", 1, torch.zeros(8, 8)), r"hidden must be \(9, 8\) .* got \(8, 8\) .* at step 1"),
        (lambda: call(head=torch.zeros(37, 7)), r"hidden must be \[A, 7\] like head"),
        (lambda: call(head=torch.zeros(37, 8).half()), "a float32 master, got torch.float16"),
        (lambda: call(head_compute=torch.zeros(36, 8)), r"head_compute must be \(37, 8\)"),
        (lambda: call(targets=HiddenTargets(torch.zeros(13, 8), torch.zeros(36, 8))), r"targets.head must be \[37"),
        (lambda: call(targets=HiddenTargets(torch.zeros(12, 8), torch.zeros(37, 8))), "targets.last_hidden must be"),
        (lambda: call(target_lse=None), "only TopKTargets"),
        (lambda: call(target_lse=torch.zeros(12)), r"target_lse must be \[13\]"),
        (lambda: call(target_index=torch.zeros(13).int()), "target_index must be int64"),
        (lambda: call(target_index=torch.full((13,), 37)), "target_index contains 37: use -1 .. 36"),
        (lambda: spoiled("rows", 1, torch.tensor([0, 3, 9])), "rows contains 9: use 0 .. 8"),
        (lambda: spoiled("rows", 1, torch.tensor([0, 3, 3])), "rows must be strictly ascending"),
        (lambda: spoiled("rows", 1, torch.tensor([0, 3])), r"rows\[1\] has 2 rows, target_rows\[1\] 3"),
        (lambda: spoiled("target_rows", 2, torch.tensor([-1])), "target_rows contains -1: use 0 .. 12"),
        (lambda: spoiled("target_rows", 2, torch.tensor([1.0])), r"target_rows\[2\] must be int64"),
        (lambda: call(row_weight=(1.0, 2.0)), "row_weight must have one entry a step, 3, got 2"),
        (lambda: spoiled("row_weight", 1, float("inf")), r"row_weight\[1\] must be finite"),
        (lambda: call(objective="kl"), "objective 'kl' is unknown: use soft_cross_entropy, lk_alpha"),
        (lambda: call(mixing=(0.1, 0.2, 0.3)), "mixing is lam of lk_lambda"),
        (lambda: call(objective="lk_lambda", mixing=(0.1, 0.2)), "mixing must have one number a step, 3, got 2"),
        (lambda: call(objective="lk_lambda", mixing=(0.1, 0.2, 1.2)), r"mixing must be in \[0, 1\], got 1.2"),
        (lambda: call(objective="lk_lambda", mixing=torch.zeros(2)), r"mixing must be \[3\]"),
        (lambda: call(objective="lk_lambda", lk_decay=-1.0), "lk_decay must be finite and not negative"),
        (lambda: call(objective="lk_alpha", temperature=2.0), "temperature 2.0 goes with soft_cross_entropy only"),
        (lambda: call(temperature=0.0), "temperature must be finite and positive"),
        (
            lambda: call(targets=top_k(make_case("cpu", torch.float32), 4), temperature=2.0),
            "temperature 2.0 needs HiddenTargets",
        ),
        (lambda: call(chunk_rows=0), "chunk_rows must be positive"),
        (lambda: call(backend="liger"), "linear loss backend 'liger' is unknown: use triton, torch"),
        (
            lambda: linear_soft_target_loss(**make_case("cpu"), backend="triton"),
            "computes in float32, hidden is float64: use 'torch'",
        ),
        (
            lambda: call(hidden=[torch.zeros(9, 8, requires_grad=True)] * 3, overwrite_hidden=True),
            r"this is a leaf: pass hidden.clone\(\)",
        ),
        (
            lambda: call(hidden=[torch.zeros(9, 8, requires_grad=True).clone()] * 3, overwrite_hidden=True),
            "whose steps share memory",
        ),
        (
            lambda: call(
                hidden=[torch.zeros(1, 8, requires_grad=True).expand(9, 8) for _ in range(3)], overwrite_hidden=True
            ),
            r"rows share memory: pass hidden.contiguous\(\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Callable[[], object], message: str) -> None:
    """Red when a mismatch goes through: rows would be read past the end, or gradients added twice."""
    with pytest.raises(ValueError, match=message):
        wrong()


def test_triton_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when triton is taken where it cannot run."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="use 'torch'"):
        call(backend="triton")
