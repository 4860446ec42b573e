"""The flex backend: its forward, and its block masks against those that evaluation finds."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from kernels.flex_base_block import BLOCK_SIZE, document_causal_block_mask
from tests.kernels.attention_unroll import ALL_ROWS, SOME_ROWS, Layout, Unroll, assert_as_good_as_the_twin

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [ALL_ROWS[1], *SOME_ROWS[4:6], ((300,), None)])
def test_flex_forward(layout: Layout, dtype: torch.dtype) -> None:
    """Red when its log-sum-exp is taken for base 2, or the mask ignores a boundary."""
    assert_as_good_as_the_twin(Unroll(layout, (6, 2, 16), 3, dtype, "cpu"), "flex", dtype, backward=False)


@pytest.mark.parametrize(
    "layout",
    [
        *(((lengths), None) for lengths in [(252,), (123, 1, 2, 126), (128, 128, 256), (255, 0, 100), (257, 99)]),
        ((5, 507), None),
        ((1,) * 300, None),
        *SOME_ROWS[:-1],
        # Gaps of whole blocks; a query block of rows of three documents, far apart; a full block of gathered rows.
        ((1500,), ((0, 100), (700, 900), (1400, 1500))),
        ((600, 300, 600), ((590, 600), (700, 720), (1400, 1500))),
        ((700, 700), ((0, 28), (300, 640), (1000, 1400))),
    ],
)
def test_block_mask_is_the_one_that_evaluation_finds(layout: Layout) -> None:
    """Red when a block is left out, or called full that is not. (flex on the CPU does not look at the blocks.)"""
    lengths, runs = layout
    num_tokens = sum(lengths)
    built = document_causal_block_mask(lengths, runs, CPU)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(num_tokens)
    if runs is not None:
        position = torch.cat([position[start:end] for start, end in runs])
    num_rows = len(position)
    # Rows past the end, in the last block, attend like the last one: a block of theirs can be full.
    position = torch.nn.functional.pad(position, (0, -num_rows % BLOCK_SIZE), value=int(position[-1]))

    def attends(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (document[position[row]] == document[column]) & (position[row] >= column)

    evaluated = create_block_mask(attends, None, None, len(position), num_tokens, device=CPU)
    assert built.seq_lengths == (num_rows, num_tokens)
    assert built.BLOCK_SIZE == evaluated.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, expected_counts = (getattr(mask, f"{kind}_num_blocks")[0, 0] for mask in (built, evaluated))
        assert counts.tolist() == expected_counts.tolist(), kind
        indices, expected_indices = (getattr(mask, f"{kind}_indices")[0, 0] for mask in (built, evaluated))
        for row, count in enumerate(counts.tolist()):
            assert indices[row, :count].tolist() == expected_indices[row, :count].tolist(), (kind, row)
    row, column = torch.meshgrid(torch.arange(num_rows), torch.arange(num_tokens), indexing="ij")
    zero = torch.tensor(0)
    assert torch.equal(built.mask_mod(zero, zero, row, column), attends(zero, zero, row, column))


@pytest.mark.parametrize("runs", [None, ((0, 40),), ((130, 1100),), ((200, 1000),), ((1099, 1100),)])
def test_blocks_of_one_run_are_ranges(runs: tuple[tuple[int, int], ...] | None) -> None:
    """Red when the hint that the kernel is given for one run, to count on from the first block, is wrong."""
    built = document_causal_block_mask((1100,), runs, CPU)
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = (getattr(built, f"{kind}_{what}")[0, 0] for what in ("num_blocks", "indices"))
        for row, count in enumerate(counts.tolist()):
            blocks = indices[row, :count]
            assert (blocks.diff() == 1).all(), (kind, row, blocks)


def test_one_block_mask_serves_all_steps_also_after_inference_mode() -> None:
    """Red when the mask is built once a step, or what inference mode built poisons a later training step."""
    with torch.inference_mode():
        first = document_causal_block_mask((3, 130, 9), None, CPU)
    assert document_causal_block_mask((3, 130, 9), None, CPU) is first
    assert not first.kv_indices.is_inference()


def test_masks_of_long_packs_are_small_and_quick() -> None:
    """Red when a table grows with the number of pairs, or the host loops over blocks or runs."""
    runs = tuple((start, start + 100) for start in range(0, 2**17, 400))
    document_causal_block_mask((4096,), None, CPU)
    start = time.perf_counter()
    mask = document_causal_block_mask((2**17,), runs, CPU)
    whole = document_causal_block_mask((2**17,), None, CPU)
    # 0.2 s on one core; evaluating 2^34 pairs takes minutes.
    assert time.perf_counter() - start < 5
    for built in (mask, whole):
        tables = [
            getattr(built, f"{kind}{what}")
            for kind in ("kv_", "full_kv_", "q_", "full_q_")
            for what in ("num_blocks", "indices")
        ]
        captured = [cell.cell_contents for cell in built.mask_mod.__closure__ or ()]
        size = sum(t.numel() * t.element_size() for t in [*tables, *captured])
        assert size < 64 * 2**20
