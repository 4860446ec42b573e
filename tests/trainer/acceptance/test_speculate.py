"""Batches of prompts and trees: the same answers as the target alone, the same rounds as one prompt at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig

from tasks.trainer.acceptance.decode import decode, generate
from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.acceptance.lossless import generate_batch
from tasks.trainer.acceptance.speculate import Rules, replay, speculate
from tasks.trainer.acceptance.statistics import count_rounds, tau
from tasks.trainer.acceptance.target_rows import TargetRows, check_rows
from tasks.trainer.acceptance.tree import DraftTree, TreeShape
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.target import Target

CHAIN, TREE = Rules(TreeShape.chain(4), 32), Rules(TreeShape(4, 5, 20), 32)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make(config: object, *eos_token_ids: int) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return Target(model, None, name="tiny", aux_layer_ids=(0, 1, 2), eos_token_ids=eos_token_ids)


def test_chains_equal_one_prompt_at_a_time(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when a text's cache, mask, positions or draft take something from the text beside it, or a round is counted
    otherwise than in decode.py."""
    for one, prompt in zip(speculate(target, trained, prompts, CHAIN), prompts, strict=True):
        alone = decode(target, prompt, Drafter(trained), num_draft_tokens=4, max_new_tokens=32)
        assert one.answer == alone.answer == generate(target, prompt, max_new_tokens=32)
        assert one.rounds == alone.rounds
        # float32 through four layers, in sums of other lengths.
        torch.testing.assert_close(one.aux_hidden, alone.aux_hidden, rtol=1e-4, atol=1e-3)


