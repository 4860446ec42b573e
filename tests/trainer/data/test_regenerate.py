"""Regeneration with a tiny random Llama: turn by turn, in committed batches, the same after a kill."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tasks.trainer.data.mask import ChatRenderer
from tasks.trainer.data.read import Conversation, Message, Refusals
from tasks.trainer.data.regenerate import regenerate
from tasks.trainer.errors import InputError

ROOT = Path(__file__).parents[3]
# A random model says <|im_end|> once in 364 tokens. With a tenth of the letters sampled answers end at all lengths.
MANY_ENDS = (3, *range(20, 60))
FEWER_ENDS = (3, *range(20, 26))


def make_target(model: Any, tokenizer: PreTrainedTokenizerBase, eos: tuple[int, ...]) -> Any:
    return SimpleNamespace(model=model, tokenizer=tokenizer, eos_token_ids=eos, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def target(tokenizer_of: Callable[..., PreTrainedTokenizerBase]) -> Any:
    tokenizer = tokenizer_of("chatml")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.5,  # random enough that greedy answers differ from prompt to prompt
    )
    model = LlamaForCausalLM(config).eval()
    # A target's own generation config must not leak in: this one would forbid most of what the model says.
    model.generation_config = GenerationConfig(repetition_penalty=9.0, suppress_tokens=list(range(60, 300)), top_k=2)
    return make_target(model, tokenizer, MANY_ENDS)


def ask(*turns: str, line: int = 1, role: str = "user") -> Conversation:
    return Conversation("a.jsonl", line, tuple(Message(role, turn) for turn in turns))


PROMPTS = [
    ask("What does the eagle see?", line=1),
    ask("end", "Why?", line=2),
    Conversation("a.jsonl", 3, (Message("system", "be"), Message("user", "q"), Message("assistant", "old answer"))),
    *(ask("day " * n, "and" * n, line=3 + n) for n in range(1, 8)),
]
SETTINGS: dict[str, Any] = {
    "fingerprint": "f",
    "max_new_tokens": 12,
    "batch_size": 3,
    "temperature": 1.0,
    "seed": 5,
}


def run(target: Any, prompts: list[Conversation], folder: Path, **changed: Any) -> list[Conversation]:
    settings = {"refusals": Refusals(), **SETTINGS, **changed}
    return regenerate(target, prompts, out_dir=folder, **settings)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*/*")}


def test_every_user_turn_is_answered_in_order(target: Any, tmp_path: Path) -> None:
    """Red when an old answer stays, a turn is skipped, order or place are lost, or an outcome has no count."""
    refusals = Refusals()
    seen: list[tuple[int, int, int]] = []
    answered = run(target, PROMPTS, tmp_path, refusals=refusals, progress=lambda *state: seen.append(state))
    assert [c.line for c in answered] == sorted(c.line for c in answered)
    assert len(answered) + refusals.total == len(PROMPTS)
    assert set(refusals.counts) <= {"empty_answer"}
    assert len(answered) >= 4
    by_line = {c.line: c for c in PROMPTS}
    reasons = set()
    for conversation in answered:
        asked = [m for m in by_line[conversation.line].messages if m.role != "assistant"]
        assert [m for m in conversation.messages if m.role != "assistant"] == asked
        for question, answer in zip(conversation.messages, conversation.messages[1:], strict=False):
            if question.role == "user":
                assert answer.role == "assistant"
                assert answer.content != "old answer"
        reasons |= {m.finish_reason for m in conversation.messages if m.role == "assistant"}
    assert reasons == {"stop", "length"}
    assert [state[:2] for state in seen] == [(3, 10), (6, 10), (9, 10), (10, 10)]
    assert seen[-1][2] > seen[0][2] > 0


def test_greedy_answers_are_the_models_own(target: Any, tmp_path: Path) -> None:
    """Red when left padding, a second BOS, the model's own generation config or the turn's history changes what is
    said: each answer is decoded again here, alone and without `generate`."""
    target = make_target(target.model, target.tokenizer, FEWER_ENDS)
    answered = run(target, PROMPTS, tmp_path, temperature=0.0, batch_size=len(PROMPTS))
    assert len(answered) >= 6
    renderer = ChatRenderer(target.tokenizer, target.eos_token_ids)
    for conversation in answered:
        for i, message in enumerate(conversation.messages):
            if message.role != "assistant":
                continue
            ids = renderer.prompt_ids(conversation.messages[:i])
            start = len(ids)
            while len(ids) - start < SETTINGS["max_new_tokens"]:
                ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] in target.eos_token_ids:
                    break
            finish = "stop" if ids[-1] in target.eos_token_ids else "length"
            own = target.tokenizer.decode(ids[start : len(ids) - (finish == "stop")])
            assert message.finish_reason == finish
            assert message.content == (own if finish == "stop" else own.rstrip("\ufffd"))
    assert target.model.generation_config.repetition_penalty == 9.0  # put back


def test_a_mix_of_temperatures_and_who_answered(target: Any, tmp_path: Path) -> None:
    """Red when a prompt's temperature is not its own, greedy answers depend on the mix, or an answer does not say how
    it was made."""
    greedy = {c.line: c for c in run(target, PROMPTS, tmp_path / "greedy", temperature=0.0, batch_size=1)}
    mixed = run(target, PROMPTS, tmp_path / "mixed", temperature=0.0, temperatures=(0.0, 1.0), batch_size=1)
    told = {c.line: json.loads(c.answered_by or "") for c in mixed}
    assert {entry["temperature"] for entry in told.values()} == {0.0, 1.0}
    assert all((entry["by"], entry["fingerprint"], entry["seed"]) == ("target", "f", 5) for entry in told.values())
    same = [c.messages == greedy[c.line].messages for c in mixed if told[c.line]["temperature"] == 0.0]
    sampled = {c.line: c for c in mixed if told[c.line]["temperature"] == 1.0}
    assert all(same)
    assert any(line not in greedy or c.messages != greedy[line].messages for line, c in sampled.items())
    again = run(target, PROMPTS, tmp_path / "mixed", temperature=0.0, temperatures=(0.0, 1.0), batch_size=1)
    assert again == mixed


def test_settings_and_prompts_have_folders_of_their_own(target: Any, tmp_path: Path) -> None:
    """Red when answers made under other settings, of another target or to other prompts are taken up."""
    changes: list[dict[str, Any]] = [
        {},
        {"fingerprint": "g"},
        {"max_new_tokens": 13},
        {"batch_size": 4},
        {"temperature": 0.5},
        {"seed": 6},
        {"template_arguments": {"date_string": "today"}},
    ]
    for number, change in enumerate(changes, start=1):
        run(target, PROMPTS[:4], tmp_path, **change)
        assert len(list(tmp_path.iterdir())) == number
    run(target, PROMPTS[:5], tmp_path)
    assert len(list(tmp_path.iterdir())) == len(changes) + 1
    run(target, [*reversed(PROMPTS[:4])], tmp_path)  # another order of the same prompts is the same work
    assert len(list(tmp_path.iterdir())) == len(changes) + 1


def test_committed_batches_are_read_back_and_damaged_ones_made_again(
    target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a rerun generates again, counts other refusals, or believes a damaged file."""
    refusals = [Refusals() for _ in range(3)]
    first = run(target, PROMPTS, tmp_path, refusals=refusals[0])
    before = files(tmp_path)
    batch = next(tmp_path.glob("*/batch-00001.jsonl"))
    batch.write_bytes(batch.read_bytes()[:-70])
    torch.manual_seed(99)  # the caller's random numbers have no part in it
    with caplog.at_level(logging.WARNING):
        assert run(target, PROMPTS, tmp_path, refusals=refusals[1]) == first
    assert "batch-00001.jsonl does not match its checksum" in caplog.text
    assert files(tmp_path) == before

    def no_more(*_: object, **__: object) -> None:
        raise AssertionError("generated again")

    monkeypatch.setattr(target.model, "generate", no_more)
    tokens: list[int] = []
    again = run(target, PROMPTS, tmp_path, refusals=refusals[2], progress=lambda _, __, n: tokens.append(n))
    assert again == first
    assert set(tokens) == {0}
    assert refusals[0] == refusals[1] == refusals[2]


