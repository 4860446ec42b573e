"""Every kind of draft on CUDA as training runs it: fused attention, linear loss, compiled pieces, bfloat16.

Held against float32 with dense attention and the reference loss. The bound is the error of a plain twin (dense
attention, reference loss) in the same bfloat16, with a tenth to spare: both round some hundred times, in other places.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from tasks.trainer.draft.alignment import count_rows, target_rows
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.layer import Memory, compiled_pieces
from tasks.trainer.draft.ttt import Computation, unroll
from tasks.trainer.train.batches import Batch
from tests.trainer.draft.conftest import masked
from tests.trainer.drafts import VARIANTS, draft_config, vocabulary_maps

pytestmark = pytest.mark.gpu

K, SIZE = 3, 256
# 140,000: more columns than a row kernel holds at once.
KINDS: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "whole vocabulary": {"vocab_size": 140_000, "target_vocab_size": 140_000},
}


def make_case(device: torch.device, **changes: Any) -> tuple[Eagle3Draft, Batch, torch.Tensor]:
    """A float32 draft whose weights are bfloat16 numbers, a batch and the target's head rows."""
    shape = {"hidden_size": SIZE, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1000,
             "target_vocab_size": 1200, "max_position_embeddings": 4096}  # fmt: skip
    config = draft_config(**{**shape, **changes})
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=generator).clamp(-3, 3) * scale).bfloat16().float()

    maps = vocabulary_maps(config, generator)
    draft = Eagle3Draft(config, embedding=normal(config.target_vocab_size, SIZE), **maps)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.copy_(normal(*parameter.shape, scale=parameter.shape[1] ** -0.5))
    mask = masked((False, 300), (True, 200), (False, 150), (True, 90), (True, 60))
    lengths = (500, 240, 60)
    rows = target_rows(mask, lengths)
    batch = Batch(
        sample_ids=("a", "b", "c"),
        document_lengths=lengths,
        token_ids=torch.randint(config.target_vocab_size, (sum(lengths),), generator=generator),
        loss_mask=mask,
        aux_hidden=normal(sum(lengths), 3 * SIZE).bfloat16(),
        target_rows=rows,
        target_argmax=torch.randint(config.target_vocab_size, (len(rows),), generator=generator, dtype=torch.int32),
        target_lse=torch.full((len(rows),), math.log(config.target_vocab_size) + 0.5),
        last_hidden=normal(len(rows), SIZE).bfloat16(),
    )
    return draft.to(device), batch.to(str(device)), normal(config.vocab_size, SIZE, scale=SIZE**-0.5).to(device)


def gradients(
    draft: Eagle3Draft, batch: Batch, head: torch.Tensor, computation: Computation, dtype: torch.dtype
) -> torch.Tensor:
    """All gradients, one after another, in float64."""
    own = copy.deepcopy(draft).to(dtype)
    rows = count_rows(batch.loss_mask, batch.document_lengths, K)
    unrolled = unroll(
        own,
        batch,
        ttt_steps=K,
        row_weight=[0.8**k / int(n) for k, n in enumerate(rows)],
        head=head.to(dtype),
        draft_ids=own.draft_ids(),
        computation=computation,
    )
    unrolled.loss.backward()
    return torch.cat([p.grad.double().flatten() for p in own.parameters() if p.grad is not None])


@pytest.mark.parametrize("checkpointing", ["none", "step"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind(kind: str, checkpointing: str, cuda: torch.device) -> None:
    """Red when a kind of draft is wrong only as it is trained: compiled, fused, in bfloat16, computed again."""
    draft, batch, head = make_case(cuda, **KINDS[kind])
    plain = Computation(attention="eager", loss="torch")
    trained = Computation("fused", "linear", "triton", pieces=compiled_pieces(), memory=Memory(checkpointing))
    truth = gradients(draft, batch, head, plain, torch.float32)
    naive = gradients(draft, batch, head, plain, torch.bfloat16)
    found = gradients(draft, batch, head, trained, torch.bfloat16)
    error, bound = (float((each - truth).norm() / truth.norm()) for each in (found, naive))
    assert error <= 1.1 * bound
