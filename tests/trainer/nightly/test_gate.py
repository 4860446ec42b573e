"""The gate on figures that are made up: how often it errs, and what it says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from tasks.trainer.acceptance.statistics import PromptCounts
from tasks.trainer.config_nightly import Nightly
from tasks.trainer.nightly.gate import Difference, JudgedSet, compare, decide

SIGNIFICANCE = 0.05


def prompt_counts(tokens: npt.NDArray[np.int64], forwards: npt.NDArray[np.float64]) -> list[PromptCounts]:
    return [PromptCounts(int(t), float(f), (), ()) for t, f in zip(tokens, forwards, strict=True)]


def nights(num_prompts: int, num_nights: int, *, gain: float, seed: int) -> list[list[list[PromptCounts]]]:
    """Counts of two drafts on the same answers. Answers' lengths are log-normal, prompts differ far more than drafts
    do, and each draft has luck of its own with each; the first needs `gain` fewer forwards (a share) than the other."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(num_nights):
        tokens = np.clip(np.exp(random.normal(4, 1, num_prompts)).astype(np.int64), 2, 400)
        ease = random.beta(2, 2, num_prompts)
        sides = []
        for share in (1.0 - gain, 1.0):
            accepted = np.clip(ease + random.normal(0, 0.1, num_prompts), 0.02, 0.95)
            per_round = (1 - accepted**5) / (1 - accepted)
            luck = 1 + random.normal(0, 0.3, num_prompts) / np.sqrt(tokens)
            sides.append(prompt_counts(tokens, np.maximum(1.0, share * tokens / per_round * luck)))
        found.append(sides)
    return found


def judged(sides: Sequence[Sequence[PromptCounts]], *, num_lossy: int = 0) -> JudgedSet:
    return JudgedSet({"draft": sides[0], "champion": sides[1]}, len(sides[0]), num_lossy)


def promotions(num_prompts: int, num_nights: int, *, gain: float, recent_gain: float | None = None) -> float:
    """Share of nights that promote."""
    recent_gain = gain if recent_gain is None else recent_gain
    fixed = nights(num_prompts, num_nights, gain=gain, seed=1)
    recent = nights(num_prompts, num_nights, gain=recent_gain, seed=2)
    settings = Nightly(significance=SIGNIFICANCE, tolerance=0.02)
    return float(
        np.mean(
            [
                decide({"fixed": judged(f), "recent": judged(r)}, settings, samples=400, seed=0).promote
                for f, r in zip(fixed, recent, strict=True)
            ]
        )
    )


@pytest.mark.parametrize("num_prompts", [8, 24, 64])
def test_better_by_chance_is_as_rare_as_the_significance_says(num_prompts: int) -> None:
    """Red when the gate takes any difference for better, or its bound is too narrow: with a percentile bound alone,
    9% of nights with 8 prompts pass. Drafts of one quality, so that every promotion is false; 500 nights at 5% have a
    standard error of 1 point, so 8% is 3 of them off, and so is 2%: below it, better drafts are turned down."""
    # The fixed set lets everything through.
    good = [prompt_counts(np.full(8, 20), np.full(8, forwards)) for forwards in (5.0, 10.0)]
    settings = Nightly(significance=SIGNIFICANCE)
    passed = sum(
        decide({"fixed": judged(good), "recent": judged(sides)}, settings, samples=400, seed=0).promote
        for sides in nights(num_prompts, 500, gain=0.0, seed=num_prompts)
    )
    assert 0.02 <= passed / 500 <= 0.08


def test_a_worse_draft_hardly_ever_passes_and_a_better_one_does() -> None:
    """Red when the gate has no power, or the fixed set has no say: a draft that gained 20% on recent data and lost 20%
    on the fixed set must stay out."""
    assert promotions(128, 60, gain=0.2) >= 0.9
    assert promotions(128, 60, gain=-0.05) == 0.0
    assert promotions(128, 60, gain=-0.25, recent_gain=0.2) == 0.0


def test_two_drafts_that_are_one_are_not_worse_and_not_better() -> None:
    """Red when equality promotes, or makes `not worse` fail."""
    ((ours, _),) = nights(40, 1, gain=0.0, seed=0)
    sets = {"fixed": judged([ours, ours]), "recent": judged([ours, ours])}
    for tolerance in (0.0, 0.02):
        decision = decide(sets, Nightly(tolerance=tolerance), samples=200, seed=0)
        assert not decision.promote
        assert decision.differences["fixed"].low == 0.0
        assert decision.differences["recent"].chance == 1.0
        assert decision.reasons[0].startswith("recent held-out data: tau")
        assert "not worse" in decision.reasons[2]


def test_one_lossy_answer_keeps_a_better_draft_out() -> None:
    """Red when losslessness is not asked of both sets."""
    ((ours, theirs),) = nights(64, 1, gain=0.3, seed=0)
    good = {"fixed": judged([ours, theirs]), "recent": judged([ours, theirs])}
    assert decide(good, Nightly(), samples=400, seed=0).promote
    for name in good:
        decision = decide(good | {name: judged([ours, theirs], num_lossy=1)}, Nightly(), samples=400, seed=0)
        assert not decision.promote
        assert decision.reasons[0] == "not lossless: 1 of 128 answers are not what the target alone says"


def test_a_first_draft_must_beat_the_floor_it_is_given() -> None:
    """Red when a first night compares with nothing, or `floor` is not heeded."""
    ((draft, ngram),) = nights(64, 1, gain=-0.3, seed=0)
    untrained = [PromptCounts(c.num_tokens, float(c.num_tokens), (), ()) for c in draft]
    sets = {
        name: JudgedSet({"draft": draft, "ngram": ngram, "untrained": untrained}, 64, 0) for name in ("fixed", "recent")
    }
    above_all = decide(sets, Nightly(floor="ngram"), samples=400, seed=0)
    assert not above_all.promote
    assert "n-gram lookup" in above_all.reasons[0]
    above_untrained = decide(sets, Nightly(floor="untrained"), samples=400, seed=0)
    assert above_untrained.promote
    assert list(above_untrained.differences) == ["untrained"]
    assert above_untrained.differences["untrained"].num_prompts == 128


def test_nothing_to_count_is_no_promotion() -> None:
    """Red when a set whose answers all loop from the start counts as passed, or divides by zero."""
    ((ours, theirs),) = nights(64, 1, gain=0.3, seed=0)
    sets = {"fixed": judged([ours, theirs]), "recent": JudgedSet({"draft": [], "champion": []}, 64, 0)}
    decision = decide(sets, Nightly(), samples=200, seed=0)
    assert not decision.promote
    assert "only 0 prompts" in decision.reasons[0]


def test_the_figures_are_those_of_the_counts() -> None:
    """Red when tau is a mean of prompts' ratios instead of a ratio of sums, or sides are mixed up."""
    ours = [PromptCounts(30, 10.0, (), ()), PromptCounts(10, 10.0, (), ())]
    theirs = [PromptCounts(30, 15.0, (), ()), PromptCounts(10, 10.0, (), ())]
    found = compare(ours, theirs, significance=SIGNIFICANCE, samples=300, seed=0)
    assert found == Difference(2.0, 1.6, found.low, found.chance, 2)
    # Of the four ways to change places two leave the first prompt, which alone differs, where it is.
    assert found.chance == pytest.approx(0.5, abs=0.1)
    assert 0.0 <= found.low < 0.4
