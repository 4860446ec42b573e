"""The merge of base block and diagonal blocks: triton's kernels (interpreted without CUDA) and the plain torch twin.

The truth is the formula in float64 under autograd, which shares no code with either.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import diagonal_merge
from kernels.attention_plan import Segment
from kernels.diagonal_merge import MergeDiagonals, merge, merge_backward
from tests.kernels.attention_unroll import assert_as_good, uniform

# H, G, Dh: no power of two in any dimension; one key/value head a query head; many query heads; the largest head dim.
HEADS = [(6, 2, 24), (4, 4, 64), (8, 1, 96), (2, 1, 256)]


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one of the two."""
    name: str = request.param
    monkeypatch.setattr(diagonal_merge, "merge_kernel", lambda *_: name)
    return name


def formula(
    parts: list[Tensor], lses: list[Tensor], query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float
) -> Tensor:
    """parts [A, H, Dh], lses [H, A]; softmax over the parts' and the steps' scores."""
    repeats = query.shape[1] // keys[0].shape[1] if keys else 1

    def by_head(rows: Tensor) -> Tensor:
        return rows.repeat_interleave(repeats, dim=1)

    scores = [lse.t() for lse in lses] + [(query * by_head(key)).sum(-1) * scale for key in keys]
    shares = torch.stack(scores).softmax(0)[..., None]
    return (shares * torch.stack([*parts, *map(by_head, values)])).sum(0)


class Case:
    """One step's tensors; the parts have a log-sum-exp of the size that T keys give."""

    def __init__(
        self, num_rows: int, heads: tuple[int, int, int], num_steps: int, num_parts: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        num_heads, num_groups, head_dim = heads
        rounded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16

        def rows(count: int, seed: int) -> Tensor:
            return uniform((num_rows, count, head_dim), seed, rounded).to(device, dtype)

        self.dtype, self.scale = dtype, 0.3
        self.query, self.grad = rows(num_heads, 0), rows(num_heads, 1)
        self.parts = [rows(num_heads, 2 + part) for part in range(num_parts)]
        self.lses = [uniform((num_heads, num_rows), 4 + part, torch.float32, device) * 2 for part in range(num_parts)]
        self.keys = [rows(num_groups, 10 + step) for step in range(num_steps)]
        self.values = [rows(num_groups, 20 + step) for step in range(num_steps)]

    def expected(self, dtype: torch.dtype) -> list[Tensor]:
        """out, then the gradients of the parts, of query, keys and values, by autograd in a dtype."""
        parts, keys, values = (
            [rows.detach().to(dtype).requires_grad_() for rows in group]
            for group in (self.parts, self.keys, self.values)
        )
        query = self.query.detach().to(dtype).requires_grad_()
        lses = [lse.double().to(dtype) for lse in self.lses]
        out = formula(parts, lses, query, keys, values, self.scale)
        inputs = [*parts, query, *keys, *values]
        gradients = torch.autograd.grad(out, inputs, self.grad.to(dtype), allow_unused=True)
        filled = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients, strict=True)]
        return [out.detach(), *filled]


