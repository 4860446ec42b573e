"""Whether answers are what the target alone would say: for a batch of greedy ones, and for sampled ones.

Greedy: `transformers.generate` answers the same prompts, padded to a batch, which is also what plain decoding costs.
Padding rounds otherwise, so a prompt whose two answers differ is answered again alone, and decode.verify_lossless has
the word.

Sampled answers differ from draw to draw, so a test decides. Two sums over all tokens have mean 0 and a known variance,
whatever came before (they are martingales, so the sum over its deviation is near a standard normal):

    likelihood   log p(x) - E log p          p of a forward of the target alone: wrong logits in batch, cache or mask
    favoured     [x is in S] - p(S)          S: the tokens that the draft gives more than the target does, or, where its
                                             likeliest tokens were the candidates, these: wrong acceptance

One of the two beyond 3.3 deviations is called lossy: a right verifier is, once in 500 evaluations. The test gets
sharper with tokens: at 10,000 it sees a bias of two points in how often such tokens come out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from tasks.trainer.acceptance.decode import Decoded, LosslessCheck, generation_defaults, until_eos, verify_lossless
from tasks.trainer.target import Target

# Of each of the two sums, two-sided.
SIGNIFICANCE = 0.001
_CHUNK_ROWS = 64  # float64 over the whole vocabulary


@dataclass(frozen=True, slots=True)
class SampledSums:
    """Of emitted tokens: the two sums of the module docstring, and their variances."""

    likelihood: float = 0.0
    likelihood_variance: float = 0.0
    favoured: float = 0.0
    favoured_variance: float = 0.0

    def __add__(self, other: SampledSums) -> SampledSums:
        return SampledSums(
            self.likelihood + other.likelihood,
            self.likelihood_variance + other.likelihood_variance,
            self.favoured + other.favoured,
            self.favoured_variance + other.favoured_variance,
        )

    def p_values(self) -> tuple[float, float]:
        """Two-sided, of likelihood and favoured; 1 where nothing was random."""
        pairs = ((self.likelihood, self.likelihood_variance), (self.favoured, self.favoured_variance))
        likelihood, favoured = (
            float(2 * stats.norm.sf(abs(total) / variance**0.5)) if variance > 0 else 1.0 for total, variance in pairs
        )
        return likelihood, favoured

    @property
    def lossless(self) -> bool:
        """Whether neither is beyond SIGNIFICANCE."""
        return min(self.p_values()) >= SIGNIFICANCE


def generate_batch(
    target: Target, prompts: Sequence[Tensor], *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> tuple[list[list[int]], float]:
    """Plain decoding of a batch by `transformers.generate`, padded on the left. Returns the answers and seconds."""
    eos = list(target.eos_token_ids)
    pad = eos[0] if eos else 0
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=eos or None, pad_token_id=pad, **sampling)
    began = time.perf_counter()
    with torch.no_grad(), torch.random.fork_rng(), generation_defaults(target):
        torch.manual_seed(seed)
        output = target.model.generate(
            input_ids=input_ids.to(target.device), attention_mask=mask.to(target.device), generation_config=config
        )
        answers = output[:, longest:].tolist()
    return [until_eos(answer, eos) for answer in answers], time.perf_counter() - began


def verify_batch(
    target: Target, decoded: Sequence[Decoded], *, max_new_tokens: int, tie_margin: float
) -> tuple[list[LosslessCheck], float]:
    """Check greedy answers. Returns a verdict each, and the seconds that plain decoding of the batch took."""
    plain, seconds = generate_batch(target, [one.prompt for one in decoded], max_new_tokens=max_new_tokens)
    checks = [
        verify_lossless(
            target, one.prompt, one.answer, max_new_tokens=max_new_tokens, tie_margin=tie_margin, plain=answer
        )
        for one, answer in zip(decoded, plain, strict=True)
    ]
    return checks, seconds


def sampled_sums(target: Target, decoded: Decoded, *, temperature: float) -> SampledSums:
    """Rescore one sampled answer."""
    answer = torch.tensor(decoded.answer)
    text = torch.cat((decoded.prompt, answer[:-1]))
    logits, _ = target.prefill(text[None], DynamicCache(), last=len(answer))
    favoured = np.array(decoded.favoured, dtype=np.float64).reshape(-1, 2)
    mass = favoured[:, 0]
    total = SampledSums(
        favoured=float((favoured[:, 1] - mass).sum()), favoured_variance=float((mass * (1 - mass)).sum())
    )
    for rows, tokens in zip(logits.split(_CHUNK_ROWS), answer.to(logits.device).split(_CHUNK_ROWS), strict=True):
        log_p = (rows.double() / temperature).log_softmax(-1)
        p = log_p.exp()
        mean = (p * log_p).sum(-1)
        spread = (p * (log_p - mean[:, None]) ** 2).sum(-1)
        surplus = log_p.gather(1, tokens[:, None])[:, 0] - mean
        total = total + SampledSums(float(surplus.sum()), float(spread.sum()))
    return total
