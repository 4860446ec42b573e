"""Prompt lookup: propose what followed the last occurrence of the current suffix. The baseline that costs nothing.

The longest suffix of 3, 2, then 1 tokens that occurred before wins, in its latest occurrence. Every n-gram is kept in a
dictionary as it appears, so that a look-up does not scan the sequence; the price is three entries a token.

Source: prompt lookup decoding (Saxena 2023); vLLM and transformers serve it as n-gram speculation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

LONGEST_SUFFIX = 3


class NgramLookup:
    """Looks in prompt and answer. token_ids: what precedes the first `extend`, i.e. the prompt's first token."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        # n-gram -> index of the token that followed its latest occurrence.
        self._followers: dict[tuple[int, ...], int] = {}
        self._append(token_ids)

    def extend(self, token_ids: Tensor, aux_hidden: Tensor) -> None:
        """Append verified tokens, int64 [r]. aux_hidden is not used: a lookup knows tokens only."""
        self._append(token_ids.tolist())

    def propose(self, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens; fewer where the sequence ends, none where no suffix occurred before."""
        for size in range(min(LONGEST_SUFFIX, len(self._tokens)), 0, -1):
            follower = self._followers.get(tuple(self._tokens[-size:]))
            if follower is not None:
                return self._tokens[follower : follower + num_tokens]
        return []

    def _append(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            # Only now do the n-grams that end at the previous token have a follower: the suffix never finds itself.
            index = len(self._tokens)
            for size in range(1, min(LONGEST_SUFFIX, index) + 1):
                self._followers[tuple(self._tokens[index - size :])] = index
            self._tokens.append(token)
