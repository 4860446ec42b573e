"""Draft trees: their shape, their choice, and that a draft on several texts drafts what it drafts on one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.trainer.acceptance.batch_drafter import BatchDrafter
from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.acceptance.tree import Candidates, DraftTree, TreeShape, select
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tests.trainer.drafts import VARIANTS, random_draft

#       0
#      / \\
#     1   2
#    / \\   \\
#   3   4   5
TREE = DraftTree([10, 11, 12, 13, 14], [0, 0, 1, 1, 2])


def test_by_hand() -> None:
    """Red when a node's ancestors, depth, height or children are another's."""
    assert TREE.children() == [[1, 2], [3, 4], [5], [], [], []]
    assert TREE.depths() == [0, 1, 1, 2, 2, 2]
    assert [TREE.height(node) for node in range(6)] == [2, 1, 1, 0, 0, 0]
    assert [np.flatnonzero(row).tolist() for row in TREE.ancestors()] == [
        [0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5],
    ]  # fmt: skip


def offered() -> Candidates:
    """The root's two children, then two of each of them."""
    return Candidates(
        tokens=np.array([[1, 2], [3, 4], [5, 6]]),
        scores=np.log(np.array([[0.6, 0.3], [0.5, 0.05], [0.2, 0.1]], dtype=np.float32)),
        nodes=np.array([-1, 0, 1]),
        depths=np.array([0, 1, 1]),
    )


def test_likeliest_nodes_are_kept() -> None:
    """Red when the choice is by level or by conditional probability, a depth limit is passed, or a parent is lost."""
    assert select(offered(), TreeShape(2, 2, 4), depth=2) == DraftTree([1, 2, 3, 5], [0, 0, 1, 2])
    assert select(offered(), TreeShape(2, 2, 4), depth=1) == DraftTree([1, 2], [0, 0])
    assert select(offered(), TreeShape(2, 2, 4), depth=0) == DraftTree([], [])


def test_drawn_children_stay_together() -> None:
    """Red when a drawn child is dropped for what it is: 5 tokens are the root's two and the likelier parent's two, even
    if a child of the other parent is likelier than one of these."""
    log_q = [torch.zeros(3) + i for i in range(3)]
    tree = select(offered(), TreeShape(2, 2, 5, drawn=True), depth=2, log_q=log_q)
    assert (tree.tokens, tree.parents) == ([1, 2, 3, 4], [0, 0, 1, 1])
    assert tree.log_q is not None
    assert {node: float(rows[0]) for node, rows in tree.log_q.items()} == {0: 0.0, 1: 1.0}


def texts(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randint(80, (n,), generator=generator), torch.rand(n, 96, generator=generator, dtype=torch.float64))
        for n in lengths
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_chains_are_the_drafters(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when several texts share rows, positions or masks, or what was drafted before leaks into the next round."""
    monkeypatch.setattr("tasks.trainer.acceptance.batch_drafter._QUERY_ROWS", 3)
    draft = random_draft(**VARIANTS[variant])
    rows = texts([9, 4, 6])
    together = BatchDrafter(draft, num_texts=3, capacity=12, shape=TreeShape.chain(5))
    alone = [Drafter(draft) for _ in rows]
    for piece in (slice(0, 2), slice(2, 4)):
        together.extend([ids[piece] for ids, _ in rows], [aux[piece] for _, aux in rows])
        for drafter, (ids, aux) in zip(alone, rows, strict=True):
            drafter.extend(ids[piece], aux[piece])
        trees = together.grow([5, 5, 3])
        assert [tree.tokens for tree in trees] == [d.propose(n) for d, n in zip(alone, (5, 5, 3), strict=True)]
        assert trees[0].parents == [0, 1, 2, 3, 4]
    together.keep([0, 2])
    together.extend([rows[0][0][4:], rows[2][0][4:]], [rows[0][1][4:], rows[2][1][4:]])
    for place in (0, 2):
        alone[place].extend(rows[place][0][4:], rows[place][1][4:])
    assert [tree.tokens for tree in together.grow([4, 4])] == [alone[0].propose(4), alone[2].propose(4)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_tree_is_the_best_of_all_branches(variant: str) -> None:
    """Red when a node reads another branch's keys, position, hidden state or token: the tree is held against an
    exhaustive search in which each branch is drafted alone."""
    draft = random_draft(**VARIANTS[variant])
    draft_ids = draft.draft_ids()
    ids, aux = texts([7])[0]
    drafter = Drafter(draft)
    drafter.extend(ids, aux)
    shape = TreeShape(top_k=3, depth=3, num_tokens=14)
    grown = BatchDrafter(draft, num_texts=2, capacity=9, shape=shape)
    grown.extend([ids[:2], ids], [aux[:2], aux])
    tree = grown.grow([3, 3])[1]

    def children(branch: tuple[int, ...]) -> list[tuple[int, float]]:
        log_q = drafter.forced_logits(torch.tensor(branch, dtype=torch.int64))[-1].log_softmax(-1)
        best = log_q.topk(3)
        return [(int(draft.target_ids[i]), float(v)) for v, i in zip(best.values, best.indices, strict=True)]

    scores: dict[tuple[int, ...], float] = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(3):
        found = {(*b, token): scores[b] + value for b in frontier for token, value in children(b)}
        scores |= found
        frontier = sorted(found, key=lambda branch: -found[branch])[:3]
    best = sorted((branch for branch in scores if branch), key=lambda branch: -scores[branch])[:14]
    branches: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        branches.append((*branches[parent], token))
    assert set(branches[1:]) == set(best)
    assert all(int(draft_ids[token]) >= 0 for token in tree.tokens)
    assert max(tree.depths()) == 3


def test_drawn_children_are_drawn_without_replacement(trained: Eagle3Draft) -> None:
    """Red when a child is drawn twice, the draws follow another temperature's distribution, or the order is another
    than that of the draws: the first of them must follow q. 2,000 draws, 5 standard errors."""
    generator = torch.Generator().manual_seed(5)
    shape = TreeShape(top_k=3, depth=1, num_tokens=3, drawn=True)
    drafter = BatchDrafter(trained, num_texts=1, capacity=8, shape=shape)
    ids = torch.randint(64, (6,), generator=generator)
    drafter.extend([ids], [torch.rand(6, 96, generator=generator)])
    trees = list(itertools.chain(*(drafter.grow([1], temperature=2.0, generators=[generator]) for _ in range(2000))))
    assert all(len(set(tree.tokens)) == 3 for tree in trees)
    log_q = (trees[0].log_q or {})[0].double()
    first = trained.draft_ids()[torch.tensor([tree.tokens[0] for tree in trees])]
    share = torch.bincount(first, minlength=len(log_q)).double() / 2000
    q = log_q.softmax(-1)
    assert bool(((share - q).abs() <= 5 * (q * (1 - q) / 2000).sqrt() + 1e-3).all())
    assert float(q.max()) < 0.9
