"""TTT attention on CUDA: every kernel of the fused backend, dummy rows, flex gradients, recompiles, no synchronisation.

Tolerances as on the CPU (`attention_unroll`): the error of the dense reference in the same dtype is the bound.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import attention_plan, base_block, base_block_cuda
from kernels.attention_plan import CudnnCall, FlashCall
from kernels.ttt_attention import choose_attention_backend, ttt_attention
from tests.kernels.attention_unroll import ALL_ROWS, LAYOUTS, SOME_ROWS, Layout, Unroll, assert_as_good_as_the_twin

pytestmark = pytest.mark.gpu

ALWAYS, NEVER = -(2**40), 2**40

# Odd lengths; squares with keys before them, with gaps, in batches, past the last token; a run of whole squares.
LONG: list[Layout] = [
    ((1001,), None),
    ((1024,), ((512, 1024),)),
    ((513, 600, 3), None),
    ((256, 256, 256), None),
    ((1100,), ((600, 1000),)),
    ((1100, 40), ((520, 700), (1090, 1100), (1105, 1140))),
    ((1300,), ((5, 9), (900, 1300))),
    ((900, 900), ((560, 600), (1490, 1500))),
]


@pytest.fixture(params=["cudnn", "flash", "both"])
def use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> Iterator[str]:
    """Forces all calls to one kernel, or mixes them at sizes that a test can afford."""
    name: str = request.param
    if name == "cudnn" and torch.cuda.get_device_capability(cuda) < (9, 0):
        pytest.skip("cuDNN attention is used from compute capability 9.0 on, this device has less")
    monkeypatch.setattr(attention_plan, "CUDNN_CALL_PAIRS", {"cudnn": ALWAYS, "flash": NEVER, "both": 2**16}[name])
    monkeypatch.setattr(attention_plan, "JOIN_PAIRS", 2**15)
    monkeypatch.setattr(attention_plan, "GATHER_PAIRS", 0)
    if name == "cudnn":
        monkeypatch.setattr(attention_plan, "FLASH_SLOWDOWN", 2**20)
    base_block._cached_plan.cache_clear()
    base_block_cuda._refused.clear()
    yield name
    base_block._cached_plan.cache_clear()


def kinds(layout: Layout, head_dim: int) -> set[type]:
    plan = base_block.plan_base_block(*layout, torch.device("cuda"), torch.bfloat16, head_dim, 4096 // head_dim)
    return {type(call) for call in plan.calls}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [*LAYOUTS, *LONG])
def test_fused(layout: Layout, dtype: torch.dtype, use: str) -> None:
    """Red when a kernel's layout, log-sum-exp or causal alignment is not what the plan takes it for, or a dummy row's
    p is not 0 in its backward."""
    assert_as_good_as_the_twin(Unroll(layout, (8, 2, 64), 3, dtype, "cuda"), "fused", dtype)
    if layout != SOME_ROWS[-1] and use != "both":
        assert kinds(layout, 64) == {CudnnCall if use == "cudnn" else FlashCall}
    assert not base_block_cuda._refused


@pytest.mark.parametrize("heads", [(4, 4, 128), (8, 2, 96), (4, 2, 256), (8, 1, 128), (6, 2, 80), (16, 1, 64)])
@pytest.mark.parametrize("layout", [LONG[2], LONG[5]])
def test_fused_head_shapes(layout: Layout, heads: tuple[int, int, int], use: str) -> None:
    """Red when a head dim or a number of query heads a key is computed wrongly. cuDNN may refuse, not be wrong."""
    assert_as_good_as_the_twin(Unroll(layout, heads, 3, torch.bfloat16, "cuda"), "fused", torch.bfloat16)


@pytest.mark.parametrize("layout", [*LAYOUTS, LONG[5]])
def test_fused_in_float32(layout: Layout, cuda: torch.device) -> None:
    """Red when row_blocks or the merge loses precision, as with products in TF32."""
    assert_as_good_as_the_twin(Unroll(layout, (6, 2, 24), 3, torch.float32, "cuda"), "fused", torch.float32)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("layout", [LONG[1], LONG[5]])
def test_dummy_rows_give_no_gradient(layout: Layout, head_dim: int, use: str) -> None:
    """A dummy row's log-sum-exp is +inf; here all rows' are. Red when a kernel's p = exp(score - inf) is not 0."""
    unroll = Unroll(layout, (8, 2, head_dim), 1, torch.bfloat16, "cuda")
    query, key, value = unroll.rows[0]
    plan = base_block.plan_base_block(*layout, query.device, query.dtype, head_dim, 8)
    lse = torch.full((8, query.shape[0]), float("inf"), device=query.device)
    segments, *of_keys = base_block.base_block_backward(
        unroll.grads[0], query, key, value, query.clone(), lse, plan, head_dim**-0.5
    )
    for gradient in [*of_keys, *(part[segment.part_rows] for segment in segments for part in segment.parts)]:
        assert gradient.abs().max() == 0  # False for NaN


