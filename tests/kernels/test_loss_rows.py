"""The row kernel: however it is launched, the same rows; and it compiles, which the interpreter does not show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import soft_target_rows, soft_target_rows_triton
from kernels.soft_target_rows import Objective, RowResults, TargetRows
from kernels.soft_target_rows_triton import RowLaunch

REPOSITORY = Path(__file__).parents[2]
SUM = 1e-5  # of a few hundred float32 products, relative to the largest value

LAUNCHES = {
    "a block a row": RowLaunch(block=512, num_warps=4, num_stages=1, programs_per_processor=0, keep_in_cache=False),
    "a ragged last block": RowLaunch(block=64, num_warps=4, num_stages=1, programs_per_processor=0, keep_in_cache=True),
    "several rows a program, loads ahead": RowLaunch(
        block=128, num_warps=8, num_stages=3, programs_per_processor=1, keep_in_cache=True
    ),
}
OBJECTIVES = [
    Objective(),
    Objective(temperature=0.7),
    Objective(temperature=2.5),
    Objective("lk_alpha"),
    Objective("total_variation"),
    Objective("lk_lambda", lk_decay=1.5),
]


def make_rows(device: torch.device, *, tail: bool, num_columns: int = 300) -> tuple[Tensor, TargetRows, dict[str, Any]]:
    """Seven rows of logits over four target rows; with a tail two thirds of the columns are not stored."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.rand(7, num_columns, generator=generator) * 2 - 1) * 6
    target = (torch.rand(4, num_columns, generator=generator) * 2 - 1) * 6
    lse = target.logsumexp(-1) + 0.3
    if tail:
        target[:, torch.rand(num_columns, generator=generator) < 2 / 3] = float("-inf")
    index = torch.tensor([3, -1, 0, 250])
    logits[0, 3] = 9.0
    others = {
        "target_row": torch.tensor([0, 1, 1, 3, 2, 0, 3]),
        "weight": torch.tensor([0.5, 0.4, 0.0, 1.5, 1.0, 0.2, 0.7]),
        "mixing": None,
    }
    targets = TargetRows(
        logits=target.to(device),
        index=index.to(device),
        lse=lse.to(device),
        draft_lse=None,
        tail=torch.tensor([0.3, 0.2, 0.1, 0.05], device=device) if tail else None,
    )
    if tail:
        # With a tail the stored probabilities add up to the rest.
        stored = target.logsumexp(-1) - (1 - torch.tensor([0.3, 0.2, 0.1, 0.05])).log()
        targets = TargetRows(targets.logits, targets.index, targets.lse, stored.to(device), targets.tail)
    return (
        logits.to(device),
        targets,
        {name: value.to(device) if isinstance(value, Tensor) else value for name, value in others.items()},
    )


def compute(
    logits: Tensor, targets: TargetRows, others: dict[str, Any], objective: Objective, launch: RowLaunch | None
) -> tuple[Tensor, RowResults]:
    """By the kernel, or by torch where launch is None."""
    gradient = logits.clone()
    results = RowResults.empty(len(logits), logits.dtype, logits.device)
    arguments = others | {"objective": objective, "write_gradient": True}
    if launch is None:
        soft_target_rows.soft_target_rows(gradient, targets, results, **arguments)
    else:
        soft_target_rows_triton.soft_target_rows(gradient, targets, results, **arguments, launch=launch)
    return gradient, results


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: f"{objective.name}-{objective.temperature}")
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_changes_nothing(name: str, objective: Objective, tail: bool, device: torch.device) -> None:
    """Red when a row's statistics leak into the program's next row, a block is left out, or torch and kernel differ."""
    if tail and objective.temperature != 1:
        objective = Objective("lk_lambda", lk_decay=0.5)  # a tail has one temperature
    logits, targets, others = make_rows(device, tail=tail)
    expected, true_results = compute(logits, targets, others, objective, None)
    gradient, results = compute(logits, targets, others, objective, LAUNCHES[name])
    size = expected.abs().max().item()
    torch.testing.assert_close(gradient, expected, rtol=0, atol=SUM * size)
    assert results.correct.tolist() == true_results.correct.tolist()
    assert 0 < results.correct.sum() < 7
    for got, wanted in ((results.loss, true_results.loss), (results.alpha, true_results.alpha)):
        torch.testing.assert_close(got, wanted, rtol=SUM, atol=SUM)
    assert not gradient[1:3].any()  # the target lies outside; the weight is 0
    assert results.loss[1] == 0
    assert results.loss[2] == 0
    assert (results.alpha > 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_known_log_sum_exp_changes_nothing(temperature: float, device: torch.device) -> None:
    """Red when the kernel that finds it, and the pass that finds it in the row kernel, differ."""
    logits, targets, others = make_rows(device, tail=False)
    objective = Objective(temperature=temperature)
    launch = LAUNCHES["a ragged last block"]
    found = soft_target_rows_triton.log_sum_exp(targets.logits, temperature, launch)
    torch.testing.assert_close(found, soft_target_rows.log_sum_exp(targets.logits, temperature), rtol=SUM, atol=0)
    known = TargetRows(targets.logits, targets.index, targets.lse, found)
    for got, wanted in zip(
        compute(logits, known, others, objective, launch)[:1],
        compute(logits, targets, others, objective, launch)[:1],
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=SUM * wanted.abs().max().item())


def test_blocks_that_fill_the_row(device: torch.device) -> None:
    """Red when a row without a ragged last block loses its last block, or reads one more."""
    logits, targets, others = make_rows(device, tail=False, num_columns=256)
    targets = TargetRows(targets.logits, targets.index % 256, targets.lse, None)
    launch = RowLaunch(block=64, num_warps=4, num_stages=1, programs_per_processor=0, keep_in_cache=True)
    for objective in (Objective(), Objective("lk_lambda")):
        expected, true_results = compute(logits, targets, others, objective, None)
        gradient, results = compute(logits, targets, others, objective, launch)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=SUM * expected.abs().max().item())
        torch.testing.assert_close(results.alpha, true_results.alpha, rtol=SUM, atol=0)


