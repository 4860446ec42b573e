"""TTT attention against the dense reference in float64, and its interface."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import base_block
from kernels.ttt_attention import choose_attention_backend, ttt_attention
from tests.kernels.attention_unroll import (
    ALL_ROWS,
    EPS,
    LAYOUTS,
    SOME_ROWS,
    Layout,
    Unroll,
    assert_as_good_as_the_twin,
)

HEADS = [(4, 4, 16), (6, 2, 24), (8, 1, 8)]  # H, G, Dh


def loop_over_pairs(unroll: Unroll) -> list[Tensor]:
    """The definition, a row and head at a time: shares no code with the reference."""
    lengths, runs = unroll.layout
    documents, start = [], 0
    for length in lengths:
        documents += [(start, p) for p in range(start, start + length)]
        start += length
    active = documents if runs is None else [documents[p] for begin, end in runs for p in range(begin, end)]
    outputs = []
    for step, (query, _, _) in enumerate(unroll.rows):
        _, base_key, base_value = unroll.rows[0]
        out = torch.empty_like(query)
        queries_per_key = query.shape[1] // base_key.shape[1]
        for i, (document, p) in enumerate(active):
            for head in range(query.shape[1]):
                group = head // queries_per_key
                keys = [base_key[t, group] for t in range(document, p + 1)]
                values = [base_value[t, group] for t in range(document, p + 1)]
                keys += [unroll.rows[j][1][i, group] for j in range(1, step + 1)]
                values += [unroll.rows[j][2][i, group] for j in range(1, step + 1)]
                weights = (torch.stack(keys) @ query[i, head] / query.shape[-1] ** 0.5).softmax(0)
                out[i, head] = weights @ torch.stack(values)
        outputs.append(out)
    return outputs


@pytest.mark.parametrize("runs", [None, ((1, 3), (5, 7), (9, 11))])
@pytest.mark.parametrize("backend", ["eager", "fused", "flex"])
def test_the_definition(backend: str, runs: tuple[tuple[int, int], ...] | None) -> None:
    """Red when a backend attends across documents, ahead, to another row's later step, or to another group's keys."""
    unroll = Unroll(((7, 1, 0, 4), runs), (4, 2, 8), 3, torch.float64, "cpu")
    for found, truth in zip(unroll.run(backend, backward=False), loop_over_pairs(unroll), strict=True):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-13)


# Every layout with one shape of heads, every shape with a packed layout.
@pytest.mark.parametrize(
    ("layout", "heads"),
    [(layout, HEADS[index % 3]) for index, layout in enumerate(LAYOUTS)] + [(SOME_ROWS[5], heads) for heads in HEADS],
)
def test_fused_is_exact_in_float64(layout: Layout, heads: tuple[int, int, int]) -> None:
    """Red when the backward gets the unmerged output or log-sum-exp, or a diagonal term lacks a factor."""
    assert_as_good_as_the_twin(Unroll(layout, heads, 3, torch.float64, "cpu"), "fused", torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [ALL_ROWS[1], SOME_ROWS[4], ((307,), None)])
def test_fused_in_low_precision(layout: Layout, dtype: torch.dtype) -> None:
    """Red when the log-sum-exp is rounded to the inputs' dtype, or the CPU kernel's own bf16 backward is used."""
    assert_as_good_as_the_twin(Unroll(layout, (6, 2, 24), 4, dtype, "cpu"), "fused", dtype)


def test_fused_gradients_by_finite_differences() -> None:
    """Red when the gradient is not that of the forward; independent of the reference."""
    unroll = Unroll(((5, 1, 0, 3), ((1, 2), (3, 5), (7, 8))), (4, 2, 4), 3, torch.float64, "cpu")
    (query, base_key, base_value), (_, key_1, value_1), (_, key_2, value_2) = unroll.rows

    def attend(*rows: Tensor) -> Tensor:
        q, k, v, k1, v1, k2, v2 = rows
        lengths, runs = unroll.layout
        return ttt_attention(q, k, v, (k1, k2), (v1, v2), document_lengths=lengths, query_runs=runs, scale=0.7)

    inputs = [rows.requires_grad_() for rows in (query, base_key, base_value, key_1, value_1, key_2, value_2)]
    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("layout", [*ALL_ROWS[1:], *SOME_ROWS[1:3], *SOME_ROWS[5:]])
@pytest.mark.parametrize("max_scores", [2**26, 300])
def test_row_blocks(layout: Layout, max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact fallback, which CUDA takes in float32. Red when a block's rows, keys or causal edge are off."""
    monkeypatch.setattr(base_block, "base_block_kernel", lambda *_: ("row_blocks", "asked for by a test"))
    monkeypatch.setattr(base_block, "_MAX_SCORES", max_scores)  # 300: blocks of one row and of a few
    assert_as_good_as_the_twin(Unroll(layout, (6, 2, 24), 3, torch.float64, "cpu"), "fused", torch.float64)


