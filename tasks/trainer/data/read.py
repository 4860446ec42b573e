"""Read conversations: JSON Lines from local paths and fsspec URLs.

Files are streamed line by line, so that an error names its line and memory holds the conversations but never the file.
Reading is strict by default: the first bad line stops it, because a trainer that drops lines in silence trains on data
that nobody chose. ``on_error="skip"`` goes on and counts what it refused, by reason. Whether a template can handle the
order of the roles is not judged here: only the template knows (see mask.py).

No text of a conversation ever enters an error message: file, line number and the kind of fault only.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import fsspec

from tasks.trainer.errors import InputError

ROLES = ("system", "user", "assistant", "tool")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ROLES}}


# What a line may say of where it is from, the first one counting; and how long a label is at most.
_LABELS = ("domain", "source")
_LONGEST_LABEL = 64


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `finish_reason` "length" says that a token limit cut the answer, so that no end-of-turn followed."""

    role: str
    content: str
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one line of a file; `line` counts from 1. `label`: what the line says of its `domain` or
    `source`, None when it says nothing."""

    source: str
    line: int
    messages: tuple[Message, ...]
    label: str | None = None

    @property
    def where(self) -> str:
        return f"{self.source}, line {self.line}"

    @property
    def domain(self) -> str:
        """What figures are grouped by: the label, else the file's name."""
        return self.label or self.source.rstrip("/").rsplit("/", 1)[-1]


@dataclass(slots=True)
class Refusals:
    """What was refused or cut, by reason: how many, and where the first one was.

    supervised_cut: supervised tokens that samples lost by being cut; those of refused samples are not among them.
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    supervised_cut: int = 0

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def merge(self, other: Refusals) -> None:
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            self.first.setdefault(reason, other.first[reason])
        self.supervised_cut += other.supervised_cut

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def summary(self) -> str:
        """One line: `3 nothing_supervised (first: a.jsonl, line 7); 1 duplicate (...)`; "none" when empty."""
        parts = [f"{count} {reason} (first: {self.first[reason]})" for reason, count in self.counts.items()]
        return "; ".join(parts) or "none"


class _BadLineError(Exception):
    """A line that is no conversation: `reason` is what is counted, `what` is told to the user."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason
        self.what = what


def read_conversations(
    urls: Sequence[str], *, on_error: Literal["stop", "skip"] = "stop"
) -> tuple[list[Conversation], Refusals]:
    """Read JSON Lines files, in the order given; gzip and the like are recognised by the suffix.

    A line holds `messages` (`role`, `content`, optional `finish_reason`) or, ShareGPT's form, `conversations` (`from`:
    human, gpt, system; `value`), and may name its `domain` or `source`. Blank lines are ignored; other keys too.

    Returns the conversations and the refusals (empty unless `on_error` is "skip").

    Raises:
        InputError: no URL at all; a file that is missing, unreadable, empty or cut inside its compression; with "stop"
            a line that is no conversation; with "skip" a set in which no line is one.
    """
    if not urls:
        raise InputError("data.source names no file: give at least one JSONL path or URL")
    refusals = Refusals()
    conversations = [found for found, _ in stream_conversations(urls, on_error=on_error, refusals=refusals)]
    if not conversations:
        raise InputError(f"no line of {', '.join(urls)} is a conversation: {refusals.summary()}")
    return conversations, refusals


def stream_conversations(
    urls: Sequence[str],
    *,
    on_error: Literal["stop", "skip"] = "stop",
    refusals: Refusals,
    empty_files: bool = False,
) -> Iterator[tuple[Conversation, bytes]]:
    """The conversations of JSON Lines files one by one, each with its line as it was read; memory holds one of them.

    refusals: receives the counts. empty_files: whether a file may have no line. Raises InputError as
    `read_conversations`, but not for a set without conversations.
    """
    for url in urls:
        any_line = False
        for line, raw in _lines(url):
            any_line = True
            try:
                messages, label = _parse(raw)
            except _BadLineError as bad:
                if on_error == "stop":
                    raise InputError(f"{url}, line {line}: {bad.what}") from None
                refusals.add(bad.reason, f"{url}, line {line}")
                continue
            yield Conversation(url, line, messages, label), raw
        if not any_line and not empty_files:
            raise InputError(f"{url} is empty: expected one JSON conversation a line")


