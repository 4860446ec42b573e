"""The losses at the sizes they are made for, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.linear_soft_target_loss import HiddenTargets, linear_soft_target_loss
from kernels.soft_target_loss import soft_target_loss
from tests.kernels.linear_case import make_case

pytestmark = pytest.mark.gpu
# A gradient is rounded to bf16 once: half a unit in the last place, and as much for falling to the other side.
BF16 = 2**-8
FLOAT32 = 1e-5


@pytest.mark.parametrize("objective", ["soft_cross_entropy", "lk_alpha", "lk_lambda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [32_000, 64_000, 151_936, 262_144, 99_999])
def test_wide_rows(num_columns: int, dtype: torch.dtype, objective: str, cuda: torch.device) -> None:
    """Red when a width's launch drops or repeats columns, or the gradient is further off than one rounding."""
    generator = torch.Generator(cuda).manual_seed(0)
    logits, target = (
        torch.empty(300, num_columns, device=cuda).uniform_(-8, 8, generator=generator).to(dtype) for _ in range(2)
    )
    index = logits.argmax(-1)
    index[::3], index[1::3] = -1, 17
    lse = target.float().logsumexp(-1) + 0.5
    others = {"target_index": index, "target_lse": lse, "weight": 0.37, "objective": objective}
    wide = logits.double().requires_grad_()
    truth = reference.soft_target_loss(wide, target.double(), **others)  # type: ignore[arg-type]
    (true_gradient,) = torch.autograd.grad(truth.loss, wide)
    leaf = logits.requires_grad_()
    result = soft_target_loss(leaf.clone(), target, **others, backend="triton")  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    # Where q and p are equal to the last bits, float32 may see q on the other side of p: that element's gradient jumps.
    p, q = (target.double() - lse.double()[:, None]).exp(), wide.detach().softmax(-1)
    clear = (p - q).abs() > FLOAT32 * p
    assert clear.double().mean() > 0.999
    size = true_gradient.abs().max().item()
    error = ((gradient.double() - true_gradient) * clear).abs().max().item()
    assert error <= (BF16 if dtype == torch.bfloat16 else FLOAT32) * size
    assert result.loss.item() == pytest.approx(truth.loss.item(), rel=FLOAT32)
    assert torch.equal(result.correct, truth.correct)
    torch.testing.assert_close(result.alpha.double(), truth.alpha, rtol=FLOAT32, atol=0)


def make_hidden(num_rows: int, size: int, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(num_rows, size, device=device, dtype=torch.bfloat16).uniform_(-1, 1, generator=generator)


@pytest.mark.parametrize("objective", ["soft_cross_entropy", "lk_lambda"])
@pytest.mark.parametrize("num_columns", [8_000, 151_936])
def test_linear_in_bf16(num_columns: int, objective: str, cuda: torch.device) -> None:
    """Red when the linear loss is further from the truth than logits and autograd in bf16 are."""
    num_rows, size, steps = 700, 512, 3
    hidden = [make_hidden(num_rows, size, cuda, seed) for seed in range(steps)]
    head, target_head = (make_hidden(num_columns, size, cuda, seed) * 0.2 for seed in (7, 8))
    last_hidden = make_hidden(num_rows, size, cuda, 9)
    target_logits = last_hidden.double() @ target_head.double().T
    rows = [torch.arange(num_rows - step - 1, device=cuda)[step::2] for step in range(steps)]
    shared = {
        "rows": rows,
        "target_rows": [own + step + 1 for step, own in enumerate(rows)],
        "target_index": target_logits.argmax(-1),
        "target_lse": target_logits.logsumexp(-1).float() + 0.5,
        "row_weight": [0.01, 0.008, 0.0064],
        "objective": objective,
    }
    del target_logits

    def gradients(function: object, dtype: torch.dtype, **settings: object) -> tuple[float, list[Tensor]]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (head, *hidden)]
        targets = HiddenTargets(last_hidden.to(dtype), target_head.to(dtype))
        states = [leaf.clone() for leaf in leaves[1:]]
        result = function(states, leaves[0], targets, **shared, **settings)  # type: ignore[operator]
        return result.loss.item(), list(torch.autograd.grad(result.loss, leaves))

    true_loss, truth = gradients(reference.linear_soft_target_loss, torch.float64)
    naive_loss, naive = gradients(reference.linear_soft_target_loss, torch.bfloat16)
    loss, got = gradients(linear_soft_target_loss, torch.bfloat16, overwrite_hidden=True, backend="triton")
    assert abs(loss - true_loss) <= abs(naive_loss - true_loss) + FLOAT32 * abs(true_loss)
    for gradient, naive_gradient, true_gradient in zip(got, naive, truth, strict=True):
        size_of_largest = true_gradient.abs().max().item()
        bound = (naive_gradient.double() - true_gradient).abs().max().item()
        assert (gradient.double() - true_gradient).abs().max().item() <= bound + BF16 * size_of_largest


