"""The rejection rules give the target's distribution, and rules that are broken on purpose are caught.

At one node the rule is tested against the exact answer, a whole decode by chi-square over the first tokens of many
answers of a tiny model. A right rule fails at 1% once in a hundred seeds; these seeds are fixed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tasks.trainer.acceptance import sampling
from tasks.trainer.acceptance import speculate as speculate_module
from tasks.trainer.acceptance.lossless import SampledSums, sampled_sums
from tasks.trainer.acceptance.speculate import Rules, speculate
from tasks.trainer.acceptance.tree import TreeShape
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.target import Target

SEED = int(os.environ.get("SOAK_SEED", "0"))
TEMPERATURE = 0.8
CHAIN, TREE = TreeShape.chain(2, drawn=True), TreeShape(3, 2, 12, drawn=True)
SHAPES = {
    "chain, drawn": CHAIN,
    "tree, drawn": TREE,
    "chain, top": TreeShape.chain(2),
    "tree, top": TreeShape(3, 2, 12),
}


def exact_distribution(p: Tensor, log_q: Tensor, target_ids: Tensor, num_candidates: int) -> Tensor:
    """What choose_drawn emits, by summing over every sequence of candidates with its probability, and over accept or
    not: `accept` is replaced by both of its answers in turn."""
    emitted = torch.zeros_like(p)

    def go(taken: list[int], chance: float) -> None:
        if len(taken) < num_candidates:
            left = log_q.clone()
            left[[int((target_ids == token).nonzero()) for token in taken]] = float("-inf")
            for index, q in enumerate(left.softmax(-1).tolist()):
                if q > 0.0:
                    go([*taken, int(target_ids[index])], chance * q)
            return
        ratios: list[float] = []
        rest: list[Tensor] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "accept", lambda ratio, _: bool(ratios.append(min(1.0, ratio))))
            patch.setattr(sampling, "draw", lambda probabilities, _: rest.append(probabilities) or 0)
            sampling.choose_drawn(p, log_q, target_ids, taken, torch.Generator())
        for token, ratio in zip(taken, ratios, strict=True):
            emitted[token] += chance * ratio
            chance *= 1 - ratio
        emitted.add_(chance * rest[0])

    go([], 1.0)
    return emitted


@pytest.mark.parametrize("num_candidates", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_one_node_exactly(seed: int, num_candidates: int) -> None:
    """Red when the rule is biased in any way: a residual not normed, q not renormed after a draw, q spread over tokens
    outside the draft vocabulary. No randomness: all of 6 x 4 x .. outcomes are summed."""
    generator = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(6, generator=generator, dtype=torch.float64)).softmax(-1)
    log_q = (2 * torch.randn(4, generator=generator, dtype=torch.float64)).log_softmax(-1)
    target_ids = torch.tensor([0, 2, 3, 5])
    emitted = exact_distribution(p, log_q, target_ids, num_candidates)
    torch.testing.assert_close(emitted, p, rtol=0, atol=1e-12)


def test_equal_and_sure_distributions() -> None:
    """Red when p = q leaves nothing to draw from, or a sure draft divides by zero for its second candidate."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.equal(sampling.without(p, p), p)
    log_q = torch.tensor([0.0, -1000.0])
    sure = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert sampling.choose_drawn(sure, log_q, torch.arange(2), [0, 1], generator) == (1, 1)


def draws(target: Target, draft: Eagle3Draft, shape: TreeShape, num_draws: int) -> Tensor:
    """Many sampled answers to one prompt, int64 [num_draws, 3]."""
    prompt = torch.tensor([3, 1, 4, 1, 5])
    answers = []
    for start in range(0, num_draws, 500):
        seeds = [10_000_000 * SEED + start + offset for offset in range(min(500, num_draws - start))]
        decoded = speculate(target, draft, [prompt] * len(seeds), Rules(shape, 3, TEMPERATURE), seeds=seeds)
        answers += [one.answer for one in decoded]
    return torch.tensor(answers)


def p_value(target: Target, answers: Tensor) -> float:
    """Chi-square of the answers, of all 64^3 that there are; those of fewer than five expected are put together."""
    prompt = torch.tensor([3, 1, 4, 1, 5])
    pairs = torch.cartesian_prod(torch.arange(64), torch.arange(64))
    with torch.no_grad():
        logits = target.model(input_ids=torch.cat((prompt.expand(len(pairs), -1), pairs), dim=1)).logits[:, -3:]
    p = (logits.double() / TEMPERATURE).softmax(-1).view(64, 64, 3, 64)
    exact = (p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]).flatten()
    seen = torch.bincount(answers[:, 0] * 64**2 + answers[:, 1] * 64 + answers[:, 2], minlength=64**3).double()
    large = exact * len(answers) >= 5
    expected = torch.cat((exact[large], exact[~large].sum()[None])) * len(answers)
    counted = torch.cat((seen[large], seen[~large].sum()[None]))
    assert len(expected) > 15
    return float(stats.chi2.sf(float(((counted - expected) ** 2 / expected).sum()), len(expected) - 1))


