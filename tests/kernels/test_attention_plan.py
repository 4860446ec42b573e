"""The plan of cuDNN and flash calls, run whole on the CPU: both kernels' contracts stand in for them, in float64."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import attention_plan, base_block, base_block_cuda
from kernels.attention_plan import CudnnCall, FlashCall, Run, active_runs, join_runs, plan_calls
from tests.kernels.attention_unroll import LAYOUTS, SOME_ROWS, Layout, Unroll, assert_as_good_as_the_twin

CPU = torch.device("cpu")
ALWAYS, NEVER = -(2**40), 2**40


class Kernels:
    """What torch documents and an H200 showed of the four operators, one sequence at a time; notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuse: set[str] = set()

    @staticmethod
    def attend(query: Tensor, key: Tensor, value: Tensor, first: int | None, scale: float) -> tuple[Tensor, Tensor]:
        """[q, H, Dh] and [k, G, Dh]; row i sees keys 0 .. first + i, all when None. Returns out, lse [H, q]."""
        repeats = query.shape[1] // key.shape[1]
        k, v = (rows.repeat_interleave(repeats, 1) for rows in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, k) * scale
        if first is not None:
            row, column = torch.arange(len(query))[:, None], torch.arange(len(key))
            scores = scores.masked_fill(column > row + first, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)

    @staticmethod
    def attend_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, first: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As a flash kernel does: p from the given lse, delta from the given out."""
        groups = key.shape[1]
        repeats = query.shape[1] // groups
        k, v = (rows.repeat_interleave(repeats, 1) for rows in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, k) * scale
        if first is not None:
            row, column = torch.arange(len(query))[:, None], torch.arange(len(key))
            scores = scores.masked_fill(column > row + first, float("-inf"))
        p = (scores - lse[..., None]).exp()
        dp = torch.einsum("qhd,khd->hqk", grad, v)
        ds = p * (dp - (grad * out).sum(-1).t()[..., None]) * scale
        of_key, of_value = torch.einsum("hqk,qhd->khd", ds, query), torch.einsum("hqk,qhd->khd", p, grad)
        shape = (len(key), groups, repeats, -1)
        return torch.einsum("hqk,khd->qhd", ds, k), of_key.view(shape).sum(2), of_value.view(shape).sum(2)

    def note(self, name: str, *shape: Any) -> None:
        self.calls.append((name, *shape))
        if name in self.refuse:
            raise RuntimeError(f"cuDNN Frontend error: no plan for {name}\nmore of it")

    def cudnn(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, with_lse: bool, dropout: float, causal: bool, debug: bool,
        *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert with_lse
        self.note("cudnn", q.shape[0], q.shape[2], k.shape[2], causal)
        each = [
            self.attend(*(rows[b].transpose(0, 1) for rows in (q, k, v)), 0 if causal else None, scale)
            for b in range(len(q))
        ]
        out = torch.stack([out for out, _ in each]).transpose(1, 2)
        lse = torch.stack([lse for _, lse in each])[..., None]
        # What a real kernel writes at dummy rows is some number; nothing may depend on it.
        return out, lse

    def cudnn_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        bias: Any, q_bounds: Any, k_bounds: Any, max_q: int, max_k: int, dropout: float, causal: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.note("cudnn_backward", q.shape[0], q.shape[2], k.shape[2], causal)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert lse.shape == (*q.shape[:3], 1)
        assert lse.is_contiguous()
        each = [
            self.attend_backward(
                *(rows[b].transpose(0, 1) for rows in (grad, q, k, v, out)), lse[b, ..., 0], 0 if causal else None,
                scale,
            )
            for b in range(len(q))
        ]  # fmt: skip
        return tuple(torch.stack(list(rows)).transpose(1, 2) for rows in zip(*each, strict=True))

    @staticmethod
    def sequences(q_bounds: Tensor, k_bounds: Tensor) -> Iterator[tuple[slice, slice]]:
        q, k = q_bounds.tolist(), k_bounds.tolist()
        for i in range(len(q) - 1):
            yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])

    def flash(
        self, q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, max_q: int, max_k: int,
        dropout: float, causal: bool, debug: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert causal
        assert q_bounds.dtype == k_bounds.dtype == torch.int32
        self.note("flash", len(q_bounds) - 1)
        out, lse = torch.full_like(q, float("nan")), q.new_full((q.shape[1], q.shape[0]), float("nan"))
        for rows, keys in self.sequences(q_bounds, k_bounds):
            num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start
            assert 0 < num_rows <= max_q
            assert 0 < num_keys <= max_k
            out[rows], lse[:, rows] = self.attend(q[rows], k[keys], v[keys], num_keys - num_rows, scale)
        return out, lse, None, None, None

    def flash_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_bounds: Tensor,
        k_bounds: Tensor, max_q: int, max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor,
        *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert lse.is_contiguous()
        self.note("flash_backward", len(q_bounds) - 1)
        found = tuple(torch.full_like(rows, float("nan")) for rows in (q, k, v))
        for rows, keys in self.sequences(q_bounds, k_bounds):
            first = keys.stop - keys.start - (rows.stop - rows.start)
            of_sequence = self.attend_backward(
                grad[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], first, scale
            )
            for gradient, where, of in zip(found, (rows, keys, keys), of_sequence, strict=True):
                gradient[where] = of
        return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """The operators on the CPU; the plan as on Hopper; nothing cached before or after."""
    stand_in = Kernels()
    operators = {
        "_scaled_dot_product_cudnn_attention": stand_in.cudnn,
        "_scaled_dot_product_cudnn_attention_backward": stand_in.cudnn_backward,
        "_flash_attention_forward": stand_in.flash,
        "_flash_attention_backward": stand_in.flash_backward,
    }
    for name, operator in operators.items():
        monkeypatch.setattr(torch.ops.aten, name, operator)
    monkeypatch.setattr(base_block, "base_block_kernel", lambda *_: ("cudnn", "asked for by a test"))
    base_block._cached_plan.cache_clear()
    base_block_cuda._refused.clear()
    base_block_cuda._log_refusal_once.cache_clear()
    yield stand_in
    base_block._cached_plan.cache_clear()
    base_block_cuda._refused.clear()


# Squares with and without keys before them, with gaps, past the last token, in batches of equal and of other lengths.
LONG: list[Layout] = [
    ((700,), None),
    ((640,), None),
    ((256, 256, 256), None),
    ((200, 256, 100, 3), None),
    ((1100,), ((600, 1000),)),
    ((1100, 40), ((520, 700), (1090, 1100), (1105, 1140))),
    ((1300,), ((5, 9), (1290, 1300))),
    ((600, 600), ((560, 600), (1190, 1200))),
    ((900, 300), ((530, 900), (900, 1000))),
]


def force(monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    monkeypatch.setattr(attention_plan, "CUDNN_CALL_PAIRS", ALWAYS if use == "cudnn" else NEVER)
    if use == "cudnn":
        monkeypatch.setattr(attention_plan, "FLASH_SLOWDOWN", 2**20)


@pytest.mark.parametrize(
    ("layout", "join"),
    [(layout, join) for layout in LAYOUTS + LONG for join in ("never", "always") if layout[1] or join == "never"],
)
@pytest.mark.parametrize("use", ["cudnn", "flash", "both"])
def test_planned_calls_are_exact(
    layout: Layout, use: str, join: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a row, key, dummy or part is misplaced, a dummy row gives a gradient, or a shared key loses one."""
    if use == "both":  # the larger batches of the long layouts; 2^14 pairs are 181 rows
        monkeypatch.setattr(attention_plan, "CUDNN_CALL_PAIRS", 2**14)
        monkeypatch.setattr(attention_plan, "GATHER_PAIRS", 0)
    else:
        force(monkeypatch, use)
    monkeypatch.setattr(attention_plan, "JOIN_PAIRS", ALWAYS if join == "never" else NEVER)
    assert_as_good_as_the_twin(Unroll(layout, (4, 2, 8), 2, torch.float64, "cpu"), "fused", torch.float64)
    names = {name for name, *_ in kernels.calls}
    if use != "both" and layout != SOME_ROWS[-1]:
        assert names == {use, f"{use}_backward"}


