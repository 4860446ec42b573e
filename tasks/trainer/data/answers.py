"""Conversations being answered, and the files that keep what was answered: a batch a file, its checksum in the last
line. They hold users' text."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.trainer.data.conversation import Message, ToolCall
from tasks.trainer.files import write_text

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Dialogue:
    """One conversation being answered: what is said so far, and what the user says yet."""

    id: str
    said: list[Message]
    to_come: list[Message]
    prompt_ids: list[int] = field(default_factory=list)
    refused: str | None = None
    tools: str | None = None
    temperature: float = 0.0
    servers: list[str] = field(default_factory=list)
    """URLs of those that answered, each once."""


def write_batch(path: Path, batch: Sequence[Dialogue]) -> None:
    lines = []
    for dialogue in batch:
        outcome: dict[str, Any] = {"id": dialogue.id}
        if dialogue.refused is None:
            outcome["messages"] = [asdict(message) for message in dialogue.said]
            outcome["servers"] = dialogue.servers
        else:
            outcome["refused"] = dialogue.refused
        lines.append(json.dumps(outcome))
    text = "\n".join(lines) + "\n"
    write_text(path, text + json.dumps({"checksum": _digest(text)}) + "\n")


def read_batch(path: Path, batch: Sequence[Dialogue]) -> bool:
    """Take a committed batch's outcomes into its dialogues; False when it is yet to be answered."""
    if not path.exists():
        return False
    text, _, last = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").rpartition("\n")
    if last != json.dumps({"checksum": _digest(text + "\n")}):
        # A rename never leaves half a file, so the disk or somebody's hand did it. Its answers can be made again.
        logger.warning("%s does not match its checksum: answering that batch again", path)
        return False
    for dialogue, line in zip(batch, text.split("\n"), strict=True):
        outcome = json.loads(line)
        assert outcome["id"] == dialogue.id
        dialogue.refused = outcome.get("refused")
        dialogue.said = [_message(message) for message in outcome.get("messages", ())]
        dialogue.servers = outcome.get("servers", [])
    return True


def _message(written: dict[str, Any]) -> Message:
    return Message(**{**written, "tool_calls": tuple(ToolCall(**call) for call in written["tool_calls"])})


def hash_json(value: Any) -> str:
    """32 hex characters of a value that JSON can carry."""
    return _digest(json.dumps(value, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
