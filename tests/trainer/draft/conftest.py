"""Small drafts and packed batches for the unroll's own tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tasks.trainer.draft.alignment import target_rows
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.train.batches import Batch
from tests.trainer.drafts import HIDDEN, TARGET_VOCAB, random_draft


@pytest.fixture
def draft() -> Eagle3Draft:
    """A float64 draft."""
    return random_draft()


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, none is available")
    return torch.device("cuda")


def make_batch(loss_mask: torch.Tensor, lengths: Sequence[int], *, seed: int = 0) -> Batch:
    """Random tokens and states under a given mask."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = loss_mask.shape[0]

    rows = target_rows(loss_mask, lengths)

    def states(num_rows: int, width: int) -> torch.Tensor:
        return torch.rand(num_rows, width, generator=generator, dtype=torch.float64) - 0.5

    return Batch(
        sample_ids=tuple(str(number) for number in range(len(lengths))),
        document_lengths=tuple(lengths),
        token_ids=torch.randint(TARGET_VOCAB, (num_tokens,), generator=generator),
        loss_mask=loss_mask,
        aux_hidden=states(num_tokens, 3 * HIDDEN),
        target_rows=rows,
        target_argmax=torch.randint(TARGET_VOCAB, (len(rows),), generator=generator, dtype=torch.int32),
        target_lse=torch.rand(len(rows), generator=generator) + 5.0,
        last_hidden=states(len(rows), HIDDEN),
    )


def masked(*runs: tuple[bool, int]) -> torch.Tensor:
    """A loss mask from (supervised, length) runs."""
    return torch.cat([torch.full((length,), supervised) for supervised, length in runs])
