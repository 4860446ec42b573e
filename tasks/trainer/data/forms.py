"""One record in, one conversation out: the forms that conversation files have.

| keys | form |
|---|---|
| `messages` (role, content; OpenAI's) | tool calls, tools, `reasoning_content`, parts of text |
| `conversations` (from, value; ShareGPT's) | human, gpt, system, function_call, observation |
| `prompt`, `completion` | text or messages; `response` and `answer` too, and `instruction`, `input`, `output` |
| `text` | already rendered with the target's chat template |
| `input_ids`, and `loss_mask` or `labels` | already tokenised |

Nothing is guessed: what a form does not allow is refused with a reason, for a trainer that bends records trains on data
that nobody wrote. No text of a record enters a message: it names keys and places only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tasks.trainer.data.conversation import ROLES, BadRecordError, Conversation, Message, ToolCall

_SURROGATE = re.compile("[\ud800-\udfff]")
# What a record may say of where it is from, the first one counting; and how long a label is at most.
_LABELS = ("domain", "source")
_LONGEST_LABEL = 64

_OPENAI_ROLES = {**{role: role for role in ROLES}, "developer": "system", "function": "tool"}
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    **_OPENAI_ROLES,
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_COMPLETIONS = ("completion", "response", "answer")
_MASKS = ("loss_mask", "assistant_masks", "completion_mask")
_IGNORED_LABEL = -100


def parse_record(value: object, *, source: str, number: int, place: str = "") -> Conversation:
    """The conversation of one record.

    Raises:
        BadRecordError: its reason is one of `wrong_structure`, `no_messages`, `unknown_role`, `content_not_text`,
            `invalid_unicode`, `bad_tool_call`, `multimodal_...` (the part's type), `no_loss_mask`, `labels_shifted`.
    """
    if not isinstance(value, dict):
        raise BadRecordError("wrong_structure", f"a JSON {type(value).__name__}, expected an object with `messages`")
    fields: dict[str, Any] = {}
    for present, parse in _FORMS:
        if present(value):
            fields = parse(value)
            break
    else:
        raise BadRecordError(
            "no_messages",
            "no `messages` (role, content), no `conversations` (from, value), and no other known form: `prompt`, "
            "`text`, or `input_ids` with `loss_mask`",
        )
    return Conversation(source=source, line=number, label=_label(value), place=place, **fields)


def _label(value: Mapping[str, Any]) -> str | None:
    """The record's domain, as a few plain words: it is shown in reports. Longer text is no label, may be anything."""
    for key in _LABELS:
        label = value.get(key)
        if isinstance(label, str) and 0 < len(label) <= _LONGEST_LABEL and label.isprintable():
            return label.replace("|", "/").strip() or None
    return None


def _chat(value: Mapping[str, Any]) -> dict[str, Any]:
    key = next(key for key in ("messages", "conversations", "conversation") if value.get(key) is not None)
    messages = _messages(value[key], key)
    system = value.get("system")
    if isinstance(system, str) and system.strip() and messages[0].role != "system":
        messages = (Message("system", _text(system, "`system`")), *messages)
    return {"messages": messages, "tools": _tools(value.get("tools"))}


def _messages(items: object, list_key: str) -> tuple[Message, ...]:
    if not isinstance(items, list):
        raise BadRecordError("wrong_structure", f"`{list_key}` is a JSON {type(items).__name__}, expected a list")
    if not items:
        raise BadRecordError("no_messages", f"`{list_key}` is empty")
    return tuple(_message(item, list_key, f"message {n} of `{list_key}`") for n, item in enumerate(items, start=1))


def _message(item: object, list_key: str, place: str) -> Message:
    if not isinstance(item, dict):
        raise BadRecordError("wrong_structure", f"{place} is not an object")
    # Tables give every message every key, with nothing in those it lacks.
    sharegpt = item.get("role") is None and (item.get("from") is not None or list_key.startswith("conversation"))
    role_key, content_key, roles = (
        ("from", "value", _SHAREGPT_ROLES) if sharegpt else ("role", "content", _OPENAI_ROLES)
    )
    said = item.get(role_key)
    if not isinstance(said, str) or said not in roles:
        # The role itself is not shown: in a file with its keys mixed up it may be text of the conversation.
        known = ", ".join(roles)
        raise BadRecordError("unknown_role", f"{place} has no known role in `{role_key}`: expected one of {known}")
    role, content = roles[said], item.get(content_key)
    calls = _tool_calls(item.get("tool_calls"), place)
    if said == "function_call":
        calls, content = (_tool_call(_loads(content, place, "bad_tool_call"), place),), ""
    if content is None and calls:
        content = ""
    finish_reason = item.get("finish_reason")
    if finish_reason is not None and not isinstance(finish_reason, str):
        raise BadRecordError("wrong_structure", f"{place}: `finish_reason` is not a string")
    reasoning = next((item[key] for key in _REASONING if item.get(key)), None) if role == "assistant" else None
    if calls and role != "assistant":
        raise BadRecordError("bad_tool_call", f"{place} calls a tool, and only an answer can")
    return Message(
        role,
        _content(content, content_key, place),
        finish_reason,
        reasoning=None if reasoning is None else _text(reasoning, f"{place}: its reasoning"),
        tool_calls=calls,
        name=_optional(item, "name", place) if role == "tool" else None,
        tool_call_id=_optional(item, "tool_call_id", place) if role == "tool" else None,
    )


def _content(content: object, key: str, place: str) -> str:
    """A string, or OpenAI's list of parts, all of them text."""
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        texts = []
        for number, part in enumerate(content, start=1):
            kind = part.get("type")
            if kind not in ("text", "input_text", "output_text"):
                # The kind is shown when it is a name, never when it may be text.
                named = kind if isinstance(kind, str) and re.fullmatch(r"[a-z_]{1,32}", kind) else "unknown"
                raise BadRecordError(
                    f"multimodal_{named}",
                    f"{place}: part {number} of `{key}` is {named}, and drafts are trained on text only",
                )
            texts.append(_text(part.get("text"), f"{place}: part {number} of `{key}`"))
        return "".join(texts)
    return _text(content, f"{place}: `{key}`")


def _text(content: object, what: str) -> str:
    if not isinstance(content, str):
        raise BadRecordError("content_not_text", f"{what} is {type(content).__name__}, expected a string")
    # JSON can carry half of a surrogate pair, which no tokenizer accepts.
    if _SURROGATE.search(content):
        raise BadRecordError("invalid_unicode", f"{what} holds a lone surrogate, no valid Unicode")
    return content


def _optional(item: Mapping[str, Any], key: str, place: str) -> str | None:
    return None if item.get(key) is None else _text(item[key], f"{place}: `{key}`")


def _tool_calls(calls: object, place: str) -> tuple[ToolCall, ...]:
    calls = _loads(calls, place, "bad_tool_call") if isinstance(calls, str) and calls else calls
    if not calls:
        return ()
    if not isinstance(calls, list):
        raise BadRecordError("bad_tool_call", f"{place}: `tool_calls` is {type(calls).__name__}, expected a list")
    return tuple(_tool_call(call, place) for call in calls)


def _tool_call(call: object, place: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise BadRecordError("bad_tool_call", f"{place}: a tool call has no `name`")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _loads(arguments or "{}", place, "bad_tool_call")
    if not isinstance(arguments, dict):
        raise BadRecordError("bad_tool_call", f"{place}: the `arguments` of a tool call are no JSON object")
    written = json.dumps(arguments, ensure_ascii=False)
    _text(written, f"{place}: the `arguments` of a tool call")
    return ToolCall(_text(name, f"{place}: `name`"), written, call["id"] if isinstance(call.get("id"), str) else None)


def _tools(tools: object) -> str | None:
    tools = _loads(tools, "`tools`", "wrong_structure") if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecordError("wrong_structure", "`tools` is no list of objects")
    return _text(json.dumps(tools, ensure_ascii=False), "`tools`")


def _loads(text: object, place: str, reason: str) -> Any:
    try:
        return json.loads(_text(text, place))
    except (ValueError, RecursionError):
        raise BadRecordError(reason, f"{place}: a tool or a tool call is no valid JSON") from None


def _prompt_completion(value: Mapping[str, Any]) -> dict[str, Any]:
    """Text stands for one turn; lists are messages. Without a completion it is a prompt to be answered."""
    prompt = value.get("prompt", value.get("question"))
    key = next((key for key in _COMPLETIONS if value.get(key) is not None), "completion")
    completion = value.get(key)
    asked = _messages(prompt, "prompt") if isinstance(prompt, list) else (Message("user", _text(prompt, "`prompt`")),)
    if completion is None:
        answer: tuple[Message, ...] = ()
    elif isinstance(completion, list):
        answer = _messages(completion, key)
    else:
        answer = (Message("assistant", _text(completion, f"`{key}`"), _optional(value, "finish_reason", "record")),)
    system = value.get("system")
    if isinstance(system, str) and system.strip():
        asked = (Message("system", _text(system, "`system`")), *asked)
    return {"messages": (*asked, *answer), "tools": _tools(value.get("tools"))}


def _instruction(value: Mapping[str, Any]) -> dict[str, Any]:
    asked = _text(value["instruction"], "`instruction`")
    if value.get("input"):
        asked = f"{asked}\n\n{_text(value['input'], '`input`')}"
    answer = () if value.get("output") is None else (Message("assistant", _text(value["output"], "`output`")),)
    return {"messages": (Message("user", asked), *answer)}


def _preformatted(value: Mapping[str, Any]) -> dict[str, Any]:
    text = _text(value["text"], "`text`")
    if not text.strip():
        raise BadRecordError("no_messages", "`text` is empty")
    return {"text": text}


def _tokens(value: Mapping[str, Any]) -> dict[str, Any]:
    key = "input_ids" if value.get("input_ids") is not None else "token_ids"
    ids = value[key]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise BadRecordError("wrong_structure", f"`{key}` is no list of token ids")
    mask_key = next((name for name in (*_MASKS, "labels") if value.get(name) is not None), None)
    if mask_key is None:
        raise BadRecordError("no_loss_mask", f"`{key}` without `loss_mask` or `labels`: which tokens are answers?")
    marks = value[mask_key]
    if not isinstance(marks, list) or len(marks) != len(ids):
        raise BadRecordError("wrong_structure", f"`{mask_key}` is no list as long as `{key}`")
    if mask_key == "labels":
        mask = tuple(label != _IGNORED_LABEL for label in marks)
        if any(kept and label != i for kept, label, i in zip(mask, marks, ids, strict=True)):
            raise BadRecordError("labels_shifted", f"`labels` differ from `{key}`: they must not be shifted")
    else:
        if not all(mark in (0, 1) for mark in marks):
            raise BadRecordError("wrong_structure", f"`{mask_key}` has other values than 0 and 1, false and true")
        mask = tuple(bool(mark) for mark in marks)
    return {"token_ids": tuple(ids), "loss_mask": mask}


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda value: any(value.get(key) is not None for key in keys)


# The first that fits: tokens before the text they came from, messages before a text made of them.
_FORMS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], dict[str, Any]]], ...] = (
    (_has("input_ids", "token_ids"), _tokens),
    (_has("messages", "conversations", "conversation"), _chat),
    (_has("prompt", "question"), _prompt_completion),
    (_has("instruction"), _instruction),
    (_has("text"), _preformatted),
)
