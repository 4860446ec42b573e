"""What a night's drafts are asked: every form of conversation, as the target would be asked."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from storage.location import locate
from tasks.trainer.data.mask import ChatRenderer
from tasks.trainer.data.read import read_conversations
from tasks.trainer.errors import InputError
from tasks.trainer.nightly.judge import read_prompts
from tasks.trainer.target_text import TargetText, load_text
from tests.trainer.nightly.conftest import MakeConfig, line, write_lines


@pytest.fixture
def text(target_folder: Path) -> TargetText:
    return load_text(
        str(target_folder), dtype="bfloat16", aux_layer_ids=None, chat_template=None, revision=None, device="cpu"
    )


def test_prompts_are_what_training_shows_before_the_first_answer(
    make_config: MakeConfig, text: TargetText, tmp_path: Path
) -> None:
    """Red when a draft is judged on another prompt than training shows for the same conversation, or the forms that are
    rendered already, or tokens, are judged on nothing."""
    chat = "<|im_start|>user\nold<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n"
    ids = text.tokenizer(chat, add_special_tokens=False)["input_ids"]
    more = {"messages": [{"role": "system", "content": "be brief"}, *line(2)["messages"], *line(3)["messages"]]}
    lines = [line(1), more, {"text": chat}, {"input_ids": ids, "loss_mask": [0] * (len(ids) - 4) + [1] * 4}]
    path = write_lines(tmp_path / "night/recent.jsonl", lines)
    config = make_config().run_config()
    found = read_prompts(locate(str(path.parent)), path.name, config, text)
    renderer = ChatRenderer(text.tokenizer, text.eos_token_ids)
    expected = []
    for conversation in read_conversations([str(path)])[0]:
        token_ids, mask = renderer.rows(conversation)[0]
        expected.append(token_ids[: int(np.argmax(mask))].tolist())
    assert sorted(prompt.tolist() for prompt in found) == sorted(expected)
    assert all(prompt.dtype == np.int32 for prompt in found)


def test_prompts_that_cannot_be_asked_are_left_out_with_a_word(
    make_config: MakeConfig, text: TargetText, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when one prompt of a log that is too long, or begins with an answer, ends the night; or all may vanish."""
    answered = {"messages": [{"role": "assistant", "content": "first"}, *line(1)["messages"]]}
    long = {"messages": [{"role": "user", "content": "long " * 300}, {"role": "assistant", "content": "no"}]}
    write_lines(tmp_path / "night/recent.jsonl", [line(1), answered, long])
    write_lines(tmp_path / "night/fixed.jsonl", [long])
    config = make_config(evaluate={"max_new_tokens": 16}).run_config()
    night = locate(str(tmp_path / "night"))
    with caplog.at_level(logging.WARNING):
        assert len(read_prompts(night, "recent.jsonl", config, text)) == 1
    assert "2 of 3 prompts left out" in caplog.text
    assert "long long" not in caplog.text
    with pytest.raises(InputError, match="no prompt fits 240 tokens"):
        read_prompts(night, "fixed.jsonl", config, text)
    assert json.loads((tmp_path / "night/fixed.jsonl").read_text()) == long
