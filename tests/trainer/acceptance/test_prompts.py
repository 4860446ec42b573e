"""Prompt files, turns played one after the other, and prompts far into the context."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.trainer.acceptance.evaluate import evaluate_acceptance
from tasks.trainer.acceptance.prompts import Prompt, heldout_prompt, lengthen, read_prompts
from tasks.trainer.acceptance.stage import chosen_prompts
from tasks.trainer.config_evaluate import Evaluate
from tasks.trainer.data.mask import ChatRenderer, RefusedConversationError
from tasks.trainer.data.prepared import PreparedSample
from tasks.trainer.data.read import Message
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.target import Target


class Letters(ChatRenderer):
    """Each character is a token below 60; 60 opens a user's turn, 61 an answer."""

    def __init__(self) -> None:
        pass

    def prompt_ids(self, messages: Any, tools: str | None = None) -> list[int]:
        ids: list[int] = []
        for message in messages:
            if "REFUSE" in message.content:
                raise RefusedConversationError("template_refused")
            ids += [60 if message.role == "user" else 61, *(ord(c) % 60 for c in message.content)]
        return [*ids, 61]


class Decoder:
    """The tokenizer's part: answers as text."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(60 + i % 60) for i in ids[:3])


def write(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_formats(tmp_path: Path) -> None:
    """Red when a known file's prompts are not found, a category is lost, or turns are taken for one."""
    bench = write(tmp_path / "mt_bench.jsonl", {"question_id": 81, "category": "writing", "turns": ["ab", "c"]})
    found = read_prompts(bench, Letters(), limit=5)
    assert [(p.domain, p.to_come, p.token_ids.tolist()) for p in found] == [
        ("mt_bench/writing", ("c",), [60, 37, 38, 61]),
    ]
    assert found[0].token_ids.dtype == np.int32
    maths = write(tmp_path / "gsm8k.test.jsonl", {"question": "a", "answer": "7"}, {"question": "b", "answer": "8"})
    assert [(p.domain, p.to_come) for p in read_prompts(maths, Letters(), limit=5)] == [("gsm8k", ())] * 2
    assert len(read_prompts(maths, Letters(), limit=1)) == 1
    code = tmp_path / "humaneval.jsonl.gz"
    code.write_bytes(gzip.compress(json.dumps({"task_id": 0, "prompt": "def f():"}).encode() + b"\n"))
    assert read_prompts(str(code), Letters(), limit=5)[0].domain == "humaneval"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "secret"}, r"bad.jsonl, line 1: no prompt found.*turns"),
        ({"turns": []}, "line 1: 'turns' must be"),
        ({"turns": ["secret", ""]}, "none of them empty"),
        ({"prompt": 7}, "'prompt' must be"),
        (["secret"], "no prompt found"),
        ({"prompt": "REFUSE secret"}, r"template does not take it \(template_refused\)"),
    ],
)
def test_bad_records(tmp_path: Path, record: Any, message: str) -> None:
    """Red when a wrong record is skipped, named without its line, or its text gets into the error."""
    with pytest.raises(InputError, match=message) as caught:
        read_prompts(write(tmp_path / "bad.jsonl", record), Letters(), limit=5)
    assert "secret" not in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    """Red when an empty file, a missing one or one that is no JSON passes."""
    with pytest.raises(InputError, match=r"empty.jsonl has no prompts"):
        read_prompts(write(tmp_path / "empty.jsonl"), Letters(), limit=5)
    with pytest.raises(InputError, match=r"missing.jsonl"):
        read_prompts(str(tmp_path / "missing.jsonl"), Letters(), limit=5)
    (tmp_path / "text.jsonl").write_text("secret\n")
    with pytest.raises(InputError, match=r"line 1: not JSON") as caught:
        read_prompts(str(tmp_path / "text.jsonl"), Letters(), limit=5)
    assert "secret" not in str(caught.value)


