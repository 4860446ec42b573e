"""The linear loss against a plain formula in float64, and against the loss from logits.

Low precision is held to: error <= that of a naive implementation in the same dtype + EPS. Inputs are bounded (uniform),
so that nothing overflows and hides a fault. Without a CUDA device the kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference, soft_target_rows_triton
from kernels.linear_soft_target_chunks import default_chunk_rows
from kernels.linear_soft_target_loss import LinearSoftTargetLoss, TopKTargets, linear_soft_target_loss
from kernels.soft_target_loss import soft_target_loss
from kernels.soft_target_rows_triton import RowLaunch
from tests.kernels.linear_case import assert_same, converted, formula, make_case, run, top_k

BACKENDS = ["torch", "triton"]
OBJECTIVES: list[dict[str, Any]] = [
    {},
    {"objective": "lk_alpha"},
    {"objective": "total_variation"},
    {"objective": "lk_lambda"},
    {"objective": "lk_lambda", "mixing": (0.2, 0.5, 0.7), "lk_decay": 1.0},
]
# Sums of at most a few thousand float32 products, relative to the largest value.
FLOAT32 = 1e-5
# The gradient of the logits is rounded once: 2^-8 in bf16. Triton's interpreter truncates instead: twice that.
EPS = {torch.bfloat16: 2**-8 if torch.cuda.is_available() else 2**-7, torch.float16: 2**-10}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a row, a ragged last one, several rows a program."""
    launch = RowLaunch(block=256, num_warps=4, num_stages=2, programs_per_processor=1, keep_in_cache=True)
    monkeypatch.setattr(soft_target_rows_triton, "row_launch", lambda *_: launch)