def test_no_step_waits_for_the_device(use: str) -> None:
    """Red when a step after the first of a layout copies from the device or waits for it."""
    unroll = Unroll(LONG[5], (8, 2, 64), 3, torch.bfloat16, "cuda")
    unroll.run("fused")
    torch.cuda.set_sync_debug_mode("error")
    try:
        unroll.run("fused")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_misaligned_rows(use: str) -> None:
    """Kernels load 16 bytes at a time. Red when rows at an odd address or stride reach them."""
    query, key, value = Unroll(LONG[2], (8, 2, 64), 1, torch.bfloat16, "cuda").rows[0]
    expected = ttt_attention(query, key, value, document_lengths=LONG[2][0])

    def shifted(rows: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(rows.numel() + 1, dtype=rows.dtype, device=rows.device)
        wide[1:] = rows.flatten()
        return wide[1:].view(rows.shape)

    found = ttt_attention(shifted(query), shifted(key), shifted(value), document_lengths=LONG[2][0])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_fused_with_many_rows(cuda: torch.device) -> None:
    """The last elements lie past 2^31. Red when a row's offset is computed in 32 bits."""
    num_rows = 2**19 + 700
    free, _ = torch.cuda.mem_get_info()
    if free < 60 * 2**30:
        pytest.skip("needs 60 GiB of device memory")
    query = torch.rand(num_rows, 32, 128, dtype=torch.bfloat16, device=cuda)
    key, value, key_1, value_1 = (torch.rand(num_rows, 8, 128, dtype=torch.bfloat16, device=cuda) for _ in range(4))
    lengths = [2048] * (num_rows // 2048) + [num_rows % 2048]
    found = ttt_attention(query, key, value, [key_1], [value_1], document_lengths=lengths)
    last = slice(num_rows - lengths[-1], num_rows)
    expected = ttt_attention(
        query[last].clone(), key[last], value[last], [key_1[last]], [value_1[last]], document_lengths=lengths[-1:]
    )
    # One rounding of outputs below 1 (values lie in [0, 1]), whose kernels may differ.
    torch.testing.assert_close(found[last], expected, rtol=0, atol=2**-8)


def test_the_choice_on_cuda(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when cuDNN is used where it is switched off or must be deterministic, or the reason is not said."""
    if torch.cuda.get_device_capability(cuda) < (9, 0):
        pytest.skip("cuDNN attention is used from compute capability 9.0 on, this device has less")
    assert "cuDNN" in choose_attention_backend("auto", cuda, torch.bfloat16, 128, True)[1]
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
        assert "switched off" in choose_attention_backend("auto", cuda, torch.bfloat16, 128, True)[1]
    torch.use_deterministic_algorithms(True)
    try:
        assert "not deterministic" in choose_attention_backend("auto", cuda, torch.bfloat16, 128, True)[1]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [ALL_ROWS[1], *SOME_ROWS[1:6], ((640, 1, 383), None), LONG[5]])
def test_flex(layout: Layout, dtype: torch.dtype, cuda: torch.device) -> None:
    """Red when a block is wrongly called full or empty, or the gradient through the log-sum-exp is lost."""
    assert_as_good_as_the_twin(Unroll(layout, (8, 2, 64), 3, dtype, "cuda"), "flex", dtype)


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
def test_flex_does_not_compile_for_every_length(cuda: torch.device) -> None:
    """Red when a new document layout, number of tokens or of active rows compiles anew."""
    from torch._dynamo.utils import counters

    def frames(layout: Layout) -> int:
        Unroll(layout, (8, 2, 64), 2, torch.bfloat16, "cuda").run("flex")
        found: int = counters["stats"]["unique_graphs"]
        return found

    # All rows active, and some: A = T is a guard of what is compiled for the first.
    for layouts in (
        [((700,), None), ((300, 77), None), ((1000, 29, 2), None), ((129,), None), ((900, 40, 1, 1, 1), None)],
        [((700,), ((5, 600),)), ((300, 77), ((7, 290), (300, 331))), ((1000, 29, 2), ((0, 1), (600, 1000)))],
    ):
        first, *later = [frames(layout) for layout in layouts]
        assert later == [first] * len(later)