def test_tree_that_is_a_chain(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when a tree of width 1 is anything but a chain: greedy, and drawn with the same random numbers."""
    narrow = TreeShape(top_k=1, depth=4, num_tokens=4)
    assert [one.rounds for one in speculate(target, trained, prompts, Rules(narrow, 32))] == [
        one.rounds for one in speculate(target, trained, prompts, CHAIN)
    ]
    drawn = TreeShape(top_k=1, depth=4, num_tokens=9, drawn=True)
    trees = speculate(target, trained, prompts, Rules(drawn, 32, 1.0))
    chains = speculate(target, trained, prompts, Rules(TreeShape.chain(4, drawn=True), 32, 1.0))
    assert [(one.answer, one.rounds) for one in trees] == [(one.answer, one.rounds) for one in chains]


def test_trees_are_lossless_and_better(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when a node sees another branch, the wrong keys are kept after a walk, or width gains nothing."""

    def worth(rules: Rules) -> float:
        found = speculate(target, trained, unseen, rules)
        for one in found:
            assert one.answer == generate(target, one.prompt, max_new_tokens=32)
            assert sum(round_.num_emitted for round_ in one.rounds) == 31
        return tau([count_rounds(one.rounds, cut=32, num_draft_tokens=rules.shape.depth) for one in found])

    generator = torch.Generator().manual_seed(9)
    unseen = [*prompts, *(torch.randint(64, (n,), generator=generator) for n in (3, 30, 8))]
    assert worth(Rules(TreeShape(4, 4, 20), 32)) > worth(CHAIN) > 1
    assert any(round_.num_accepted for one in speculate(target, trained, unseen[4:], TREE) for round_ in one.rounds)


@pytest.mark.parametrize("rules", [CHAIN, TREE], ids=["chain", "tree"])
def test_replay(
    rules: Rules, target: Target, trained: Eagle3Draft, untrained: Eagle3Draft, prompts: list[Tensor]
) -> None:
    """Red when replaying a draft takes other rounds than decoding with it, ends of turns included."""
    free = generate(target, prompts[2], max_new_tokens=32)
    ending = make(LlamaConfig(**SIZES, tie_word_embeddings=False), free[9])
    ending.model.load_state_dict(target.model.state_dict())
    for model in (target, ending):
        decoded = speculate(model, trained, prompts, rules)
        assert replay(decoded, trained, rules) == [one.rounds for one in decoded]
        assert replay(decoded, untrained, rules) == [one.rounds for one in speculate(model, untrained, prompts, rules)]
    assert decoded[2].answer == free[: free.index(free[9]) + 1]


def test_batches_draw_the_same(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when an answer depends on what it is decoded beside, or on nothing but its seed."""
    for shape in (TreeShape(4, 5, 20, drawn=True), TreeShape(4, 5, 20)):
        rules = Rules(shape, 32, 1.0)
        together = speculate(target, trained, prompts, rules, seeds=[5, 6, 7, 8])
        alone = [
            speculate(target, trained, [prompt], rules, seeds=[seed])[0]
            for prompt, seed in zip(prompts, (5, 6, 7, 8), strict=True)
        ]
        assert [one.answer for one in together] == [one.answer for one in alone]
        other = speculate(target, trained, prompts, rules, seeds=[1, 2, 3, 4])
        assert [one.answer for one in together] != [one.answer for one in other]


def test_sampled_replay_is_exact_for_top_candidates(
    target: Target, trained: Eagle3Draft, prompts: list[Tensor]
) -> None:
    """Red when replaying top candidates on a sampled answer takes other rounds than the decode did."""
    rules = Rules(TreeShape(4, 5, 20), 32, 1.0)
    decoded = speculate(target, trained, prompts, rules)
    assert replay(decoded, trained, rules) == [one.rounds for one in decoded]


def test_generate_batch(target: Target, prompts: list[Tensor]) -> None:
    """Red when padding gets into the answers, or sampling ignores its temperature or seed."""
    greedy, seconds = generate_batch(target, prompts, max_new_tokens=20)
    assert greedy == [generate(target, prompt, max_new_tokens=20) for prompt in prompts]
    assert seconds > 0
    cold, _ = generate_batch(target, prompts, max_new_tokens=20, temperature=1e-4)
    assert cold == greedy
    warm, _ = generate_batch(target, prompts, max_new_tokens=20, temperature=1.0, seed=1)
    assert warm != greedy
    assert warm == generate_batch(target, prompts, max_new_tokens=20, temperature=1.0, seed=1)[0]


TARGETS = {
    "llama": LlamaConfig(**SIZES),
    "mistral, a window": MistralConfig(**SIZES, sliding_window=8, head_dim=8),
    "gemma 3, windows in some layers": Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "gpt2, learned positions": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=128, initializer_range=0.4, eos_token_id=None,
        bos_token_id=None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_rows_equal_the_branch_alone(name: str) -> None:
    """Red when a model's windows or positions are not those of its own decoding: every node of two texts' trees, and
    what comes after a walk, against a forward of its branch alone."""
    target = make(TARGETS[name])
    check_rows(target)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(64, (n,), generator=generator) for n in (11, 20)]
    rows = TargetRows(target, num_texts=2, capacity=40)
    for text, prompt in enumerate(prompts):
        rows.read(text, prompt)
    tree = DraftTree([1, 2, 3, 4, 5], [0, 0, 1, 2, 4])
    logits, _ = rows.verify([7, 8], [tree, DraftTree([9], [0])])

    def alone(text: int, *tokens: int) -> Tensor:
        whole = torch.cat((prompts[text], torch.tensor(tokens)))
        return target.prefill(whole[None], DynamicCache())[0][-1]

    branches = [(), (1,), (2,), (1, 3), (2, 4), (2, 4, 5)]
    for node, branch in enumerate(branches):
        torch.testing.assert_close(logits[0, node], alone(0, 7, *branch), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(logits[1, 1], alone(1, 8, 9), rtol=1e-4, atol=1e-3)
    rows.accept([[0, 2, 4, 5], [0]])
    rows.keep([1, 0])
    logits, _ = rows.verify([6, 6], [DraftTree([3], [0]), DraftTree([], [])])
    torch.testing.assert_close(logits[0, 1], alone(1, 8, 6, 3), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(logits[1, 0], alone(0, 7, 2, 4, 5, 6), rtol=1e-4, atol=1e-3)


def test_a_target_that_takes_no_tree_is_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a model that ignores mask or positions, or has another attention, is measured with wrong numbers."""
    rule = Target.forward_rows

    def plain_positions(self: Target, token_ids: Tensor, *arguments: object, **keywords: object) -> object:
        keywords["position_ids"] = torch.arange(token_ids.shape[1])[None]
        return rule(self, token_ids, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "forward_rows", plain_positions)
    with pytest.raises(InputError, match=r"differ by .*batch_size=1"):
        check_rows(target)
    monkeypatch.undo()
    monkeypatch.setattr(target.config, "layer_types", ["chunked_attention"], raising=False)
    with pytest.raises(InputError, match="layers of chunked_attention"):
        check_rows(target)


def test_bfloat16_rows(target: Target, trained: Eagle3Draft, prompts: list[Tensor]) -> None:
    """Red when a dtype is mixed up in cache, mask or draft."""
    rounded = make(LlamaConfig(**SIZES, tie_word_embeddings=False))
    rounded.model.load_state_dict(target.model.state_dict())
    rounded = Target(rounded.model.to(torch.bfloat16), None, name="bf16", aux_layer_ids=(0, 1, 2))
    draft = Eagle3Draft(trained.config, embedding=rounded.embedding, d2t=trained.d2t.clone(), t2d=trained.t2d.clone())
    draft.load_state_dict(trained.state_dict())
    decoded = speculate(rounded, draft.to(torch.bfloat16), prompts, TREE)
    assert [len(one.answer) for one in decoded] == [32] * 4
    assert np.mean([len(one.rounds) for one in decoded]) < 31
