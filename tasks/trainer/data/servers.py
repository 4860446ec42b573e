"""Servers that answer for the target: any list of OpenAI-compatible ones (SGLang, vLLM), through the `openai` client.

Fast, and not bit for bit repeatable: what is kept is each answer with how it was made. The server renders the prompt
with its own copy of the chat template, so it must serve the very target that the run trains for; a name can be checked
and weights cannot. The client retries what passes by itself; a server that stays away is left out, and its prompts go
to the others.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import openai

from tasks.trainer.data.conversation import Message, ToolCall
from tasks.trainer.data.mask import RefusedConversationError, as_dict
from tasks.trainer.errors import InputError
from tasks.trainer.target_text import TargetText

logger = logging.getLogger(__name__)

RETRIES = 6
"""Of one request, by the client, with growing pauses of half a second to 8 s: a server may restart meanwhile."""
TIMEOUT = 600.0
"""Seconds of one request. A long answer of a loaded server takes minutes."""
_KEY = "OPENAI_API_KEY"


class _Server:
    """One server: its client, the model's name there, and how many requests are under way."""

    def __init__(self, url: str, model: str | None) -> None:
        self.url = url
        self.host = urlsplit(url).netloc
        # The client insists on a key; servers that want none ignore it.
        self.client = openai.OpenAI(
            base_url=url, api_key=os.environ.get(_KEY) or "none", max_retries=RETRIES, timeout=TIMEOUT
        )
        self.model = model
        self.under_way = 0
        self.is_away = False


class Servers:
    """Answers prompts on whichever server has the least to do. Threads may share it.

    urls: base URLs, with /v1. text: the target's tokenizer and fingerprint. model: its name on the servers; None: the
    one that each server lists.

    Raises:
        InputError: no server answers, one wants another key, or lists several models and none was named.
    """

    def __init__(self, urls: Sequence[str], text: TargetText, *, model: str | None = None) -> None:
        self.tokenizer = text.tokenizer
        self.eos_token_ids = text.eos_token_ids
        self.max_positions = getattr(text.config, "max_position_embeddings", None)
        self._lock = threading.Lock()
        self._servers = [_Server(url, model) for url in urls]
        for server in self._servers:
            self._find_model(server)
        self.models = sorted({server.model for server in self._servers if server.model})
        self._check_some_left()

    def __len__(self) -> int:
        return len(self._servers)

    def answer(
        self,
        messages: Sequence[Message],
        *,
        tools: str | None,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        template_arguments: Mapping[str, Any],
    ) -> tuple[Message, str, int]:
        """The answer to `messages`, the server's URL, and how many tokens it has.

        Sampled from the plain distribution, whatever the server's defaults: no top-k, no top-p, no penalties.

        Raises:
            RefusedConversationError: `refused_by_server` (too long, say), `empty_answer`, `filtered_answer`.
            InputError: no server is left, or one refuses the key or the model.
        """
        more: dict[str, Any] = {"tools": json.loads(tools)} if tools else {}
        while True:
            server = self._take()
            try:
                completion = server.client.chat.completions.create(
                    model=server.model or "",
                    messages=[_for_server(message) for message in messages],
                    max_tokens=max_new_tokens,
                    temperature=temperature,
                    top_p=1.0,
                    seed=seed,
                    extra_body={
                        "top_k": -1,
                        "min_p": 0.0,
                        "repetition_penalty": 1.0,
                        "chat_template_kwargs": dict(template_arguments),
                    },
                    **more,
                )
            except (openai.BadRequestError, openai.UnprocessableEntityError):
                # Its message may quote the conversation.
                raise RefusedConversationError("refused_by_server") from None
            except openai.APIStatusError as error:
                if error.status_code < 500 and error.status_code not in (408, 409, 429):
                    raise InputError(_refused(server, error.status_code)) from None
                self._leave_out(server, f"status {error.status_code}")
                continue
            except openai.APIConnectionError as error:  # timeouts too
                self._leave_out(server, type(error).__name__)
                continue
            finally:
                with self._lock:
                    server.under_way -= 1
            usage = completion.usage
            return _read_answer(completion), server.url, usage.completion_tokens if usage else 0

    def _take(self) -> _Server:
        with self._lock:
            here = [server for server in self._servers if not server.is_away]
            if here:
                server = min(here, key=lambda each: each.under_way)
                server.under_way += 1
                return server
        self._check_some_left()
        raise AssertionError

    def _leave_out(self, server: _Server, why: str) -> None:
        with self._lock:
            was_here, server.is_away = not server.is_away, True
        if was_here:
            logger.warning("the server on %s is left out after %d retries: %s", server.host, RETRIES, why)

    def _check_some_left(self) -> None:
        if all(server.is_away for server in self._servers):
            hosts = ", ".join(server.host for server in self._servers)
            raise InputError(
                f"no server of data.regenerate_servers answers ({hosts}): start one and run the same command again, "
                "answers made so far are kept"
            )

    def _find_model(self, server: _Server) -> None:
        try:
            names = [each.id for each in server.client.models.list()]
        except openai.APIStatusError as error:
            if error.status_code >= 500:
                self._leave_out(server, f"status {error.status_code}")
                return
            raise InputError(_refused(server, error.status_code)) from None
        except openai.APIConnectionError as error:
            self._leave_out(server, type(error).__name__)
            return
        if server.model is None and len(names) == 1:
            server.model = names[0]
        elif server.model not in names:
            asked = "several" if server.model is None else f"no {server.model!r}"
            raise InputError(
                f"the server on {server.host} has {asked} among its models ({', '.join(names[:8]) or 'none'}): set "
                "data.regenerate_model to the target's name there"
            )


def _refused(server: _Server, status: int) -> str:
    way_out = f"set {_KEY} in the environment" if status in (401, 403) else "check data.regenerate_servers"
    return f"the server on {server.host} refuses requests with status {status}: {way_out}"


def _for_server(message: Message) -> Any:
    """A message as the API takes it: arguments as text, and thoughts under one name."""
    given = as_dict(message)
    given.pop("thinking", None)
    for call in given.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return given


def _read_answer(completion: Any) -> Message:
    if not completion.choices:
        raise RefusedConversationError("empty_answer")
    choice = completion.choices[0]
    if choice.finish_reason == "content_filter":
        raise RefusedConversationError("filtered_answer")
    said = choice.message
    extra = said.model_extra or {}  # servers that split thoughts off send them under one of these
    reasoning = extra.get("reasoning_content") or extra.get("reasoning") or None
    try:
        calls = tuple(
            ToolCall(call.function.name, json.dumps(json.loads(call.function.arguments or "{}"), ensure_ascii=False))
            for call in said.tool_calls or ()
        )
    except ValueError:
        raise RefusedConversationError("bad_tool_call") from None
    text = said.content or ""
    is_cut = choice.finish_reason == "length"
    if is_cut:
        text = text.rstrip("\ufffd")  # the limit cut a character in two
    if not (text.strip() or reasoning or calls):
        raise RefusedConversationError("empty_answer")
    return Message("assistant", text, "length" if is_cut else "stop", reasoning=reasoning, tool_calls=calls)
