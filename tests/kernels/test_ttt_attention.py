"""TTT attention against the dense reference in float64.

Low precision is held to: the kernel's error <= the error of the reference run in the same dtype + EPS. Inputs are
bounded (uniform in [-1, 1]): outliers would overflow low precision and hide real faults.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels import base_block
from kernels.ttt_attention import choose_attention_backend, ttt_attention

# Relative to a tensor's largest value: one rounding more than the twin's (the base block's output is rounded before the
# merge, its gradients before the diagonal terms are added), that is the unit roundoff, 2^-8 in bf16 and 2^-11 in fp16.
# In float32 it is the order of the sums: a few thousand terms of a key's gradient, sqrt(3000) * 2^-24 = 2^-18.
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-19, torch.float64: 1e-14}
# Absolute, where the truth is 0: a query that sees one key has no gradient, but dp - sum(grad * out) cancels in the
# accumulation dtype only up to the rounding of dp, which is up to Dh in size.
CANCELLATION = {torch.bfloat16: 2**-20, torch.float16: 2**-20, torch.float32: 2**-20, torch.float64: 1e-14}

# Ragged on purpose: no multiple of any block; documents shorter than the steps, of length 1, empty ones.
LAYOUTS = [(252,), (123, 1, 0, 2, 126), (1, 1, 1), (0, 3), (5, 128, 130)]
HEADS = [(4, 4, 16), (6, 2, 24), (8, 1, 8)]  # H, G, Dh


def uniform(shape: Sequence[int], seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1).to(device, dtype)


class Unroll:
    """The tensors of K TTT steps, and the forward and backward of all steps as training runs them."""

    def __init__(
        self, lengths: tuple[int, ...], heads: tuple[int, int, int], num_steps: int, dtype: torch.dtype, device: str
    ) -> None:
        num_heads, num_groups, head_dim = heads
        self.lengths = lengths
        # The same rounded values in every dtype, or the comparison would measure the rounding of the inputs.
        rounded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
        self.rows = [
            [
                uniform((sum(lengths), count, head_dim), 10 * step + index, rounded).to(device, dtype)
                for index, count in enumerate((num_heads, num_groups, num_groups))
            ]
            for step in range(num_steps)
        ]
        self.grads = [
            uniform(self.rows[0][0].shape, 1000 + step, rounded).to(device, dtype) for step in range(num_steps)
        ]

    def to(self, dtype: torch.dtype) -> Unroll:
        copy = object.__new__(Unroll)
        copy.lengths = self.lengths
        copy.rows = [[rows.to(dtype) for rows in step] for step in self.rows]
        copy.grads = [rows.to(dtype) for rows in self.grads]
        return copy

    def run(self, backend: str, backward: bool = True) -> list[Tensor]:
        """Outputs of all steps, then the gradients of q, k and v of every step."""
        # detach() keeps the strides.
        rows = [[tensor.detach().requires_grad_(backward) for tensor in step] for step in self.rows]
        (_, base_key, base_value), later = rows[0], rows[1:]
        outputs = []
        for step, (query, _, _) in enumerate(rows):
            keys, values = [r[1] for r in later[:step]], [r[2] for r in later[:step]]
            outputs.append(
                ttt_attention(query, base_key, base_value, keys, values, document_lengths=self.lengths, backend=backend)
            )
        if not backward:
            return outputs
        inputs = [tensor for step in rows for tensor in step]
        gradients = torch.autograd.grad(outputs, inputs, self.grads)
        return [output.detach() for output in outputs] + list(gradients)


def assert_as_good_as_the_twin(unroll: Unroll, backend: str, dtype: torch.dtype, backward: bool = True) -> None:
    truth = unroll.to(torch.float64).run("eager", backward)
    naive = unroll.to(dtype).run("eager", backward)
    found = unroll.to(dtype).run(backend, backward)
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


def loop_over_pairs(unroll: Unroll) -> list[Tensor]:
    """The definition, a row and head at a time: shares no code with the reference."""
    outputs = []
    for step, (query, _, _) in enumerate(unroll.rows):
        _, base_key, base_value = unroll.rows[0]
        out = torch.empty_like(query)
        queries_per_key = query.shape[1] // base_key.shape[1]
        start = 0
        for length in unroll.lengths:
            for p in range(start, start + length):
                for head in range(query.shape[1]):
                    group = head // queries_per_key
                    keys = [base_key[t, group] for t in range(start, p + 1)]
                    values = [base_value[t, group] for t in range(start, p + 1)]
                    keys += [unroll.rows[j][1][p, group] for j in range(1, step + 1)]
                    values += [unroll.rows[j][2][p, group] for j in range(1, step + 1)]
                    weights = (torch.stack(keys) @ query[p, head] / query.shape[-1] ** 0.5).softmax(0)
                    out[p, head] = weights @ torch.stack(values)
            start += length
        outputs.append(out)
    return outputs


@pytest.mark.parametrize("backend", ["eager", "fused", "flex"])
def test_the_definition(backend: str) -> None:
    """Red when a backend attends across documents, ahead, to another row's later step, or to another group's keys."""
    unroll = Unroll((7, 1, 0, 4), (4, 2, 8), 3, torch.float64, "cpu")
    for found, truth in zip(unroll.run(backend, backward=False), loop_over_pairs(unroll), strict=True):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize("lengths", LAYOUTS)
@pytest.mark.parametrize("heads", HEADS)
def test_fused_is_exact_in_float64(lengths: tuple[int, ...], heads: tuple[int, int, int]) -> None:
    """Red when the backward gets the unmerged output or log-sum-exp, or a diagonal term lacks a factor."""
    assert_as_good_as_the_twin(Unroll(lengths, heads, 4, torch.float64, "cpu"), "fused", torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(123, 1, 0, 2, 126), (507,)])
def test_fused_in_low_precision(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Red when the log-sum-exp is rounded to the inputs' dtype, or the CPU kernel's own bf16 backward is used."""
    assert_as_good_as_the_twin(Unroll(lengths, (6, 2, 24), 7, dtype, "cpu"), "fused", dtype)


