"""The result of an evaluation as plain numbers: what evaluation.json, the report and the nightly gate read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tasks.trainer.acceptance.decode import LosslessCheck
from tasks.trainer.acceptance.lossless import SampledSums
from tasks.trainer.acceptance.prompts import Prompt
from tasks.trainer.acceptance.statistics import FIRST_CONTEXT, PromptCounts, acceptance_per_depth, bootstrap_tau, tau
from tasks.trainer.config_evaluate import Evaluate
from tasks.trainer.errors import InputError


@dataclass(frozen=True, slots=True)
class Measured:
    """One conversation, its turns together. counts: by proposer, draft, ngram, untrained; contexts: of the draft, by
    the context's least length; emitted: rounds by tokens emitted; num_tokens: emitted by rounds, loops included."""

    counts: dict[str, PromptCounts]
    contexts: dict[int, PromptCounts]
    emitted: list[int]
    num_tokens: int

    def __add__(self, other: Measured) -> Measured:
        both = self.contexts.keys() & other.contexts.keys()
        return Measured(
            {name: counts + other.counts[name] for name, counts in self.counts.items()},
            {**self.contexts, **other.contexts, **{low: self.contexts[low] + other.contexts[low] for low in both}},
            [mine + theirs for mine, theirs in zip(self.emitted, other.emitted, strict=True)],
            self.num_tokens + other.num_tokens,
        )


@dataclass(slots=True)
class Verdicts:
    """Checks and times of all answers. num_forwards: of the target, prompts' included, as if each answer was alone."""

    lossy: set[int] = field(default_factory=set)
    num_not_argmax: int = 0
    largest_gap: float = 0.0
    num_equal: int = 0
    sampled: SampledSums = field(default_factory=SampledSums)
    speculative_seconds: float = 0.0
    plain_seconds: float = 0.0
    num_forwards: int = 0
    num_answer_tokens: int = 0

    def add(self, numbers: Sequence[int], checks: Sequence[LosslessCheck]) -> None:
        """Of a batch of numbered conversations' answers."""
        for number, check in zip(numbers, checks, strict=True):
            if not check.lossless:
                self.lossy.add(number)
            self.num_not_argmax += check.num_not_argmax
            self.largest_gap = max(self.largest_gap, check.largest_gap)
            self.num_equal += check.equals_generate


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """What a draft is worth; statistics.py defines tau. Plain numbers, strings and sequences of them:
    `dataclasses.asdict` is the `acceptance` of evaluation.json.

    How it was drafted: drafting ("chain" or "tree"), num_draft_tokens (a chain's length, a tree's depth), tree_top_k
    and tree_tokens (None for a chain), temperature (0 is greedy), candidates (None when greedy), max_new_tokens,
    batch_size.

    tau, tau_ngram, tau_untrained: of the draft, of n-gram lookup (always a chain) and of the untrained draft, on the
    same answers. *_interval: 95% bootstrap intervals over conversations; those of differences are paired.
    acceptance, acceptance_ngram, acceptance_untrained: per depth, among proposals whose predecessors were accepted; of
    a tree, whether one of a node's children was. emitted: rounds that emitted 1, 2, .. tokens.
    domains: of each domain name: name, prompts, tau, tau_interval (None for one prompt), tau_ngram, acceptance; the
    most prompts first. Empty unless prompts are of two at least.
    contexts: of each range of tokens before a round: from, to (exclusive), prompts, tau, tau_interval, acceptance;
    lengthened: of each length of evaluate.context_lengths: context, prompts, tau, tau_interval, acceptance. These
    prompts count nowhere else but in losslessness and seconds.

    lossless: every answer passed the check named by lossless_check: "generate" (token for token, float32), "rescored"
    (every token within tie_margin of the maximum logit; num_not_argmax tokens are not the exact argmax,
    largest_gap is the widest) or, when sampling, "statistical" (p_likelihood and p_favoured: lossless.py; None when
    greedy). lossy_prompts: indices of the conversations that failed.
    num_equal_to_generate: answers identical to transformers.generate's, informative below float32.
    num_prompts: conversations counted or not, the lengthened ones apart; turns_left_out: later turns that were not
    asked, for they passed the target's positions or its template refused them.
    num_tokens: emitted by rounds; num_tokens_counted: of them before the first repeated 8-gram; loop_share: the rest's.
    speculative_seconds, plain_seconds: wall clock of all answers, with the draft and by transformers.generate, both in
    batches of batch_size. speed_up: their ratio. speed_up_ceiling: all tokens over all forwards of the target, what a
    draft and a verification that cost nothing would give.
    """

    drafting: str
    num_draft_tokens: int
    tree_top_k: int | None
    tree_tokens: int | None
    temperature: float
    candidates: str | None
    max_new_tokens: int
    batch_size: int
    tau: float
    tau_interval: tuple[float, float]
    tau_ngram: float
    tau_untrained: float
    tau_minus_ngram_interval: tuple[float, float]
    tau_minus_untrained_interval: tuple[float, float]
    acceptance: list[float]
    acceptance_ngram: list[float]
    acceptance_untrained: list[float]
    emitted: list[int]
    domains: list[dict[str, Any]]
    contexts: list[dict[str, Any]]
    lengthened: list[dict[str, Any]]
    lossless: bool
    lossless_check: str
    lossy_prompts: list[int]
    tie_margin: float
    num_not_argmax: int
    largest_gap: float
    num_equal_to_generate: int
    p_likelihood: float | None
    p_favoured: float | None
    num_prompts: int
    turns_left_out: int
    num_tokens: int
    num_tokens_counted: int
    loop_share: float
    speculative_seconds: float
    plain_seconds: float
    speed_up: float
    speed_up_ceiling: float


