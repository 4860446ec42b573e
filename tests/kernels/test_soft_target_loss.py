"""The loss against the formula in float64, and the triton kernel against the torch reference.

The gradient in low precision is held to: the kernel's error <= the reference's error in the same dtype + EPS. Inputs
are bounded (uniform), so that nothing overflows and hides a fault. Without a CUDA device the kernel is interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference, soft_target_rows_triton
from kernels.soft_target_loss import SoftTargetLoss, choose_loss_backend, soft_target_loss

BACKENDS = ["torch", "triton"]
# Relative to the largest gradient. Gradients are rounded once to the logits' dtype, by the kernel as by the reference;
# a value near the middle may fall either way, which costs the unit roundoff (2^-8 in bf16) at most. The interpreter of
# triton truncates to bf16 instead of rounding: twice that. In float32 it is exp(x), whose argument's rounding costs
# |x| * 2^-24, and |x| reaches 20 here.
EPS = {
    torch.bfloat16: 2**-8 if torch.cuda.is_available() else 2**-7,
    torch.float16: 2**-11,
    torch.float32: 2**-19,
}
# Sums of float32 products over up to a few thousand columns, relative to the sum.
SUM = 1e-5


def rows(
    num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> tuple[Tensor, dict[str, Any]]:
    """Draft logits, and the other arguments; a third of the rows has a target outside the draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    # Rising along the columns: the largest logit so far changes from block to block.
    rise = torch.linspace(-3, 3, num_columns)
    draft, target = (
        ((torch.rand(num_rows, num_columns, generator=generator) * 2 - 1) * 8 + rise).to(dtype) for _ in range(2)
    )
    target_index = torch.randint(num_columns, (num_rows,), generator=generator)
    # Every other countable row is made correct, or at this size none would be.
    target_index[::2] = draft.argmax(-1)[::2]
    target_index[1::3] = -1
    # The full vocabulary holds more mass than the draft's.
    target_lse = target.float().logsumexp(-1) + torch.rand(num_rows, generator=generator)
    others = {"target_logits": target, "target_index": target_index, "target_lse": target_lse}
    return draft.to(device), {name: tensor.to(device) for name, tensor in others.items()} | {"weight": 0.37}


def run(backend: str, draft: Tensor, others: Mapping[str, Any], factor: float = 1.0) -> tuple[SoftTargetLoss, Tensor]:
    leaf = draft.clone().requires_grad_()
    result = soft_target_loss(leaf.clone(), **others, backend=backend)
    (result.loss * factor).backward()
    assert leaf.grad is not None
    return result, leaf.grad


def formula(draft: Tensor, others: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradient, correct, alpha) in float64, a row at a time; shares no code with the reference."""
    loss, gradient = torch.zeros((), dtype=torch.float64), torch.zeros(draft.shape, dtype=torch.float64)
    correct, alpha = [], []
    columns = zip(draft.double(), others["target_logits"].double(), others["target_index"].tolist(), strict=True)
    for row, (q_logits, p_logits, index) in enumerate(columns):
        p, q = p_logits.exp() / p_logits.exp().sum(), q_logits.exp() / q_logits.exp().sum()
        if index >= 0:
            loss = loss + others["weight"] * -sum(p[j] * q[j].log() for j in range(len(p)))
            gradient[row] = others["weight"] * (q * p.sum() - p)
        lowest_best = min(j for j in range(len(q)) if q_logits[j] == q_logits.max())
        correct.append(lowest_best == index)
        full_p = (p_logits - others["target_lse"][row].double()).exp()
        alpha.append(sum(min(full_p[j].item(), q[j].item()) for j in range(len(q))))
    return loss, gradient, torch.tensor(correct, dtype=torch.bool), torch.tensor(alpha, dtype=torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_formula(backend: str, device: torch.device) -> None:
    """Red when a row outside the draft vocabulary adds to the loss or counts as a hit, alpha takes p over the draft
    vocabulary alone, or the weight is applied twice or not to the gradient."""
    draft, others = rows(13, 29, torch.float32, device)
    result, gradient = run(backend, draft, others)
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in others.items()}
    loss, expected_gradient, correct, alpha = formula(draft.cpu(), on_cpu)
    assert result.loss.dtype == result.alpha.dtype == torch.float32
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert result.correct.tolist() == correct.tolist()
    assert 0 < result.correct.sum() < 13
    torch.testing.assert_close(result.alpha.cpu().double(), alpha, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.cpu().double(), expected_gradient, rtol=0, atol=3e-7)  # ~3 ulp of the largest
    assert not gradient[others["target_index"] < 0].any()


def test_the_reference_is_exact_in_float64() -> None:
    """Red when the reference drops to float32 inside: it could not serve as the truth."""
    draft, others = rows(7, 11, torch.float64, "cpu")
    others["target_lse"] = others["target_lse"].double()
    result, gradient = run("torch", draft, others)
    loss, expected_gradient, _, alpha = formula(draft, others)
    torch.testing.assert_close(result.loss.detach(), loss, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-15)
    torch.testing.assert_close(result.alpha, alpha, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(5, 252), (3, 507), (2, 123), (4, 1), (2, 4096), (3, 9001)])
def test_triton(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Red when a ragged last block is read or written past its end, or a block's statistics are not carried on."""
    draft, others = rows(num_rows, num_columns, dtype, device)
    truth, true_gradient = run("torch", draft.double(), others)
    _, naive_gradient = run("torch", draft, others)
    result, gradient = run("triton", draft, others)
    assert gradient.dtype == dtype
    size = true_gradient.abs().max().item()
    error = (gradient.double() - true_gradient).abs().max().item()
    bound = (naive_gradient.double() - true_gradient).abs().max().item()
    assert error <= bound + EPS[dtype] * size
    assert result.loss.item() == pytest.approx(truth.loss.item(), rel=SUM)
    assert torch.equal(result.correct, truth.correct)
    torch.testing.assert_close(result.alpha.double(), truth.alpha, rtol=SUM, atol=0)


