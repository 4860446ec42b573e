"""Small drafts and packed batches for the unroll's own tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tasks.trainer.draft.alignment import target_rows
from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.train.batches import Batch

HIDDEN, TARGET_VOCAB, DRAFT_VOCAB = 32, 80, 48


@pytest.fixture
def draft() -> Eagle3Draft:
    """A float64 draft with weights of order 1, so that a wrong row shows."""
    config = DraftConfig(
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=40,
        vocab_size=DRAFT_VOCAB,
        target_vocab_size=TARGET_VOCAB,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        aux_layer_ids=(0, 1, 2),
    )
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(TARGET_VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(TARGET_VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    draft = Eagle3Draft(
        config,
        embedding=torch.rand(TARGET_VOCAB, HIDDEN, generator=generator) - 0.5,
        d2t=chosen - torch.arange(DRAFT_VOCAB),
        t2d=t2d,
    )
    with torch.no_grad():
        for parameter in draft.parameters():
            low, high = (0.5, 1.5) if parameter.ndim == 1 else (-0.4, 0.4)
            parameter.uniform_(low, high, generator=generator)
    return draft.to(torch.float64)


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
