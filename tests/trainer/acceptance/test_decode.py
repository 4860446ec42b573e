"""Speculative decoding is lossless whatever is proposed, and a verifier that is not lossless is caught."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tasks.trainer.acceptance import decode as decode_module
from tasks.trainer.acceptance.decode import Decoded, Proposer, decode, generate, replay, verify_lossless
from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.acceptance.ngram import NgramLookup
from tasks.trainer.acceptance.statistics import Round
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.target import Target

LIMITS = {"num_draft_tokens": 4, "max_new_tokens": 32}


class Oracle:
    """Proposes the true continuation, wrong from `wrong_at` on in each round: all lengths of acceptance on demand."""

    def __init__(self, answer: list[int], accepts: list[int], vocab_size: int) -> None:
        self._answer, self._accepts, self._vocab_size = answer, accepts, vocab_size
        self._done, self._round = -1, 0

    def extend(self, token_ids: Tensor, aux_hidden: Tensor) -> None:
        assert aux_hidden.shape[0] == token_ids.shape[0]
        self._done = 1 if self._done < 0 else self._done + token_ids.shape[0]

    def propose(self, num_tokens: int) -> list[int]:
        chain = self._answer[self._done : self._done + num_tokens]
        wrong_at = self._accepts[self._round % len(self._accepts)]
        self._round += 1
        return [t if i < wrong_at else (t + 1) % self._vocab_size for i, t in enumerate(chain)]


def proposers(draft: Eagle3Draft, prompt: Tensor, answer: list[int]) -> list[Proposer]:
    return [
        Drafter(draft),
        NgramLookup(prompt[:1].tolist()),
        Oracle(answer, [4, 0, 1, 3, 2], 64),
        Oracle(answer, [0], 64),
        Oracle(answer, [4], 64),
    ]


def copy_of(target: Target, dtype: torch.dtype, *eos_token_ids: int) -> Target:
    """The same weights in another dtype, or with another end of turn."""
    model = LlamaForCausalLM(LlamaConfig.from_dict(target.model.config.to_dict()))
    model.load_state_dict(target.model.state_dict())
    return Target(model.to(dtype), None, name="copy", aux_layer_ids=target.aux_layer_ids, eos_token_ids=eos_token_ids)


def test_equals_generate(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when the cache is cropped by one too few or many, a rejected token is emitted, or the bonus is lost."""
    for prompt in prompts:
        expected = generate(target, prompt, max_new_tokens=32)
        assert len(expected) == 32
        for proposer in proposers(trained, prompt, expected):
            decoded = decode(target, prompt, proposer, **LIMITS)
            assert decoded.answer == expected
            assert sum(r.num_emitted for r in decoded.rounds) == len(expected) - 1
            assert decoded.aux_hidden.shape == (len(prompt) + len(expected) - 1, 96)
        check = verify_lossless(target, prompt, decoded.answer, max_new_tokens=32, tie_margin=0.1)
        assert check.lossless
        assert check.equals_generate
        assert check.num_not_argmax == 0


