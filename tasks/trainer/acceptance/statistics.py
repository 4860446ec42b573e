"""What rounds of speculative decoding are worth: tau, acceptance per depth, intervals.

tau = tokens emitted by rounds / target forwards of rounds, the bonus token included (>= 1). The forward over the prompt
and the token it gives belong to no round. Both sums run over all prompts: a ratio of sums, so that a long answer weighs
more than a short one, as it does in a server's bill.

Small models loop, and a loop is accepted by any proposer. So only tokens before the first repeated 8-gram of the answer
count: the answer is cut where the first 8-gram starts that already started at an earlier place (the two may overlap).
A round of n tokens that crosses the cut with c of them before it counts c tokens and c/n of a forward: each token of a
round carries an equal share of its forward, and no round is favoured for being long. A round that the answer's end
shortens (end of turn, or the length limit) counts one whole forward: it was paid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LOOP_NGRAM = 8
FIRST_CONTEXT = 256
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Round:
    """One verification. num_proposed: of a chain its length, of a tree the longest branch that holds the last node
    reached; num_accepted: proposals that were emitted; num_emitted: those and the target's own token."""

    num_proposed: int
    num_accepted: int
    num_emitted: int


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """What one answer adds to the sums: tokens and forwards before the cut, and per depth (0-based, n entries) how
    many proposals were tried, i.e. all before them in their round accepted, and how many of these were accepted."""

    num_tokens: int
    num_forwards: float
    tried: tuple[int, ...]
    accepted: tuple[int, ...]

    def __add__(self, other: PromptCounts) -> PromptCounts:
        """Of two answers together, the turns of a conversation for one: they are no two draws of the bootstrap."""
        return PromptCounts(
            self.num_tokens + other.num_tokens,
            self.num_forwards + other.num_forwards,
            tuple(map(sum, zip(self.tried, other.tried, strict=True))),
            tuple(map(sum, zip(self.accepted, other.accepted, strict=True))),
        )


def loop_start(answer: Sequence[int]) -> int:
    """Number of tokens before the first repeated 8-gram; the answer's length when none repeats."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(answer) - LOOP_NGRAM + 1):
        ngram = tuple(answer[start : start + LOOP_NGRAM])
        if ngram in seen:
            return start
        seen.add(ngram)
    return len(answer)


def count_rounds(
    rounds: Sequence[Round], *, cut: int, num_draft_tokens: int, first: int = 0, end: int | None = None
) -> PromptCounts:
    """Sum the rounds of one answer over its tokens 1 .. cut-1; token 0 came with the prompt's forward.

    first, end: of the rounds that begin at such an answer token alone, first <= token < end; default all.
    """
    num_tokens, num_forwards, start = 0, 0.0, 1
    tried, accepted = [0] * num_draft_tokens, [0] * num_draft_tokens
    for round_ in rounds:
        kept = min(start + round_.num_emitted, cut) - start
        if kept <= 0:
            break
        begins, start = start, start + round_.num_emitted
        if begins < first or (end is not None and begins >= end):
            continue
        num_tokens += kept
        num_forwards += kept / round_.num_emitted
        # Depth k tries token start + k; the first rejected proposal is the last one tried. Proposals past the
        # answer's end or past the cut were neither right nor wrong.
        for depth in range(min(round_.num_proposed, round_.num_accepted + 1, kept)):
            tried[depth] += 1
            accepted[depth] += depth < round_.num_accepted
    return PromptCounts(num_tokens, num_forwards, tuple(tried), tuple(accepted))


def count_by_context(
    rounds: Sequence[Round], *, cut: int, num_draft_tokens: int, prompt_length: int
) -> dict[int, PromptCounts]:
    """count_rounds by the tokens before a round: key n is n <= context < 2 n, for n = 256, 512, ..; 0 is below 256."""
    found = {}
    longest = prompt_length + cut
    low, high = 0, FIRST_CONTEXT
    while low < longest:
        counts = count_rounds(
            rounds, cut=cut, num_draft_tokens=num_draft_tokens, first=low - prompt_length, end=high - prompt_length
        )
        if counts.num_forwards > 0:
            found[low] = counts
        low, high = high, 2 * high
    return found


def emitted_histogram(rounds: Sequence[Round], *, cut: int, num_draft_tokens: int) -> list[int]:
    """How many rounds emitted 1, 2, .. num_draft_tokens + 1 tokens, of those that end before the cut."""
    found, start = [0] * (num_draft_tokens + 1), 1
    for round_ in rounds:
        start += round_.num_emitted
        if start > cut:
            break
        found[round_.num_emitted - 1] += 1
    return found


def tau(counts: Sequence[PromptCounts]) -> float:
    """Tokens a target forward, the ratio of the sums over prompts."""
    return sum(c.num_tokens for c in counts) / sum(c.num_forwards for c in counts)


def acceptance_per_depth(counts: Sequence[PromptCounts]) -> list[float]:
    """Share of tried proposals accepted at each depth; 0 where no round got that deep."""
    tried = np.sum([c.tried for c in counts], axis=0)
    accepted = np.sum([c.accepted for c in counts], axis=0)
    return [float(value) for value in accepted / np.maximum(tried, 1)]


def bootstrap_tau(
    counts: Sequence[PromptCounts],
    baseline: Sequence[PromptCounts] | None = None,
    *,
    samples: int,
    seed: int,
) -> tuple[float, float]:
    """95% percentile bootstrap interval of tau, or of tau - tau(baseline), over prompts.

    Paired: each resample draws whole prompts and takes both proposers' counts of them, because prompts differ far
    more than proposers do. Each resample's tau is a ratio of sums again. Every prompt must have a round that counts.
    """
    assert all(c.num_forwards > 0 for c in counts), "a resample of empty answers has no tau"
    assert baseline is None or len(baseline) == len(counts), "one baseline count a prompt"
    picks = np.random.default_rng(seed).integers(len(counts), size=(samples, len(counts)))
    values = resampled_tau(counts, picks)
    if baseline is not None:
        values = values - resampled_tau(baseline, picks)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def resampled_tau(counts: Sequence[PromptCounts], picks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """tau of each resample, float64 [samples]. picks: int64 [samples, prompts], the prompts it draws."""
    num_tokens = np.array([c.num_tokens for c in counts], dtype=np.float64)
    num_forwards = np.array([c.num_forwards for c in counts], dtype=np.float64)
    ratios: npt.NDArray[np.float64] = num_tokens[picks].sum(1) / num_forwards[picks].sum(1)
    return ratios
