"""The tensors of K TTT steps, and the comparison with the dense reference in float64.

Low precision is held to: the kernel's error <= the error of the reference run in the same dtype + EPS. Inputs are
bounded (uniform in [-1, 1]): outliers would overflow low precision and hide real faults.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.ttt_attention import ttt_attention

# Relative to a tensor's largest value: one rounding more than the twin's (the base block's output is rounded before the
# merge, its gradients before the diagonal terms are added), that is the unit roundoff, 2^-8 in bf16 and 2^-11 in fp16.
# In float32 it is the order of the sums: a few thousand terms of a key's gradient, sqrt(3000) * 2^-24 = 2^-18.
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-19, torch.float64: 1e-14}
# Absolute, where the truth is 0: a query that sees one key has no gradient, but dp - sum(grad * out) cancels in the
# accumulation dtype only up to the rounding of dp, which is up to Dh in size.
CANCELLATION = {torch.bfloat16: 2**-20, torch.float16: 2**-20, torch.float32: 2**-20, torch.float64: 1e-14}

Runs = tuple[tuple[int, int], ...] | None
Layout = tuple[tuple[int, ...], Runs]
"""Document lengths and the active rows."""

# Ragged on purpose: no multiple of any block; documents shorter than the steps, of length 1, empty ones.
ALL_ROWS: list[Layout] = [
    ((252,), None),
    ((123, 1, 0, 2, 126), None),
    ((1, 1, 1), None),
    ((0, 3), None),
    ((5, 128, 130), None),
]
SOME_ROWS: list[Layout] = [
    ((252,), ((0, 1),)),
    ((252,), ((251, 252),)),
    ((252,), ((99, 100),)),
    ((252,), ((0, 252),)),
    ((252,), ((3, 50), (50, 60), (200, 252))),
    ((123, 1, 0, 2, 126), ((5, 9), (20, 123), (123, 124), (130, 131), (240, 252))),
    ((5, 128, 130), ((2, 5), (5, 133), (262, 263))),
    ((1, 1, 1), ((1, 2),)),
    ((7, 0, 3), ()),
]
LAYOUTS = ALL_ROWS + SOME_ROWS


def num_active(layout: Layout) -> int:
    lengths, runs = layout
    return sum(lengths) if runs is None else sum(end - start for start, end in runs)


def uniform(shape: Sequence[int], seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1).to(device, dtype)


class Unroll:
    """The tensors of K TTT steps, and the forward and backward of all steps as training runs them."""

    def __init__(
        self, layout: Layout, heads: tuple[int, int, int], num_steps: int, dtype: torch.dtype, device: str
    ) -> None:
        num_heads, num_groups, head_dim = heads
        self.layout = layout
        num_tokens, num_rows = sum(layout[0]), num_active(layout)
        # The same rounded values in every dtype, or the comparison would measure the rounding of the inputs.
        rounded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16

        def rows(count: int, heads: int, seed: int) -> Tensor:
            return uniform((count, heads, head_dim), seed, rounded).to(device, dtype)

        # Each step's query, key and value: keys of all tokens at step 0, of the active rows after it.
        self.rows = [
            [
                rows(num_rows, num_heads, 10 * step),
                rows(num_rows if step else num_tokens, num_groups, 10 * step + 1),
                rows(num_rows if step else num_tokens, num_groups, 10 * step + 2),
            ]
            for step in range(num_steps)
        ]
        self.grads = [rows(num_rows, num_heads, 1000 + step) for step in range(num_steps)]

    def to(self, dtype: torch.dtype) -> Unroll:
        copy = object.__new__(Unroll)
        copy.layout = self.layout
        copy.rows = [[rows.to(dtype) for rows in step] for step in self.rows]
        copy.grads = [rows.to(dtype) for rows in self.grads]
        return copy

    def run(self, backend: str, backward: bool = True) -> list[Tensor]:
        """Outputs of all steps, then the gradients of q, k and v of every step."""
        lengths, runs = self.layout
        # detach() keeps the strides.
        rows = [[tensor.detach().requires_grad_(backward) for tensor in step] for step in self.rows]
        (_, base_key, base_value), later = rows[0], rows[1:]
        outputs = []
        for step, (query, _, _) in enumerate(rows):
            keys, values = [r[1] for r in later[:step]], [r[2] for r in later[:step]]
            outputs.append(
                ttt_attention(
                    query,
                    base_key,
                    base_value,
                    keys,
                    values,
                    document_lengths=lengths,
                    query_runs=runs,
                    backend=backend,
                )
            )
        if not backward:
            return outputs
        inputs = [tensor for step in rows for tensor in step]
        gradients = torch.autograd.grad(outputs, inputs, self.grads)
        return [output.detach() for output in outputs] + list(gradients)


def assert_as_good(
    found: Sequence[Tensor], naive: Sequence[Tensor], truth: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Each tensor's error is at most the naive twin's, and what EPS and CANCELLATION allow."""
    for index, (t, n, f) in enumerate(zip(truth, naive, found, strict=True)):
        assert f.dtype == dtype
        assert f.shape == t.shape
        if not t.numel():
            continue
        # The maximum finds a wrong row, the root mean square what is a little wrong everywhere.
        for order in (float("inf"), 2.0):
            error, bound, size = (
                torch.linalg.vector_norm(x.double(), order).item() / (t.numel() ** 0.5 if order == 2.0 else 1.0)
                for x in (f - t, n - t, t)
            )
            allowed = bound + EPS[dtype] * size + CANCELLATION[dtype]
            assert error <= allowed, f"tensor {index}: {error:.3g} > {allowed:.3g}, naive {bound:.3g}, size {size:.3g}"


def assert_as_good_as_the_twin(unroll: Unroll, backend: str, dtype: torch.dtype, backward: bool = True) -> None:
    truth = unroll.to(torch.float64).run("eager", backward)
    naive = unroll.to(dtype).run("eager", backward)
    assert_as_good(unroll.to(dtype).run(backend, backward), naive, truth, dtype)
