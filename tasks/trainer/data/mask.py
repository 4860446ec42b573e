"""Render conversations with the target's own chat template: token ids and the loss mask.

Which characters are the target's own is read off the template, never off hard-coded separators, in one of two ways:

* `{% generation %}` tags, where the template has them and each tagged span holds its message and an end-of-turn token
  (inside the span, or as the token right after it);
* else by rendering prefixes: the text up to an answer with the generation prompt, and the text through the answer.

        prefix i, with generation prompt   <|im_start|>user\\nq<|im_end|>\\n<|im_start|>assistant\\n
        through answer i                   <|im_start|>user\\nq<|im_end|>\\n<|im_start|>assistant\\na<|im_end|>\\n
        supervised                                                                      ^^^^^^^^^^^

  Both must be prefixes of the whole rendering. A template that rewrites earlier turns (strips their reasoning, say)
  breaks that: what it shows of the earlier answer is not what the target said there. Such a conversation becomes one
  row for each answer, rendered up to it, as the target was asked and answered: the price is that the turns before it
  are in every row. Where even that is not stable, the conversation is refused.

The whole text is tokenised once, as the target sees it, and characters become tokens by their offsets:

* The span of an answer runs from the end of the generation prompt to its end-of-turn token: the first token there
  that is one of `eos_token_ids`, itself supervised. Without one (templates that end a turn with plain text only), and
  for an answer cut by a token limit (`finish_reason` "length": the target did not end the turn there), it ends with
  the content.
* A token that straddles an edge of a span is not supervised: it carries text that the target did not write.

The price: a conversation of n answers is rendered 2n + 1 times (n + 1 more for answers without an end-of-turn token).

A text that went through the template already has no messages to render: its answers lie between the template's own
header of an answer and the next end-of-turn token. Token ids with a mask are taken as they are.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jinja2
import numpy as np
import numpy.typing as npt
from tokenizers import processors
from transformers.utils.chat_template_utils import render_jinja_template

from tasks.trainer.data.conversation import Conversation, Message
from tasks.trainer.errors import InputError

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
_STAND_IN = "Eyas0stands0in"  # letters and digits only: no template strips, splits or escapes them
_REWRITES = "template_rewrites_history"

Supervise = Literal["all", "last"]
Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""token_ids int32 [T], loss_mask bool [T]."""