@pytest.mark.parametrize("kernel", ["triton", "torch"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_steps", "num_parts"), [(0, 2), (1, 1), (3, 2)])
def test_merge_and_its_backward(
    num_steps: int, num_parts: int, dtype: torch.dtype, kernel: str, device: torch.device
) -> None:
    """Red when a part or a step is left out, weighed wrongly, or the sum of the parts' dq is rounded before it ends."""
    for heads in HEADS:
        case = Case(37, heads, num_steps, num_parts, dtype, device)
        everything = slice(0, 37)
        parts, lses = tuple(part.clone() for part in case.parts), tuple(case.lses)
        segments = [Segment(everything, everything, parts, lses)]
        out, lse = merge(segments, case.query, case.keys, case.values, case.scale)
        # Any tensors serve as the base block's dq: they are added to the diagonal blocks' share.
        base = tuple(uniform(part.shape, 50 + i, dtype, device) for i, part in enumerate(parts))
        grad_query, grad_keys, grad_values = merge_backward(
            [Segment(everything, everything, tuple(part.clone() for part in base), ())],
            case.grad, case.query, out, lse.contiguous(), case.keys, case.values, case.scale,
        )  # fmt: skip
        found = [out, grad_query, *grad_keys, *grad_values]
        expected = []
        for of_dtype in (dtype, torch.float64):
            twin = case.expected(of_dtype)
            del twin[1 : 1 + num_parts]
            twin[1] = sum((part.to(of_dtype) for part in base), start=twin[1])
            expected.append(twin)
        assert_as_good(found, *expected, dtype)
        scores = [part_lse.t().double() for part_lse in lses]
        scores += [
            (case.query.double() * key.double().repeat_interleave(heads[0] // heads[1], 1)).sum(-1) * case.scale
            for key in case.keys
        ]
        # lse is of the order of 10 and float32, whatever the inputs: 10 * 2^-23.
        torch.testing.assert_close(lse.double().t(), torch.stack(scores).logsumexp(0), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kernel", ["triton", "torch"], indirect=True)
def test_segments_of_gathered_rows(kernel: str, device: torch.device) -> None:
    """Red when a row's place among the active rows, in its part and in its log-sum-exp are mixed up."""
    case = Case(20, (6, 2, 24), 2, 1, torch.float32, device)
    # Rows 3 .. 9 lie in a part with dummies at its ends, some rows among dummies, the others one after another.
    rows = torch.tensor([0, 1, 2, 10, 11], device=device)
    places = torch.tensor([1, 3, 5, 7, 8], device=device)
    others = torch.tensor([12, 14, 16, 13, 15, 17, 18, 19], device=device)

    def segments(part: Tensor, lse: Tensor | None) -> list[Segment]:
        first = part.new_full((12, *part.shape[1:]), float("nan"))
        first[4:11] = part[3:10]
        second = part.new_full((30, *part.shape[1:]), float("nan"))
        second[places] = part[rows]
        lses = [() if lse is None else (lse[:, chosen],) for chosen in (slice(3, 10), rows, others)]
        return [
            Segment(slice(3, 10), slice(4, 11), (first,), lses[0]),
            Segment(rows, places, (second,), lses[1]),
            Segment(others, slice(0, 8), (part[others],), lses[2]),
        ]

    arguments = (case.query, case.keys, case.values, case.scale)
    out, lse = merge(segments(case.parts[0], case.lses[0]), *arguments)
    whole = slice(0, 20)
    expected_out, expected_lse = merge([Segment(whole, whole, (case.parts[0].clone(),), (case.lses[0],))], *arguments)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-6)
    base = uniform(case.query.shape, 50, torch.float32, device)
    found = merge_backward(segments(base, None), case.grad, case.query, out, lse, *arguments[1:])
    expected = merge_backward(
        [Segment(whole, whole, (base.clone(),), ())], case.grad, case.query, out, lse, *arguments[1:]
    )
    for mine, other in zip([found[0], *found[1], *found[2]], [expected[0], *expected[1], *expected[2]], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", ["triton", "torch"], indirect=True)
def test_a_row_without_a_second_part(kernel: str, device: torch.device) -> None:
    """A part whose log-sum-exp is -inf counts nothing. Red when it gives NaN."""
    case = Case(9, (4, 2, 16), 2, 2, torch.float32, device)
    case.lses[1][:, :5] = float("-inf")
    case.parts[1][:5] = 0
    whole = slice(0, 9)
    segment = Segment(whole, whole, tuple(part.clone() for part in case.parts), tuple(case.lses))
    out, _ = merge([segment], case.query, case.keys, case.values, case.scale)
    torch.testing.assert_close(out.double(), case.expected(torch.float64)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", ["triton", "torch"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merge_under_autograd(dtype: torch.dtype, kernel: str, device: torch.device) -> None:
    """Red when the gradient of the base block's output or of its log-sum-exp is lost or takes the wrong delta."""
    for heads in HEADS[:2]:
        case = Case(37, heads, 3, 1, dtype, device)

        def run(dtype: torch.dtype, differentiable: bool, case: Case = case) -> list[Tensor]:
            rows = [case.parts[0], case.query, *case.keys, *case.values]
            part, query, *steps = (r.detach().to(dtype).requires_grad_() for r in rows)
            lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            lse = case.lses[0].to(lse_dtype).requires_grad_()
            if differentiable:
                out = MergeDiagonals.apply(case.scale, 3, part, lse, query, *steps)
            else:
                out = formula([part], [lse.to(dtype)], query, list(steps[:3]), list(steps[3:]), case.scale)
            gradients = torch.autograd.grad(out, [part, query, *steps, lse], case.grad.to(dtype))
            *others, of_lse = gradients
            return [out.detach(), *others, of_lse.to(dtype)]

        assert_as_good(run(dtype, True), run(dtype, False), run(torch.float64, False), dtype)


def test_merge_under_autograd_by_finite_differences() -> None:
    """Red when the plain torch gradient is not that of the forward."""
    case = Case(3, (4, 2, 5), 2, 1, torch.float64, torch.device("cpu"))
    inputs = [case.parts[0], case.lses[0].double(), case.query, *case.keys, *case.values]
    for rows in inputs:
        rows.requires_grad_()
    assert torch.autograd.gradcheck(lambda *rows: MergeDiagonals.apply(0.3, 2, *rows), inputs)


@pytest.mark.parametrize("kernel", ["triton", "torch"], indirect=True)
def test_strides_of_any_step(kernel: str, device: torch.device) -> None:
    """Red when one step's key has other strides than the first's and is read with those."""
    case = Case(11, (4, 2, 16), 3, 1, torch.float32, device)
    whole = slice(0, 11)

    def run(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        segment = Segment(whole, whole, (case.parts[0].clone(),), (case.lses[0],))
        out, lse = merge([segment], query, keys, values, case.scale)
        back = Segment(whole, whole, (torch.zeros_like(out),), ())
        grad_query, grad_keys, grad_values = merge_backward(
            [back], case.grad, query, out, lse, keys, values, case.scale
        )
        return [out, grad_query, *grad_keys, *grad_values]

    def wide(rows: Tensor) -> Tensor:  # a slice of a fused projection
        return torch.cat([rows, rows + 1, rows], dim=1)[:, : rows.shape[1]]

    expected = run(case.query, case.keys, case.values)
    for keys in ([wide(key) for key in case.keys], [case.keys[0], wide(case.keys[1]), case.keys[2]]):
        found = run(wide(case.query), keys, [wide(value) for value in case.values])
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