@pytest.mark.parametrize(
    ("settings", "stored"),
    [*((settings, stored) for settings in OBJECTIVES for stored in (None, 5)), ({"temperature": 1.7}, None)],
)
def test_the_formula(settings: dict[str, Any], stored: int | None, device: torch.device) -> None:
    """Red when an objective, its gradient, the tail, a weight or lam of another step is wrong, in a backend or in the
    twin; when a row outside the vocabulary adds to the loss or is a hit."""
    case = make_case("cpu")
    if stored is not None:
        case["targets"] = top_k(case, stored)
    truth = formula(case, **settings)
    assert 0 < sum(int(hits.sum()) for hits in truth[0].correct) < 10
    assert_same(run(reference.linear_soft_target_loss, case, **settings), truth, 1e-13)
    assert_same(run(linear_soft_target_loss, case, backend="torch", **settings), truth, 1e-13)
    for backend in BACKENDS:
        single = converted(case, torch.float32, device)
        result, gradients = run(linear_soft_target_loss, single, backend=backend, **settings)
        assert result.loss.dtype == result.loss_sums.dtype == result.alpha[0].dtype == torch.float32
        assert_same((result, gradients), truth, FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", [{}, {"objective": "lk_lambda"}])
@pytest.mark.parametrize(
    ("num_columns", "dtype"),
    [(252, torch.bfloat16), (507, torch.bfloat16), (1000, torch.bfloat16), (507, torch.float16)],
)
@pytest.mark.usefixtures("small_blocks")
def test_low_precision(
    num_columns: int, dtype: torch.dtype, settings: dict[str, Any], backend: str, device: torch.device
) -> None:
    """Red when a block's end is missed, or something is rounded that the naive implementation does not round."""
    case = make_case(device, dtype, num_columns=num_columns)
    truth, true_gradients = run(reference.linear_soft_target_loss, converted(case, torch.float64), **settings)
    naive, naive_gradients = run(reference.linear_soft_target_loss, case, **settings)
    result, gradients = run(linear_soft_target_loss, case, backend=backend, **settings)
    for gradient, naive_gradient, true_gradient in zip(gradients, naive_gradients, true_gradients, strict=True):
        assert gradient.dtype == dtype
        size = true_gradient.abs().max().item()
        bound = (naive_gradient.double() - true_gradient).abs().max().item()
        assert (gradient.double() - true_gradient).abs().max().item() <= bound + EPS[dtype] * size
    error, naive_error = (abs(got.loss.item() - truth.loss.item()) for got in (result, naive))
    assert error <= naive_error + FLOAT32 * truth.loss.item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stored", [None, 5])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_chunks(chunk_rows: int, stored: int | None, backend: str, device: torch.device) -> None:
    """Red when a chunk's rows get another's targets, weights or results, or one chunk's head gradient is lost."""
    case = make_case(device, torch.float32)
    if stored is not None:
        case["targets"] = top_k(case, stored)
    settings: dict[str, Any] = {"objective": "lk_lambda", "mixing": (0.1, 0.5, 0.9), "backend": backend}
    whole = run(reference.linear_soft_target_loss, case, objective="lk_lambda", mixing=settings["mixing"])
    assert_same(run(linear_soft_target_loss, case, chunk_rows=chunk_rows, **settings), whole, FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "rows",
    [[[], [], []], [[4], [], []], [[], [2], [0, 7]], [[*range(9)]] * 3, [[1, 3, 5, 8], [0, 2, 4, 6], [1, 6]]],
    ids=["none", "one", "ragged", "all", "apart"],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_few_rows(rows: list[list[int]], overwrite: bool, backend: str, device: torch.device) -> None:
    """Red when a step without rows fails or leaves its states ungraded, or one row is taken for a whole chunk."""
    case = make_case("cpu", rows=rows)
    single = converted(case, torch.float32, device)
    got = run(linear_soft_target_loss, single, backend=backend, chunk_rows=2, overwrite_hidden=overwrite)
    assert_same(got, formula(case), FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_count_is_not_read(backend: str, device: torch.device) -> None:
    """Red when a row of hidden, or of the targets, that no step names costs anything: here it would spread NaN."""
    case = make_case(device, torch.float32)
    expected = run(linear_soft_target_loss, case, backend=backend)
    named = torch.cat(case["target_rows"])
    for row in range(13):
        if row not in named:
            case["targets"].last_hidden[row] = float("nan")
            case["target_lse"][row] = float("nan")
    for states, own in zip(case["hidden"], case["rows"], strict=True):
        for row in range(9):
            if row not in own:
                states[row] = float("nan")
    for overwrite in (False, True):
        got = run(linear_soft_target_loss, case, backend=backend, overwrite_hidden=overwrite)
        assert_same(got, expected, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", OBJECTIVES)
def test_all_tokens_stored_is_the_whole_distribution(
    settings: dict[str, Any], backend: str, device: torch.device
) -> None:
    """Red when top-k adds a tail that is not there, or renormalises otherwise than a softmax does."""
    case = make_case(device, torch.float32)
    logits = case["targets"].last_hidden @ case["targets"].head.T
    index = torch.arange(37, device=device).flip(0).expand(13, 37)
    log_probability = (logits - case["target_lse"][:, None]).flip(1)
    stored = case | {"targets": TopKTargets(index=index, log_probability=log_probability), "target_lse": None}
    got = run(linear_soft_target_loss, stored, backend=backend, **settings)
    assert_same(got, run(linear_soft_target_loss, case, backend=backend, **settings), FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_stored_outside_the_draft_vocabulary(backend: str, device: torch.device) -> None:
    """Red when such a row, which has no soft target, turns the loss into NaN, or index -1 writes a column."""
    case = make_case(device, torch.float32)
    stored = top_k(case, 4)
    row = int(case["target_rows"][0][1])
    stored.index[row] = -1
    stored.log_probability[row] = torch.tensor([0.25, 0.25, 0.25, 0.25], device=device).log()
    case["target_index"][row] = -1
    result, gradients = run(linear_soft_target_loss, case | {"targets": stored}, backend=backend)
    assert result.loss.isfinite()
    assert result.alpha[0][1] == 0
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixing_as_a_tensor(backend: str, device: torch.device) -> None:
    """Red when the tensor's entries go to other steps than the sequence's."""
    case = make_case(device, torch.float32)
    shares = (0.2, 0.5, 0.7)
    settings: dict[str, Any] = {"objective": "lk_lambda", "backend": backend, "chunk_rows": 2}
    expected = run(linear_soft_target_loss, case, mixing=shares, **settings)
    assert_same(run(linear_soft_target_loss, case, mixing=torch.tensor(shares), **settings), expected, 0.0)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"objective": "lk_alpha"}, {"objective": "lk_lambda"}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_from_logits_is_the_same(backend: str, settings: dict[str, Any], device: torch.device) -> None:
    """Red when the two ways to the loss drift apart."""
    case = make_case(device, torch.float32)

    def from_logits(hidden: Sequence[Tensor], head: Tensor, **_: Any) -> LinearSoftTargetLoss:
        target_logits = case["targets"].last_hidden @ case["targets"].head.T
        steps = [
            soft_target_loss(
                states[own] @ head.T,
                target_logits,
                target_row=others,
                target_index=case["target_index"],
                target_lse=case["target_lse"],
                weight=weight,
                backend=backend,
                **settings,
            )
            for states, own, others, weight in zip(
                hidden, case["rows"], case["target_rows"], case["row_weight"], strict=True
            )
        ]
        return LinearSoftTargetLoss(
            loss=torch.stack([step.loss for step in steps]).sum(),
            loss_sums=torch.stack([step.loss_sum for step in steps]),
            correct=tuple(step.correct for step in steps),
            alpha=tuple(step.alpha for step in steps),
        )

    got = run(linear_soft_target_loss, case, backend=backend, **settings)
    assert_same(got, run(from_logits, case), FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter computes in numpy
def test_what_is_not_finite_is_not_hidden(backend: str, device: torch.device) -> None:
    """Red when a NaN in a row that counts leaves the loss finite, or spreads to other rows' metrics."""
    case = make_case(device, torch.float32)
    case["hidden"][0][4, 2] = float("nan")
    result, (grad_head, *_) = run(linear_soft_target_loss, case, backend=backend)
    assert result.loss.isnan()
    assert grad_head.isnan().any()
    assert result.alpha[0].isnan().tolist() == [row == 4 for row in case["rows"][0].tolist()]
    assert not result.correct[0][3]
    assert result.loss_sums.isnan().tolist() == [True, False, False]


def test_the_default_chunk() -> None:
    """Red when a chunk outgrows its share of what all logits would take, or its product falls below full speed although
    memory would allow more."""
    for num_targets, rows in [(16_384, 964), (8_192, 512), (4_096, 683), (1_024, 342)]:
        assert default_chunk_rows(num_targets, 7, 32_000, 4096, 2, 2) == rows
    assert default_chunk_rows(100, 7, 32_000, 4096, 2, 2) == 100
    assert default_chunk_rows(8_192, 1, 32_000, 4096, 2, 2) <= 8_192 / 8
    assert default_chunk_rows(65_536, 7, 32_000, 4096, 2, 2) == 1_024
    # Equal chunks, not 16 full ones and one of 8 rows.
    assert default_chunk_rows(8_200, 7, 32_000, 4096, 2, 2) == 513
