"""Regeneration by servers: real HTTP, with what servers do: fail, refuse, go away, cut, think apart and call tools."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tasks.trainer.data import servers as module
from tasks.trainer.data.conversation import Conversation, Message, Refusals
from tasks.trainer.data.regenerate import regenerate
from tasks.trainer.data.servers import Servers
from tasks.trainer.errors import InputError


class FakeServer(ThreadingHTTPServer):
    """Speaks as much of the API as SGLang and vLLM do; `faults` are statuses that it answers first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults: list[int] = []
        self.requests: list[dict[str, Any]] = []
        self.models = ["the-target"]
        self.gone_after: int | None = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """A client that was cut off is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "x"} for name in self.server.models]
        self._send(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(asked)
        if self.server.gone_after is not None and len(self.server.requests) > self.server.gone_after:
            self.connection.close()
            return
        if self.server.faults:
            self._send(self.server.faults.pop(), {"error": {"message": "secret question"}})
            return
        question = asked["messages"][-1]["content"]
        message: dict[str, Any] = {"role": "assistant", "content": f"answer to {question}"}
        finish = "stop"
        if question == "cut":
            message["content"], finish = "half a wor\ufffd", "length"
        elif question == "think":
            message["reasoning_content"] = "a thought"
        elif question == "call":
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            message, finish = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        elif question == "mute":
            message["content"] = " "
        elif question == "forbidden":
            self._send(400, {"error": {"message": "secret question"}})
            return
        choice = {"index": 0, "message": message, "finish_reason": finish}
        usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        self._send(200, {"id": "x", "object": "chat.completion", "created": 0, "model": asked["model"],
                         "choices": [choice], "usage": usage})  # fmt: skip


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], FakeServer]]:
    monkeypatch.setattr(module, "RETRIES", 1)
    made: list[FakeServer] = []

    def make() -> FakeServer:
        made.append(FakeServer())
        return made[-1]

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


@pytest.fixture
def text(tokenizer_of: Callable[..., PreTrainedTokenizerBase], eos_ids: tuple[int, ...]) -> Any:
    config = SimpleNamespace(max_position_embeddings=4096)
    return SimpleNamespace(tokenizer=tokenizer_of("chatml"), eos_token_ids=eos_ids, config=config)


def ask(*turns: str, line: int = 1) -> Conversation:
    return Conversation("a.jsonl", line, tuple(Message("user", turn) for turn in turns))


def run(
    servers: Servers, prompts: list[Conversation], folder: Path, refusals: Refusals | None = None, **changed: Any
) -> list[Conversation]:
    settings: dict[str, Any] = {"fingerprint": "f", "max_new_tokens": 16, "batch_size": 4, "seed": 3, **changed}
    return regenerate(servers, prompts, out_dir=folder, refusals=refusals or Refusals(), **settings)


def test_each_turn_is_answered_and_says_by_whom(
    make_server: Callable[[], FakeServer], text: Any, tmp_path: Path
) -> None:
    """Red when a turn is left out, a thought, a call or a cut is lost, or the server's own sampling decides."""
    first, second = make_server(), make_server()
    prompts = [ask(f"q{n}", f"r{n}", line=n) for n in range(1, 13)]
    prompts += [ask("cut", line=13), ask("think", line=14), ask("call", "next", line=15)]
    refusals = Refusals()
    prompts += [ask("mute", line=16), ask("forbidden", line=17), ask("q1", "r1", line=18)]
    answered = run(
        Servers([first.url, second.url], text), prompts, tmp_path, refusals, temperatures=(0.0, 0.7),
        template_arguments={"date_string": "today"},
    )  # fmt: skip
    by_line = {conversation.line: conversation for conversation in answered}
    assert list(by_line) == list(range(1, 16))
    for n in range(1, 13):
        assert [m.content for m in by_line[n].messages] == [f"q{n}", f"answer to q{n}", f"r{n}", f"answer to r{n}"]
    assert by_line[13].messages[1] == Message("assistant", "half a wor", "length")
    assert by_line[14].messages[1].reasoning == "a thought"
    assert [call.name for call in by_line[15].messages[-1].tool_calls] == ["f"]
    assert len(by_line[15].messages) == 2
    assert refusals.counts == {"empty_answer": 1, "refused_by_server": 1, "duplicate_prompt": 1}
    told = [json.loads(conversation.answered_by or "") for conversation in answered]
    assert {entry["temperature"] for entry in told} == {0.0, 0.7}
    assert all(entry["models"] == ["the-target"] and entry["by"] == "server" for entry in told)
    assert {url for entry in told for url in entry["servers"]} == {first.url, second.url}
    for asked in (*first.requests, *second.requests):
        assert (asked["top_k"], asked["top_p"], asked["repetition_penalty"]) == (-1, 1.0, 1.0)
        assert asked["chat_template_kwargs"] == {"date_string": "today"}
        assert asked["max_tokens"] == 16
    temperatures = Counter(asked["temperature"] for asked in (*first.requests, *second.requests))
    assert set(temperatures) == {0.0, 0.7}


def test_what_passes_is_retried_and_a_lost_server_left_out(
    make_server: Callable[[], FakeServer], text: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when one fault of a server loses an answer, or the prompts of a server that went away are not asked again."""
    good, lost = make_server(), make_server()
    good.faults, lost.gone_after = [503, 429], 1
    prompts = [ask(f"q{n}", line=n) for n in range(1, 21)]
    answered = run(Servers([good.url, lost.url], text), prompts, tmp_path, batch_size=2)
    assert [conversation.line for conversation in answered] == list(range(1, 21))
    assert caplog.text.count("is left out after 1 retries: APIConnectionError") == 1


def test_a_rerun_keeps_what_was_answered(make_server: Callable[[], FakeServer], text: Any, tmp_path: Path) -> None:
    """Red when all servers going away loses committed answers, is a traceback, or the rerun asks for them again."""
    server = make_server()
    servers = Servers([server.url], text)
    server.gone_after = 7
    prompts = [ask(f"q{n}", line=n) for n in range(1, 21)]
    with pytest.raises(InputError, match=r"no server of data\.regenerate_servers answers \(127.*answers made so far"):
        run(servers, prompts, tmp_path)
    kept = list(tmp_path.glob("*/batch-*.jsonl"))
    server.gone_after, before = None, len(server.requests)
    answered = run(Servers([server.url], text), prompts, tmp_path)
    assert len(answered) == 20
    assert kept
    assert len(server.requests) - before == 20 - 4 * len(kept)
    before = len(server.requests)
    assert run(Servers([server.url], text), prompts, tmp_path) == answered
    assert len(server.requests) == before


def test_mistakes_are_one_line(make_server: Callable[[], FakeServer], text: Any, tmp_path: Path) -> None:
    """Red when a wrong key, a wrong name or no server at all is a traceback, or spills the server's message."""
    server = make_server()
    server.models = ["one", "two"]
    with pytest.raises(InputError, match=r"has several among its models \(one, two\): set data\.regenerate_model"):
        Servers([server.url], text)
    with pytest.raises(InputError, match=r"has no 'three' among its models"):
        Servers([server.url], text, model="three")
    servers = Servers([server.url], text, model="two")
    server.faults = [401]
    with pytest.raises(InputError, match="refuses requests with status 401: set OPENAI_API_KEY") as caught:
        run(servers, [ask("q")], tmp_path)
    assert "secret" not in str(caught.value)
    with pytest.raises(InputError, match="no server of"):
        Servers(["http://127.0.0.1:9/v1"], text)