@pytest.mark.parametrize("launch", [None, LAUNCHES["a ragged last block"]], ids=["torch", "triton"])
def test_no_overlap(launch: RowLaunch | None, device: torch.device) -> None:
    """Red when a row without any overlap makes lk_alpha infinite, or its gradient NaN."""
    logits, targets, others = make_rows(device, tail=False)
    logits[:, 150:], targets.logits[:, :150] = -300.0, -300.0
    gradient, results = compute(logits, targets, others, Objective("lk_alpha"), launch)
    assert results.alpha.max() == 0
    assert results.loss[0].item() == pytest.approx(69.0776, rel=1e-5)  # -log(PROBABILITY_FLOOR)
    assert not gradient.any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own tests compile it")
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Red when a kernel holds what the interpreter takes but the compiler does not, as a variable of two types."""
    code = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.scale_triton import _scale_kernel
from kernels.soft_target_rows_triton import _log_sum_exp_kernel, _rows_kernel

def build(kernel, types, constants):
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_pointer"):
            signature[name] = "*" + types.get(name, "fp32")
        else:
            signature[name] = "fp32" if name in ("inverse_temperature", "lk_decay") else "i32"
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))

types = {"logits_pointer": "bf16", "target_pointer": "bf16", "target_row_pointer": "i64",
         "target_index_pointer": "i64", "correct_pointer": "u8", "gradient_pointer": "bf16"}
shape = {"BLOCK": 256, "NUM_STAGES": 1, "RAGGED": True}
row = shape | {"LOGITS_UNIT": True, "TARGET_UNIT": True, "READ_AGAIN": "evict_last", "READ_LAST": "evict_first",
               "mixing_pointer": None, "tail_pointer": None, "TEMPERED": False, "WRITE_GRADIENT": True}
build(_rows_kernel, types, row | {"OBJECTIVE": "soft_cross_entropy", "target_row_pointer": None})
build(_rows_kernel, types, row | {"OBJECTIVE": "soft_cross_entropy", "TEMPERED": True, "draft_lse_pointer": None})
build(_rows_kernel, types, {n: v for n, v in row.items() if n != "tail_pointer"} | {"OBJECTIVE": "lk_alpha"})
lam = {n: v for n, v in row.items() if n != "mixing_pointer"}
build(_rows_kernel, types, lam | {"OBJECTIVE": "lk_lambda", "LOGITS_UNIT": False, "draft_lse_pointer": None})
build(_rows_kernel, types, row | {"OBJECTIVE": "total_variation", "WRITE_GRADIENT": False, "RAGGED": False})
build(_log_sum_exp_kernel, types, shape | {"TEMPERED": True, "UNIT": False})
build(_scale_kernel, types, {"BLOCK": 256})
print("compiled")
"""
    environment = os.environ | {
        "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "compiled"
