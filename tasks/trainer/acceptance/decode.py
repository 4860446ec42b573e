"""Speculative decoding for real: a proposer drafts a chain, the target verifies it in one forward with a cache.

Greedy and lossless: the emitted tokens are the target's own argmax, whatever is proposed. So every proposer gives the
same answer and differs only in the number of rounds, and a second proposer needs no target at all: `replay` walks it
along an answer already decoded, with the aux_hidden that its decode kept, and accepts the proposals that equal the
answer's continuation. All proposers are thus measured on the same answers for the price of one decode. What that costs
is memory for one answer's aux_hidden.

A round, after x[0..m] are verified:

    propose  d1 .. dn                    one forward of the target over   x[m] d1 .. dn
    the target's argmax at each          t1 t2 .. t(n+1)                  accept while d(i) = t(i)
    emit     t1 .. t(a+1)                a accepted, and the target's own token: the bonus
    crop the cache by n - a, give x[m] d1 .. da's aux_hidden to the proposer
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from tasks.trainer.acceptance.statistics import Round
from tasks.trainer.target import Target

# Where the answer must equal generate's token for token: rounding is too fine there to reorder real logits.
EXACT_DTYPES = (torch.float32, torch.float64)


class Proposer(Protocol):
    """What drafts: Drafter (trained or not) and NgramLookup. Made anew for each prompt."""

    def extend(self, token_ids: Tensor, aux_hidden: Tensor) -> None:
        """Append verified positions: token_ids int64 [r], x[p+1] of each; aux_hidden [r, 3D], of p."""

    def propose(self, num_tokens: int) -> list[int]:
        """At most `num_tokens` target ids to follow the last token of `extend`."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer. prompt int64 [P] on the CPU; answer: A >= 1 tokens, the end-of-turn token included; rounds: they
    emit answer[1:], since answer[0] comes with the prompt's forward; aux_hidden [P + A - 1, 3D]: of every position
    but the last token's; seconds: wall clock, the prompt's forward included; favoured: when sampling, of each place at
    which a round drew a token: the probability that it is one of those the draft favours, and whether it was."""

    prompt: Tensor
    answer: list[int]
    rounds: list[Round]
    aux_hidden: Tensor
    seconds: float
    favoured: list[tuple[float, bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LosslessCheck:
    """Whether one answer is what the target alone would say.

    lossless: the verdict. equals_generate: token for token. num_not_argmax: answer tokens that are not the exact
    argmax when the answer is rescored. largest_gap: the most that a token lies below its row's maximum logit.
    generate_seconds: what plain decoding took.
    """

    lossless: bool
    equals_generate: bool
    num_not_argmax: int
    largest_gap: float
    generate_seconds: float


def num_accepted(proposals: Sequence[int], verified: Sequence[int]) -> int:
    """Length of the common prefix."""
    count = 0
    for proposal, token in zip(proposals, verified, strict=False):
        if proposal != token:
            break
        count += 1
    return count


def decode(
    target: Target, prompt: Tensor, proposer: Proposer, *, num_draft_tokens: int, max_new_tokens: int
) -> Decoded:
    """Answer one prompt, int64 [P], P >= 1, greedily; stops after an eos token or max_new_tokens, as generate does."""
    began = time.perf_counter()
    cache = DynamicCache()
    logits, aux_hidden = target.forward(prompt[None], cache)
    answer: list[int] = logits[-1:].argmax(-1).tolist()
    proposer.extend(torch.cat((prompt[1:], torch.tensor(answer))), aux_hidden)
    rounds, kept = [], [aux_hidden]
    while answer[-1] not in target.eos_token_ids and len(answer) < max_new_tokens:
        # A round emits one token more than it accepts: proposals that could not be emitted are not asked for.
        proposals = proposer.propose(min(num_draft_tokens, max_new_tokens - len(answer) - 1))
        logits, aux_hidden = target.forward(torch.tensor([[answer[-1], *proposals]]), cache)
        verified: list[int] = logits.argmax(-1).tolist()
        accepted = num_accepted(proposals, verified)
        emitted = until_eos(verified[: accepted + 1], target.eos_token_ids)
        # Negative: so many entries off the end. Positive lengths mean other things in other versions.
        cache.crop(accepted - len(proposals))
        aux_hidden = aux_hidden[: len(emitted)]
        proposer.extend(torch.tensor(emitted), aux_hidden)
        rounds.append(Round(len(proposals), min(accepted, len(emitted)), len(emitted)))
        kept.append(aux_hidden)
        answer += emitted
    return Decoded(prompt, answer, rounds, torch.cat(kept), time.perf_counter() - began)


def replay(decoded: Decoded, proposer: Proposer, *, num_draft_tokens: int, max_new_tokens: int) -> list[Round]:
    """The rounds that `decode` would take with another proposer, without the target (see the module docstring).

    The proposer is fed in the same pieces as in a decode, so that replaying the decode's own proposer repeats its
    rounds exactly. Give the decode's num_draft_tokens and max_new_tokens.
    """
    answer = decoded.answer
    done, row = 1, decoded.prompt.shape[0]
    proposer.extend(torch.cat((decoded.prompt[1:], torch.tensor(answer[:1]))), decoded.aux_hidden[:row])
    rounds = []
    while done < len(answer):
        proposals = proposer.propose(min(num_draft_tokens, max_new_tokens - done - 1))
        accepted = num_accepted(proposals, answer[done:])
        emitted = answer[done : done + accepted + 1]
        proposer.extend(torch.tensor(emitted), decoded.aux_hidden[row : row + len(emitted)])
        rounds.append(Round(len(proposals), accepted, len(emitted)))
        done, row = done + len(emitted), row + len(emitted)
    return rounds


def verify_lossless(
    target: Target,
    prompt: Tensor,
    answer: Sequence[int],
    *,
    max_new_tokens: int,
    tie_margin: float,
    plain: Sequence[int] | None = None,
) -> LosslessCheck:
    """Check an answer against the target alone.

    A float32 target: the answer must equal `transformers.generate` (greedy) token for token. Lower precisions: a
    forward over several tokens rounds differently from one over a single token, and tokens whose logits tie
    there may come out in either order, from generate as well. So the answer is rescored in one forward without a
    cache, and every token must lie within `tie_margin` (in logits) of its row's maximum; how many are not the
    exact argmax is counted. In both cases the answer must end where decoding has to stop.

    plain: generate's answer when it is there already, from a padded batch; where it is another one, in float32, the
    prompt is answered again alone, and that one counts.
    """
    exact = target.dtype in EXACT_DTYPES
    equal, seconds = plain is not None and list(answer) == list(plain), 0.0
    if plain is None or (exact and not equal):
        began = time.perf_counter()
        equal = list(answer) == generate(target, prompt, max_new_tokens=max_new_tokens)
        seconds = time.perf_counter() - began
    if equal and exact:
        return LosslessCheck(True, True, 0, 0.0, seconds)
    sequence = torch.cat((prompt, torch.tensor(list(answer[:-1]), dtype=torch.int64)))
    logits = target.prefill(sequence[None], DynamicCache(), last=len(answer))[0].float()
    maximum, argmax = logits.max(-1)
    tokens = torch.tensor(list(answer), device=logits.device)
    gaps = maximum - logits.gather(1, tokens[:, None])[:, 0]
    stops = _stops_right(answer, target.eos_token_ids, max_new_tokens)
    largest = float(gaps.max())
    lossless = equal if exact else stops and largest <= tie_margin
    return LosslessCheck(lossless, equal, int((argmax != tokens).sum()), largest, seconds)


@torch.no_grad()
def generate(target: Target, prompt: Tensor, *, max_new_tokens: int) -> list[int]:
    """The answer to one prompt, int64 [P], by plain greedy `transformers.generate`. One prompt at a time: padding
    a batch would change the numbers."""
    eos = list(target.eos_token_ids)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
    )
    input_ids = prompt[None].to(target.device)
    with generation_defaults(target):
        output = target.model.generate(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
        )
    answer: list[int] = output[0, prompt.shape[0] :].tolist()
    return answer


@contextmanager
def generation_defaults(target: Target) -> Iterator[None]:
    """Hide the model's own generation config: generate fills what we leave out from it, and a repetition penalty
    (Qwen2.5 ships 1.05) is no greedy decoding."""
    own = target.model.generation_config
    target.model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        target.model.generation_config = own


def until_eos(tokens: Sequence[int], eos_token_ids: Sequence[int]) -> list[int]:
    """The tokens up to the first that ends a turn, that one included."""
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return list(tokens[: index + 1])
    return list(tokens)


def _stops_right(answer: Sequence[int], eos_token_ids: Sequence[int], max_new_tokens: int) -> bool:
    """Ends with the first eos token, or is exactly max_new_tokens long without one before its end."""
    if until_eos(answer, eos_token_ids) != list(answer) or len(answer) > max_new_tokens:
        return False
    return answer[-1] in eos_token_ids or len(answer) == max_new_tokens