def broken_accept(ratio: float, generator: torch.Generator) -> bool:
    """Accepts whatever is proposed."""
    return True


def broken_rest(probabilities: Tensor, proposal: Tensor) -> Tensor:
    """A rejected proposal leaves p as it was."""
    return probabilities


def broken_among(token: int, candidates: Any) -> tuple[int, int | None]:
    """Takes the first candidate wherever there is one in four of the draws."""
    if candidates and token % 4 == 0:
        return candidates[0], 0
    return sampling.among(token, candidates)


def _break(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    module: Any = speculate_module if what == "among" else sampling
    broken: dict[str, Callable[..., Any]] = {"accept": broken_accept, "without": broken_rest, "among": broken_among}
    monkeypatch.setattr(module, what, broken[what])


@pytest.mark.parametrize("shape", ["chain, drawn", "tree, drawn", "tree, top"])
def test_few_draws(shape: str, target: Target, trained: Eagle3Draft) -> None:
    """Red when the emitted tokens are not the target's: a small draw of the soak below."""
    assert p_value(target, draws(target, trained, SHAPES[shape], 1000)) > 0.01


@pytest.mark.parametrize(("shape", "what"), [("chain, drawn", "accept"), ("tree, top", "among")])
def test_few_draws_catch_a_broken_rule(
    shape: str, what: str, target: Target, trained: Eagle3Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the test above could not fail."""
    _break(monkeypatch, what)
    assert p_value(target, draws(target, trained, SHAPES[shape], 1000)) < 0.01


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES)
def test_many_draws(shape: str, target: Target, trained: Eagle3Draft) -> None:
    """Red when a small bias is left: 20,000 answers."""
    assert p_value(target, draws(target, trained, SHAPES[shape], 20_000)) > 0.01


@pytest.mark.soak
@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ("chain, drawn", "accept"),
        ("chain, drawn", "without"),
        ("tree, drawn", "accept"),
        ("tree, drawn", "without"),
        ("chain, top", "among"),
        ("tree, top", "among"),
    ],
)
def test_many_draws_catch_a_broken_rule(
    shape: str, what: str, target: Target, trained: Eagle3Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a broken rule passes 20,000 draws."""
    _break(monkeypatch, what)
    assert p_value(target, draws(target, trained, SHAPES[shape], 20_000)) < 0.01


def _sums(target: Target, draft: Eagle3Draft, prompts: list[Tensor], shape: TreeShape, copies: int) -> SampledSums:
    many = prompts * copies
    decoded = speculate(target, draft, many, Rules(shape, 24, TEMPERATURE), seeds=range(len(many)))
    return sum((sampled_sums(target, one, temperature=TEMPERATURE) for one in decoded), SampledSums())


@pytest.mark.parametrize("shape", ["chain, drawn", "tree, top"])
def test_statistical_check(
    shape: str, target: Target, trained: Eagle3Draft, prompts: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the check of a run calls right samples lossy, or a verifier that accepts too much lossless."""
    assert _sums(target, trained, prompts, SHAPES[shape], 12).lossless
    _break(monkeypatch, "accept" if "drawn" in shape else "among")
    broken = _sums(target, trained, prompts, SHAPES[shape], 12)
    assert not broken.lossless
    assert broken.p_values()[1] < 1e-4


def test_sums_are_standard(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when a variance is wrong: 24 sums over their deviations must have a mean square near 1 (chi-square at
    0.1%)."""
    scores = []
    for one in prompts[1:]:
        for start in range(4):
            decoded = speculate(
                target, trained, [one] * 8, Rules(CHAIN, 16, TEMPERATURE), seeds=range(100 * start, 100 * start + 8)
            )
            sums = sum((sampled_sums(target, answer, temperature=TEMPERATURE) for answer in decoded), SampledSums())
            scores += [sums.likelihood / sums.likelihood_variance**0.5, sums.favoured / sums.favoured_variance**0.5]
    total = float(np.square(scores).sum())
    assert stats.chi2.ppf(0.0005, len(scores)) < total < stats.chi2.ppf(0.9995, len(scores))
