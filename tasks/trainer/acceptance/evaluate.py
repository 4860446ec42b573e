"""What a draft is worth: decode held-out prompts for real and compare with two baselines on the same answers.

The trained draft decodes with the target. N-gram lookup and the untrained draft are replayed on the answers that
came out (acceptance/decode.py says why that is exact), and each answer is checked against the target alone. One prompt
at a time, unbatched: slower than a server, but nothing is padded and nothing approximated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.trainer.acceptance.decode import EXACT_DTYPES, decode, replay, verify_lossless
from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.acceptance.ngram import NgramLookup
from tasks.trainer.acceptance.statistics import (
    PromptCounts,
    acceptance_per_depth,
    bootstrap_tau,
    count_rounds,
    loop_start,
    tau,
)
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.target import Target


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """Greedy acceptance (temperature 0) of a chain of num_draft_tokens; acceptance/statistics.py defines tau. Plain
    numbers, strings and sequences of them: `dataclasses.asdict` is JSON.

    tau, tau_ngram, tau_untrained: of the draft, of n-gram lookup and of the untrained draft, on the same answers.
    *_interval: 95% bootstrap intervals over prompts; those of differences are paired.
    acceptance, acceptance_ngram, acceptance_untrained: per depth, among proposals whose predecessors were accepted.
    lossless: every answer passed the check named by lossless_check: "generate" (token for token, float32) or "rescored"
    (every token within tie_margin of the maximum logit; num_not_argmax tokens are not the exact argmax,
    largest_gap is the widest). lossy_prompts: indices of the prompts that failed.
    num_equal_to_generate: answers identical to transformers.generate's, informative below float32.
    num_tokens: emitted by rounds; num_tokens_counted: of them before the first repeated 8-gram; loop_share: the rest's.
    speculative_seconds, plain_seconds: wall clock of all answers, with and without the draft.
    domains: of each domain name, prompts, tau, tau_interval (None for one prompt), tau_ngram, acceptance; the most
    prompts first. Empty unless prompts are of two at least.
    """

    tau: float
    tau_interval: tuple[float, float]
    tau_ngram: float
    tau_untrained: float
    tau_minus_ngram_interval: tuple[float, float]
    tau_minus_untrained_interval: tuple[float, float]
    acceptance: list[float]
    acceptance_ngram: list[float]
    acceptance_untrained: list[float]
    lossless: bool
    lossless_check: str
    lossy_prompts: list[int]
    tie_margin: float
    num_not_argmax: int
    largest_gap: float
    num_equal_to_generate: int
    num_prompts: int
    num_draft_tokens: int
    max_new_tokens: int
    num_tokens: int
    num_tokens_counted: int
    loop_share: float
    speculative_seconds: float
    plain_seconds: float
    domains: list[dict[str, Any]]


def evaluate_acceptance(
    target: Target,
    draft: Eagle3Draft,
    untrained: Eagle3Draft,
    prompts: Sequence[npt.NDArray[np.int32]],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    tie_margin: float,
    bootstrap_samples: int = 2000,
    seed: int = 0,
    domains: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AcceptanceReport:
    """Decode every prompt (token ids [P], the generation prompt included) and count.

    domains: the name of each prompt's, None for none. progress(done, total) is called after each prompt. Raises
    InputError for an empty prompt, one that does not fit the target's positions, or when fewer than two answers have a
    token to count.
    """
    _check_prompts(target, prompts, max_new_tokens)
    limits = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": max_new_tokens}
    counts: dict[str, list[PromptCounts]] = {"draft": [], "ngram": [], "untrained": []}
    checks, counted_domains = [], []
    num_tokens, seconds = 0, 0.0
    for done, token_ids in enumerate(prompts, start=1):
        prompt = torch.from_numpy(token_ids.astype(np.int64))
        decoded = decode(target, prompt, Drafter(draft), **limits)
        checks.append(
            verify_lossless(target, prompt, decoded.answer, max_new_tokens=max_new_tokens, tie_margin=tie_margin)
        )
        num_tokens += len(decoded.answer) - 1
        seconds += decoded.seconds
        cut = loop_start(decoded.answer)
        # An answer without a token to count adds nothing to any sum, but a resample of such answers has no tau.
        if cut > 1 and decoded.rounds:
            rounds = {
                "draft": decoded.rounds,
                "ngram": replay(decoded, NgramLookup(prompt[:1].tolist()), **limits),
                "untrained": replay(decoded, Drafter(untrained), **limits),
            }
            counted_domains.append("" if domains is None else domains[done - 1])
            for name, taken in rounds.items():
                counts[name].append(count_rounds(taken, cut=cut, num_draft_tokens=num_draft_tokens))
        if progress is not None:
            progress(done, len(prompts))
    if len(counts["draft"]) < 2:
        raise InputError(
            f"only {len(counts['draft'])} of {len(prompts)} held-out prompts got an answer of two or more tokens "
            "before it loops; tau needs two such: give more held-out prompts (evaluate.num_prompts) or other ones"
        )
    counted = sum(c.num_tokens for c in counts["draft"])
    interval = partial(bootstrap_tau, counts["draft"], samples=bootstrap_samples, seed=seed)
    return AcceptanceReport(
        tau=tau(counts["draft"]),
        tau_interval=interval(),
        tau_ngram=tau(counts["ngram"]),
        tau_untrained=tau(counts["untrained"]),
        tau_minus_ngram_interval=interval(counts["ngram"]),
        tau_minus_untrained_interval=interval(counts["untrained"]),
        acceptance=acceptance_per_depth(counts["draft"]),
        acceptance_ngram=acceptance_per_depth(counts["ngram"]),
        acceptance_untrained=acceptance_per_depth(counts["untrained"]),
        lossless=all(check.lossless for check in checks),
        lossless_check="generate" if target.dtype in EXACT_DTYPES else "rescored",
        lossy_prompts=[index for index, check in enumerate(checks) if not check.lossless],
        tie_margin=tie_margin,
        num_not_argmax=sum(check.num_not_argmax for check in checks),
        largest_gap=max(check.largest_gap for check in checks),
        num_equal_to_generate=sum(check.equals_generate for check in checks),
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        num_tokens_counted=counted,
        loop_share=1 - counted / num_tokens,
        speculative_seconds=seconds,
        plain_seconds=sum(check.generate_seconds for check in checks),
        domains=_by_domain(counts, counted_domains, samples=bootstrap_samples, seed=seed),
        **limits,
    )


def _by_domain(
    counts: dict[str, list[PromptCounts]], domains: Sequence[str], *, samples: int, seed: int
) -> list[dict[str, Any]]:
    found = []
    names = Counter(domains)
    for name, number in names.most_common() if len(names) > 1 else ():
        draft, ngram = (
            [count for count, domain in zip(counts[proposer], domains, strict=True) if domain == name]
            for proposer in ("draft", "ngram")
        )
        found.append(
            {
                "name": name,
                "prompts": number,
                "tau": tau(draft),
                "tau_interval": bootstrap_tau(draft, samples=samples, seed=seed) if number > 1 else None,
                "tau_ngram": tau(ngram),
                "acceptance": acceptance_per_depth(draft),
            }
        )
    return found


def _check_prompts(target: Target, prompts: Sequence[npt.NDArray[np.int32]], max_new_tokens: int) -> None:
    longest = getattr(target.config, "max_position_embeddings", None)
    for index, token_ids in enumerate(prompts):
        if not len(token_ids):
            raise InputError(f"held-out prompt {index} has no tokens; remove it from data.heldout_source")
        if longest is not None and len(token_ids) + max_new_tokens > longest:
            raise InputError(
                f"held-out prompt {index} has {len(token_ids)} tokens; with evaluate.max_new_tokens={max_new_tokens} "
                f"it passes the target's {longest} positions: lower evaluate.max_new_tokens or remove the prompt"
            )