def _lines(url: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, bytes with the newline) of every line that is not blank."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise InputError(
            f"the data URL on host {parts.hostname} carries a user name or password: put credentials in the environment"
        )
    try:
        with fsspec.open(url, "rb", compression="infer") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if raw.strip():
                    yield number, raw
    except FileNotFoundError:
        raise InputError(f"{url} does not exist: check data.source") from None
    except (IsADirectoryError, NotADirectoryError):
        raise InputError(f"{url} is not a file: data.source takes JSONL files") from None
    except PermissionError:
        raise InputError(f"{url} may not be read by this user: check its permissions") from None
    except EOFError:
        raise InputError(f"{url} ends in the middle of its compression: the file looks truncated") from None
    except (gzip.BadGzipFile, zlib.error):
        raise InputError(f"{url} is not what its suffix says: its compression cannot be read") from None
    except (ImportError, ValueError) as exc:  # unknown protocol or compression, or its package is not installed
        if isinstance(exc, InputError):
            raise
        raise InputError(f"{url} cannot be opened: {' '.join(str(exc).split())}") from None


def _parse(raw: bytes) -> tuple[tuple[Message, ...], str | None]:
    try:
        text = raw.decode("utf-8")
        value = json.loads(text)
    except UnicodeDecodeError as exc:
        # A file cut inside a character is a truncation as well, and only its last line lacks the newline.
        if not raw.endswith(b"\n"):
            raise _truncated() from None
        raise _BadLineError("not_utf8", f"not UTF-8 (byte {exc.start + 1} of the line): convert the file") from None
    except (ValueError, RecursionError) as exc:
        if not raw.endswith(b"\n"):
            raise _truncated() from None
        at = f" at column {exc.colno} ({exc.msg})" if isinstance(exc, json.JSONDecodeError) else ""
        raise _BadLineError("invalid_json", f"invalid JSON{at}: each line must be one JSON object") from None
    if not isinstance(value, dict):
        raise _BadLineError("wrong_structure", f"a JSON {type(value).__name__}, expected an object with `messages`")
    label = _label(value)
    if "messages" in value:
        return _messages(value["messages"], "messages", "role", "content", {role: role for role in ROLES}), label
    if "conversations" in value:
        return _messages(value["conversations"], "conversations", "from", "value", _SHAREGPT_ROLES), label
    raise _BadLineError("no_messages", "no `messages` (role, content) and no `conversations` (from, value)")


def _label(value: dict[str, Any]) -> str | None:
    """The line's domain, as a few plain words: it is shown in reports. Longer text is no label, and may be anything."""
    for key in _LABELS:
        label = value.get(key)
        if isinstance(label, str) and 0 < len(label) <= _LONGEST_LABEL and label.isprintable():
            return label.replace("|", "/").strip() or None
    return None


def _truncated() -> _BadLineError:
    return _BadLineError(
        "truncated_last_line", "the last line is invalid JSON without a newline: the file looks truncated"
    )


def _messages(
    items: object, list_key: str, role_key: str, content_key: str, roles: dict[str, str]
) -> tuple[Message, ...]:
    if not isinstance(items, list):
        raise _BadLineError("wrong_structure", f"`{list_key}` is a JSON {type(items).__name__}, expected a list")
    if not items:
        raise _BadLineError("no_messages", f"`{list_key}` is empty")
    messages = []
    for number, item in enumerate(items, start=1):
        place = f"message {number} of `{list_key}`"
        if not isinstance(item, dict):
            raise _BadLineError("wrong_structure", f"{place} is not an object")
        role, content, finish_reason = item.get(role_key), item.get(content_key), item.get("finish_reason")
        if not isinstance(role, str) or role not in roles:
            # The role itself is not shown: in a file with its keys mixed up it may be text of the conversation.
            known = ", ".join(roles)
            raise _BadLineError("unknown_role", f"{place} has no known role in `{role_key}`: expected one of {known}")
        if not isinstance(content, str):
            found = type(content).__name__
            raise _BadLineError("content_not_text", f"{place}: `{content_key}` is {found}, expected a string")
        if finish_reason is not None and not isinstance(finish_reason, str):
            raise _BadLineError("wrong_structure", f"{place}: `finish_reason` is not a string")
        # JSON can carry half of a surrogate pair, which no tokenizer accepts.
        if _SURROGATE.search(content):
            raise _BadLineError("invalid_unicode", f"{place}: `{content_key}` holds a lone surrogate, no valid Unicode")
        messages.append(Message(roles[role], content, finish_reason))
    return tuple(messages)
