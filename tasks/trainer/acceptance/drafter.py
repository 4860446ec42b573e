"""The draft as it is served: a key/value cache of step-0 rows and a chain of drafted tokens on top of it.

    verified tokens   x[0] .. x[m]; the target has run over x[0..m-1], so rows 0..m-1 have their aux_hidden
    step-0 row p      embedding of x[p+1], fc(aux_hidden[p]), position p; its key and value stay for good
    drafting          starts from row m-1: step 0 predicts x[m+1]; step k >= 1 reads the token drafted last and the
                      layer output of step k-1, at position m-1+k; its key and value last until the round is over

This is the other half of the training-time test: draft/ttt.py must give the same logits for the same tokens. It is
plain torch and one row a step, because it is what the fused unroll is checked against. The keys of a round lie behind
the cache's end and the next `extend` writes over them, so nothing can leak from one round into the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.trainer.draft.eagle3 import Eagle3Draft

_FIRST_CAPACITY = 256


class Drafter:
    """One draft decoding one sequence. The draft's dtype (fp64 too) and device are used throughout."""

    def __init__(self, draft: Eagle3Draft) -> None:
        weight = draft.fc.weight
        config = draft.config
        self._draft = draft
        self._target_ids = draft.target_ids
        self._dtype = weight.dtype
        self._device = weight.device
        self._keys = weight.new_empty(_FIRST_CAPACITY, config.num_kv_heads, config.head_dim)
        self._values = torch.empty_like(self._keys)
        self._num_rows = 0
        # Layer output [1, D] of step 0 at the last row: what the first drafted token is read from.
        self._hidden: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Verified positions in the cache."""
        return self._num_rows

    @torch.no_grad()
    def extend(self, token_ids: Tensor, aux_hidden: Tensor) -> None:
        """Append r >= 1 newly verified positions p = num_rows .. num_rows + r - 1.

        token_ids int64 [r]: x[p+1] of each of them, the token after it. aux_hidden [r, 3D]: the target's, of p.
        """
        draft, first, rows = self._draft, self._num_rows, token_ids.shape[0]
        assert rows >= 1, "a round verifies one position at least"
        assert aux_hidden.shape[0] == rows, "one row of aux_hidden a token"
        hidden = draft.fuse(aux_hidden.to(self._device, self._dtype))
        positions = torch.arange(first, first + rows, device=self._device)
        query, key, value = draft.qkv(draft.embed(token_ids.to(self._device)), hidden, positions)
        self._write(first, key, value)
        self._num_rows = first + rows
        # With one layer, earlier rows matter through their keys and values only: attend from the last row alone.
        self._hidden = draft.finish(self._attend(query[-1:], self._num_rows), hidden[-1:])

    @torch.no_grad()
    def propose(self, num_tokens: int) -> list[int]:
        """Draft a greedy chain from the last row: `num_tokens` target ids (through d2t)."""
        if num_tokens == 0:
            return []
        hidden = self._last_hidden()
        tokens: list[Tensor] = []
        for step in range(num_tokens):
            if step:
                hidden = self._advance(tokens[-1], hidden, step)
            tokens.append(self._target_ids[self._draft.logits(hidden).argmax(-1)])
        chain: list[int] = torch.cat(tokens).tolist()
        return chain

    @torch.no_grad()
    def forced_logits(self, token_ids: Tensor) -> Tensor:
        """Teacher forcing: the logits of every step when the drafted tokens are given.

        token_ids int64 [n]: read in place of the tokens drafted at steps 0 .. n-1. Returns [n + 1, Vd]: row k
        is what step k predicts.
        """
        hidden = self._last_hidden()
        logits = [self._draft.logits(hidden)]
        for step in range(1, token_ids.shape[0] + 1):
            hidden = self._advance(token_ids[step - 1 : step].to(self._device), hidden, step)
            logits.append(self._draft.logits(hidden))
        return torch.cat(logits)

    def _last_hidden(self) -> Tensor:
        assert self._hidden is not None, "extend with the prompt before drafting"
        return self._hidden

    def _advance(self, token: Tensor, hidden: Tensor, step: int) -> Tensor:
        """Step k >= 1: read token int64 [1] and the previous step's output [1, D]; returns this step's [1, D]."""
        position = self._num_rows - 1 + step
        query, key, value = self._draft.qkv(
            self._draft.embed(token), hidden, torch.tensor([position], device=self._device)
        )
        self._write(position, key, value)
        return self._draft.finish(self._attend(query, position + 1), hidden)

    def _write(self, first: int, key: Tensor, value: Tensor) -> None:
        end = first + key.shape[0]
        capacity = self._keys.shape[0]
        if end > capacity:
            grown = max(end, 2 * capacity) - capacity
            self._keys = torch.cat((self._keys, self._keys.new_empty(grown, *key.shape[1:])))
            self._values = torch.cat((self._values, self._values.new_empty(grown, *value.shape[1:])))
        self._keys[first:end] = key
        self._values[first:end] = value

    def _attend(self, query: Tensor, num_keys: int) -> Tensor:
        """Attention of one row to the first `num_keys` keys. query [1, H, Dh] -> [1, H, Dh]."""
        keys, values = self._keys[:num_keys], self._values[:num_keys]
        # Query head h shares the key/value head h // (H / G).
        grouped = query.view(keys.shape[1], -1, keys.shape[2])
        scores = torch.einsum("grd,tgd->grt", grouped, keys) * keys.shape[2] ** -0.5
        # Softmax in fp32 at least; fp64 stays.
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.to(wide).softmax(-1).to(values.dtype)
        return torch.einsum("grt,tgd->grd", weights, values).reshape(query.shape)
