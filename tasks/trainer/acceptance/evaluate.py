"""What a draft is worth: decode prompts for real and compare with two baselines on the same answers.

The trained draft decodes with the target, several prompts at once, as a server does. N-gram lookup and the untrained
draft are replayed on the answers that came out (speculate.py says how far that is exact), and answers are checked
against the target alone, which is also what decoding costs without a draft. Prompts go by length into batches, and the
second turns of conversations after all first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tasks.trainer.acceptance.decode import EXACT_DTYPES, Decoded, decode
from tasks.trainer.acceptance.decode import replay as replay_one
from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.acceptance.lossless import generate_batch, sampled_sums, verify_batch
from tasks.trainer.acceptance.ngram import NgramLookup
from tasks.trainer.acceptance.prompts import Prompt
from tasks.trainer.acceptance.speculate import Rules, replay, speculate
from tasks.trainer.acceptance.statistics import (
    PromptCounts,
    Round,
    count_by_context,
    count_rounds,
    emitted_histogram,
    loop_start,
)
from tasks.trainer.acceptance.summary import AcceptanceReport, Measured, Verdicts, summarise
from tasks.trainer.acceptance.target_rows import check_rows
from tasks.trainer.acceptance.tree import TreeShape
from tasks.trainer.config_evaluate import Evaluate
from tasks.trainer.data.mask import ChatRenderer
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.target import Target


def rules_of(settings: Evaluate) -> Rules:
    """How the settings draft and sample."""
    drawn = settings.temperature > 0.0 and settings.candidates == "drawn"
    shape = (
        TreeShape(settings.tree_top_k, settings.tree_depth, settings.tree_tokens, drawn)
        if settings.drafting == "tree"
        else TreeShape.chain(settings.draft_tokens, drawn=drawn)
    )
    return Rules(shape, settings.max_new_tokens, settings.temperature)


def evaluate_acceptance(
    target: Target,
    draft: Eagle3Draft,
    untrained: Eagle3Draft,
    prompts: Sequence[Prompt],
    settings: Evaluate,
    *,
    renderer: ChatRenderer | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AcceptanceReport:
    """Decode every conversation and count.

    renderer: for prompts of several turns. progress(done, total) is called after each batch, in turns. Raises
    InputError for an empty prompt, one that does not fit the target's positions, a target that takes no trees, or when
    fewer than two conversations have a token to count.
    """
    _check_prompts(target, prompts, settings.max_new_tokens)
    if not _one_at_a_time(settings):
        check_rows(target)
    work = _Evaluation(target, draft, untrained, settings)
    total = sum(1 + len(prompt.to_come) for prompt in prompts)
    done, wave = 0, list(enumerate(prompts))
    while wave:
        wave.sort(key=lambda pair: len(pair[1].token_ids))
        following = []
        for start in range(0, len(wave), settings.batch_size):
            batch = wave[start : start + settings.batch_size]
            answers = work.measure(batch)
            for (number, prompt), answer in zip(batch, answers, strict=True):
                done += 1
                if not prompt.to_come:
                    continue
                assert renderer is not None, "later turns must be rendered"
                text = target.tokenizer.decode(answer, skip_special_tokens=True)
                further = prompt.following(text, renderer)
                if further is not None and _fits(target, further, settings.max_new_tokens):
                    following.append((number, further))
                else:
                    work.left_out += len(prompt.to_come)
                    done += len(prompt.to_come)
            if progress is not None:
                progress(done, total)
        wave = following
    return work.report(prompts)


@dataclass(slots=True)
class _Evaluation:
    """The sums of an evaluation under way."""

    target: Target
    draft: Eagle3Draft
    untrained: Eagle3Draft
    settings: Evaluate
    measured: dict[int, Measured] = field(default_factory=dict)
    verdicts: Verdicts = field(default_factory=Verdicts)
    left_out: int = 0

    def measure(self, batch: Sequence[tuple[int, Prompt]]) -> list[list[int]]:
        """Decode a batch of numbered conversations' present turns; returns the answers."""
        prompts = [torch.from_numpy(prompt.token_ids).to(torch.int64) for _, prompt in batch]
        rules = rules_of(self.settings)
        # Of every prompt its own, whatever it is batched with, and another in each turn.
        seeds = [_seed(self.settings.seed, number, len(prompt.said)) for number, prompt in batch]
        if _one_at_a_time(self.settings):
            decoded = [
                decode(
                    self.target,
                    prompt,
                    Drafter(self.draft),
                    num_draft_tokens=self.settings.depth,
                    max_new_tokens=self.settings.max_new_tokens,
                )
                for prompt in prompts
            ]
        else:
            decoded = speculate(self.target, self.draft, prompts, rules, seeds=seeds)
        self._check([number for number, _ in batch], decoded)
        untrained = replay(decoded, self.untrained, rules)
        for (number, prompt), one, by_untrained in zip(batch, decoded, untrained, strict=True):
            ngram = replay_one(
                one,
                NgramLookup(one.prompt[:1].tolist()),
                num_draft_tokens=self.settings.depth,
                max_new_tokens=self.settings.max_new_tokens,
            )
            self._count(number, prompt, one, {"draft": one.rounds, "ngram": ngram, "untrained": by_untrained})
        return [one.answer for one in decoded]

    def _check(self, numbers: Sequence[int], decoded: Sequence[Decoded]) -> None:
        settings, verdicts = self.settings, self.verdicts
        if settings.temperature == 0.0:
            checks, seconds = verify_batch(
                self.target, decoded, max_new_tokens=settings.max_new_tokens, tie_margin=settings.tie_margin
            )
            verdicts.add(numbers, checks)
        else:
            _, seconds = generate_batch(
                self.target,
                [one.prompt for one in decoded],
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
            )
            for one in decoded:
                verdicts.sampled = verdicts.sampled + sampled_sums(self.target, one, temperature=settings.temperature)
        verdicts.plain_seconds += seconds
        verdicts.speculative_seconds += sum(one.seconds for one in decoded)
        verdicts.num_forwards += sum(1 + len(one.rounds) for one in decoded)
        verdicts.num_answer_tokens += sum(len(one.answer) for one in decoded)

    def _count(self, number: int, prompt: Prompt, decoded: Decoded, rounds: dict[str, list[Round]]) -> None:
        depth = self.settings.depth
        cut = loop_start(decoded.answer)
        counts: dict[str, PromptCounts] = {
            name: count_rounds(taken, cut=cut, num_draft_tokens=depth) for name, taken in rounds.items()
        }
        found = Measured(
            counts=counts,
            contexts=count_by_context(
                decoded.rounds, cut=cut, num_draft_tokens=depth, prompt_length=len(decoded.prompt)
            ),
            emitted=emitted_histogram(decoded.rounds, cut=cut, num_draft_tokens=depth),
            num_tokens=len(decoded.answer) - 1,
        )
        self.measured[number] = self.measured[number] + found if number in self.measured else found

    def report(self, prompts: Sequence[Prompt]) -> AcceptanceReport:
        if self.settings.temperature > 0.0:
            check = "statistical"
        else:
            check = "generate" if self.target.dtype in EXACT_DTYPES else "rescored"
        return summarise(
            prompts,
            [self.measured[number] for number in range(len(prompts))],
            self.verdicts,
            self.settings,
            check=check,
            turns_left_out=self.left_out,
        )


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _one_at_a_time(settings: Evaluate) -> bool:
    """Whether decode.py does it all: for targets whose attention takes no mask of ours."""
    return settings.batch_size == 1 and settings.drafting == "chain" and settings.temperature == 0.0


def _fits(target: Target, prompt: Prompt, max_new_tokens: int) -> bool:
    longest = getattr(target.config, "max_position_embeddings", None)
    return longest is None or len(prompt.token_ids) + max_new_tokens <= longest


def _check_prompts(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    for index, prompt in enumerate(prompts):
        where = prompt.where or f"prompt {index}"
        if not len(prompt.token_ids):
            raise InputError(f"{where} has no tokens; remove it from its file")
        if not _fits(target, prompt, max_new_tokens):
            raise InputError(
                f"{where} has {len(prompt.token_ids)} tokens; with evaluate.max_new_tokens={max_new_tokens} it passes "
                f"the target's {target.config.max_position_embeddings} positions: lower evaluate.max_new_tokens or "
                "remove the prompt"
            )
