"""The draft as it is served: a key/value cache of step-0 rows and a chain of drafted tokens on top of it.

    verified tokens   x[0] .. x[m]; the target has run over x[0..m-1], so rows 0..m-1 have their aux_hidden
    step-0 row p      embedding of x[p+1], fc(aux_hidden[p]), position p; its keys and values (one a layer) stay
    drafting          starts from row m-1: step 0 predicts x[m+1]; step k >= 1 reads the token drafted last and the
                      output of step k-1, at position m-1+k; its keys and values last until the round is over

This is the other half of the training-time test: draft/ttt.py must give the same logits for the same tokens. It is
plain torch and one row a step, because it is what the fused unroll is checked against. The keys of a round lie behind
the cache's end and the next `extend` writes over them, so nothing can leak from one round into the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.trainer.draft.eagle3 import Eagle3Draft

_FIRST_CAPACITY = 256
_QUERY_ROWS = 256  # attended at once: the scores of a long prompt's rows would not fit


class Drafter:
    """One draft decoding one sequence. The draft's dtype (fp64 too) and device are used throughout."""

    def __init__(self, draft: Eagle3Draft) -> None:
        weight = draft.fc.weight
        config = draft.config
        self._draft = draft
        self._target_ids = draft.target_ids
        self._dtype = weight.dtype
        self._device = weight.device
        # [layers, capacity, G, Dh]
        self._keys = weight.new_empty(config.num_layers, _FIRST_CAPACITY, config.num_kv_heads, config.head_dim)
        self._values = torch.empty_like(self._keys)
        self._num_rows = 0
        # The last layer's output [1, D] of step 0 at the last row: what the first drafted token is read from.
        self._output: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Verified positions in the cache."""
        return self._num_rows

    @torch.no_grad()
    def extend(self, token_ids: Tensor, aux_hidden: Tensor) -> None:
        """Append r >= 1 newly verified positions p = num_rows .. num_rows + r - 1.

        token_ids int64 [r]: x[p+1] of each of them, the token after it. aux_hidden [r, 3D]: the target's, of p.
        """
        first, rows = self._num_rows, token_ids.shape[0]
        assert rows >= 1, "a round verifies one position at least"
        assert aux_hidden.shape[0] == rows, "one row of aux_hidden a token"
        hidden = self._draft.fuse(aux_hidden.to(self._device, self._dtype))
        self._output = self._through_layers(token_ids, hidden, first)
        self._num_rows = first + rows

    @torch.no_grad()
    def propose(self, num_tokens: int) -> list[int]:
        """Draft a greedy chain from the last row: `num_tokens` target ids (through d2t)."""
        if num_tokens == 0:
            return []
        output = self._first_output()
        tokens: list[Tensor] = []
        for step in range(num_tokens):
            if step:
                output = self._advance(tokens[-1], output, step)
            tokens.append(self._target_ids[self._logits(output).argmax(-1)])
        chain: list[int] = torch.cat(tokens).tolist()
        return chain

    @torch.no_grad()
    def forced_logits(self, token_ids: Tensor) -> Tensor:
        """Teacher forcing: the logits of every step when the drafted tokens are given.

        token_ids int64 [n]: read in place of the tokens drafted at steps 0 .. n-1. Returns [n + 1, Vd]: row k
        is what step k predicts.
        """
        output = self._first_output()
        logits = [self._logits(output)]
        for step in range(1, token_ids.shape[0] + 1):
            output = self._advance(token_ids[step - 1 : step], output, step)
            logits.append(self._logits(output))
        return torch.cat(logits)

    def _first_output(self) -> Tensor:
        assert self._output is not None, "extend with the prompt before drafting"
        return self._output

    def _logits(self, output: Tensor) -> Tensor:
        logits: Tensor = self._draft.lm_head(self._draft.outputs(output)[1])
        return logits

    def _advance(self, token: Tensor, output: Tensor, step: int) -> Tensor:
        """Step k >= 1: read token int64 [1] and the previous step's output [1, D]; returns this step's [1, D]."""
        return self._through_layers(token, self._draft.outputs(output)[0], self._num_rows - 1 + step)

    def _through_layers(self, token_ids: Tensor, hidden: Tensor, first: int) -> Tensor:
        """Run rows first .. first + r - 1, writing their keys and values; returns the last row's output [1, D].

        token_ids int64 [r], what the rows read; hidden [r, D].
        """
        draft, rows = self._draft, token_ids.shape[0]
        embeds = draft.embed(token_ids.to(self._device))
        positions = torch.arange(first, first + rows, device=self._device)
        for layer in range(draft.config.num_layers):
            query, key, value = draft.qkv(embeds, hidden, positions, layer=layer)
            self._write(layer, first, key, value)
            if layer == draft.config.num_layers - 1:
                # Nothing reads the last layer's earlier rows but through their keys and values.
                query, hidden = query[-1:], hidden[-1:]
            attended = self._attend(layer, query, first + rows - query.shape[0])
            hidden = draft.finish(attended, hidden, layer=layer)
        return hidden

    def _write(self, layer: int, first: int, key: Tensor, value: Tensor) -> None:
        end = first + key.shape[0]
        capacity = self._keys.shape[1]
        if end > capacity:
            grown = max(end, 2 * capacity) - capacity
            more = self._keys.new_empty(self._keys.shape[0], grown, *key.shape[1:])
            self._keys = torch.cat((self._keys, more), dim=1)
            self._values = torch.cat((self._values, more), dim=1)
        self._keys[layer, first:end] = key
        self._values[layer, first:end] = value

    def _attend(self, layer: int, query: Tensor, first: int) -> Tensor:
        """Causal attention of rows first .. first + r - 1 to the layer's keys. query [r, H, Dh] -> [r, H, Dh]."""
        parts = query.split(_QUERY_ROWS)
        return torch.cat([self._attend_part(layer, part, first + i * _QUERY_ROWS) for i, part in enumerate(parts)])

    def _attend_part(self, layer: int, query: Tensor, first: int) -> Tensor:
        rows = query.shape[0]
        keys, values = self._keys[layer, : first + rows], self._values[layer, : first + rows]
        # Query head h shares the key/value head h // (H / G).
        grouped = query.view(rows, keys.shape[1], -1, keys.shape[2])
        scores = torch.einsum("qgrd,tgd->grqt", grouped, keys) * keys.shape[2] ** -0.5
        later = torch.ones(rows, first + rows, dtype=torch.bool, device=query.device).triu(first + 1)
        scores = scores.masked_fill(later, float("-inf"))
        # Softmax in fp32 at least; fp64 stays.
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.to(wide).softmax(-1).to(values.dtype)
        return torch.einsum("grqt,tgd->qgrd", weights, values).reshape(query.shape)
