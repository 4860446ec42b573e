"""tau and its interval on rounds made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.trainer.acceptance.statistics import (
    PromptCounts,
    Round,
    acceptance_per_depth,
    bootstrap_tau,
    count_by_context,
    count_rounds,
    emitted_histogram,
    loop_start,
    tau,
)


def test_loop_start() -> None:
    """Red when the cut is the first occurrence, the repeat's end, or another length than 8 is looked for."""
    eight = list(range(8))
    assert loop_start([*eight, *eight]) == 8
    assert loop_start([*eight, 99, *eight, 5]) == 9
    assert loop_start([*eight, *eight[:7], 99]) == 16  # only 7 repeat
    assert loop_start([50, *[7] * 20]) == 2  # overlapping: the 8-gram that starts at 1 starts again at 2
    assert loop_start([1, 2, 3]) == 3
    assert loop_start([]) == 0


ROUNDS = [Round(4, 2, 3), Round(4, 4, 5), Round(4, 0, 1), Round(2, 1, 2)]  # answer of 1 + 11 tokens


def test_counts_without_a_cut() -> None:
    """Red when the prompt's own token or forward is counted, or a depth is tried that nothing led to."""
    counts = count_rounds(ROUNDS, cut=12, num_draft_tokens=4)
    assert counts == PromptCounts(11, 4.0, tried=(4, 3, 2, 1), accepted=(3, 2, 1, 1))
    assert tau([counts]) == 11 / 4


def test_round_that_crosses_the_cut() -> None:
    """Red when a crossing round counts whole, not at all, or its forward is not shared evenly."""
    # Tokens 1..5 lie before the cut: round 0 emits 1..3 whole, round 1 emits 4..8, two of five before the cut.
    counts = count_rounds(ROUNDS, cut=6, num_draft_tokens=4)
    assert counts == PromptCounts(5, 1 + 2 / 5, tried=(2, 2, 1, 0), accepted=(2, 2, 0, 0))
    assert count_rounds(ROUNDS, cut=1, num_draft_tokens=4) == PromptCounts(0, 0.0, (0,) * 4, (0,) * 4)
    assert count_rounds(ROUNDS, cut=4, num_draft_tokens=4).num_forwards == 1.0


def test_round_that_ends_the_answer() -> None:
    """Red when proposals past the end of the turn count as tried, or the round as less than a forward."""
    # The second proposal was the end of the turn: no bonus token, and the other two were neither right nor wrong.
    counts = count_rounds([Round(4, 2, 2)], cut=3, num_draft_tokens=4)
    assert counts == PromptCounts(2, 1.0, tried=(1, 1, 0, 0), accepted=(1, 1, 0, 0))


def test_contexts_divide_the_rounds() -> None:
    """Red when a round counts in another range than that of its context, in two, or in none."""
    # Rounds begin at answer tokens 1, 4, 9, 10; with a prompt of 252 tokens at contexts 253, 256, 261, 262.
    found = count_by_context(ROUNDS, cut=12, num_draft_tokens=4, prompt_length=252)
    assert found == {
        0: PromptCounts(3, 1.0, tried=(1, 1, 1, 0), accepted=(1, 1, 0, 0)),
        256: PromptCounts(8, 3.0, tried=(3, 2, 1, 1), accepted=(2, 1, 1, 1)),
    }
    assert found[0] + found[256] == count_rounds(ROUNDS, cut=12, num_draft_tokens=4)
    assert list(count_by_context(ROUNDS, cut=12, num_draft_tokens=4, prompt_length=1020)) == [512, 1024]


def test_emitted_histogram() -> None:
    """Red when a round is counted by what it accepted, or one that crosses the cut is counted."""
    assert emitted_histogram(ROUNDS, cut=12, num_draft_tokens=4) == [1, 1, 1, 0, 1]
    assert emitted_histogram(ROUNDS, cut=8, num_draft_tokens=4) == [0, 0, 1, 0, 0]


def test_ratio_of_sums() -> None:
    """Red when tau is a mean of the prompts' tau: a long answer must weigh more."""
    counts = [PromptCounts(10, 10.0, (10,), (0,)), PromptCounts(300, 100.0, (100,), (50,))]
    assert tau(counts) == 310 / 110
    assert acceptance_per_depth(counts) == [50 / 110]
    assert acceptance_per_depth([PromptCounts(1, 1.0, (1, 0), (0, 0))]) == [0.0, 0.0]


def made_up(seed: int, num_prompts: int) -> tuple[list[PromptCounts], list[PromptCounts]]:
    """Two proposers, prompts that differ far more than they do: tau about 2 against 1.8."""
    draw = np.random.default_rng(seed)
    ours, theirs = [], []
    for _ in range(num_prompts):
        forwards = float(draw.uniform(20, 90))
        ours.append(PromptCounts(100, forwards, (), ()))
        theirs.append(PromptCounts(100, forwards * float(draw.uniform(1.05, 1.15)), (), ()))
    return ours, theirs


def test_bootstrap_is_paired() -> None:
    """Red when the two proposers are resampled apart: the interval of the difference would then contain 0."""
    ours, theirs = made_up(0, 40)
    low, high = bootstrap_tau(ours, theirs, samples=2000, seed=0)
    assert 0 < low < tau(ours) - tau(theirs) < high
    own_low, own_high = bootstrap_tau(ours, samples=2000, seed=0)
    assert own_low < tau(ours) < own_high
    assert high - low < (own_high - own_low) / 2
    assert bootstrap_tau(ours, ours, samples=200, seed=0) == (0.0, 0.0)


def test_bootstrap_is_seeded() -> None:
    """Red when the interval depends on anything but its seed."""
    ours, theirs = made_up(0, 10)
    assert bootstrap_tau(ours, theirs, samples=300, seed=1) == bootstrap_tau(ours, theirs, samples=300, seed=1)
    assert bootstrap_tau(ours, theirs, samples=300, seed=1) != bootstrap_tau(ours, theirs, samples=300, seed=2)


def test_bootstrap_covers() -> None:
    """Red when the interval is not near 95%: over 200 draws of prompts the true tau lies inside in 88% at least
    (percentile intervals of 40 prompts fall a little short; 2 standard errors of 200 trials are 3 points)."""
    # E[tokens] / E[forwards] of made_up's prompts.
    truth = 100 / 55
    inside = 0
    for seed in range(200):
        low, high = bootstrap_tau(made_up(seed, 40)[0], samples=400, seed=seed)
        inside += low <= truth <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_bootstrap_refuses_empty_answers() -> None:
    """Red when a prompt without a forward gets in: some resamples would divide by zero."""
    with pytest.raises(AssertionError, match="no tau"):
        bootstrap_tau([PromptCounts(0, 0.0, (), ())], samples=10, seed=0)
