"""Read conversations from files of any form that is known (forms.py), on any fsspec URL (records.py, sources.py).

Files are streamed, so that an error names its line or byte and memory holds one record. Reading is strict by default:
the first bad record stops it, because a trainer that drops records in silence trains on data that nobody chose.
``on_error="skip"`` goes on and counts what it refused, by reason. A file that ends in the middle of a document or of
its compression is another matter, half the data may be missing: its whole records are used only where
``on_truncated="keep"`` asks for it. Whether a template can handle the order of the roles is not judged here: only the
template knows (see mask.py).

No text of a conversation ever enters an error message: file, place and the kind of fault only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from tasks.trainer.data.conversation import ROLES, BadRecordError, Conversation, Message, Refusals, ToolCall
from tasks.trainer.data.forms import parse_record
from tasks.trainer.data.records import Record, TruncatedError, read_records
from tasks.trainer.data.sources import expand_source
from tasks.trainer.errors import InputError

__all__ = ["ROLES", "Conversation", "Message", "Refusals", "ToolCall", "read_conversations", "stream_conversations"]

OnError = Literal["stop", "skip"]
OnTruncated = Literal["stop", "keep"]


def read_conversations(
    urls: Sequence[str], *, on_error: OnError = "stop", on_truncated: OnTruncated = "stop"
) -> tuple[list[Conversation], Refusals]:
    """Read the conversations of files, globs and folders, in the order given, into memory.

    Returns the conversations and the refusals (empty unless `on_error` is "skip" or `on_truncated` "keep").

    Raises:
        InputError: no URL at all; a file that is missing, unreadable, empty or cut; with "stop" a record that is no
            conversation; with "skip" a set in which no record is one.
    """
    refusals = Refusals()
    stream = stream_conversations(urls, on_error=on_error, on_truncated=on_truncated, refusals=refusals)
    conversations = [found for found, _ in stream]
    if not conversations:
        raise nothing_read(urls, refusals)
    return conversations, refusals


def nothing_read(urls: Sequence[str], refusals: Refusals) -> InputError:
    """The error of a set without conversations."""
    return InputError(f"no line of {', '.join(urls)} is a conversation: {refusals.summary()}")


def stream_conversations(
    urls: Sequence[str],
    *,
    on_error: OnError = "stop",
    on_truncated: OnTruncated = "stop",
    refusals: Refusals,
    empty_files: bool = False,
) -> Iterator[tuple[Conversation, bytes]]:
    """The conversations one by one, each with its record as a line of JSON (of JSON Lines: as it was read).

    refusals: receives the counts. empty_files: whether a file may have no record. Raises InputError as
    `read_conversations`, but not for a set without conversations.
    """
    if not urls:
        raise InputError("data.source names no file: give at least one path or URL")
    for url in (file for each in urls for file in expand_source(each)):
        any_record = False
        try:
            for record in read_records(url):
                any_record = True
                where = f"{url}, {record.place or f'line {record.number}'}"
                try:
                    value = _value(record)
                    found = parse_record(value, source=url, number=record.number, place=record.place)
                except BadRecordError as bad:
                    cut = bad.reason == "truncated_last_line" and on_truncated == "keep"
                    if on_error == "stop" and not cut:
                        raise InputError(f"{where}: {bad.what}") from None
                    refusals.add(bad.reason, where)
                    continue
                yield found, _as_line(record, value)
        except TruncatedError as cut_at:
            if on_truncated == "stop":
                raise InputError(
                    f"{url} ends too early, at {cut_at.place}: the file looks truncated; fetch it again, or use its "
                    "whole records with data.on_truncated=keep"
                ) from None
            any_record = True
            refusals.add("truncated_file", f"{url}, {cut_at.place}")
        if not any_record and not empty_files:
            raise InputError(f"{url} is empty: expected one JSON conversation a line")


def _as_line(record: Record, value: Any) -> bytes:
    raw = record.raw
    if record.place and b"\n" in raw.rstrip(b"\n"):
        return json.dumps(value).encode() + b"\n"
    return raw


def _value(record: Record) -> Any:
    if record.value is not None:
        return record.value
    raw, is_line = record.raw, not record.place
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as exc:
        # A file cut inside a character is a truncation as well, and only its last line lacks the newline.
        if is_line and not raw.endswith(b"\n"):
            raise _cut_line() from None
        of = "line" if is_line else "record"
        raise BadRecordError("not_utf8", f"not UTF-8 (byte {exc.start + 1} of the {of}): convert the file") from None
    except (ValueError, RecursionError) as exc:
        if is_line and not raw.endswith(b"\n"):
            raise _cut_line() from None
        at = f" at column {exc.colno} ({exc.msg})" if isinstance(exc, json.JSONDecodeError) else ""
        each = "each line must be one JSON object" if is_line else "each record must be a JSON object"
        raise BadRecordError("invalid_json", f"invalid JSON{at}: {each}") from None


def _cut_line() -> BadRecordError:
    return BadRecordError(
        "truncated_last_line", "the last line is invalid JSON without a newline: the file looks truncated"
    )