def test_what_cudnn_refuses_flash_computes(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when the fallback is silent, noisy, asks cuDNN again for what it refused, or is wrong."""
    force(monkeypatch, "cudnn")
    unroll = Unroll(((700,), ((600, 700),)), (2, 1, 8), 2, torch.float64, "cpu")
    for refused in ("cudnn", "cudnn_backward"):
        base_block_cuda._refused.clear()
        base_block_cuda._log_refusal_once.cache_clear()
        kernels.calls.clear()
        caplog.clear()
        kernels.refuse = {refused}
        with caplog.at_level(logging.WARNING, logger="kernels.base_block_cuda"):
            assert_as_good_as_the_twin(unroll, "fused", torch.float64)
        assert [name for name, *_ in kernels.calls].count(refused) == 1
        assert [r.getMessage().partition("time: ")[2] for r in caplog.records] == [
            f"cuDNN Frontend error: no plan for {refused}"
        ]


def test_no_memory_is_no_refusal(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when running out of memory is taken for a shape that cuDNN lacks."""

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    force(monkeypatch, "cudnn")
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        Unroll(((300,), None), (2, 1, 8), 1, torch.float64, "cpu").run("fused")


def shapes(layout: Layout) -> list[tuple[Any, ...]]:
    """(batch, size, keys before) of each cuDNN call, (rows, keys, spans) of each flash call."""
    lengths, runs = layout
    calls = plan_calls(active_runs(lengths, runs), sum(lengths), CPU, True)
    return [
        ("cudnn", call.batch, call.size, call.num_prefix)
        if isinstance(call, CudnnCall)
        else ("flash", call.max_query, call.max_key, len(call.query_bounds) - 1)
        for call in calls
    ]


def test_which_calls_are_made() -> None:
    """Red when long runs go to flash, short ones to cuDNN, sides are not rounded, or documents are not batched."""
    assert shapes(((16384,), None)) == [("cudnn", 1, 16384, 0)]
    assert shapes(((16001,), None)) == [("cudnn", 1, 16384, 0)]
    assert shapes(((16000, 384), None)) == [("cudnn", 1, 16384, 0), ("flash", 384, 384, 1)]
    # The answer to a long prompt: keys 12,000 .. 16,000 need the 11,776 before them.
    assert shapes(((16000,), ((12000, 16000),))) == [("cudnn", 1, 4608, 11776)]
    # A few rows after long prompts: 512 of cuDNN's rows would be dummies.
    assert shapes(((60000,), ((59900, 59910),))) == [("flash", 10, 59910, 1)]
    assert shapes(((300, 400, 500), None)) == [("flash", 500, 500, 3)]
    assert shapes(((1024,) * 16, None)) == [("cudnn", 16, 1024, 0)]
    # A batch of unlike documents is gathered: too dear for short ones.
    assert shapes(((900, 1300, 1000, 1000, 800, 1200, 1000, 1100) * 2, None)) == [("flash", 1300, 1300, 16)]
    mixed = shapes(((3900, 4000, 3500, 3800, 3600, 4090, 4050, 3700), None))
    assert [name for name, *_ in mixed] == ["cudnn"] * len(mixed)
    assert len(mixed) <= 3
    # Eight turns with answers of 512 rows: far apart, they are computed apart.
    turns = tuple((start + 1536, start + 2048) for start in range(0, 16384, 2048))
    assert len(shapes(((16384,), turns))) == 8


def test_an_equal_layout_needs_no_copies() -> None:
    """Red when a plain causal call would first gather its rows."""
    for lengths, runs in [((16384,), None), ((1024,) * 16, None), ((4096, 8192), ((4096, 12288),))]:
        (call,) = plan_calls(active_runs(lengths, runs), sum(lengths), CPU, True)
        assert isinstance(call, CudnnCall)
        assert isinstance(call.queries.source, slice)
        assert isinstance(call.keys.source, slice)
        assert not call.queries.has_dummies
    # Rows of other documents stand for dummies: only the log-sum-exp is copied.
    first, second = plan_calls(active_runs((9000, 7384), None), 16384, CPU, True)
    assert isinstance(first, CudnnCall)
    assert first.queries.source == slice(0, 9216)
    assert isinstance(second, CudnnCall)
    assert isinstance(second.queries.source, Tensor)  # past the last row


def test_joining_runs() -> None:
    """Red when near runs cost a call each, or far ones are computed with all the rows between."""

    def joined(*ranges: tuple[int, int], document: int = 0) -> list[list[tuple[int, int]]]:
        runs = [Run(document, start, end, 0) for start, end in ranges]
        return [[(run.start, run.end) for run in span] for span in join_runs(runs)]

    assert joined((0, 100), (100, 200)) == [[(0, 100), (100, 200)]]
    assert joined((0, 100), (120, 200)) == [[(0, 100), (120, 200)]]
    assert joined((0, 100), (60000, 60100)) == [[(0, 100)], [(60000, 60100)]]
    two = [Run(0, 0, 5, 0), Run(10, 10, 15, 5)]
    assert join_runs(two) == [(two[0],), (two[1],)]


def test_small_models_make_fewer_calls() -> None:
    """Red when a call costs a narrow draft as few pairs as a wide one: its launches then take longer than attention."""
    lengths = (3500, 700, 400)
    runs = active_runs(lengths, ((0, 3500), (3600, 4200), (4300, 4600)))

    def kinds(width: int) -> list[type]:
        return [type(call) for call in plan_calls(runs, sum(lengths), CPU, True, width=width)]

    assert kinds(32 * 128) == [CudnnCall, FlashCall]
    assert kinds(9 * 64) == [FlashCall]
    far = [Run(0, 0, 100, 0), Run(0, 20000, 20100, 100)]
    assert len(join_runs(far)) == 2
    near = [Run(0, 0, 100, 0), Run(0, 2900, 3000, 100)]
    assert (len(join_runs(near)), len(join_runs(near, width=9 * 64))) == (2, 1)


def test_a_plan_is_made_once_and_after_inference_mode(kernels: Kernels) -> None:
    """Red when every step copies index tensors to the device, or those of inference mode poison a training step."""
    arguments = ((300, 5000), ((4, 6), (9, 20), (3000, 3100)), CPU, torch.bfloat16, 64, 8)
    with torch.inference_mode():
        first = base_block.plan_base_block(*arguments)
    assert base_block.plan_base_block(*arguments) is first
    for call in first.calls:
        bounds = call.query_bounds if isinstance(call, FlashCall) else torch.zeros(1)
        assert not bounds.is_inference()
