"""The target verifying draft trees on several texts in one forward: a cache of unequal lengths and a mask.

    cache of a text      x[0] .. x[L-1] verified | the tree's nodes, the root x[L] first | free
    node i attends to    columns < L, and of the nodes itself and its ancestors; its position is L + depth
    after the walk       the keys on the way taken move to L, L+1, ..; the rest is overwritten by the next tree

Texts share one buffer of the longest's size, so a batch costs memory as if all were the longest; nothing is copied as
texts grow. Prompts are read one at a time, unpadded, by the target's ordinary causal attention: their states are those
of capture, and no mask of a long prompt's square is built. Verification is exact up to rounding: sums over a few rows
more or less come out otherwise in the last bits, as they do in any server that batches.

Layers with a window get one in their mask. Attention of another kind (chunks, recurrent layers) is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from tasks.trainer.acceptance.tree import DraftTree
from tasks.trainer.errors import InputError
from tasks.trainer.target import Target

_WAY_OUT = (
    "evaluate.batch_size=1 with evaluate.drafting=chain and evaluate.temperature=0 needs no mask of its own: use these"
)
_PROBE_TOKENS = 12
# Of a row's norm. Another mask or position gives 0.3 and more, the rounding of deep bfloat16 models 0.05.
_PROBE_TOLERANCE = 0.1


class _RaggedCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of texts of unequal lengths. New rows go behind each text's own last one."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self.places = torch.zeros(0, 0, dtype=torch.int64)

    def fill(self, text: int, num_texts: int, prompt: DynamicCache) -> None:
        """Take a prompt's keys and values, [1, G, P, Dh] a layer."""
        for number, layer in enumerate(prompt.layers):
            keys, values = layer.keys, layer.values
            assert keys is not None
            assert values is not None
            if self._buffers[number] is None:
                shapes = ((num_texts, part.shape[1], self._capacity, part.shape[3]) for part in (keys, values))
                self._buffers[number] = keys.new_zeros(next(shapes)), values.new_zeros(next(shapes))
            for buffer, part in zip(self._layer(number), (keys, values), strict=True):
                buffer[text, :, : part.shape[2]] = part[0]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows [B, G, n, Dh] of one forward to `places` and return all columns up to the last one used."""
        keys, values = self._layer(layer_idx)
        texts = torch.arange(keys.shape[0], device=keys.device)[:, None]
        keys[texts, :, self.places] = key_states.transpose(1, 2)
        values[texts, :, self.places] = value_states.transpose(1, 2)
        width = int(self.places.max()) + 1
        return keys[:, :, :width], values[:, :, :width]

    def move(self, texts: Tensor, sources: Tensor, ends: Tensor) -> None:
        """Copy rows from columns to columns, int64 [n] each."""
        for number in range(len(self._buffers)):
            for buffer in self._layer(number):
                buffer[texts, :, ends] = buffer[texts, :, sources]

    def keep(self, texts: Tensor) -> None:
        """Drop the other texts."""
        for number in range(len(self._buffers)):
            keys, values = self._layer(number)
            self._buffers[number] = keys[texts], values[texts]

    def _layer(self, number: int) -> tuple[Tensor, Tensor]:
        buffers = self._buffers[number]
        assert buffers is not None, f"layer {number} keeps no keys and values"
        return buffers


class TargetRows:
    """The target on several texts."""

    def __init__(self, target: Target, *, num_texts: int, capacity: int) -> None:
        """capacity: columns of the longest text at its end, a tree's nodes included."""
        self._target = target
        self._num_texts = num_texts
        self._cache = _RaggedCache(target.num_layers, capacity)
        self._lengths = torch.zeros(num_texts, dtype=torch.int64, device=target.device)

    def read(self, text: int, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """The forward over a text's prompt, int64 [P]. Returns logits [V] of its last token, aux_hidden [P, 3D]."""
        cache = DynamicCache()
        logits, aux_hidden = self._target.prefill(prompt[None], cache)
        self._cache.fill(text, self._num_texts, cache)
        self._lengths[text] = len(prompt)
        return logits[-1], aux_hidden

    @torch.no_grad()
    def verify(self, roots: Sequence[int], trees: Sequence[DraftTree]) -> tuple[Tensor, Tensor]:
        """One forward over all nodes. roots: the token of each root. Returns logits [B, n, V], aux_hidden [B, n, 3D],
        n nodes of the largest tree: rows past a tree's own are of nobody's use."""
        device, lengths = self._lengths.device, self._lengths
        size = max(tree.num_nodes for tree in trees)
        token_ids = torch.zeros(len(trees), size, dtype=torch.int64)
        depths = torch.zeros(len(trees), size, dtype=torch.int64)
        sees = np.broadcast_to(np.eye(size, dtype=np.bool_), (len(trees), size, size)).copy()
        for text, (root, tree) in enumerate(zip(roots, trees, strict=True)):
            nodes = tree.num_nodes
            token_ids[text, :nodes] = torch.tensor([root, *tree.tokens])
            depths[text, :nodes] = torch.tensor(tree.depths())
            sees[text, :nodes, :nodes] = tree.ancestors()
        positions = lengths[:, None] + depths.to(device)
        places = lengths[:, None] + torch.arange(size, device=device)
        columns = torch.arange(int(places.max()) + 1, device=device)
        visible = (columns < lengths[:, None])[:, None].repeat(1, size, 1)
        visible.scatter_(2, places[:, None].expand(-1, size, -1), torch.from_numpy(sees).to(device))
        key_positions = columns.repeat(len(trees), 1).scatter_(1, places, positions)
        self._cache.places = places
        return self._target.forward_rows(
            token_ids,
            self._cache,
            position_ids=positions,
            attention_mask=_masks(self._target, visible, positions[..., None] - key_positions[:, None]),
        )

    def accept(self, rows: Sequence[Sequence[int]]) -> None:
        """Keep these nodes of each text's tree, the root first and ascending, as its next verified columns."""
        texts, sources, ends = [], [], []
        for text, nodes in enumerate(rows):
            for end, node in enumerate(nodes):
                if node != end:
                    texts.append(text)
                    sources.append(node)
                    ends.append(end)
        if texts:
            index = torch.tensor(texts, device=self._lengths.device)
            first = self._lengths[index]
            self._cache.move(index, first + torch.tensor(sources).to(first), first + torch.tensor(ends).to(first))
        self._lengths = self._lengths + torch.tensor([len(nodes) for nodes in rows], device=self._lengths.device)

    def keep(self, texts: Sequence[int]) -> None:
        """Go on with these texts alone, by their present places."""
        index = torch.tensor(list(texts), device=self._lengths.device)
        self._cache.keep(index)
        self._lengths = self._lengths[index]


def _masks(target: Target, visible: Tensor, distance: Tensor) -> Tensor | dict[str, Tensor]:
    """What is added to the scores, [B, 1, n, W]: for all layers, or by their type. visible bool, distance int64 [B, n,
    W] of a row's position to its key's. Raises InputError for a type of attention that no mask describes."""

    def added(allowed: Tensor) -> Tensor:
        mask = torch.zeros(allowed.shape, dtype=target.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(target.dtype).min)[:, None]

    types = set(getattr(target.config, "layer_types", None) or ())
    window = getattr(target.config, "sliding_window", None)
    if unknown := types - {"full_attention", "sliding_attention"}:
        raise InputError(f"target {target.name!r} has layers of {', '.join(sorted(unknown))}; {_WAY_OUT}")
    if "sliding_attention" not in types and (types or not getattr(target.config, "use_sliding_window", True)):
        window = None
    if window is None:
        return added(visible)
    near = added(visible & (distance < window))
    return {"full_attention": added(visible), "sliding_attention": near} if types else near


def check_rows(target: Target) -> None:
    """Try a small tree on this target before hours are spent: the logits at a branch must be those of the branch alone.
    Raises InputError when the model does something else with mask, positions or cache."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(target.vocab_size, (_PROBE_TOKENS,), generator=generator)
    rows = TargetRows(target, num_texts=1, capacity=2 * _PROBE_TOKENS)
    prompt, root, tokens = text[:-5], int(text[-5]), text[-4:].tolist()
    try:
        rows.read(0, prompt)
        # root -> 1 -> 3, root -> 2 -> 4
        logits, _ = rows.verify([root], [DraftTree(tokens, [0, 0, 1, 2])])
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise InputError(f"target {target.name!r} takes no tree in one forward ({reason}); {_WAY_OUT}") from error
    for first, second in ((0, 2), (1, 3)):
        branch = torch.cat((prompt, torch.tensor([root, tokens[first], tokens[second]])))
        alone = target.prefill(branch[None], DynamicCache())[0][-1].float()
        change = float((logits[0, second + 1].float() - alone).norm() / alone.norm())
        if not change <= _PROBE_TOLERANCE:
            raise InputError(
                f"target {target.name!r}: logits in a tree differ by {change:.0%} from those of the branch alone; "
                f"{_WAY_OUT}"
            )
