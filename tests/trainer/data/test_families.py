"""Masks token by token, for sample files in all forms and templates of six families, against golden files.

A golden file has a line for each token: `+` where it is supervised, then the token as JSON. They were read by eye;
EYAS_GOLDEN=write writes them anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tasks.trainer.data.conversation import Conversation, Message, ToolCall
from tasks.trainer.data.mask import ChatRenderer, RefusedConversationError, Row
from tasks.trainer.data.read import read_conversations
from tests.trainer.data.families import FAMILIES, family_tokenizer

HERE = Path(__file__).parent
SAMPLES = ("messages.jsonl", "bom_crlf.jsonl", "sharegpt.json", "reasoning.jsonl")


def renderer_of(family: str) -> ChatRenderer:
    tokenizer = family_tokenizer(family)
    return ChatRenderer(tokenizer, (tokenizer.eos_token_id,))


def written(renderer: ChatRenderer, row: Row) -> str:
    """A line a token."""
    tokens = [json.dumps(renderer.tokenizer.decode([int(i)]), ensure_ascii=False) for i in row[0]]
    return "".join(f"{'+' if kept else ' '} {token}\n" for token, kept in zip(tokens, row[1], strict=True))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_golden_masks(family: str) -> None:
    """Red when one token of any sample is supervised that was not, or the other way round, or the rows change."""
    renderer = renderer_of(family)
    text = ""
    for name in SAMPLES:
        for conversation in read_conversations([str(HERE / "samples" / name)])[0]:
            text += f"# {name}, record {conversation.line}\n"
            try:
                rows = renderer.rows(conversation)
            except RefusedConversationError as refused:
                text += f"refused: {refused.reason}\n"
                continue
            text += "--\n".join(written(renderer, row) for row in rows)
    path = HERE / "golden" / f"{family}.txt"
    if os.environ.get("EYAS_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def spans(renderer: ChatRenderer, row: Row) -> list[str]:
    """The supervised text, run by run."""
    ids, mask = row
    runs, before = [], False
    for token, kept in zip(ids.tolist(), mask.tolist(), strict=True):
        if kept:
            runs.append([*(runs.pop() if before else ()), token])
        before = kept
    return [renderer.tokenizer.decode(run) for run in runs]


def test_rewritten_history_becomes_a_row_an_answer() -> None:
    """Red when an earlier answer is trained on without the thought that the target had, when a thought of history is
    shown where the target would not see it, or `last` gives more than the last answer."""
    renderer = renderer_of("reasoning")
    thinking, inline = read_conversations([str(HERE / "samples/reasoning.jsonl")])[0]
    first, second = renderer.rows(thinking)
    assert spans(renderer, first) == ["<think>\nTwo and two make four.\n</think>\n\n4<|im_end|>"]
    assert spans(renderer, second) == ["<think>\nFour and one.\n</think>\n\n5<|im_end|>"]
    assert "make four" not in renderer.tokenizer.decode(second[0].tolist())
    assert [spans(renderer, row) for row in renderer.rows(thinking, supervise="last")] == [spans(renderer, second)]
    assert len(renderer.rows(inline)) == 1


def test_supervise_last_in_every_form() -> None:
    """Red when `last` supervises another answer than the last one, of messages, text or tokens."""
    renderer = renderer_of("chatml")
    (text,) = read_conversations([str(HERE / "samples/preformatted.jsonl")])[0]
    assert [spans(renderer, row) for row in renderer.rows(text)] == [["Hi.<|im_end|>", "Bye.<|im_end|>"]]
    assert [spans(renderer, row) for row in renderer.rows(text, supervise="last")] == [["Bye.<|im_end|>"]]
    messages = read_conversations([str(HERE / "samples/messages.jsonl")])[0][1]
    assert spans(renderer, renderer.rows(messages, supervise="last")[0]) == ["Less.\n\nIt hunts by day.<|im_end|>"]
    given = Conversation("f", 1, token_ids=tuple(range(8)), loss_mask=tuple(map(bool, (0, 1, 1, 0, 0, 1, 1, 0))))
    assert renderer.rows(given)[0][1].tolist() == [bool(i) for i in (0, 1, 1, 0, 0, 1, 1, 0)]
    assert renderer.rows(given, supervise="last")[0][1].tolist() == [bool(i) for i in (0, 0, 0, 0, 0, 1, 1, 0)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_preformatted_text_is_masked_as_its_messages(family: str) -> None:
    """Red when a text that the template made is masked otherwise than the messages it was made of."""
    renderer = renderer_of(family)
    messages = (
        Message("user", "Hello"),
        Message("assistant", "Hi."),
        Message("user", "Bye"),
        Message("assistant", "x y"),
    )
    conversation = Conversation("f", 1, messages)
    text = renderer._text(messages)
    (row,) = renderer.rows(conversation)
    for given in (text, text.removeprefix(renderer.tokenizer.bos_token)):
        (same,) = renderer.rows(Conversation("f", 1, text=given))
        assert written(renderer, same) == written(renderer, row)
    with pytest.raises(RefusedConversationError, match="no_answer_header"):
        renderer.rows(Conversation("f", 1, text="words of nobody"))


def test_tool_calls_are_supervised_and_results_are_not() -> None:
    """Red when a call is not what the target is trained to say, its result is, or the tools are not shown."""
    renderer = renderer_of("chatml")
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "%s"}}\n</tool_call><|im_end|>'
    for name, town, answer in (("tools", "Bergen", "Yes, take a coat."), ("sharegpt_tools", "Rome", "It shines.")):
        (conversation,) = read_conversations([str(HERE / f"samples/{name}.jsonl")])[0]
        (row,) = renderer.rows(conversation)
        assert spans(renderer, row) == [call % town, answer + "<|im_end|>"]
        assert "Weather of a town" in renderer.tokenizer.decode(row[0].tolist())


@pytest.mark.parametrize(
    ("family", "messages", "reason"),
    [
        ("no_system", (Message("system", "s"), Message("user", "q"), Message("assistant", "a")), "system_role_refused"),
        ("chatml", (Message("user", "q"), Message("assistant", "a", reasoning="hm")), "reasoning_not_rendered"),
        ("llama3", (Message("user", "q"), Message("assistant", "", tool_calls=(ToolCall("f", "{}"),))),
         "tool_call_not_rendered"),
        ("chatml", (Message("user", "q"), Message("assistant", "a", reasoning="<|im_end|>")),
         "end_of_turn_inside_answer"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_show_is_refused(family: str, messages: tuple[Message, ...], reason: str) -> None:
    """Red when a part of an answer vanishes in the template and the rest is trained on."""
    with pytest.raises(RefusedConversationError, match=rf"^{reason}$"):
        renderer_of(family).rows(Conversation("f", 1, messages))