def test_turns_are_played(
    target: Target, trained: Eagle3Draft, prompts: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a second turn is asked without the first answer before it, counts as a conversation of its own, or one
    that does not fit is asked or forgotten."""
    monkeypatch.setattr(target, "tokenizer", Decoder())
    asked: list[tuple[Message, ...]] = []

    class Recording(Letters):
        def prompt_ids(self, messages: Any, tools: str | None = None) -> list[int]:
            asked.append(tuple(messages))
            return super().prompt_ids(messages)

    def ask(number: int, *to_come: str) -> Prompt:
        return Prompt(prompts[number].numpy().astype(np.int32), said=(Message("user", "q"),), to_come=to_come)

    settings = Evaluate(draft_tokens=4, max_new_tokens=32, batch_size=2)
    steps: list[tuple[int, int]] = []
    report = evaluate_acceptance(
        target,
        trained,
        trained,
        [ask(1, "second", "third"), ask(2), ask(3, "x" * 90)],
        settings,
        renderer=Recording(),
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps[-1] == (6, 6)
    assert report.num_prompts == 3
    assert report.turns_left_out == 1
    assert report.num_tokens == 5 * 31
    assert report.lossless
    said = [tuple((message.role, len(message.content)) for message in messages) for messages in asked]
    assert (("user", 1), ("assistant", 3), ("user", 6)) in said
    assert (("user", 1), ("assistant", 3), ("user", 6), ("assistant", 3), ("user", 5)) in said


def samples(*lengths: int) -> list[PreparedSample]:
    made = []
    for number, length in enumerate(lengths):
        ids = (np.arange(length) + 10 * number).astype(np.int32) % 64
        made.append(PreparedSample(f"s{number}", ids, np.arange(length) >= 3))
    return made


def test_lengthened_prompts() -> None:
    """Red when the first token, the prompt's own end or the others' order is lost, or the length is another."""
    data = samples(6, 5, 4)
    prompt = heldout_prompt(data[0], 0, "law")
    assert (prompt.token_ids.tolist(), prompt.domain) == ([0, 1, 2], "law")
    longer = lengthen(prompt, data[1:], 9)
    assert longer.token_ids.tolist() == [0, 23, 10, 11, 12, 13, 14, 1, 2]
    assert longer.context == 9
    assert lengthen(prompt, data[1:], 2).token_ids.tolist() == [0, 2]
    with pytest.raises(InputError, match="context_lengths: 13 tokens"):
        lengthen(prompt, data[1:], 13)


def test_sets_are_domains(tmp_path: Path, target: Target, trained: Eagle3Draft) -> None:
    """Red when a set is not a domain, a set is read past its limit, or lengthened prompts count in tau."""
    path = write(tmp_path / "gsm8k.jsonl", *({"question": f"a{i}"} for i in range(5)))
    data = samples(*[20] * 4)
    settings = Evaluate(prompts=["heldout", path], num_prompts=3, max_new_tokens=16, context_lengths=[40], batch_size=4)
    chosen = chosen_prompts(settings, data, ["law", "code", "law", "law"], Letters())
    assert [(p.domain, p.context) for p in chosen] == [
        ("heldout/law", None), ("heldout/code", None), ("heldout/law", None),
        ("heldout/law", 40), ("heldout/code", 40), ("heldout/law", 40),
        ("gsm8k", None), ("gsm8k", None), ("gsm8k", None),
    ]  # fmt: skip
    assert [p.domain for p in chosen_prompts(Evaluate(num_prompts=2), data, ["law", "code"], Letters())] == [
        "law", "code",
    ]  # fmt: skip
    report = evaluate_acceptance(target, trained, trained, chosen, settings)
    assert report.num_prompts == 6
    assert [(one["context"], one["prompts"]) for one in report.lengthened] == [(40, 3)]
    assert {one["name"]: one["prompts"] for one in report.domains} == {"gsm8k": 3, "heldout/law": 2, "heldout/code": 1}
    plain = evaluate_acceptance(target, trained, trained, [p for p in chosen if p.context is None], settings)
    assert plain.tau == report.tau
    assert torch.isfinite(torch.tensor(report.lengthened[0]["tau"]))
