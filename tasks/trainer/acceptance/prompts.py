"""What is asked: held-out conversations, prompt files, and held-out prompts far into the context.

A held-out prompt is everything before the first supervised token, header included, as the target would be served. A
prompt file has one conversation a record, of user turns alone; the target's own answers go between them, so a second
turn is known only when the first is answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.trainer.data.mask import ChatRenderer, RefusedConversationError
from tasks.trainer.data.prepared import PreparedSample
from tasks.trainer.data.read import Message
from tasks.trainer.data.records import TruncatedError, read_records
from tasks.trainer.errors import InputError

# In this order: GSM8K has a question and its answer, HumanEval a prompt and its tests.
_KEYS = ("turns", "question", "prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids int32 [P], the generation prompt included; domain: a row of the report; where: for errors.

    said, to_come: of a prompt file, the messages so far and the user's turns after this one. context: of a lengthened
    prompt, how long it was made: it counts for that length alone.
    """

    token_ids: npt.NDArray[np.int32]
    domain: str = ""
    where: str = ""
    said: tuple[Message, ...] = ()
    to_come: tuple[str, ...] = ()
    context: int | None = None

    def following(self, answer: str, renderer: ChatRenderer) -> Prompt | None:
        """The next turn, when this one was answered so; None after the last, or where the template refuses it."""
        if not self.to_come:
            return None
        said = (*self.said, Message("assistant", answer), Message("user", self.to_come[0]))
        try:
            token_ids = np.array(renderer.prompt_ids(said), dtype=np.int32)
        except RefusedConversationError:
            return None
        return Prompt(token_ids, self.domain, self.where, said, self.to_come[1:])


def heldout_prompt(sample: PreparedSample, number: int, domain: str) -> Prompt:
    """The prompt of a prepared sample."""
    first = int(np.argmax(sample.loss_mask))
    return Prompt(np.array(sample.token_ids[:first], dtype=np.int32), domain, f"held-out prompt {number}")


def lengthen(prompt: Prompt, others: Iterable[PreparedSample], length: int) -> Prompt:
    """The prompt with other conversations before it, int32 [length]: their last tokens, behind the prompt's first one,
    which many templates need there. A prompt that is as long already is cut to its last `length` tokens.

    Raises InputError when the others are too short together.
    """
    own = prompt.token_ids
    if len(own) < length:
        lead, missing = [], length - len(own)
        for sample in others:
            if missing <= 0:
                break
            lead.append(np.array(sample.token_ids[-missing:], dtype=np.int32))
            missing -= len(lead[-1])
        if missing > 0:
            raise InputError(
                f"evaluate.context_lengths: {length} tokens are more than all held-out conversations have; lower it"
            )
        own = np.concatenate((own[:1], *reversed(lead), own[1:]))
    else:
        own = np.concatenate((own[:1], own[len(own) - length + 1 :]))
    return Prompt(own, prompt.domain, f"{prompt.where}, lengthened to {length} tokens", context=length)


def read_prompts(url: str, renderer: ChatRenderer, *, limit: int) -> list[Prompt]:
    """The first `limit` prompts of a file; its name is their domain, with MT-bench's category behind it.

    Raises InputError for a file that cannot be read, or a record that has none of the keys, by its line.
    """
    name = PurePosixPath(url.split("?")[0]).name.split(".")[0]
    found: list[Prompt] = []
    try:
        for record in read_records(url):
            where = f"{url}, {record.place or f'line {record.number}'}"
            value = _value(record.raw, where) if record.value is None else record.value
            first, *rest = _turns(value, where)
            category = value.get("category")
            domain = f"{name}/{category}" if isinstance(category, str) and category else name
            said = (Message("user", first),)
            try:
                token_ids = np.array(renderer.prompt_ids(said), dtype=np.int32)
            except RefusedConversationError as refused:
                raise InputError(f"{where}: the chat template does not take it ({refused})") from None
            found.append(Prompt(token_ids, domain, where, said, tuple(rest)))
            if len(found) == limit:
                break
    except TruncatedError as cut:
        raise InputError(f"{url} ends too early, at {cut.place}; fetch it again") from None
    if not found:
        raise InputError(f"{url} has no prompts; give a file with one a line, or remove it from evaluate.prompts")
    return found


def _value(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        raise InputError(f"{where}: not JSON; evaluate.prompts takes one JSON object a line") from None


def _turns(value: Any, where: str) -> list[str]:
    for key in _KEYS:
        if isinstance(value, dict) and key in value:
            turns = [value[key]] if isinstance(value[key], str) else value[key]
            if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns):
                return turns
            raise InputError(f"{where}: {key!r} must be a text or a list of texts, none of them empty")
    raise InputError(
        f'{where}: no prompt found; each record needs "turns" (a list of texts), "question" or "prompt" (a text)'
    )
