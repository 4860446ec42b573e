"""The draft as it is served, for several texts at once, drafting trees: Drafter's twin where time counts.

Texts have verified rows of unequal numbers in one cache [sequences, capacity]; the keys of drafted nodes lie behind
each text's own last row and the next `extend` writes over them. Which keys a row sees is a mask: the text's rows, and
the nodes on its own way from the root. Nothing is padded but the mask, so a text's numbers depend on its neighbours by
rounding alone. drafter.py stays the definition: one text, one chain, checked against the training unroll; this one is
checked against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tasks.trainer.acceptance.tree import Candidates, DraftTree, TreeShape, select
from tasks.trainer.draft.eagle3 import Eagle3Draft

_QUERY_ROWS = 256  # attended at once: the scores of a long prompt's rows would not fit


class BatchDrafter:
    """One draft on several texts. The draft's dtype and device are used throughout."""

    def __init__(self, draft: Eagle3Draft, *, num_texts: int, capacity: int, shape: TreeShape) -> None:
        """capacity: verified rows of the longest text at its end."""
        weight, config = draft.fc.weight, draft.config
        self._draft = draft
        self._shape = shape
        self._target_ids = draft.target_ids
        self._top_k = min(shape.top_k, config.vocab_size)
        nodes = self._top_k * (shape.depth - 1)
        # [layers, texts, rows, G, Dh]
        self._keys = weight.new_zeros(
            config.num_layers, num_texts, capacity + nodes, config.num_kv_heads, config.head_dim
        )
        self._values = torch.zeros_like(self._keys)
        self._num_rows = torch.zeros(num_texts, dtype=torch.int64, device=weight.device)
        # The last layer's output [texts, D] of step 0 at each text's last row.
        self._output = weight.new_zeros(num_texts, config.hidden_size)

    def keep(self, texts: Sequence[int]) -> None:
        """Go on with these texts alone, by their present places."""
        index = torch.tensor(list(texts), device=self._output.device)
        self._keys, self._values = self._keys[:, index], self._values[:, index]
        self._num_rows, self._output = self._num_rows[index], self._output[index]

    @torch.no_grad()
    def extend(self, token_ids: Sequence[Tensor], aux_hidden: Sequence[Tensor]) -> None:
        """Append each text's newly verified positions p, one at least: token_ids int64 [r], x[p+1] of each; aux_hidden
        [r, 3D], of p."""
        draft, device = self._draft, self._output.device
        counts = torch.tensor([len(ids) for ids in token_ids], device=device)
        texts = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
        ends = counts.cumsum(0)
        first = torch.repeat_interleave(self._num_rows - (ends - counts), counts)
        rows = first + torch.arange(len(texts), device=device)
        embeds = draft.embed(torch.cat(list(token_ids)).to(device))
        hidden = draft.fuse(torch.cat(list(aux_hidden)).to(device, embeds.dtype))
        for layer in range(draft.config.num_layers):
            query, key, value = draft.qkv(embeds, hidden, rows, layer=layer)
            self._keys[layer, texts, rows], self._values[layer, texts, rows] = key, value
            if layer == draft.config.num_layers - 1:
                # Nothing reads the last layer's earlier rows but through their keys and values.
                query, hidden = query[ends - 1], hidden[ends - 1]
                attended = self._attend(layer, query[:, None], self._seen(rows[ends - 1][:, None]))[:, 0]
            else:
                attended = self._attend_pieces(layer, query, rows, counts.tolist())
            hidden = draft.finish(attended, hidden, layer=layer)
        self._output = hidden
        self._num_rows = self._num_rows + counts

    @torch.no_grad()
    def grow(
        self, limits: Sequence[int], *, temperature: float = 1.0, generators: Sequence[torch.Generator] | None = None
    ) -> list[DraftTree]:
        """A tree on each text, none deeper than the text's limit. temperature, generators (of each text, on the CPU):
        for children that are drawn."""
        draft, shape, top_k = self._draft, self._shape, self._top_k
        num_texts, device = len(limits), self._output.device
        depth = min(shape.depth, max(limits))
        if depth == 0:
            return [DraftTree([], []) for _ in limits]
        hidden, width = self._output[:, None], 1
        scores = torch.zeros(num_texts, 1, device=device)
        # Of the expanded nodes: their candidate, and which keys of expanded nodes they see, themselves included.
        nodes = torch.full((num_texts, 1), -1, dtype=torch.int64, device=device)
        sees = torch.zeros(num_texts, 1, 0, dtype=torch.bool, device=device)
        found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        expanded = 0
        for level in range(depth):
            logits = draft.lm_head(draft.outputs(hidden.flatten(0, 1))[1]).unflatten(0, (num_texts, width))
            log_q = (logits.float() / (temperature if shape.drawn else 1.0)).log_softmax(-1)
            ranking = log_q
            if shape.drawn:
                assert generators is not None, "who draws needs random numbers"
                ranking = log_q + _gumbel(log_q, generators, [level < limit for limit in limits])
            ids = ranking.topk(top_k, dim=-1).indices
            tokens, ways = self._target_ids[ids], scores[:, :, None] + log_q.gather(-1, ids)
            found.append((tokens, ways, nodes, log_q))
            if level == depth - 1:
                break
            # The next level: the likeliest of this one's candidates. Stable, so that a rerun grows the same tree.
            best = ways.flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
            parents, next_width = best // top_k, best.shape[1]
            nodes = best + expanded * top_k
            expanded += width
            scores = ways.flatten(1).gather(1, best)
            hidden = hidden.gather(1, parents[..., None].expand(-1, -1, hidden.shape[-1]))
            before = sees.gather(1, parents[..., None].expand(-1, -1, sees.shape[-1]))
            own = torch.eye(next_width, dtype=torch.bool, device=device).expand(num_texts, -1, -1)
            sees = torch.cat((before, own), dim=-1)
            width = next_width
            hidden = self._step(tokens.flatten(1).gather(1, best), hidden, level + 1, sees)
        return self._trees(found, limits)

    def _step(self, token_ids: Tensor, hidden: Tensor, depth: int, sees: Tensor) -> Tensor:
        """Run nodes of one depth, [texts, n, D] -> [texts, n, D].

        token_ids int64 [texts, n]: what they read; hidden: their parents' outputs; sees bool [texts, n, slots]: which
        nodes' keys they attend to, their own last.
        """
        draft, (num_texts, width) = self._draft, token_ids.shape
        slots = sees.shape[-1]
        embeds = draft.embed(token_ids.flatten())
        state = draft.outputs(hidden.flatten(0, 1))[0]
        # Row m-1 is the last verified one, and step k reads position m-1+k.
        positions = (self._num_rows - 1 + depth)[:, None].expand(-1, width).flatten()
        texts = torch.arange(num_texts, device=token_ids.device)[:, None]
        places = self._num_rows[:, None] + torch.arange(slots, device=token_ids.device)
        visible = self._seen((self._num_rows - 1)[:, None]).repeat(1, width, 1)
        visible.scatter_(2, places[:, None].expand(-1, width, -1), sees)
        for layer in range(draft.config.num_layers):
            query, key, value = draft.qkv(embeds, state, positions, layer=layer)
            self._keys[layer, texts, places[:, -width:]] = key.unflatten(0, (num_texts, width))
            self._values[layer, texts, places[:, -width:]] = value.unflatten(0, (num_texts, width))
            attended = self._attend(layer, query.unflatten(0, (num_texts, width)), visible)
            state = draft.finish(attended.flatten(0, 1), state, layer=layer)
        output: Tensor = state.unflatten(0, (num_texts, width))
        return output

    def _trees(self, found: list[tuple[Tensor, Tensor, Tensor, Tensor]], limits: Sequence[int]) -> list[DraftTree]:
        tokens, scores, nodes = (torch.cat([level[part] for level in found], dim=1).cpu().numpy() for part in (0, 1, 2))
        depths = np.repeat(np.arange(len(found)), [level[2].shape[1] for level in found])
        trees = []
        for text, limit in enumerate(limits):
            offered = Candidates(tokens[text], scores[text], nodes[text], depths)
            log_q = [row for level in found for row in level[3][text]] if self._shape.drawn else None
            trees.append(select(offered, self._shape, depth=limit, log_q=log_q))
        return trees

    def _seen(self, last: Tensor) -> Tensor:
        """Rows up to `last`, int64 [texts, r]: bool [texts, r, rows]."""
        return torch.arange(self._keys.shape[2], device=last.device) <= last[..., None]

    def _attend_pieces(self, layer: int, query: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Causal attention of each text's piece of rows, [n, H, Dh] -> [n, H, Dh]."""
        pieces = []
        for text, (piece, places) in enumerate(zip(query.split(counts), rows.split(counts), strict=True)):
            for part, place in zip(piece.split(_QUERY_ROWS), places.split(_QUERY_ROWS), strict=True):
                pieces.append(self._attend(layer, part[None], self._seen(place[None]), slice(text, text + 1))[0])
        return torch.cat(pieces)

    def _attend(self, layer: int, query: Tensor, visible: Tensor, texts: slice = slice(None)) -> Tensor:
        """query [texts, r, H, Dh], visible bool [texts, r, rows] -> [texts, r, H, Dh]. No row sees past the last one
        that any sees."""
        width = int(visible.any(0).any(0).nonzero()[-1]) + 1
        keys, values = self._keys[layer, texts, :width], self._values[layer, texts, :width]
        # Query head h shares the key/value head h // (H / G).
        grouped = query.unflatten(2, (keys.shape[2], -1))
        scores = torch.einsum("bqgrd,btgd->bgrqt", grouped, keys) * keys.shape[3] ** -0.5
        scores = scores.masked_fill(~visible[:, None, None, :, :width], float("-inf"))
        # Softmax in fp32 at least; fp64 stays.
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.to(wide).softmax(-1).to(values.dtype)
        return torch.einsum("bgrqt,btgd->bqgrd", weights, values).reshape(query.shape)


def _gumbel(log_q: Tensor, generators: Sequence[torch.Generator], draws: Sequence[bool]) -> Tensor:
    """Noise with which the largest are draws without replacement (Gumbel-top-k), from each text's own generator.

    draws: whether a text can use them. One near its end does not, and would otherwise draw more or fewer numbers with
    the texts beside it.
    """
    noise = torch.ones(log_q.shape, dtype=torch.float64)
    for text, (generator, drawn) in enumerate(zip(generators, draws, strict=True)):
        if drawn:
            noise[text].exponential_(generator=generator)
    return -noise.log().to(log_q.device, log_q.dtype)