def test_triton_at_a_full_vocabulary(device: torch.device) -> None:
    """Qwen3's 151,936 columns. Red when the width is limited (131,072 in public kernels)."""
    draft, others = rows(2, 151_936, torch.bfloat16, device)
    truth, _ = run("torch", draft.double(), others)
    result, gradient = run("triton", draft, others)
    assert result.loss.item() == pytest.approx(truth.loss.item(), rel=SUM)
    torch.testing.assert_close(result.alpha.double(), truth.alpha, rtol=SUM, atol=0)
    assert gradient[0].float().sum().abs() < 1e-2  # q - p sums to 0: bf16 roundings of 0.37 * (2 in all) at most
    assert not gradient[1].any()


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_triton_multiplies_by_the_incoming_scalar_in_float32(factor: float, device: torch.device) -> None:
    """Red when the backward ignores the scalar, or rounds it to fp16 first: the whole gradient would be 0.02% off (in
    bf16, 0.2%; but the interpreter does not round to bf16)."""
    draft, others = rows(4, 300, torch.float16, device)
    _, once = run("triton", draft, others)
    _, scaled = run("triton", draft, others, factor)
    assert torch.equal(scaled, (once.float() * factor).half())


@pytest.mark.parametrize("layout", ["transposed", "slice of a wider tensor"])
def test_triton_strides(layout: str, device: torch.device) -> None:
    """Red when a stride is ignored, or a neighbour of the logits is written."""
    draft, others = rows(5, 300, torch.float32, device)
    _, expected = run("triton", draft, others)
    others["target_logits"] = others["target_logits"].t().contiguous().t()
    if layout == "transposed":
        whole = draft.t().contiguous().requires_grad_()
        logits, neighbours = whole.clone().t(), None
    else:
        whole = torch.cat([draft, torch.ones_like(draft)], dim=1).requires_grad_()
        wide = whole.clone()
        logits, neighbours = wide[:, :300], wide[:, 300:]
    (gradient,) = torch.autograd.grad(soft_target_loss(logits, **others, backend="triton").loss, whole)
    if neighbours is None:
        assert torch.equal(gradient.t(), expected)
    else:
        assert torch.equal(gradient[:, :300], expected)
        assert not gradient[:, 300:].any()
        assert torch.equal(neighbours, torch.ones_like(neighbours))


def test_triton_keeps_the_gradient_in_the_logits(device: torch.device) -> None:
    """Red when a second [N, Vd] tensor is allocated, or logits without a gradient are overwritten."""
    draft, others = rows(4, 300, torch.float32, device)
    logits = draft.clone().requires_grad_().clone()
    storage = logits.data_ptr()
    result = soft_target_loss(logits, **others, backend="triton")
    (gradient,) = torch.autograd.grad(result.loss, logits)
    assert gradient.data_ptr() == storage
    untouched = draft.clone().requires_grad_()
    with torch.no_grad():
        evaluated = soft_target_loss(untouched, **others, backend="triton")
    assert torch.equal(untouched, draft)
    assert evaluated.loss.item() == result.loss.item()
    soft_target_loss(untouched.detach(), **others, backend="triton")
    assert torch.equal(untouched, draft)