def summarise(
    prompts: Sequence[Prompt],
    measured: Sequence[Measured],
    verdicts: Verdicts,
    settings: Evaluate,
    *,
    check: str,
    turns_left_out: int,
) -> AcceptanceReport:
    """The report of all conversations. Raises InputError when fewer than two have a token to count."""
    pairs = list(zip(prompts, measured, strict=True))
    main = [(prompt, one) for prompt, one in pairs if prompt.context is None]
    # An answer without a token to count adds nothing to any sum, but a resample of such answers has no tau.
    counted = [(prompt, one) for prompt, one in main if one.counts["draft"].num_forwards > 0]
    if len(counted) < 2:
        raise InputError(
            f"only {len(counted)} of {len(main)} prompts got an answer of two or more tokens before it loops; tau "
            "needs two such: give more prompts (evaluate.num_prompts) or other ones"
        )
    counts = {name: [one.counts[name] for _, one in counted] for name in ("draft", "ngram", "untrained")}
    interval = partial(bootstrap_tau, counts["draft"], samples=settings.bootstrap_samples, seed=settings.seed)
    num_tokens = sum(one.num_tokens for _, one in main)
    num_counted = sum(one.num_tokens for one in counts["draft"])
    is_tree, sampled = settings.drafting == "tree", settings.temperature > 0.0
    p_likelihood, p_favoured = verdicts.sampled.p_values() if sampled else (None, None)
    return AcceptanceReport(
        drafting=settings.drafting,
        num_draft_tokens=settings.depth,
        tree_top_k=settings.tree_top_k if is_tree else None,
        tree_tokens=settings.tree_tokens if is_tree else None,
        temperature=settings.temperature,
        candidates=settings.candidates if sampled else None,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        tau=tau(counts["draft"]),
        tau_interval=interval(),
        tau_ngram=tau(counts["ngram"]),
        tau_untrained=tau(counts["untrained"]),
        tau_minus_ngram_interval=interval(counts["ngram"]),
        tau_minus_untrained_interval=interval(counts["untrained"]),
        acceptance=acceptance_per_depth(counts["draft"]),
        acceptance_ngram=acceptance_per_depth(counts["ngram"]),
        acceptance_untrained=acceptance_per_depth(counts["untrained"]),
        emitted=[sum(column) for column in zip(*(one.emitted for _, one in counted), strict=True)],
        domains=_by_domain(counted, settings),
        contexts=_by_context([one for _, one in main], settings),
        lengthened=_lengthened(pairs, settings),
        lossless=verdicts.sampled.lossless if sampled else not verdicts.lossy,
        lossless_check=check,
        lossy_prompts=sorted(verdicts.lossy),
        tie_margin=settings.tie_margin,
        num_not_argmax=verdicts.num_not_argmax,
        largest_gap=verdicts.largest_gap,
        num_equal_to_generate=verdicts.num_equal,
        p_likelihood=p_likelihood,
        p_favoured=p_favoured,
        num_prompts=len(main),
        turns_left_out=turns_left_out,
        num_tokens=num_tokens,
        num_tokens_counted=num_counted,
        loop_share=1 - num_counted / num_tokens,
        speculative_seconds=verdicts.speculative_seconds,
        plain_seconds=verdicts.plain_seconds,
        speed_up=verdicts.plain_seconds / verdicts.speculative_seconds,
        speed_up_ceiling=verdicts.num_answer_tokens / verdicts.num_forwards,
    )


def _figures(counts: Sequence[PromptCounts], settings: Evaluate) -> dict[str, Any]:
    several = len(counts) > 1
    return {
        "prompts": len(counts),
        "tau": tau(counts),
        "tau_interval": bootstrap_tau(counts, samples=settings.bootstrap_samples, seed=settings.seed)
        if several
        else None,
        "acceptance": acceptance_per_depth(counts),
    }


def _by_domain(counted: Sequence[tuple[Prompt, Measured]], settings: Evaluate) -> list[dict[str, Any]]:
    names = Counter(prompt.domain for prompt, _ in counted)
    found = []
    for name, _ in names.most_common() if len(names) > 1 else ():
        own = [one.counts for prompt, one in counted if prompt.domain == name]
        figures = _figures([counts["draft"] for counts in own], settings)
        found.append({"name": name, **figures, "tau_ngram": tau([counts["ngram"] for counts in own])})
    return found


def _by_context(measured: Sequence[Measured], settings: Evaluate) -> list[dict[str, Any]]:
    found = []
    for low in sorted({low for one in measured for low in one.contexts}):
        own = [one.contexts[low] for one in measured if low in one.contexts]
        found.append({"from": low, "to": 2 * low if low else FIRST_CONTEXT, **_figures(own, settings)})
    return found


def _lengthened(pairs: Sequence[tuple[Prompt, Measured]], settings: Evaluate) -> list[dict[str, Any]]:
    found = []
    for context in sorted({prompt.context for prompt, _ in pairs if prompt.context is not None}):
        own = [one.counts["draft"] for prompt, one in pairs if prompt.context == context]
        own = [counts for counts in own if counts.num_forwards > 0]
        if own:
            found.append({"context": context, **_figures(own, settings)})
    return found
