"""Ranks that share a pack, a GPU each, over NCCL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.trainer.draft.layer import Memory
from tests.trainer.draft.conftest import masked
from tests.trainer.draft.context_ranks import Case, run_case, run_ranks, together

pytestmark = pytest.mark.gpu

# Long enough for cuDNN: squares with keys before them, and runs of one document on one rank that share keys.
LONG = (masked((False, 1000), (True, 9000), (False, 700), (True, 40)), (9500, 1200, 40))
SHORT = (masked((True, 300), (False, 40), (True, 60)), (300, 70, 30))


def test_gpus_together_are_one_gpu(tmp_path: Path) -> None:
    """Red when NCCL moves other rows than gloo, or attention's calls for a rank's pieces lose keys or their gradients.
    Truth: float64 on the CPU; the bound: twice one GPU's own error, for a norm's gradient is 32 rounded numbers."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = Case([LONG, SHORT], dtype=torch.bfloat16, rounded=True, device="cuda")
    cases = {"all": case, "steps run again": replace(case, memory=Memory("step"))}
    found = run_ranks(cases, 2, tmp_path)
    truth, one = run_case(replace(case, dtype=torch.float64, device="cpu")), run_case(case)
    for name in cases:
        sums = together(found[name])
        assert torch.equal(sums["rows"], one["rows"])
        for key in sums:
            if key.startswith(("gradient", "aux_hidden")):
                own, bound = (float((of[key].double() - truth[key]).norm()) for of in (sums, one))
                assert own <= 2 * bound + 1e-12, f"{name}, {key}: {own:.3e} against {bound:.3e}"
