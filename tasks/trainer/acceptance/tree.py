"""Draft trees: several continuations of a text that the target verifies in one forward.

    node 0        the last token of the text, x[m]: the root
    node i >= 1   a drafted token; its parent's number is lower, so that a chain is the tree in which parents[i] = i - 1
    depth         of the root 0; a node of depth d would be x[m + d]

The tree is EAGLE-2's: from the root on, each level's `top_k` likeliest nodes, by the product of the draft's
probabilities on the way to them, get `top_k` children each, and of all nodes together the `num_tokens` likeliest are
kept. A parent is never less likely than its child, so what is kept is a tree. One width for every position wastes
tokens where the draft is sure; this one grows deep there, and wide where it is not.

Children that were *drawn* from the draft's distribution must not be dropped for what they turned out to be, or the test
that makes them exact (sampling.py) would no longer know their distribution. So drawn children stay or go together, by
the likelihood of their parent, which was known before they were drawn. No decision about a node's children then
depends on them: a node that ranks above another one is never a descendant of it.

Source: EAGLE-2 (Li et al. 2024, arXiv:2406.16858), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

ROOT = 0


@dataclass(frozen=True, slots=True)
class TreeShape:
    """top_k: children of a node, and nodes of a level that get some; depth: the longest branch; num_tokens: nodes but
    the root at most; drawn: whether children are drawn from the draft's distribution or are its likeliest tokens."""

    top_k: int
    depth: int
    num_tokens: int
    drawn: bool = False

    @classmethod
    def chain(cls, num_tokens: int, *, drawn: bool = False) -> TreeShape:
        """One child of each node."""
        return cls(1, num_tokens, num_tokens, drawn)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """tokens, parents: of node i at [i - 1]. log_q: of the nodes whose children were drawn, the draft's tempered
    log-probabilities, float [Vd]; None where children are the likeliest tokens, in that order."""

    tokens: list[int]
    parents: list[int]
    log_q: dict[int, Tensor] | None = None

    @property
    def num_nodes(self) -> int:
        """The root included."""
        return len(self.tokens) + 1

    def token(self, node: int) -> int:
        """Of a node but the root."""
        return self.tokens[node - 1]

    def children(self) -> list[list[int]]:
        """Of each node, in the order in which they were drafted."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node, parent in enumerate(self.parents, start=1):
            found[parent].append(node)
        return found

    def depths(self) -> list[int]:
        """Of each node."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def height(self, node: int) -> int:
        """Tokens of the longest branch below a node."""
        heights = [0] * self.num_nodes
        for child in range(self.num_nodes - 1, 0, -1):
            parent = self.parents[child - 1]
            heights[parent] = max(heights[parent], heights[child] + 1)
        return heights[node]

    def ancestors(self) -> npt.NDArray[np.bool_]:
        """[n, n] of the n nodes: row i is true at i and at its ancestors, the root included: what it attends to."""
        seen = np.eye(self.num_nodes, dtype=np.bool_)
        for node, parent in enumerate(self.parents, start=1):
            seen[node] |= seen[parent]
        return seen


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a draft offered for one text: G expanded nodes, `top_k` children each. Candidate g * top_k + j is child j of
    expanded node g; expanded node 0 is the root, and parents come before their children.

    tokens int [G, top_k]; scores float [G, top_k]: log-probability of the way from the root; nodes int [G]: the
    candidate that an expanded node is, -1 for the root; depths int [G]: of the expanded nodes."""

    tokens: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    nodes: npt.NDArray[np.int64]
    depths: npt.NDArray[np.int64]


def select(candidates: Candidates, shape: TreeShape, *, depth: int, log_q: list[Tensor] | None = None) -> DraftTree:
    """The tree of the likeliest candidates, none deeper than `depth`. log_q: of each expanded node, when drawn."""
    top_k = candidates.tokens.shape[1]
    allowed = candidates.depths < depth
    if shape.drawn:
        own = np.where(candidates.nodes < 0, 0.0, candidates.scores.reshape(-1)[candidates.nodes])
        order = np.argsort(-own, kind="stable")
        groups = order[allowed[order]][: max(shape.num_tokens // top_k, 1)]
        kept = (np.sort(groups)[:, None] * top_k + np.arange(top_k)).reshape(-1)
    else:
        # Of equals the earlier one, which is the parent's side.
        order = np.argsort(-candidates.scores.reshape(-1), kind="stable")
        kept = np.sort(order[np.repeat(allowed, top_k)[order]][: shape.num_tokens])
    number = {int(candidate): node for node, candidate in enumerate(kept, start=1)}
    number[-1] = ROOT
    tokens = candidates.tokens.reshape(-1)[kept].tolist()
    parents = [number[int(candidates.nodes[candidate // top_k])] for candidate in kept]
    if log_q is None:
        return DraftTree(tokens, parents)
    expanded = {number[int(node)]: log_q[group] for group, node in enumerate(candidates.nodes) if int(node) in number}
    return DraftTree(tokens, parents, {node: expanded[node] for node in set(parents)})
