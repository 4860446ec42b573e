"""What reading gives: conversations, and the count of what was refused on the way.

A conversation is what one record of a file holds, in one of three forms: messages (most), a text that already went
through the chat template, or token ids with their mask. Everything is plain and hashable, so that conversations cross
process borders as they are; the JSON of tools and tool calls stays text until a template asks for it.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an answer makes."""

    name: str
    """Of the function."""
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    """What the tool's message refers to, where the file says it."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: str
    """One of ROLES."""
    content: str
    finish_reason: str | None = None
    """"length": a token limit cut the answer, so that no end-of-turn followed."""
    reasoning: str | None = None
    """What an answer thought before it spoke, where the file keeps the two apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    """Of the tool whose result this is."""
    tool_call_id: str | None = None

    @property
    def identity(self) -> list[object]:
        """What makes it this message and no other, for hashes: [role, content], and what else there is."""
        more: list[object] = []
        if self.reasoning or self.tool_calls or self.name or self.tool_call_id:
            calls = [[call.name, call.arguments, call.id] for call in self.tool_calls]
            more = [self.reasoning, calls, self.name, self.tool_call_id]
        return [self.role, self.content, *more]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One record of a file."""

    source: str
    """The file's path or URL."""
    line: int
    """Which record it is, from 1; in JSON Lines its line."""
    messages: tuple[Message, ...] = ()
    label: str | None = None
    """What the record says of its `domain` or `source`; None when it says nothing."""
    tools: str | None = None
    """What the target may call: a JSON list, as text."""
    text: str | None = None
    """In place of messages: a conversation that went through the chat template already."""
    token_ids: tuple[int, ...] | None = None
    """In place of messages: the tokens, with loss_mask."""
    loss_mask: tuple[bool, ...] | None = None
    place: str = ""
    """Where in the file, when that is no line: "byte 17"."""
    answered_by: str | None = None
    """Of answers made by regeneration: how, a JSON object as text. None: the answers are the file's."""

    @property
    def identity(self) -> str:
        """What makes it this conversation and no other, wherever it lies; for hashes."""
        messages = [[*m.identity[:2], m.finish_reason, *m.identity[2:]] for m in self.messages]
        return json.dumps([*messages, *self._rest()])

    @property
    def prompt_identity(self) -> str:
        """What precedes the first answer, for hashes: it stays when the answers are made anew. Of preformatted text
        all of it, for only the template knows where an answer begins."""
        asked = itertools.takewhile(lambda message: message.role != "assistant", self.messages)
        mask = self.loss_mask or ()
        first = mask.index(True) if True in mask else len(mask)
        return json.dumps([*(message.identity for message in asked), *self._rest(first)])

    def _rest(self, num_tokens: int | None = None) -> list[object]:
        """What most conversations do not have, so that it adds nothing to their hashes."""
        rest: list[object] = [part for part in (self.tools, self.text) if part is not None]
        if self.token_ids is not None:
            rest.append(self.token_ids[:num_tokens])
            rest += [] if num_tokens is not None else [self.loss_mask]
        return rest

    @property
    def where(self) -> str:
        return f"{self.source}, {self.place or f'line {self.line}'}"

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


class BadRecordError(Exception):
    """A record that is no conversation: `reason` is what is counted, `what` is told to the user."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason
        self.what = what