def test_linear_addresses_in_64_bits(cuda: torch.device) -> None:
    """Hidden states of K * A * D > 2^31 elements, views of one tensor. Red when an offset wraps around."""
    steps, num_rows, size = 2, 270_000, 4096
    whole = torch.empty(steps, num_rows, size, device=cuda, dtype=torch.bfloat16).zero_().requires_grad_()
    assert whole.numel() > 2**31
    with torch.no_grad():
        whole[:, -300:] = make_hidden(300, size, cuda, 0)
    head, target_head = (make_hidden(1_000, size, cuda, seed) * 0.05 for seed in (1, 2))
    last_hidden = make_hidden(300, size, cuda, 3)
    few = torch.arange(300, device=cuda)

    def run(states: Tensor, rows: Tensor) -> tuple[float, Tensor]:
        result = linear_soft_target_loss(
            list(states.unbind(0)),
            head,
            HiddenTargets(last_hidden, target_head),
            rows=[rows] * steps,
            target_rows=[few] * steps,
            target_index=torch.zeros(300, dtype=torch.int64, device=cuda),
            target_lse=torch.full((300,), 10.0, device=cuda),
            row_weight=[0.1, 0.1],
            backend="triton",
        )
        return result.loss.item(), torch.autograd.grad(result.loss, states)[0]

    loss, gradient = run(whole, few + num_rows - 300)
    expected_loss, expected = run(whole[:, -300:].detach().clone().requires_grad_(), few)
    assert loss == expected_loss
    assert torch.equal(gradient[:, -300:], expected)
    assert not gradient[:, :-300].any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_rows_of_the_host_need_no_wait(cuda: torch.device) -> None:
    """Red when something waits for the device, or rows that lie apart are taken for a range."""
    on_device = make_case(cuda, torch.float32, rows=((0, 1, 2, 4, 5, 8), (0, 3, 8), ()))
    on_host = on_device | {name: [index.cpu() for index in on_device[name]] for name in ("rows", "target_rows")}
    expected = linear_soft_target_loss(**on_device, chunk_rows=3)
    linear_soft_target_loss(**on_host, chunk_rows=3)  # what is compiled or cached at first may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = linear_soft_target_loss(**on_host, chunk_rows=3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(got.loss_sums, expected.loss_sums)


def test_extra_memory(cuda: torch.device) -> None:
    """Red when more than a tenth of all logits is held at 8,192 tokens, beside inputs and returned gradients."""
    steps, num_rows, size, num_columns = 7, 8_192, 1024, 32_000
    hidden = [make_hidden(num_rows, size, cuda, step).requires_grad_() * 1 for step in range(steps)]
    head = make_hidden(num_columns, size, cuda, 8).float().requires_grad_()
    head_compute = head.detach().bfloat16()
    targets = HiddenTargets(make_hidden(num_rows, size, cuda, 9), make_hidden(num_columns, size, cuda, 10))
    rows = [torch.arange(num_rows - step - 1, device=cuda) for step in range(steps)]
    target_rows = [own + step + 1 for step, own in enumerate(rows)]
    index = torch.zeros(num_rows, dtype=torch.int64, device=cuda)
    lse = torch.full((num_rows,), 12.0, device=cuda)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = linear_soft_target_loss(
        hidden,
        head,
        targets,
        rows=rows,
        target_rows=target_rows,
        target_index=index,
        target_lse=lse,
        row_weight=[1e-5] * steps,
        head_compute=head_compute,
        overwrite_hidden=True,
        backend="triton",
    )
    torch.cuda.synchronize()
    assert result.loss.isfinite()
    returned = head.numel() * 4
    extra = torch.cuda.max_memory_allocated() - before - returned
    assert extra <= (steps + 1) * num_rows * num_columns * 2 / 10
