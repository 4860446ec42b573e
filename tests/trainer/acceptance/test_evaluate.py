"""The whole evaluation on a tiny target."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.trainer.acceptance import evaluate as evaluate_module
from tasks.trainer.acceptance.decode import Decoded
from tasks.trainer.acceptance.evaluate import evaluate_acceptance
from tasks.trainer.acceptance.prompts import Prompt
from tasks.trainer.config_evaluate import Evaluate
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.target import Target

SETTINGS = Evaluate(draft_tokens=4, max_new_tokens=32, bootstrap_samples=500, batch_size=3)
TREE = {"drafting": "tree", "tree_depth": 5, "tree_top_k": 4, "tree_tokens": 16}


def asked(prompts: list[Tensor], domains: list[str] | None = None) -> list[Prompt]:
    names = domains or [""] * len(prompts)
    return [Prompt(prompt.numpy().astype(np.int32), name) for prompt, name in zip(prompts, names, strict=True)]


def changed(**values: Any) -> Evaluate:
    return Evaluate.model_validate({**SETTINGS.model_dump(), **values})


def test_trained_draft_beats_both_baselines(
    target: Target, trained: Eagle3Draft, untrained: Eagle3Draft, prompts: list[Tensor]
) -> None:
    """Red when a baseline gets the trained draft's rounds or the other way round, or the sums do not add up."""
    steps: list[tuple[int, int]] = []
    report = evaluate_acceptance(
        target, trained, untrained, asked(prompts), SETTINGS, progress=lambda done, total: steps.append((done, total))
    )
    assert steps == [(3, 4), (4, 4)]
    assert report.lossless
    assert report.lossless_check == "generate"
    assert report.num_equal_to_generate == 4
    assert report.num_not_argmax == 0
    assert report.lossy_prompts == []
    assert report.tau_interval[0] <= report.tau <= report.tau_interval[1]
    assert report.tau > 2 > max(report.tau_ngram, report.tau_untrained) >= 1
    assert report.tau_minus_ngram_interval[0] > 0
    assert report.tau_minus_untrained_interval[0] > 0
    assert len(report.acceptance) == len(report.acceptance_ngram) == len(report.acceptance_untrained) == 4
    assert report.acceptance[0] > 0.5 > report.acceptance_untrained[0]
    assert report.num_tokens == 4 * 31
    assert report.loop_share == 1 - report.num_tokens_counted / report.num_tokens
    assert report.speculative_seconds > 0
    assert report.plain_seconds > 0
    read = json.loads(json.dumps(dataclasses.asdict(report), allow_nan=False))
    assert read["tau"] == report.tau
    assert read["tau_interval"] == list(report.tau_interval)


def test_domains_add_up(target: Target, trained: Eagle3Draft, untrained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when a prompt counts for another domain, or domains do not sum to the whole."""
    names = ["law", "code", "law", "law"]
    report = evaluate_acceptance(target, trained, untrained, asked(prompts, names), SETTINGS)
    assert [(one["name"], one["prompts"]) for one in report.domains] == [("law", 3), ("code", 1)]
    law, code = report.domains
    assert law["tau_interval"][0] <= law["tau"] <= law["tau_interval"][1]
    assert code["tau_interval"] is None
    alone = evaluate_acceptance(target, trained, untrained, asked([prompts[i] for i in (0, 2, 3)]), SETTINGS)
    assert law["tau"] == alone.tau
    assert law["acceptance"] == alone.acceptance
    assert alone.domains == []


def test_same_proposer_same_tau(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when replaying gives a proposer another tau than decoding: the trained draft stands in as the baseline."""
    report = evaluate_acceptance(target, trained, trained, asked(prompts), SETTINGS)
    assert report.tau_untrained == report.tau
    assert report.tau_minus_untrained_interval == (0.0, 0.0)
    assert report.acceptance_untrained == report.acceptance


def test_wrong_verifier_is_reported(
    target: Target,
    trained: Eagle3Draft,
    untrained: Eagle3Draft,
    prompts: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a lossy decode is reported as lossless. One token of prompt 1's answer is another."""
    rule = evaluate_module.speculate

    def lossy(*arguments: Any, **keywords: Any) -> list[Decoded]:
        found = rule(*arguments, **keywords)
        for decoded in found:
            if len(decoded.prompt) == 5:
                decoded.answer[7] = (decoded.answer[7] + 1) % 64
        return found

    monkeypatch.setattr(evaluate_module, "speculate", lossy)
    report = evaluate_acceptance(target, trained, untrained, asked(prompts), SETTINGS)
    assert not report.lossless
    assert report.lossy_prompts == [1]
    assert report.num_equal_to_generate == 3
    assert report.num_not_argmax > 0


def test_loops_are_cut(trained: Eagle3Draft, untrained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when looping answers count in full: a target that repeats one pattern is free for n-gram lookup."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    looping = Target(LlamaForCausalLM(config), None, name="loop", aux_layer_ids=(0, 1, 2))
    report = evaluate_acceptance(looping, trained, untrained, asked(prompts), SETTINGS)
    assert report.lossless
    assert report.loop_share > 0.3
    assert report.num_tokens_counted < report.num_tokens


def test_input_errors(target: Target, trained: Eagle3Draft, untrained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when a prompt that cannot be decoded, or too few answers, is not refused by name before the work is done."""
    empty = [*asked(prompts[:1]), Prompt(np.zeros(0, dtype=np.int32))]
    with pytest.raises(InputError, match="prompt 1 has no tokens"):
        evaluate_acceptance(target, trained, untrained, empty, SETTINGS)
    long = [Prompt(np.zeros(100, dtype=np.int32))]
    with pytest.raises(InputError, match=r"prompt 0 has 100 tokens.*128 positions"):
        evaluate_acceptance(target, trained, untrained, long, SETTINGS)
    with pytest.raises(InputError, match="only 1 of 1 prompts"):
        evaluate_acceptance(target, trained, untrained, asked(prompts[:1]), SETTINGS)