def test_triton_backward_runs_once(device: torch.device) -> None:
    """Red when a retained graph hands out the gradient, already multiplied, a second time."""
    draft, others = rows(4, 30, torch.float32, device)
    loss = soft_target_loss(draft.requires_grad_().clone(), **others, backend="triton").loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward .* its gradient lay in the logits' storage"):
        loss.backward()


def test_triton_is_seen_by_autograd(device: torch.device) -> None:
    """Red when another operation that kept the logits silently reads the gradient in their place."""
    draft, others = rows(4, 30, torch.float32, device)
    logits = draft.requires_grad_().clone()
    other = logits.square().sum()
    loss = soft_target_loss(logits, **others, backend="triton").loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ties", [(3, 7), (3, 4200), (4095, 4096), (0, 1, 2)])
def test_of_a_tie_the_lowest_index_is_the_argmax(ties: tuple[int, ...], backend: str, device: torch.device) -> None:
    """Ties are common in bf16. Red when the backends differ, within a block of columns or across two."""
    draft = torch.zeros(2, 5000, dtype=torch.bfloat16, device=device)
    draft[:, list(ties)] = 3.0
    others = {
        "target_logits": torch.zeros_like(draft),
        "target_index": torch.tensor(ties[:2], device=device),
        "target_lse": torch.full((2,), 9.0, device=device),
        "weight": 1.0,
    }
    result, _ = run(backend, draft, others)
    assert result.correct.tolist() == [True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str, device: torch.device) -> None:
    """Red when a step without rows fails, or takes its parameters off the graph."""
    draft, others = rows(0, 30, torch.bfloat16, device)
    result, gradient = run(backend, draft, others)
    assert result.loss.item() == 0.0
    assert gradient.shape == (0, 30)
    assert result.correct.shape == result.alpha.shape == (0,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_zero(backend: str, device: torch.device) -> None:
    """Red when it leaves something of the logits in the gradient."""
    draft, others = rows(4, 30, torch.float32, device)
    result, gradient = run(backend, draft, others | {"weight": 0.0})
    assert result.loss.item() == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter computes in numpy
@pytest.mark.parametrize("index", ["the bad one", "the best of the others", "none"])
@pytest.mark.parametrize(("where", "bad"), [("draft", float("nan")), ("draft", float("inf")), ("target", float("nan"))])
def test_what_is_not_finite_is_not_hidden(
    where: str, bad: float, index: str, backend: str, device: torch.device
) -> None:
    """Red when a maximum or minimum swallows a NaN, or a row that does not count does, or it spreads to other rows."""
    draft, others = rows(3, 30, torch.float32, device)
    others["target_index"] = draft.argmax(-1)
    if index != "the best of the others":
        others["target_index"][1] = 7 if index == "the bad one" else -1
    (draft if where == "draft" else others["target_logits"])[1, 7] = bad
    result, gradient = run(backend, draft, others)
    assert result.loss.isnan()
    assert result.alpha.isnan().tolist() == [False, True, False]
    assert gradient.isnan().any(-1).tolist() == [False, True, False]
    assert result.correct[0]
    if where == "draft":
        assert not result.correct[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_target_token_of_no_probability(backend: str, device: torch.device) -> None:
    """Targets mask padding tokens with -inf, here a whole block of columns. Red when it makes the row NaN."""
    draft, others = rows(2, 5000, torch.float32, device)
    others["target_logits"][:, :4096] = float("-inf")
    result, gradient = run(backend, draft, others)
    truth, true_gradient = run("torch", draft.double(), others)
    assert result.loss.item() == pytest.approx(truth.loss.item(), rel=SUM)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=0, atol=3e-7)
    torch.testing.assert_close(result.alpha.double(), truth.alpha, rtol=SUM, atol=0)


def test_metrics_have_no_gradient(device: torch.device) -> None:
    """Red when alpha keeps the reference's graph, and its tensors, alive."""
    draft, others = rows(4, 30, torch.float32, device)
    for backend in BACKENDS:
        result = soft_target_loss(draft.requires_grad_().clone(), **others, backend=backend)
        assert not result.alpha.requires_grad
        assert not result.correct.requires_grad


def call(draft: Tensor | None = None, backend: str = "torch", **changed: Any) -> SoftTargetLoss:
    usual, others = rows(4, 30, torch.float32, "cpu")
    return soft_target_loss(usual if draft is None else draft, **(others | changed), backend=backend)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: call(torch.zeros(4, 0)), r"logits must be \[N, Vd\] with Vd positive, got \(4, 0\)"),
        (lambda: call(target_logits=torch.zeros(4, 29)), r"target_logits must be \(4, 30\)"),
        (lambda: call(target_index=torch.zeros(3, dtype=torch.int64)), r"target_index must be \[4\]"),
        (lambda: call(target_index=torch.zeros(4, dtype=torch.int32)), "target_index must be int64, got torch.int32"),
        (lambda: call(target_index=torch.full((4,), 30)), r"target_index 30 is no .* use 0 .. 29, or -1"),
        (lambda: call(target_index=torch.full((4,), -2)), "target_index -2 is no"),
        (lambda: call(target_lse=torch.zeros(5)), r"target_lse must be \[4\]"),
        (lambda: call(weight=float("inf")), "weight must be finite, got inf"),
        (lambda: call(backend="liger"), "loss backend 'liger' is unknown: use triton, torch"),
        (lambda: call(torch.zeros(4, 30, dtype=torch.float64), backend="triton"), "logits are float64: use 'torch'"),
        (
            lambda: call(torch.zeros(4, 30, requires_grad=True), backend="triton"),
            r"these are a leaf: pass logits.clone",
        ),
        (
            lambda: call(torch.zeros(1, 30, requires_grad=True).expand(4, 30), backend="triton"),
            r"rows share memory: pass logits.contiguous\(\)",
        ),
        (lambda: choose_loss_backend("liger", "cpu"), "use auto, triton, torch"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="triton is interpreted on the CPU only where there is no CUDA")