def test_the_fallback_is_logged_once_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when the slow path is silent, or fills the log."""
    monkeypatch.setattr(base_block, "base_block_kernel", lambda *_: ("row_blocks", "a reason of this test"))
    with caplog.at_level(logging.WARNING, logger="kernels.base_block"):
        Unroll(((3, 4), None), (2, 1, 8), 3, torch.float32, "cpu").run("fused")
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["a reason of this test"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backend", ["eager", "fused", "flex"])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_next_to_nothing(num_tokens: int, backend: str, dtype: torch.dtype) -> None:
    """T = 0 kills the process in torch's CPU kernel. Red when it reaches it, or the result is off the graph."""
    unroll = Unroll(((num_tokens, 0), None), (4, 2, 8), 3, dtype, "cpu")
    assert_as_good_as_the_twin(unroll, backend, dtype, backward=backend != "flex")


@pytest.mark.parametrize("backend", ["eager", "fused", "flex"])
def test_any_strides(backend: str) -> None:
    """torch's CPU kernel is silently wrong for a last-dim stride other than 1. Red when one reaches it."""
    unroll = Unroll(((9, 4), None), (4, 2, 8), 3, torch.float64, "cpu")
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
    unroll = Unroll(((9, 4), None), (4, 2, 8), 1, dtype, str(device))
    gradients = []
    for backend in ("eager", "fused"):
        rows = [tensor.clone().requires_grad_() for tensor in unroll.rows[0]]
        ttt_attention(*rows, document_lengths=(9, 4), backend=backend).sum().backward()
        gradients.append([tensor.grad for tensor in rows])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=4 * EPS[dtype])


def test_flex_names_the_way_out_on_the_cpu() -> None:
    """Red when torch's own NotImplementedError comes through, or a run without gradients is refused too."""
    query, key, value = Unroll(((5,), None), (4, 2, 16), 1, torch.float32, "cpu").rows[0]
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
        (lambda: ttt_attention(rows(), rows(), rows(), document_lengths=(4,)), "sum to 4, but base_key has 5 rows"),
        (lambda: ttt_attention(rows(), rows(), rows(), document_lengths=(7, -2)), "not be negative, got -2"),
        (lambda: ttt_attention(rows(), rows(), rows(), (rows(),), document_lengths=(5,)), "1 step_keys but 0 step_val"),
        (lambda: ttt_attention(rows(4), rows(), rows(), document_lengths=(5,)), "sum to 5, but query has 4 rows"),
        (lambda: ttt_attention(rows(), rows(head_dim=4), rows(), document_lengths=(5,)), r"base_key must be \[T, G, 8"),
        (
            lambda: ttt_attention(rows(), rows(), rows(), document_lengths=(5,), query_runs=((0, 4),)),
            "lengths of query_runs sum to 4, but query has 5 rows",
        ),
        (
            lambda: ttt_attention(
                rows(2), rows(), rows(), (rows(),), (rows(2),), document_lengths=(5,), query_runs=((0, 2),)
            ),
            r"step_keys\[0\] must be \(2, 2, 8\)",
        ),
        (lambda: ttt_attention(rows(), rows(), rows(head_dim=4), document_lengths=(5,)), r"base_value must be \(5, 2"),
        (
            lambda: ttt_attention(rows(), rows(), rows(), (rows(4),), (rows(),), document_lengths=(5,)),
            r"step_keys\[0\] must be",
        ),
        (
            lambda: ttt_attention(rows(), rows(), rows(dtype=torch.float64), document_lengths=(5,)),
            "base_value is torch.float64 on cpu, query torch.float32",
        ),
        (lambda: ttt_attention(rows()[0], rows(), rows(), document_lengths=(5,)), r"query must be \[A, H, Dh\]"),
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


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (((0, 2), (2, 2)), r"query_runs\[1\] = \(2, 2\) must be"),
        (((-1, 2),), r"query_runs\[0\] = \(-1, 2\) must be"),
        (((0, 2), (1, 3)), r"query_runs\[1\] = \(1, 3\) begins before row 2"),
        (((2, 3), (0, 1)), r"query_runs\[1\] = \(0, 1\) begins before row 3"),
        (((3, 5),), r"query_runs\[0\] = \(3, 5\) crosses the end of its document at row 4"),
        (((0, 1), (6, 8)), r"query_runs\[1\] = \(6, 8\) crosses the end of its document at row 7"),
        (((7, 8),), r"query_runs\[0\] = \(7, 8\) lies past the last document, which ends at row 7"),
    ],
)
def test_runs_that_do_not_fit_are_refused(runs: tuple[tuple[int, int], ...], message: str) -> None:
    """Red when such a run goes through, twice in a row too (the runs are cached), or is not named."""
    for backend in ("eager", "fused"):
        with pytest.raises(ValueError, match=message):
            ttt_attention(rows(7), rows(7), rows(7), document_lengths=(4, 0, 3), query_runs=runs, backend=backend)