def test_fused_gradients_by_finite_differences() -> None:
    """Red when the gradient is not that of the forward; independent of the reference."""
    unroll = Unroll((5, 1, 0, 3), (4, 2, 4), 3, torch.float64, "cpu")
    (query, base_key, base_value), (_, key_1, value_1), (_, key_2, value_2) = unroll.rows

    def attend(*rows: Tensor) -> Tensor:
        q, k, v, k1, v1, k2, v2 = rows
        return ttt_attention(q, k, v, (k1, k2), (v1, v2), document_lengths=unroll.lengths, scale=0.7)

    inputs = [rows.requires_grad_() for rows in (query, base_key, base_value, key_1, value_1, key_2, value_2)]
    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("lengths", LAYOUTS)
@pytest.mark.parametrize("max_scores", [2**26, 300])
def test_row_blocks(lengths: tuple[int, ...], max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact fallback, which CUDA takes in float32. Red when a block's rows, keys or causal edge are off."""
    monkeypatch.setattr(base_block, "base_block_kernel", lambda *_: ("row_blocks", "asked for by a test"))
    monkeypatch.setattr(base_block, "_MAX_SCORES", max_scores)  # 300: blocks of one row and of a few
    assert_as_good_as_the_twin(Unroll(lengths, (6, 2, 24), 3, torch.float64, "cpu"), "fused", torch.float64)


def test_the_fallback_is_logged_once_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when the slow path is silent, or fills the log."""
    monkeypatch.setattr(base_block, "base_block_kernel", lambda *_: ("row_blocks", "a reason of this test"))
    with caplog.at_level(logging.WARNING, logger="kernels.base_block"):
        Unroll((3, 4), (2, 1, 8), 3, torch.float32, "cpu").run("fused")
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["a reason of this test"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(123, 1, 0, 2, 126), (300,)])
def test_flex_forward(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Red when its log-sum-exp is taken for base 2, or the mask ignores a boundary."""
    assert_as_good_as_the_twin(Unroll(lengths, (6, 2, 16), 3, dtype, "cpu"), "flex", dtype, backward=False)


@pytest.mark.parametrize(
    "lengths", [(252,), (123, 1, 2, 126), (128, 128, 256), (255, 100), (257, 99), (5, 507), (1,) * 300]
)
def test_block_mask_is_the_one_that_evaluation_finds(lengths: tuple[int, ...]) -> None:
    """Red when a block is left out, or called full that is not. (flex on the CPU does not look at the blocks.)"""
    from torch.nn.attention.flex_attention import create_block_mask

    from kernels.flex_base_block import document_causal_block_mask

    device, num_tokens = torch.device("cpu"), sum(lengths)
    built = document_causal_block_mask(lengths, device)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def attends(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (document[row] == document[column]) & (row >= column)

    evaluated = create_block_mask(attends, None, None, num_tokens, num_tokens, device=device)
    assert built.seq_lengths == evaluated.seq_lengths == (num_tokens, num_tokens)
    assert built.BLOCK_SIZE == evaluated.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, expected_counts = (getattr(mask, f"{kind}_num_blocks")[0, 0] for mask in (built, evaluated))
        assert counts.tolist() == expected_counts.tolist(), kind
        indices, expected_indices = (getattr(mask, f"{kind}_indices")[0, 0] for mask in (built, evaluated))
        for row, count in enumerate(counts.tolist()):
            assert indices[row, :count].tolist() == expected_indices[row, :count].tolist(), (kind, row)
    row, column = torch.meshgrid(torch.arange(num_tokens), torch.arange(num_tokens), indexing="ij")
    zero = torch.tensor(0)
    assert torch.equal(built.mask_mod(zero, zero, row, column), attends(zero, zero, row, column))


def test_one_block_mask_serves_all_steps_also_after_inference_mode() -> None:
    """Red when the mask is built once a step, or what inference mode built poisons a later training step."""
    from kernels.flex_base_block import document_causal_block_mask

    with torch.inference_mode():
        first = document_causal_block_mask((3, 130, 9), torch.device("cpu"))
    assert document_causal_block_mask((3, 130, 9), torch.device("cpu")) is first
    assert not first.kv_indices.is_inference()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backend", ["eager", "fused", "flex"])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_next_to_nothing(num_tokens: int, backend: str, dtype: torch.dtype) -> None:
    """T = 0 kills the process in torch's CPU kernel. Red when it reaches it, or the result is off the graph."""
    unroll = Unroll((num_tokens, 0), (4, 2, 8), 3, dtype, "cpu")
    assert_as_good_as_the_twin(unroll, backend, dtype, backward=backend != "flex")


@pytest.mark.parametrize("backend", ["eager", "fused", "flex"])
def test_any_strides(backend: str) -> None:
    """torch's CPU kernel is silently wrong for a last-dim stride other than 1. Red when one reaches it."""
    unroll = Unroll((9, 4), (4, 2, 8), 3, torch.float64, "cpu")
    truth = unroll.run("eager", backward=False)

    def strided(rows: Tensor, way: int) -> Tensor:
        """The same values: every second element, dimensions swapped in memory, or a slice of a wider projection."""
        if way == 0:
            return torch.stack([rows, rows + 1], dim=-1)[..., 0]
        if way == 1:
            return rows.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        return torch.cat([rows, rows], dim=1)[:, : rows.shape[1]]

    for way in range(3):
        unroll.rows = [[strided(rows, way) for rows in step] for step in unroll.rows]
        for found, expected in zip(unroll.run(backend, backward=False), truth, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_any_strides_of_the_incoming_gradient(device: torch.device) -> None:
    """sum() sends back an expanded gradient, all of whose strides are 0. Red on CUDA when flash gets it as it is."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    unroll = Unroll((9, 4), (4, 2, 8), 1, dtype, str(device))
    gradients = []
    for backend in ("eager", "fused"):
        rows = [tensor.clone().requires_grad_() for tensor in unroll.rows[0]]
        ttt_attention(*rows, document_lengths=unroll.lengths, backend=backend).sum().backward()
        gradients.append([tensor.grad for tensor in rows])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=4 * EPS[dtype])


def test_flex_names_the_way_out_on_the_cpu() -> None:
    """Red when torch's own NotImplementedError comes through, or a run without gradients is refused too."""
    query, key, value = Unroll((5,), (4, 2, 16), 1, torch.float32, "cpu").rows[0]
    key.requires_grad_()
    with pytest.raises(ValueError, match="'flex' has no backward on the CPU: use 'fused'"):
        ttt_attention(query, key, value, document_lengths=(5,), backend="flex")
    with torch.no_grad():
        ttt_attention(query, key, value, document_lengths=(5,), backend="flex")


def rows(tokens: int = 5, heads: int = 2, head_dim: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(tokens, heads, head_dim, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ttt_attention(rows(heads=3), rows(), rows(), document_lengths=(5,)), "3 query heads .* 2 key/value"),
        (lambda: ttt_attention(rows(), rows(), rows(), document_lengths=(4,)), "sum to 4, but query has 5 rows"),
        (lambda: ttt_attention(rows(), rows(), rows(), document_lengths=(7, -2)), "not be negative, got -2"),
        (lambda: ttt_attention(rows(), rows(), rows(), (rows(),), document_lengths=(5,)), "1 step_keys but 0 step_val"),
        (lambda: ttt_attention(rows(), rows(4), rows(), document_lengths=(5,)), r"base_key must be \[5, G, 8\]"),
        (lambda: ttt_attention(rows(), rows(), rows(head_dim=4), document_lengths=(5,)), r"base_value must be \(5, 2"),
        (
            lambda: ttt_attention(rows(), rows(), rows(), (rows(4),), (rows(),), document_lengths=(5,)),
            r"step_keys\[0\] must be",
        ),
        (
            lambda: ttt_attention(rows(), rows(), rows(dtype=torch.float64), document_lengths=(5,)),
            "base_value is torch.float64 on cpu, query torch.float32",
        ),
        (lambda: ttt_attention(rows()[0], rows(), rows(), document_lengths=(5,)), r"query must be \[T, H, Dh\]"),
        (lambda: ttt_attention(rows(), rows(), rows(), document_lengths=(5,), backend="cudnn"), "'cudnn' is unknown"),
        (
            lambda: choose_attention_backend("sdpa", "cpu", torch.float32, 64, True),
            "'sdpa' is unknown: use auto, fused",
        ),
        (lambda: choose_attention_backend("flex", "cpu", torch.float32, 64, True), "no backward on the CPU"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    """Red when a mismatch goes through: torch's CPU kernel does not refuse such heads, it reads past the end."""
    with pytest.raises(ValueError, match=message):
        call()


def test_the_choice_of_a_backend() -> None:
    """Red when auto is not what training should run, or a request is not honoured."""
    assert choose_attention_backend("auto", "cpu", torch.float32, 64, True) == ("fused", "fused CPU flash attention")
    assert choose_attention_backend("flex", "cpu", torch.float32, 64, False) == ("flex", "asked for")
    assert choose_attention_backend("eager", "cpu", torch.float32, 64, True) == ("eager", "asked for")
    for dtype, head_dim, said in [(torch.float32, 64, "torch.float32"), (torch.bfloat16, 60, "60")]:
        name, why = choose_attention_backend("auto", "cuda", dtype, head_dim, True)
        assert name == "fused"
        assert said in why


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(6, 2, 24), (8, 2, 64), (4, 4, 128), (4, 2, 256)])
@pytest.mark.parametrize("lengths", LAYOUTS)
def test_fused_on_cuda(
    lengths: tuple[int, ...], heads: tuple[int, int, int], dtype: torch.dtype, cuda: torch.device
) -> None:
    """Red when flash's log-sum-exp has another layout or base than the merge takes, or its backward refuses it."""
    assert_as_good_as_the_twin(Unroll(lengths, heads, 4, dtype, "cuda"), "fused", dtype)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(123, 1, 0, 2, 126), (300,), (640, 1, 383)])
def test_flex_on_cuda(lengths: tuple[int, ...], dtype: torch.dtype, cuda: torch.device) -> None:
    """Red when a block is wrongly called full or empty, or the gradient through the log-sum-exp is lost."""
    assert_as_good_as_the_twin(Unroll(lengths, (8, 2, 64), 3, dtype, "cuda"), "flex", dtype)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
def test_flex_does_not_compile_for_every_length(cuda: torch.device) -> None:
    """Red when a new document layout or number of tokens compiles anew."""
    from torch._dynamo.utils import counters

    frames = []
    for lengths in [(700,), (300, 77), (1000, 29, 2), (129,), (900, 40, 1, 1, 1)]:
        Unroll(lengths, (8, 2, 64), 2, torch.bfloat16, "cuda").run("flex")
        frames.append(counters["stats"]["unique_graphs"])
    assert frames[1:] == frames[:1] * 4
