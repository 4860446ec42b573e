"""Reading conversations: both forms, and each fault of a file as one line with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import fsspec
import pytest

from tasks.trainer.data.read import Message, read_conversations
from tasks.trainer.errors import InputError

SECRET = "the user's own words"
GOOD = json.dumps({"messages": [{"role": "user", "content": SECRET}, {"role": "assistant", "content": "yes"}]})


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_messages_and_sharegpt_read_alike(tmp_path: Path) -> None:
    """Red when a ShareGPT role is mapped wrongly, a blank line shifts the line numbers or finish_reason is lost."""
    sharegpt = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a", "finish_reason": "length"},
        ]
    }
    url = write(tmp_path / "a.jsonl", "\ufeff" + GOOD + "\n\n" + json.dumps(sharegpt))
    conversations, refusals = read_conversations([url])
    assert [c.line for c in conversations] == [1, 3]
    assert conversations[0].messages == (Message("user", SECRET), Message("assistant", "yes"))
    assert conversations[1].messages == (
        Message("system", "s"),
        Message("user", "q"),
        Message("assistant", "a", "length"),
    )
    assert refusals.total == 0


def test_a_line_may_say_its_domain(tmp_path: Path) -> None:
    """Red when acceptance cannot be told by domain, or a long text of the line becomes a heading of the report."""
    said = ({"domain": "law|tax", "source": "x"}, {"source": "forum"}, {"source": "s" * 65}, {"domain": 3}, {})
    lines = [json.loads(GOOD) | more for more in said]
    url = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))
    conversations, _ = read_conversations([url])
    assert [c.domain for c in conversations] == ["law/tax", "forum", "a.jsonl", "a.jsonl", "a.jsonl"]


def test_fsspec_urls_and_gzip(tmp_path: Path) -> None:
    """Red when only local plain files can be read."""
    with fsspec.open("memory://read/a.jsonl", "wb") as file:
        file.write(GOOD.encode() + b"\n")
    zipped = write(tmp_path / "b.jsonl.gz", gzip.compress(GOOD.encode() + b"\n"))
    conversations, _ = read_conversations(["memory://read/a.jsonl", zipped])
    assert [c.source for c in conversations] == ["memory://read/a.jsonl", zipped]


BAD_LINES = {
    "invalid_json": (b'{"messages": ["' + SECRET.encode() + b'",,]}\n', "line 2: invalid JSON at column"),
    "truncated_last_line": (GOOD[:-20].encode(), "line 2: the last line .* looks truncated"),
    "not_utf8": (b'{"messages": "\xff"}\n', "line 2: not UTF-8"),
    "no_messages": (json.dumps({"words": SECRET}).encode() + b"\n", "line 2: no `messages`"),
    "unknown_role": (
        json.dumps({"messages": [{"role": SECRET, "content": SECRET}]}).encode() + b"\n",
        "line 2: message 1 of `messages` has no known role",
    ),
    "content_not_text": (
        json.dumps({"messages": [{"role": "user", "content": [SECRET]}]}).encode() + b"\n",
        "line 2: message 1 of `messages`: `content` is list",
    ),
    "wrong_structure": (json.dumps([SECRET]).encode() + b"\n", "line 2: a JSON list"),
    "invalid_unicode": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n', "line 2: .* lone surrogate"),
}


@pytest.mark.parametrize("reason", sorted(BAD_LINES))
def test_a_bad_line_stops_or_is_counted(tmp_path: Path, reason: str) -> None:
    """Red when a fault passes, is counted under another name, or its message spills the text or spans lines."""
    raw, message = BAD_LINES[reason]
    url = write(tmp_path / "bad.jsonl", GOOD.encode() + b"\n" + raw)
    with pytest.raises(InputError, match=message) as caught:
        read_conversations([url])
    assert url in str(caught.value)
    assert "own words" not in str(caught.value)
    assert "\n" not in str(caught.value)
    conversations, refusals = read_conversations([url], on_error="skip")
    assert len(conversations) == 1
    assert refusals.counts == {reason: 1}
    assert refusals.first == {reason: f"{url}, line 2"}


def test_deep_json_is_invalid_not_a_crash(tmp_path: Path) -> None:
    """Red when nesting beyond Python's stack surfaces as RecursionError."""
    url = write(tmp_path / "deep.jsonl", "[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(InputError, match="line 1: invalid JSON"):
        read_conversations([url])


def test_a_complete_last_line_needs_no_newline(tmp_path: Path) -> None:
    """Red when a file without a final newline is called truncated."""
    assert len(read_conversations([write(tmp_path / "a.jsonl", GOOD)])[0]) == 1


def test_faults_of_whole_files(tmp_path: Path) -> None:
    """Red when a missing, empty, non-file or half-compressed source passes, even with on_error="skip"."""
    (tmp_path / "none").mkdir()
    cut = gzip.compress(GOOD.encode() * 100)[:-20]
    cases = {
        str(tmp_path / "missing.jsonl"): "does not exist",
        write(tmp_path / "empty.jsonl", ""): "is empty",
        write(tmp_path / "blank.jsonl", "\n \n"): "is empty",
        str(tmp_path / "none"): "is not a file, and as a folder",
        write(tmp_path / "cut.jsonl.gz", cut): "looks truncated",
        write(tmp_path / "fake.jsonl.gz", GOOD): "compression cannot be read",
        write(tmp_path / "none.jsonl", "{}\n"): "(no line of .* 1 no_messages|line 1: no `messages`)",
        "nosuchprotocol://a.jsonl": "cannot be opened: Protocol not known",
    }
    for url, message in cases.items():
        for on_error in ("stop", "skip"):
            with pytest.raises(InputError, match=message) as caught:
                read_conversations([url], on_error=on_error)
            assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="names no file"):
        read_conversations([])


def test_credentials_in_a_url_are_refused_and_not_shown() -> None:
    """Red when a URL with a password is opened or printed."""
    with pytest.raises(InputError, match="credentials in the environment") as caught:
        read_conversations(["https://someone:hunter2@example.org/a.jsonl"])
    assert "hunter2" not in str(caught.value)
