"""The drafter's cache: what is fed in pieces, drafted twice or grown must change nothing."""

from __future__ import annotations

import copy

import pytest
import torch

from tasks.trainer.acceptance import drafter as drafter_module
from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tests.trainer.drafts import random_draft


def rows(num: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, (num,), generator=generator), torch.rand(num, 96, generator=generator) - 0.5


def test_pieces_equal_the_whole(trained: Eagle3Draft) -> None:
    """Red when extend starts at the wrong position, or keeps a drafted token's key among the verified rows."""
    token_ids, aux_hidden = rows(12)
    whole, pieces = Drafter(trained), Drafter(trained)
    whole.extend(token_ids, aux_hidden)
    for start, end in ((0, 5), (5, 6), (6, 9), (9, 12)):
        pieces.extend(token_ids[start:end], aux_hidden[start:end])
        first = pieces.propose(4)
        assert pieces.propose(4) == first, "drafting changed what is drafted next"
    forced = token_ids[:5]
    torch.testing.assert_close(pieces.forced_logits(forced), whole.forced_logits(forced), rtol=0, atol=1e-5)
    assert pieces.num_rows == whole.num_rows == 12


def test_proposals_are_the_greedy_chain_in_target_ids(trained: Eagle3Draft) -> None:
    """Red when d2t is taken for an absolute id, or a step reads the draft id instead of the target id."""
    drafted: set[int] = set()
    for seed in range(20):
        token_ids, aux_hidden = rows(6, seed)
        drafter = Drafter(trained)
        drafter.extend(token_ids, aux_hidden)
        chain = drafter.propose(5)
        logits = drafter.forced_logits(torch.tensor(chain[:-1]))
        assert [int(trained.target_ids[i]) for i in logits.argmax(-1)] == chain
        drafted.update(chain)
        assert drafter.propose(0) == []
    # Ids 20..27 are not in the draft vocabulary, so every id from 28 on tells offset and draft id apart.
    assert any(token >= 28 for token in drafted)


def test_cache_grows(trained: Eagle3Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when growing loses rows, also in the middle of a draft."""
    token_ids, aux_hidden = rows(9)
    large = Drafter(trained)
    large.extend(token_ids, aux_hidden)
    monkeypatch.setattr(drafter_module, "_FIRST_CAPACITY", 2)
    small = Drafter(trained)
    for index in range(9):
        small.extend(token_ids[index : index + 1], aux_hidden[index : index + 1])
        small.propose(3)
    assert small.propose(12) == large.propose(12)


def test_bfloat16(trained: Eagle3Draft) -> None:
    """Red when a dtype is mixed up: the chain must be near the float32 one's, logits within bfloat16 rounding."""
    token_ids, aux_hidden = rows(6)
    exact, rounded = Drafter(trained), Drafter(copy.deepcopy(trained).to(torch.bfloat16))
    for drafter in (exact, rounded):
        drafter.extend(token_ids, aux_hidden)
    truth, low = exact.forced_logits(token_ids[:3]), rounded.forced_logits(token_ids[:3])
    assert low.dtype == torch.bfloat16
    # A rounding is 2^-9 of a value at most and some tens follow each other: 2% of the largest logit on average.
    assert float((low.float() - truth).abs().mean()) <= 0.02 * float(truth.abs().max())


def test_layers_have_caches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when growing or feeding in pieces mixes the layers' keys, or a prompt's rows are attended in wrong parts."""
    draft = random_draft(num_layers=3)
    generator = torch.Generator().manual_seed(0)
    token_ids, aux_hidden = torch.randint(80, (14,), generator=generator), torch.rand(14, 96, generator=generator)
    whole = Drafter(draft)
    whole.extend(token_ids, aux_hidden)
    monkeypatch.setattr(drafter_module, "_FIRST_CAPACITY", 2)
    monkeypatch.setattr(drafter_module, "_QUERY_ROWS", 3)
    pieces = Drafter(draft)
    for start, end in ((0, 8), (8, 9), (9, 14)):
        pieces.extend(token_ids[start:end], aux_hidden[start:end])
        pieces.propose(3)
    forced = token_ids[:5]
    torch.testing.assert_close(pieces.forced_logits(forced), whole.forced_logits(forced), rtol=0, atol=1e-12)
