"""Whether tonight's draft becomes the champion: a paired bootstrap over prompts, on counts and nothing else.

    fixed held-out set    not worse: the lower bound of tau(draft) - tau(champion) is above -tolerance * tau(champion)
    recent held-out data  better: that lower bound is above 0, and not by chance (see below)
    both                  every answer is what the target alone says

A percentile interval of few prompts is too narrow. It is widened to what Student's t would have (Hesterberg, "What
Teachers Should Know About the Bootstrap", 2015: the expanded percentile interval). Answers differ so much in length
that a draft that is no better would still pass in about 6 nights of 100 where 5 are allowed. So `better` also asks how
often the difference is as large when the two drafts change places in each prompt at random, which no distribution of
prompts can mislead (Fisher's test of paired samples). The price of both is power: with few prompts, better drafts are
turned down, and with fewer than 5 all are. `not worse` with a tolerance is a test of its own: a set too small to see a
loss proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from tasks.trainer.acceptance.statistics import PromptCounts, resampled_tau, tau
from tasks.trainer.config_nightly import Nightly

MIN_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class Difference:
    """Two drafts on the same answers."""

    tau: float
    """Of the draft in question."""
    other: float
    """Of the other one."""
    low: float
    """Lower bound of tau - other."""
    chance: float
    """How often the difference is as large when the drafts change places at random."""
    num_prompts: int
    """Prompts that counted."""


@dataclass(frozen=True, slots=True)
class JudgedSet:
    """What one set of prompts gave."""

    counts: Mapping[str, Sequence[PromptCounts]]
    """By proposer (draft, champion, ngram, untrained), a count for each prompt with something to count."""
    num_prompts: int
    """Prompts decoded."""
    num_lossy: int
    """Of them, how many answers are not the target's own."""


def judged_sets(document: Mapping[str, Any]) -> dict[str, JudgedSet]:
    """The sets of a judgement.json (nightly/judge.py)."""

    def prompt_counts(count: Mapping[str, Any]) -> PromptCounts:
        return PromptCounts(count["num_tokens"], count["num_forwards"], tuple(count["tried"]), tuple(count["accepted"]))

    return {
        name: JudgedSet(
            {who: [prompt_counts(count) for count in counts] for who, counts in judged["counts"].items()},
            judged["num_prompts"],
            judged["num_lossy"],
        )
        for name, judged in document["sets"].items()
    }


@dataclass(frozen=True, slots=True)
class Decision:
    """What the gate says."""

    promote: bool
    """Whether the draft becomes the champion."""
    reasons: tuple[str, ...]
    """One sentence a test, those that failed first."""
    differences: Mapping[str, Difference]
    """By what was compared: `fixed`, `recent`, or on a first night `untrained` and `ngram`."""


def compare(
    ours: Sequence[PromptCounts], theirs: Sequence[PromptCounts], *, significance: float, samples: int, seed: int
) -> Difference:
    """Paired: each resample draws whole prompts and takes both drafts' counts of them.

    The bound holds with probability 1 - significance. Both must have a count for each of at least MIN_PROMPTS prompts.
    """
    assert len(ours) == len(theirs) >= MIN_PROMPTS
    n = len(ours)
    random = np.random.default_rng(seed)
    picks = random.integers(n, size=(samples, n))
    values = resampled_tau(ours, picks) - resampled_tau(theirs, picks)
    level = stats.norm.cdf(np.sqrt(n / (n - 1)) * stats.t.ppf(significance, n - 1))
    found = tau(ours) - tau(theirs)
    swapped = _swapped_differences(ours, theirs, random.integers(2, size=(samples, n)).astype(np.bool_))
    # Rounding: a difference that comes again must not count as smaller.
    chance = (1 + int((swapped >= found - 1e-9).sum())) / (samples + 1)
    return Difference(tau(ours), tau(theirs), float(np.quantile(values, level)), chance, n)


def _swapped_differences(
    ours: Sequence[PromptCounts], theirs: Sequence[PromptCounts], swaps: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """tau(ours) - tau(theirs), float64 [samples], after the prompts of swaps [samples, n] changed sides."""
    both = np.array([[[c.num_tokens, c.num_forwards] for c in side] for side in (ours, theirs)])  # [side, prompt, sum]
    first = np.where(swaps[..., None], both[1], both[0]).sum(1)
    second = np.where(swaps[..., None], both[0], both[1]).sum(1)
    differences: npt.NDArray[np.float64] = first[:, 0] / first[:, 1] - second[:, 0] / second[:, 1]
    return differences


def decide(sets: Mapping[str, JudgedSet], settings: Nightly, *, samples: int, seed: int) -> Decision:
    """Judge a night. sets: `fixed` and `recent`; without counts of a champion, the floor of a first night decides."""
    failed: list[str] = []
    passed: list[str] = []
    lossy = sum(judged.num_lossy for judged in sets.values())
    decoded = sum(judged.num_prompts for judged in sets.values())
    (failed if lossy else passed).append(
        f"not lossless: {lossy} of {decoded} answers are not what the target alone says"
        if lossy
        else f"lossless: all {decoded} answers are what the target alone says"
    )
    differences = {}
    for name, ours, theirs, margin in _tests(sets, settings):
        if len(ours) < MIN_PROMPTS:
            failed.append(f"{name}: only {len(ours)} prompts have an answer to count; give more held-out prompts")
            continue
        found = compare(ours, theirs, significance=settings.significance, samples=samples, seed=seed)
        differences[name] = found
        allowed = -margin * found.other
        # Better is strict: two drafts that are one differ by nothing in every resample.
        better = found.low > 0.0 and found.chance <= settings.significance
        holds = found.low >= allowed if name == "fixed" else better
        (passed if holds else failed).append(_sentence(name, found, allowed, holds, settings.significance))
    return Decision(not failed, (*failed, *passed), differences)


def _tests(
    sets: Mapping[str, JudgedSet], settings: Nightly
) -> list[tuple[str, Sequence[PromptCounts], Sequence[PromptCounts], float]]:
    """(name, ours, theirs, margin as a share of theirs) of each test."""
    fixed, recent = sets["fixed"].counts, sets["recent"].counts
    if "champion" in fixed:
        return [
            ("fixed", fixed["draft"], fixed["champion"], settings.tolerance),
            ("recent", recent["draft"], recent["champion"], 0.0),
        ]
    floors = ["untrained", *(["ngram"] if settings.floor == "ngram" else [])]
    both = [*fixed["draft"], *recent["draft"]]
    return [(name, both, [*fixed[name], *recent[name]], 0.0) for name in floors]


_OTHERS = {
    "fixed": ("fixed held-out set", "the champion"),
    "recent": ("recent held-out data", "the champion"),
    "untrained": ("all held-out data", "the draft before training"),
    "ngram": ("all held-out data", "n-gram lookup"),
}


def _sentence(name: str, found: Difference, allowed: float, holds: bool, significance: float) -> str:
    data, other = _OTHERS[name]
    wanted = f"not worse by {-allowed:.3f}" if name == "fixed" else "better"
    verdict = wanted if holds else f"not shown to be {wanted}"
    return (
        f"{data}: tau {found.tau:.3f} against {found.other:.3f} of {other}, {verdict} (difference "
        f"{found.tau - found.other:+.3f}, at least {found.low:+.3f} with {1 - significance:.0%} confidence, "
        f"by chance {found.chance:.2g}, {found.num_prompts} prompts)"
    )
