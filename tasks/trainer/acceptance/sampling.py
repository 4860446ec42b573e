"""Which token is emitted at a node of a draft tree, such that the text is distributed as the target's own.

Greedy: the target's argmax. The draft's part is only whether that token is among the node's children.

Sampling, children that are the draft's likeliest tokens: they carry no randomness, so the target draws its token, and
where it is one of the children the walk goes on there. That is rejection sampling with proposals of probability 1: in
turn, accept child x with probability p(x), else strike it from p.

Sampling, children x1, x2, ... drawn from the draft's q without replacement: with r = p,

    accept x1 with probability min(1, r(x1) / q(x1));  else  r <- norm(max(r - q, 0)),  q <- norm(q without x1)
    accept x2 with probability min(1, r(x2) / q(x2));  ...   none accepted: draw from r

q lives on the draft vocabulary: a token outside has q = 0, is never proposed and comes out of r alone. Probabilities
are float64: the differences of nearly equal ones decide.

Source: speculative sampling (Leviathan et al. 2023, Chen et al. 2023), for several candidates SpecInfer (Miao et al.
2024, arXiv:2305.09781), without replacement Jeon et al. 2024 and Yang et al. 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tasks.trainer.acceptance.tree import ROOT, DraftTree


class Choice(Protocol):
    """Decides at a node: its children's tokens -> the token emitted there (None: the text ends before it), and which
    child it is (None: none of them)."""

    def __call__(self, node: int, depth: int, candidates: Sequence[int]) -> tuple[int | None, int | None]: ...


@dataclass(frozen=True, slots=True)
class Walk:
    """The way through a tree. path: the accepted nodes; tokens: what is emitted, theirs and one more unless the text
    ends; num_proposed: the longest branch that holds the last node."""

    path: list[int]
    tokens: list[int]
    num_proposed: int


def walk(tree: DraftTree, choose: Choice) -> Walk:
    """Go from the root as long as the token chosen at a node is one of its children."""
    children = tree.children()
    path: list[int] = []
    tokens: list[int] = []
    node: int | None = ROOT
    last = ROOT
    while node is not None:
        last = node
        candidates = [tree.token(child) for child in children[node]]
        token, taken = choose(node, len(path), candidates)
        if token is None:
            break
        tokens.append(token)
        node = None if taken is None else children[node][taken]
        if node is not None:
            path.append(node)
    return Walk(path, tokens, len(path) + tree.height(last))


def among(token: int, candidates: Sequence[int]) -> tuple[int, int | None]:
    """A token that does not depend on the candidates, and which of them it is."""
    return token, candidates.index(token) if token in candidates else None


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature), logits [V] -> float64 [V] on the CPU."""
    return (logits.double().cpu() / temperature).softmax(-1)


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """A token of float64 [V]."""
    return int(torch.multinomial(probabilities, 1, generator=generator))


def accept(ratio: float, generator: torch.Generator) -> bool:
    """True with probability min(1, ratio)."""
    return float(torch.rand((), dtype=torch.float64, generator=generator)) < ratio


def without(probabilities: Tensor, proposal: Tensor) -> Tensor:
    """norm(max(p - q, 0)), float64 [V]: what a rejected proposal from q leaves of p."""
    rest = (probabilities - proposal).clamp_min_(0.0)
    total = rest.sum()
    # p = q to the last bit is never rejected but by rounding; then any draw from p is right.
    return rest / total if float(total) > 0.0 else probabilities


def favoured(probabilities: Tensor, log_q: Tensor, target_ids: Tensor) -> Tensor:
    """bool [V]: the tokens that the draft gives more than the target does.

    A verifier that accepts too much emits one of them too often, wherever it does (lossless.py).
    """
    proposal = torch.zeros_like(probabilities)
    proposal[target_ids] = log_q.double().cpu().softmax(-1)
    return proposal > probabilities


def choose_drawn(
    probabilities: Tensor, log_q: Tensor, target_ids: Tensor, candidates: Sequence[int], generator: torch.Generator
) -> tuple[int, int | None]:
    """The exact test of candidates drawn without replacement (see the module docstring).

    probabilities float64 [V], the target's; log_q [Vd], the distribution that the candidates, target ids, were drawn
    from; target_ids int64 [Vd].
    """
    remaining = log_q.double().cpu().clone()
    rest = probabilities
    for index, token in enumerate(candidates):
        proposal = torch.zeros_like(rest)
        # Normed from logarithms: what is left after a sure token would be 0 / 0 otherwise.
        proposal[target_ids] = remaining.softmax(-1)
        if accept(float(rest[token] / proposal[token]), generator):
            return token, index
        rest = without(rest, proposal)
        remaining[target_ids == token] = float("-inf")
    return draw(rest, generator), None
