"""N-gram lookup against a brute-force search over the whole sequence."""

from __future__ import annotations

import random

import pytest
import torch

from tasks.trainer.acceptance.ngram import NgramLookup


def brute_force(tokens: list[int], num_tokens: int) -> list[int]:
    for size in (3, 2, 1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if len(tokens) > size and tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + num_tokens]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_equals_brute_force(seed: int) -> None:
    """Red when a shorter suffix or an earlier occurrence wins, the suffix finds itself, or a piece's edge is lost."""
    draw = random.Random(seed)
    tokens = [draw.randrange(4)]
    lookup = NgramLookup(tokens)
    for _ in range(40):
        assert lookup.propose(4) == brute_force(tokens, 4)
        piece = [draw.randrange(4) for _ in range(draw.randrange(1, 4))]
        lookup.extend(torch.tensor(piece), torch.empty(len(piece), 0))
        tokens += piece


def test_by_hand() -> None:
    """Red when the rule itself changes: latest trigram, no proposal for an unseen token, none when none is asked."""
    assert NgramLookup([1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3]).propose(2) == [8, 9]
    assert NgramLookup([5, 6, 5]).propose(4) == [6, 5]
    assert NgramLookup([1, 2, 3]).propose(4) == []
    assert NgramLookup([1, 1]).propose(0) == []
    assert NgramLookup().propose(3) == []
