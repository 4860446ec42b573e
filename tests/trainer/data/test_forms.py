"""Every form of record and of file: the sample files, tables and folders made of them, and what each refuses."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from tasks.trainer.data.conversation import BadRecordError, Message, Refusals, ToolCall
from tasks.trainer.data.forms import parse_record
from tasks.trainer.data.read import read_conversations, stream_conversations
from tasks.trainer.data.sources import expand_source
from tasks.trainer.errors import InputError

SAMPLES = Path(__file__).parent / "samples"
USER, ANSWER = "user", "assistant"


def turns(name: str, **settings: Any) -> list[list[tuple[str, str]]]:
    """Role and content of each message of each conversation of a sample file."""
    found, _ = read_conversations([str(SAMPLES / name)], **settings)
    return [[(message.role, message.content) for message in conversation.messages] for conversation in found]


def test_questions_and_answers_of_every_form() -> None:
    """Red when a form loses a turn, swaps roles, or a bracket, quote or escape in a text cuts a record."""
    assert turns("sharegpt.json") == [
        [(USER, "Name two rivers."), (ANSWER, 'The "Elbe" and the {Oder}.'), (USER, "One more: [short]"),
         (ANSWER, "Rhine \\ Rhein")],
        [("system", "Be brief."), (USER, "Bye"), (ANSWER, "Bye.")],
    ]  # fmt: skip
    assert turns("wrapped.json") == [[(USER, "One?"), (ANSWER, "1")], [(USER, "Two?"), (ANSWER, "2")]]
    assert turns("pretty.json") == [[(USER, "Alone?"), (ANSWER, "Yes, one object over many lines.")]]
    assert turns("lines.json") == [[(USER, f"Line {i}?"), (ANSWER, f"Line {i}.")] for i in range(2)]
    assert turns("bom_crlf.jsonl") == [[(USER, "Wie heißt er?"), (ANSWER, "Der Adler 🦅.")],
                                       [(USER, "ἀετός?"), (ANSWER, "Αετός: an eagle.")]]  # fmt: skip
    assert turns("prompt_completion.jsonl") == [
        [(USER, "The capital of Norway?"), (ANSWER, "Oslo.")],
        [("system", "Short."), (USER, "Of Peru?"), (ANSWER, "Lima.")],
        [(USER, "A prompt to be answered yet")],
    ]
    assert turns("alpaca.json") == [[(USER, "Translate to German.\n\neagle"), (ANSWER, "Adler")],
                                    [(USER, "Name a colour."), (ANSWER, "Green.")]]  # fmt: skip


def test_tools_reasoning_and_tokens() -> None:
    """Red when a tool, a call, its result, a thought, a text or a mask is dropped on reading."""
    (openai,), _ = read_conversations([str(SAMPLES / "tools.jsonl")])
    assert openai.messages[1] == Message(
        ANSWER, "", tool_calls=(ToolCall("get_weather", '{"town": "Bergen"}', "call_1"),)
    )
    assert openai.messages[2] == Message("tool", '{"rain": true}', name="get_weather", tool_call_id="call_1")
    (sharegpt,), _ = read_conversations([str(SAMPLES / "sharegpt_tools.jsonl")])
    assert [message.role for message in sharegpt.messages] == ["system", USER, ANSWER, "tool", ANSWER]
    assert sharegpt.messages[2].tool_calls == (ToolCall("get_weather", '{"town": "Rome"}'),)
    assert sharegpt.tools == openai.tools
    assert json.loads(sharegpt.tools or "")[0]["function"]["name"] == "get_weather"
    thinking, _ = read_conversations([str(SAMPLES / "reasoning.jsonl")])
    assert [message.reasoning for message in thinking[0].messages if message.role == ANSWER] == [
        "Two and two make four.",
        "Four and one.",
    ]
    (text,), _ = read_conversations([str(SAMPLES / "preformatted.jsonl")])
    assert text.text is not None
    assert text.text.count("<|im_end|>") == 4
    masked, labelled = read_conversations([str(SAMPLES / "tokens.jsonl")])[0]
    assert (masked.token_ids, masked.loss_mask) == ((5, 6, 7, 8, 9), (False, False, True, True, True))
    assert labelled.loss_mask == (False, False, True, True)


def test_parts_of_text_are_joined_and_pictures_refused_by_name() -> None:
    """Red when a picture is dropped and its question trained on, or the refusal does not say what it was."""
    with pytest.raises(InputError, match=r"line 2: message 1 .*: part 2 of `content` is image_url"):
        turns("parts.jsonl")
    found, refusals = read_conversations([str(SAMPLES / "parts.jsonl")], on_error="skip")
    assert [conversation.messages[0].content for conversation in found] == ["Look here."]
    assert refusals.counts == {"multimodal_image_url": 1}


ASK = {"role": "user", "content": "secret"}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input_ids": [1, 2]}, "no_loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "wrong_structure"),
        ({"input_ids": [1, 2], "loss_mask": [1, 7]}, "wrong_structure"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "wrong_structure"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels_shifted"),
        ({"text": " \n"}, "no_messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, "bad_tool_call"),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{secret"}]}]},
         "bad_tool_call"),
        ({"messages": [{**ASK, "tool_calls": [{"name": "f", "arguments": {}}]}]}, "bad_tool_call"),
        ({"messages": [{**ASK, "content": [{"type": "SECRET words", "text": "secret"}]}]}, "multimodal_unknown"),
        ({"messages": [ASK], "tools": "{secret"}, "wrong_structure"),
        ({"prompt": 7}, "content_not_text"),
        ({"words": "secret"}, "no_messages"),
    ],
)  # fmt: skip
def test_what_a_form_does_not_allow(record: dict[str, Any], reason: str) -> None:
    """Red when one of these is trained on, counted under another name, or its text is told."""
    with pytest.raises(BadRecordError) as caught:
        parse_record(record, source="f", number=1)
    assert caught.value.reason == reason
    assert "secret" not in caught.value.what.lower()


ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]} for i in range(600)
]


def rows_read(*urls: str, **settings: Any) -> list[str]:
    return [conversation.messages[0].content for conversation in read_conversations(urls, **settings)[0]]


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def write_saved(folder: Path, rows: list[dict[str, Any]]) -> None:
    """As `datasets.save_to_disk` leaves it, with a cache file of a map beside."""
    folder.mkdir(parents=True)
    half = len(rows) // 2
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write_arrow(folder / names[0], rows[:half])
    write_arrow(folder / names[1], rows[half:])
    write_arrow(folder / "cache-0123456789abcdef.arrow", rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_tables_and_folders(tmp_path: Path) -> None:
    """Red when a row of Parquet or Arrow is lost, a cache is read twice, or a split is chosen silently."""
    expected = [f"q{i}" for i in range(600)]
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=70)
    assert rows_read(str(tmp_path / "rows.parquet")) == expected
    write_saved(tmp_path / "saved", ROWS)
    assert rows_read(str(tmp_path / "saved")) == expected
    write_saved(tmp_path / "dict/train", ROWS)
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train"]}')
    assert rows_read(str(tmp_path / "dict")) == expected
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"holds the splits train, test: name one, for example .*/dict/train"):
        rows_read(str(tmp_path / "dict"))
    hub = tmp_path / "hub/data"
    hub.mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(ROWS[:3]), hub / f"{split}-00000-of-00001.parquet")
    with pytest.raises(InputError, match=r"several splits \(test, train\)"):
        rows_read(str(tmp_path / "hub"))
    assert rows_read(str(tmp_path / "hub/**/*train*")) == expected[:3]
    with pytest.raises(InputError, match="matches no file"):
        expand_source(str(tmp_path / "hub/*.jsonl"))
    found, _ = read_conversations([str(tmp_path / "rows.parquet")])
    assert found[2].where.endswith("rows.parquet, row 3")


def test_rows_become_lines_for_whoever_copies_them(tmp_path: Path) -> None:
    """Red when a night that copies lines writes half a record, or one that reads back as another."""
    write_arrow(tmp_path / "rows.arrow", ROWS[:5])
    for name in (tmp_path / "rows.arrow", SAMPLES / "sharegpt.json", SAMPLES / "pretty.json", SAMPLES / "tools.jsonl"):
        given = list(stream_conversations([str(name)], refusals=Refusals()))
        assert all(raw.rstrip(b"\r\n").count(b"\n") == 0 for _, raw in given)
        copy = tmp_path / "copy.jsonl"
        copy.write_bytes(b"".join(raw.rstrip(b"\r\n") + b"\n" for _, raw in given))
        again, _ = read_conversations([str(copy)])
        assert [conversation.identity for conversation in again] == [found.identity for found, _ in given]


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".zst", zstd.compress), (".bz2", bz2.compress)]
)
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_compressed_files_and_their_truncation(tmp_path: Path, kind: str, suffix: str, compress: Any) -> None:
    """Red when a compression is not read, a cut passes for the end, or its whole records are lost or kept unasked."""
    lines = [json.dumps(row) for row in ROWS]
    body = ("\n".join(lines) + "\n" if kind == "jsonl" else "[" + ",\n".join(lines) + "]").encode()
    path = tmp_path / f"rows.{kind}{suffix}"
    path.write_bytes(compress(body))
    assert rows_read(str(path)) == [f"q{i}" for i in range(600)]
    with fsspec.open(f"memory://forms/rows.{kind}{suffix}", "wb") as file:
        file.write(path.read_bytes())
    assert len(rows_read(f"memory://forms/rows.{kind}{suffix}")) == 600
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 9 // 10])
    for on_error in ("stop", "skip"):
        if suffix or kind == "json":
            with pytest.raises(InputError, match="the file looks truncated"):
                read_conversations([str(path)], on_error=on_error)
    try:
        kept, refusals = read_conversations([str(path)], on_truncated="keep")
    except InputError:
        assert suffix in (".zst", ".bz2")  # one block holds all of this file: nothing of it is left
        return
    assert 0 < len(kept) < 600
    assert [c.messages[0].content for c in kept] == [f"q{i}" for i in range(len(kept))]
    assert refusals.total == 1
    assert set(refusals.counts) <= {"truncated_file", "truncated_last_line"}


def test_a_cut_document_says_at_which_byte() -> None:
    """Red when the place of the cut is not the start of the record that is not whole."""
    path = SAMPLES / "cut.json"
    with pytest.raises(InputError, match=r"cut\.json ends too early, at byte \d+: .*data\.on_truncated=keep"):
        read_conversations([str(path)])
    kept, refusals = read_conversations([str(path)], on_truncated="keep")
    assert [c.messages[0].content for c in kept] == ["Question 0", "Question 1"]
    byte = int(refusals.first["truncated_file"].rpartition(" ")[2])
    assert path.read_bytes()[byte - 1 :].startswith(b'{"conversations": [{"from": "human", "value": "Question 2"')


def test_a_document_cut_between_two_records_is_cut_all_the_same(tmp_path: Path) -> None:
    """Red when an array without its end passes for whole because its last record is, or a whole one for cut."""
    path, good = tmp_path / "a.json", json.dumps(ROWS[0])
    for end, is_cut in (("", True), (",", True), (",\n  ", True), ("]", False), ("]\n", False)):
        path.write_text(f"[{good}{end}")
        if not is_cut:
            assert rows_read(str(path)) == ["q0"]
            continue
        with pytest.raises(InputError, match=r"a\.json ends too early, at byte \d+"):
            read_conversations([str(path)])
        assert rows_read(str(path), on_truncated="keep") == ["q0"]


def test_a_bad_record_of_a_document_is_told_by_byte_and_skipped(tmp_path: Path) -> None:
    """Red when one bad record hides those behind it, or its place is that of another."""
    good = json.dumps(ROWS[0])
    path = tmp_path / "a.json"
    path.write_text(f'[{good}, {{"messages": [,]}}, 7, "x", {good}]')
    with pytest.raises(InputError, match=rf"a\.json, byte {len(good) + 4}: invalid JSON at column"):
        read_conversations([str(path)])
    kept, refusals = read_conversations([str(path)], on_error="skip")
    assert len(kept) == 2
    assert refusals.counts == {"invalid_json": 1, "wrong_structure": 2}
    assert kept[1].where.endswith(f"byte {path.read_text().rindex(good) + 1}")


def test_cut_tables(tmp_path: Path) -> None:
    """Red when a cut Parquet file is a traceback, or the whole batches of a cut Arrow file are not kept when asked."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match="no parquet file, or is cut"):
        read_conversations([str(path)], on_truncated="keep")
    path = tmp_path / "rows.arrow"
    write_arrow(path, ROWS)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match="looks truncated"):
        read_conversations([str(path)])
    assert 0 < len(rows_read(str(path), on_truncated="keep")) < 600