def test_stops_at_the_end_of_the_turn(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when tokens behind the end of the turn are emitted, in the middle of accepted proposals too."""
    seen = set()
    for prompt in prompts[:3]:
        free = generate(target, prompt, max_new_tokens=32)
        for place in (0, 6, 13):
            # Two ids, as instruction-tuned models have; the second one never comes.
            never = next(i for i in range(64) if i not in free)
            ending = copy_of(target, torch.float32, free[place], never)
            expected = generate(ending, prompt, max_new_tokens=32)
            assert expected[-1] == free[place]
            for proposer in proposers(trained, prompt, free):
                decoded = decode(ending, prompt, proposer, **LIMITS)
                assert decoded.answer == expected
                if decoded.rounds:
                    last = decoded.rounds[-1]
                    seen.add((last.num_accepted == last.num_emitted, last.num_proposed > last.num_emitted))
                    assert replay(decoded, _same(proposer, trained, prompt, free), **LIMITS) == decoded.rounds
    assert (True, True) in seen, "no answer ended inside a round's accepted proposals"


def _same(proposer: Proposer, draft: Eagle3Draft, prompt: Tensor, answer: list[int]) -> Proposer:
    """A fresh proposer like the given one."""
    if isinstance(proposer, Oracle):
        return Oracle(answer, proposer._accepts, 64)
    return Drafter(draft) if isinstance(proposer, Drafter) else NgramLookup(prompt[:1].tolist())


def test_token_limit(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when a round passes the limit, or the target runs once more after the last token."""
    calls = 0

    class Counting:
        eos_token_ids, dtype, device = target.eos_token_ids, target.dtype, target.device

        def forward(self, *arguments: object) -> object:
            nonlocal calls
            calls += 1
            return target.forward(*arguments)  # type: ignore[arg-type]

    for limit in (1, 2, 3, 7):
        calls = 0
        decoded = decode(Counting(), prompts[2], Drafter(trained), num_draft_tokens=4, max_new_tokens=limit)  # type: ignore[arg-type]
        assert decoded.answer == generate(target, prompts[2], max_new_tokens=limit)
        assert calls == 1 + len(decoded.rounds)
        assert (limit == 1) == (not decoded.rounds)


def test_replay_repeats_the_decode(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when replay feeds other rows, other pieces or another token than the decode did, or stops elsewhere."""
    accepted = set()
    for prompt in prompts:
        decoded = decode(target, prompt, Drafter(trained), **LIMITS)
        assert replay(decoded, Drafter(trained), **LIMITS) == decoded.rounds
        accepted |= {r.num_accepted for r in decoded.rounds}
    assert accepted == {0, 1, 2, 3, 4}, "the trained draft must be accepted to every length for this to say anything"


def test_replay_equals_a_decode_of_its_own(
    target: Target, trained: Eagle3Draft, untrained: Eagle3Draft, prompts: list[Tensor]
) -> None:
    """Red when a baseline replayed on the trained draft's answers takes other rounds than it would alone."""
    for prompt in prompts:
        decoded = decode(target, prompt, Drafter(trained), **LIMITS)
        pairs: list[tuple[Proposer, Proposer]] = [
            (Drafter(untrained), Drafter(untrained)),
            (NgramLookup(prompt[:1].tolist()), NgramLookup(prompt[:1].tolist())),
        ]
        for replayed, alone in pairs:
            assert replay(decoded, replayed, **LIMITS) == decode(target, prompt, alone, **LIMITS).rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrong_verifier_is_caught(
    dtype: torch.dtype, target: Target, untrained: Eagle3Draft, prompts: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the check passes a verifier that accepts whatever is proposed."""
    checked = copy_of(target, dtype)
    monkeypatch.setattr(decode_module, "num_accepted", lambda proposals, verified: len(proposals))
    for prompt in prompts:
        decoded = decode(checked, prompt, Drafter(untrained), **LIMITS)
        check = verify_lossless(checked, prompt, decoded.answer, max_new_tokens=32, tie_margin=0.25)
        assert not check.lossless
        assert not check.equals_generate
        assert check.num_not_argmax > 0
        assert check.largest_gap > 0.25


def test_low_precision_is_rescored(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when a bfloat16 answer is not rescored: right answers pass, a changed token fails and is counted."""
    rounded = copy_of(target, torch.bfloat16)
    for prompt in prompts:
        decoded = decode(rounded, prompt, Drafter(trained), **LIMITS)
        # bfloat16 logits of size 8 to 16 are 2^-4 apart; two spacings are a tie.
        check = verify_lossless(rounded, prompt, decoded.answer, max_new_tokens=32, tie_margin=0.125)
        assert check.lossless
        assert check.largest_gap <= 0.125
        changed = [*decoded.answer[:-1], _worst_token(rounded, decoded)]
        caught = verify_lossless(rounded, prompt, changed, max_new_tokens=32, tie_margin=0.125)
        assert not caught.lossless
        assert caught.num_not_argmax == check.num_not_argmax + 1
        assert caught.largest_gap > 1
        tolerant = verify_lossless(rounded, prompt, changed, max_new_tokens=32, tie_margin=1e3)
        assert tolerant.lossless, "the margin decides, and only the margin"


def _worst_token(target: Target, decoded: Decoded) -> int:
    sequence = torch.cat((decoded.prompt, torch.tensor(decoded.answer[:-1])))
    return int(target.model(input_ids=sequence[None]).logits[0, -1].argmin())


def test_an_answer_that_stops_wrongly_is_caught(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when an answer cut short, or one that talks past the end of its turn, passes the rescoring."""
    prompt = prompts[1]
    rounded = copy_of(target, torch.bfloat16)
    answer = decode(rounded, prompt, Drafter(trained), **LIMITS).answer
    assert not verify_lossless(rounded, prompt, answer[:-1], max_new_tokens=32, tie_margin=0.2).lossless
    place = next(i for i in range(3, 32) if answer[i] not in answer[:i])
    ending = copy_of(target, torch.bfloat16, answer[place])
    assert verify_lossless(ending, prompt, answer[: place + 1], max_new_tokens=32, tie_margin=0.2).lossless
    assert not verify_lossless(ending, prompt, answer, max_new_tokens=32, tie_margin=0.2).lossless


def test_the_models_own_generation_config_is_left_alone(target: Target, prompts: list[Tensor]) -> None:
    """Red when a repetition penalty in the model's files gets into the reference, or is lost afterwards."""
    free = generate(target, prompts[0], max_new_tokens=20)
    penalised = copy_of(target, torch.float32)
    own = GenerationConfig(repetition_penalty=3.0, do_sample=True, temperature=0.7)
    penalised.model.generation_config = own
    assert generate(penalised, prompts[0], max_new_tokens=20) == free
    assert penalised.model.generation_config is own


def test_round_counts(target: Target, prompts: list[Tensor]) -> None:
    """Red when a round reports other numbers than those that happened."""
    answer = generate(target, prompts[2], max_new_tokens=12)
    decoded = decode(target, prompts[2], Oracle(answer, [4, 0, 2], 64), num_draft_tokens=4, max_new_tokens=12)
    assert decoded.rounds == [Round(4, 4, 5), Round(4, 0, 1), Round(4, 2, 3), Round(1, 1, 2)]
