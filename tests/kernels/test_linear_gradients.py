"""The linear loss's gradients: whose they are, where they lie, and that they are handed out once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.linear_soft_target_loss import linear_soft_target_loss
from tests.kernels.linear_case import make_case, run

BACKENDS = ["torch", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_do_not_count_have_a_zero_gradient(backend: str, device: torch.device) -> None:
    """Red when overwritten states of such rows, or rows whose target lies outside, are handed out as gradients."""
    case = make_case(device, torch.float32)
    for overwrite in (False, True):
        _, gradients = run(linear_soft_target_loss, case, backend=backend, overwrite_hidden=overwrite)
        for gradient, own, others in zip(gradients[1:], case["rows"], case["target_rows"], strict=True):
            counts = torch.zeros(9, dtype=torch.bool, device=device)
            counts[own[case["target_index"][others] >= 0]] = True
            assert gradient[counts].any(-1).all()
            assert not gradient[~counts].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_overwrite_hidden(backend: str, device: torch.device) -> None:
    """Red when the gradients lie elsewhere, states are overwritten unasked, or without a gradient."""
    case = make_case(device, torch.float32)
    before = [states.clone() for states in case["hidden"]]
    hidden = [states.requires_grad_().clone() for states in case["hidden"]]
    hidden[1] = hidden[1].detach()
    plain = linear_soft_target_loss(**case | {"hidden": hidden}, backend=backend)
    expected = torch.autograd.grad(plain.loss, [hidden[0], hidden[2]])
    with torch.no_grad():
        linear_soft_target_loss(**case | {"hidden": hidden}, backend=backend, overwrite_hidden=True)
    for states, kept in zip(hidden, before, strict=True):
        assert torch.equal(states, kept)
    result = linear_soft_target_loss(**case | {"hidden": hidden}, backend=backend, overwrite_hidden=True)
    gradients = torch.autograd.grad(result.loss, [hidden[0], hidden[2]])
    assert torch.equal(hidden[1], before[1])
    for step, gradient, other in zip((0, 2), gradients, expected, strict=True):
        assert gradient.data_ptr() == hidden[step].data_ptr()
        assert torch.equal(gradient, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_overwritten_states_are_seen_by_autograd(backend: str, device: torch.device) -> None:
    """Red when another operation that kept them silently reads gradients, or ours hands out what was written later."""
    case = make_case(device, torch.float32)
    hidden = [states.requires_grad_().clone() for states in case["hidden"]]
    other = hidden[0].square().sum()
    loss = linear_soft_target_loss(**case | {"hidden": hidden}, backend=backend, overwrite_hidden=True).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()
    hidden = [states.clone() for states in case["hidden"]]
    loss = linear_soft_target_loss(**case | {"hidden": hidden}, backend=backend, overwrite_hidden=True).loss
    with torch.no_grad():
        hidden[2].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_backward_runs_once(overwrite: bool, backend: str, device: torch.device) -> None:
    """Red when gradients that were scaled and handed out are handed out again, or a graph is kept in silence."""
    case = make_case(device, torch.float32)

    def loss() -> Tensor:
        hidden = [states.requires_grad_().clone() for states in case["hidden"]]
        arguments = case | {"hidden": hidden, "overwrite_hidden": overwrite}
        return linear_soft_target_loss(**arguments, backend=backend).loss

    with pytest.raises(RuntimeError, match="leave retain_graph and create_graph out"):
        loss().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="leave retain_graph and create_graph out"):
        loss().backward(create_graph=True)
    once = loss()
    once.backward()
    with pytest.raises(RuntimeError, match="second backward through linear_soft_target_loss"):
        once.backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_incoming_scalar_multiplies_in_float32(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Red when a gradient is not scaled, or the scalar is rounded to float16 first (0.02% of every value)."""
    case = make_case(device, dtype)
    _, once = run(linear_soft_target_loss, case, backend=backend)
    _, scaled = run(linear_soft_target_loss, case, factor=0.3, backend=backend)
    for gradient, factored in zip(once, scaled, strict=True):
        assert torch.equal(factored, (gradient.float() * 0.3).to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_masters_gradient_is_not_rounded(backend: str, device: torch.device) -> None:
    """Red when it is accumulated or returned in bf16, or the head is multiplied in float32."""
    case = make_case(device, torch.bfloat16, num_columns=252)
    _, (rounded, *rounded_hidden) = run(linear_soft_target_loss, case, backend=backend, chunk_rows=2)
    master = case["head"].float()
    # In bf16 the same head: below half of a bf16 step.
    master += torch.rand(master.shape, device=device) * 2**-10 * master.abs()
    _, (gradient, *hidden) = run(linear_soft_target_loss, case | {"head": master}, backend=backend, chunk_rows=2)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient.bfloat16(), rounded)
    assert not torch.equal(gradient, rounded.float())
    for with_master, without in zip(hidden, rounded_hidden, strict=True):
        assert torch.equal(with_master, without)
    _, (given, *_) = run(
        linear_soft_target_loss, case | {"head": master}, backend=backend, chunk_rows=2, head_compute=-case["head"]
    )
    assert not torch.equal(given, gradient), "head_compute is what is multiplied"


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_needs_a_gradient_gets_one(backend: str, device: torch.device) -> None:
    """Red when a frozen head, or hidden states alone, fail or change the other's gradient."""
    case = make_case(device, torch.float32)
    _, (grad_head, *grad_hidden) = run(linear_soft_target_loss, case, backend=backend)
    head = case["head"].clone().requires_grad_()
    linear_soft_target_loss(**case | {"head": head}, backend=backend).loss.backward()
    assert head.grad is not None
    assert torch.equal(head.grad, grad_head)
    hidden = [states.clone().requires_grad_() for states in case["hidden"]]
    linear_soft_target_loss(**case | {"hidden": hidden}, backend=backend).loss.backward()
    for states, gradient in zip(hidden, grad_hidden, strict=True):
        assert states.grad is not None
        assert torch.equal(states.grad, gradient)
    assert not linear_soft_target_loss(**case, backend=backend).loss.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend: str, device: torch.device) -> None:
    """Red when views of one tensor are read elsewhere, or a step's gradient is written over another's states."""
    case = make_case(device, torch.float32)
    expected = run(linear_soft_target_loss, case, backend=backend)
    whole = torch.stack(case["hidden"], dim=1).requires_grad_()  # [A, K, D]
    views = list(whole.clone().unbind(1))
    result = linear_soft_target_loss(**case | {"hidden": views}, backend=backend)
    (gradient,) = torch.autograd.grad(result.loss, whole)
    for step, wanted in enumerate(expected[1][1:]):
        assert torch.equal(gradient[:, step], wanted)
    # Interleaved steps overlap as ranges of memory: refused rather than looked into.
    views = list(whole.clone().unbind(1))
    with pytest.raises(ValueError, match="whose steps share memory"):
        linear_soft_target_loss(**case | {"hidden": views}, backend=backend, overwrite_hidden=True)