def test_what_does_not_fit_is_refused(wrong: Callable[[], object], message: str) -> None:
    """Red when a mismatch goes through: the kernel would read past the end."""
    with pytest.raises(ValueError, match=message):
        wrong()


def test_triton_on_the_cpu_is_refused_unless_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when it is silently replaced, or fails inside triton."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"triton needs a CUDA device, not cpu .*; use 'torch'"):
        call(backend="triton")
    with pytest.raises(ValueError, match="use 'torch'"):
        choose_loss_backend("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(soft_target_rows_triton, "INTERPRETED", False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1 came after its import"):
        call(backend="triton")


def test_the_choice_of_a_backend() -> None:
    """Red when auto is not what training should run, or a request is not honoured."""
    assert choose_loss_backend("auto", "cpu") == ("torch", "triton kernels do not run on device cpu")
    assert choose_loss_backend("auto", "cuda") == ("triton", "gradient in place, on a CUDA device")
    assert choose_loss_backend("torch", "cuda") == ("torch", "asked for")


def test_the_reference_is_the_torch_backend() -> None:
    """Red when the two drift apart: every bound here is measured against the reference."""
    draft, others = rows(4, 30, torch.float32, "cpu")
    twin, backend = reference.soft_target_loss(draft, **others), soft_target_loss(draft, **others, backend="torch")
    assert torch.equal(twin.loss, backend.loss)
    assert torch.equal(twin.alpha, backend.alpha)


@pytest.mark.gpu
def test_triton_addresses_rows_in_64_bits(cuda: torch.device) -> None:
    """More than 2^31 elements. Red when a row's offset wraps around."""
    num_rows, num_columns = 14_200, 151_936
    logits = torch.zeros(1, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    logits = (logits * torch.ones(1, device=cuda, dtype=torch.bfloat16)).repeat(num_rows * num_columns)
    logits = logits.view(num_rows, num_columns)
    with torch.no_grad():
        logits[-1, 5] = 8.0
    target = torch.zeros(1, num_columns, device=cuda, dtype=torch.bfloat16).expand(num_rows, num_columns)
    index = torch.full((num_rows,), -1, device=cuda)
    index[-1] = 5
    lse = torch.full((num_rows,), 12.0, device=cuda)
    result = soft_target_loss(logits, target, target_index=index, target_lse=lse, weight=1.0, backend="triton")
    assert result.correct.nonzero().tolist() == [[num_rows - 1]]
    q = torch.tensor([8.0] + [0.0] * (num_columns - 1), dtype=torch.float64).softmax(0)
    assert result.loss.item() == pytest.approx(-(q.log().mean()).item(), rel=SUM)
    assert logits[-1, 5].item() == pytest.approx(q[0].item() - 1 / num_columns, rel=2**-8)
    assert not logits[0].any()