KILLED = """
import os, pathlib, signal, sys
import pytest
sys.path.insert(0, "tests/trainer/data")
import test_regenerate as test
from transformers import AutoTokenizer, LlamaForCausalLM

place, folder, out = sys.argv[1:]
model = LlamaForCausalLM.from_pretrained(folder)
target = test.make_target(model, AutoTokenizer.from_pretrained(folder), test.MANY_ENDS)
calls = 0

def kill_at(owner, name, call):
    original = getattr(owner, name)
    def counted(*args, **kwargs):
        global calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(owner, name, counted)

# Before the rename that commits the second batch (the first is that of settings.json), or in the next but one.
kill_at(*((pathlib.Path, "replace", 3) if place == "commit" else (model, "generate", 3)))
test.run(target, test.PROMPTS, pathlib.Path(out))
"""


def test_killed_and_resumed_equals_uninterrupted(target: Any, tmp_path: Path) -> None:
    """Red when a resumed run redoes a committed batch, takes up a half-written one, or samples other answers."""
    model_folder, out = tmp_path / "model", tmp_path / "resumed"
    target.model.generation_config = GenerationConfig()  # the other one is not valid enough to be saved
    target.model.save_pretrained(model_folder)
    target.tokenizer.save_pretrained(model_folder)
    committed = []
    for place in ("commit", "generate"):
        process = subprocess.run(
            [sys.executable, "-c", KILLED, place, str(model_folder), str(out)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert process.returncode == -signal.SIGKILL, process.stderr
        committed.append(sorted(path.name for path in out.glob("*/batch-*.jsonl")))
    assert committed[0] == ["batch-00000.jsonl"]
    assert [path.name for path in out.glob("*/.batch-00001*")]  # half-written, and left alone
    assert committed[1] == ["batch-00000.jsonl", "batch-00001.jsonl"]
    uninterrupted = run(target, PROMPTS, tmp_path / "uninterrupted")
    assert run(target, PROMPTS, out) == uninterrupted
    whole = files(tmp_path / "uninterrupted")
    assert {name: raw for name, raw in files(out).items() if not name.startswith(".")} == whole
    assert len(whole) == 5


def test_prompts_that_cannot_be_answered_are_counted(target: Any, tmp_path: Path) -> None:
    """Red when one of these is dropped without a count, or stops the others."""
    refusals = Refusals()
    prompts = [
        ask("q", line=1),
        ask("q", line=2),
        ask("s", line=3, role="system"),
        Conversation("a.jsonl", 4, (Message("user", "q"), Message("tool", "t"))),
        ask("day " * 200, line=5),
        ask("r", "day " * 200, line=6),
    ]
    target = make_target(target.model, target.tokenizer, (3,))
    answered = run(target, prompts, tmp_path, refusals=refusals, temperature=0.0)
    assert [c.line for c in answered] == [1]
    assert refusals.counts == {"duplicate_prompt": 1, "no_user_turn": 1, "tool_turn": 1, "prompt_too_long": 2}
    assert refusals.first["prompt_too_long"] == "a.jsonl, line 5"


def test_an_empty_answer_is_refused_with_a_count(target: Any, tmp_path: Path) -> None:
    """Red when a target that says nothing gives a sample, or its next turns are asked all the same."""
    mute = make_target(target.model, target.tokenizer, tuple(range(len(target.tokenizer))))
    refusals = Refusals()
    assert run(mute, PROMPTS, tmp_path, refusals=refusals) == []
    assert refusals.counts == {"empty_answer": len(PROMPTS)}


def test_user_mistakes(target: Any, tokenizer_of: Callable[..., PreTrainedTokenizerBase], tmp_path: Path) -> None:
    """Red when a folder that cannot be made, or a model without a chat template, ends in a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written: .*data\.regenerate_dir"):
        run(target, PROMPTS, tmp_path / "file")
    with pytest.raises(InputError, match="has no chat template"):
        run(make_target(target.model, tokenizer_of(None), (3,)), PROMPTS, tmp_path)