class RefusedConversationError(Exception):
    """This conversation cannot be rendered into a trustworthy sample; `reason` is the name it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ChatRenderer:
    """Renders with one tokenizer's chat template; made once, used for many conversations.

    Args:
        tokenizer: a `transformers` tokenizer with offsets ("fast").
        eos_token_ids: the tokens that end the target's turn (from its generation config).
        template_arguments: more variables for the template. Fix `date_string` here for templates that print today's
            date: otherwise the same conversation is another sample tomorrow.

    Raises:
        InputError: no chat template, a template that does not parse, no eos tokens or a tokenizer without offsets.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        *,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise InputError(f"{name} has no chat template: set target.chat_template to a Jinja file of its format")
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(f"the tokenizer of {name} gives no offsets: the target needs a tokenizer.json")
        if not eos_token_ids:
            raise InputError(f"{name} names no end-of-turn token: set eos_token_id in its generation_config.json")
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.template_arguments = dict(template_arguments or {})
        try:
            self.template: str = tokenizer.get_chat_template()
            self._render([Message("user", "a")])
        except (ValueError, jinja2.TemplateSyntaxError) as exc:
            what = " ".join(str(exc).split())
            raise InputError(f"the chat template of {name} cannot be used: {what}; set target.chat_template") from None
        except (jinja2.TemplateError, TypeError):
            pass  # it parses; what it refuses at run time is a matter of each conversation
        self._has_tags = _GENERATION_TAG.search(self.template) is not None
        self._eos_texts = tuple(tokenizer.convert_ids_to_tokens(list(self.eos_token_ids)))
        # Offsets must cover every character. Some tokenizers trim the space off each word's offsets in their
        # post-processor, which otherwise only adds special tokens, and those the template has already written.
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.post_processor = processors.ByteLevel(trim_offsets=False)
        self._backend.no_truncation()
        self._backend.no_padding()

    def prompt_ids(self, messages: Sequence[Message], tools: str | None = None) -> list[int]:
        """Token ids of `messages` and the generation prompt: what the target is asked to continue.

        tools: what it may call, a JSON list as text.

        Raises:
            RefusedConversationError: the template does not take these messages.
        """
        text = self._text(messages, prompt=True, tools=tools)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def rows(self, conversation: Conversation, *, supervise: Supervise = "all") -> list[Row]:
        """What is trained on of a conversation: one row, or one for each answer where the template rewrites history.

        supervise: every answer, or the last one alone.

        Raises:
            RefusedConversationError: as `render`; `system_role_refused` when only the system message is in the way;
                for preformatted text `no_answer_header` and `answer_not_found`.
        """
        if conversation.token_ids is not None and conversation.loss_mask is not None:
            mask = np.array(conversation.loss_mask, dtype=np.bool_)
            if supervise == "last" and mask.any():
                stop = int(np.flatnonzero(mask)[-1]) + 1
                gaps = np.flatnonzero(~mask[:stop])
                mask[: int(gaps[-1]) if len(gaps) else 0] = False
            return [(np.array(conversation.token_ids, dtype=np.int32), mask)]
        if conversation.text is not None:
            return [self._preformatted(conversation.text, supervise)]
        messages, tools = conversation.messages, conversation.tools
        answers = self._answers(messages)
        wanted = answers[-1:] if supervise == "last" else answers
        try:
            return [self._row(messages, wanted, tools)]
        except RefusedConversationError as refused:
            if refused.reason == "template_refused" and messages[0].role == "system":
                self._text(messages[1:], tools=tools)  # refused as well: the system message is not what is in the way
                raise RefusedConversationError("system_role_refused") from None
            if refused.reason != _REWRITES:
                raise
        return [self._row(messages[: i + 1], [i], tools) for i in wanted]

    def render(self, conversation: Conversation) -> Row:
        """Render a whole conversation of messages into one row.

        Returns:
            token_ids int32 [T] and loss_mask bool [T]: true on the answers' tokens, each with its end-of-turn token.

        Raises:
            RefusedConversationError: `template_refused`, `template_rewrites_history`, `starts_with_answer`,
                `empty_answer`, `end_of_turn_inside_answer`, `answer_not_found`, `reasoning_not_rendered`,
                `tool_call_not_rendered`.
        """
        return self._row(conversation.messages, self._answers(conversation.messages), conversation.tools)

    def _answers(self, messages: Sequence[Message]) -> list[int]:
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if answers and answers[0] == 0:
            raise RefusedConversationError("starts_with_answer")
        for i in answers:
            message = messages[i]
            calls = [call.name + call.arguments for call in message.tool_calls]
            said = "\n".join((message.reasoning or "", message.content, *calls))
            if not said.strip():
                raise RefusedConversationError("empty_answer")
            # The target stops at its end-of-turn token, so it can never have said what follows one.
            if any(text in said for text in self._eos_texts):
                raise RefusedConversationError("end_of_turn_inside_answer")
        return answers

    def _encode(self, text: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Token ids, and offsets [T, 2]: first character, one past the last; the pieces of one character all carry
        its offsets."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def _row(self, messages: Sequence[Message], answers: Sequence[int], tools: str | None) -> Row:
        """All messages as one row, with these answers supervised."""
        text = self._text(messages, tools=tools)
        ids, offsets = self._encode(text)
        tagged = self._tagged_spans(messages, answers, text, ids, offsets, tools) if self._has_tags else None
        spans = tagged or [self._span_by_prefixes(messages, i, text, ids, offsets, tools) for i in answers]
        mask = np.zeros(len(ids), dtype=np.bool_)
        for i, (start, stop, end_of_turn) in zip(answers, spans, strict=True):
            missing = _missing(messages[i], text[start:stop])
            if missing is not None:
                # Only the last answer shows what a template does to an answer that is no history yet.
                raise RefusedConversationError(missing if i == len(messages) - 1 else _REWRITES)
            if messages[i].finish_reason == "length" or end_of_turn is None:
                stop = self._content_end(messages, i, text, tools)
                mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= stop)
            else:
                first = int(np.searchsorted(offsets[:, 0], start, side="left"))
                mask[first : end_of_turn + 1] = True
        return ids, mask

    def _tagged_spans(
        self,
        messages: Sequence[Message],
        answers: Sequence[int],
        text: str,
        ids: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        tools: str | None,
    ) -> list[tuple[int, int, int | None]] | None:
        """(start, stop, token index of the end of the turn) of each answer by the tags; None when they do not serve.

        They do not when a span misses its message or its end of turn. Then the prefixes decide.
        """
        _, (tags,) = render_jinja_template(
            conversations=[_dicts(messages)],
            tools=json.loads(tools) if tools else None,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.template_arguments},
        )
        every = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if len(tags) != len(every):
            return None
        spans: list[tuple[int, int, int | None]] = []
        for i, (start, stop) in zip(every, tags, strict=True):
            if i not in answers:
                continue
            if messages[i].content.strip() not in text[start:stop] or _missing(messages[i], text[start:stop]):
                return None
            end_of_turn = self._first_eos(ids, offsets, start, stop)
            if end_of_turn is None:
                after = int(np.searchsorted(offsets[:, 0], stop, side="left"))
                if after == len(ids) or int(ids[after]) not in self.eos_token_ids:
                    return None
                end_of_turn = after
            spans.append((start, stop, end_of_turn))
        return spans

    def _span_by_prefixes(
        self,
        messages: Sequence[Message],
        i: int,
        text: str,
        ids: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        tools: str | None,
    ) -> tuple[int, int, int | None]:
        """(start, stop, token index of the end of the turn or None) of answer i, by rendering prefixes."""
        before = self._text(messages[:i], prompt=True, tools=tools)
        if not text.startswith(before):
            raise RefusedConversationError(_REWRITES)
        through = self._text(messages[: i + 1], tools=tools)
        stop = _common_prefix(through, text)
        end_of_turn = self._first_eos(ids, offsets, len(before), stop)
        # Some templates close a finished conversation with one more token, which the longer one does not have there.
        # That is harmless when both agree through the end of the turn; any other difference rewrote the answer.
        if stop < len(through) and end_of_turn is None:
            raise RefusedConversationError(_REWRITES)
        return len(before), stop, end_of_turn

    def _first_eos(
        self, ids: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], start: int, stop: int
    ) -> int | None:
        inside = (offsets[:, 0] >= start) & (offsets[:, 0] < stop) & np.isin(ids, self.eos_token_ids)
        found = np.flatnonzero(inside)
        return int(found[0]) if len(found) else None

    def _preformatted(self, text: str, supervise: Supervise) -> Row:
        """A text that the template made: each answer lies between an answer's header and the end of its turn."""
        asked = self._text([Message("user", _STAND_IN)], prompt=True)
        closed = self._text([Message("user", _STAND_IN)])
        header = asked[len(closed) :] if asked.startswith(closed) else ""
        if not header.strip():  # no generation prompt: what follows the question stands for it
            header = asked.partition(_STAND_IN)[2]
        starts = [found.end() for found in re.finditer(re.escape(header), text)] if header.strip() else []
        if not starts:
            raise RefusedConversationError("no_answer_header")
        bos = self.tokenizer.bos_token
        if bos and asked.startswith(bos) and not text.startswith(bos):
            text, starts = bos + text, [start + len(bos) for start in starts]  # what the target is served begins so
        ids, offsets = self._encode(text)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for number, start in enumerate(starts):
            if supervise == "last" and number < len(starts) - 1:
                continue
            stop = starts[number + 1] if number + 1 < len(starts) else len(text)
            end_of_turn = self._first_eos(ids, offsets, start, stop)
            if end_of_turn is None and stop < len(text):
                raise RefusedConversationError("answer_not_found")
            first = int(np.searchsorted(offsets[:, 0], start, side="left"))
            mask[first : len(ids) if end_of_turn is None else end_of_turn + 1] = True
        return ids, mask

    def _content_end(self, messages: Sequence[Message], i: int, text: str, tools: str | None) -> int:
        """The character after answer i's content in `text`.

        Searching for the content would find "end" in "<|im_end|>". Instead another text stands in for it: what
        surrounds the stand-in surrounds the content, even when the template strips its white space.
        """
        if messages[i].tool_calls:
            raise RefusedConversationError("answer_not_found")  # what ends it is written by the template
        stand_in = [*messages[:i], replace(messages[i], content=_STAND_IN), *messages[i + 1 :]]
        head, found, tail = self._text(stand_in, tools=tools).partition(_STAND_IN)
        content = text[len(head) : len(text) - len(tail)]
        same = found and text.startswith(head) and text.endswith(tail) and _STAND_IN not in tail
        if not same or content.strip() != messages[i].content.strip():
            raise RefusedConversationError("answer_not_found")
        return len(head) + len(content)

    def _text(self, messages: Sequence[Message], *, prompt: bool = False, tools: str | None = None) -> str:
        try:
            return self._render(messages, prompt=prompt, tools=tools)
        except (jinja2.TemplateError, TypeError, ValueError):
            # Its message may quote the conversation; the reason is all that is kept.
            raise RefusedConversationError("template_refused") from None

    def _render(self, messages: Sequence[Message], *, prompt: bool = False, tools: str | None = None) -> str:
        text: str = self.tokenizer.apply_chat_template(
            _dicts(messages),
            tools=json.loads(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=prompt,
            **self.template_arguments,
        )
        return text


def render(tokenizer: Any, conversation: Conversation, eos_token_ids: Sequence[int]) -> Row:
    """`ChatRenderer(tokenizer, eos_token_ids).render(conversation)`, for one conversation."""
    return ChatRenderer(tokenizer, eos_token_ids).render(conversation)


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [as_dict(message) for message in messages]


def as_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates and servers take it: OpenAI's form, with arguments as objects."""
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        given |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        given["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    for key in ("name", "tool_call_id"):
        if getattr(message, key) is not None:
            given[key] = getattr(message, key)
    return given


def _missing(message: Message, shown: str) -> str | None:
    """The reason to refuse an answer of which the template shows only a part; None when it shows all."""
    if message.reasoning and message.reasoning.strip() not in shown:
        return "reasoning_not_rendered"
    if any(call.name not in shown for call in message.tool_calls):
        return "tool_call_not_rendered"
    return None


def _common_prefix(one: str, other: str) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])
