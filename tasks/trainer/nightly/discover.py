"""What is new since the last night, and what tonight trains on and is judged on.

A conversation is known by the hash of its messages: moved, renamed, compressed or copied into another file it is not
new, and with one more turn it is. The hash of its prompt (what precedes the first answer) decides for ever whether it
is trained on, chooses checkpoints, or judges:

    0                  data.heldout_fraction            1 - nightly.recent_heldout        1
    |   validation     |   training                     |   judges, while it is new      |

So a prompt that judges is never trained on, whichever night it comes in, and what is judged is never what chose the
checkpoint. Prompts of the fixed held-out set are in none of them.

    new       not seen by any night that ended
    fresh     new to the champion: it, and the drafts it descends from, were not trained on it. What a night that failed
              the gate was trained on is fresh again
    replayed  of those that the champion was trained on, a share drawn anew each night

All files are read every night, twice: what was deleted at the source is replayed no more, and no copy of everything is
kept. The price is the reading, and half a kilobyte of memory a conversation.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import fsspec
import numpy as np
import numpy.typing as npt

from storage.location import Location
from tasks.trainer.champion import History
from tasks.trainer.config_nightly import NightlyConfig
from tasks.trainer.data.prepared import prompt_id
from tasks.trainer.data.read import Conversation, Refusals, stream_conversations
from tasks.trainer.data.sources import expand_source
from tasks.trainer.errors import InputError
from tasks.trainer.nightly.home import FIXED, RECENT, SEEN, TRAIN, TRAINED, VALIDATION, Home

logger = logging.getLogger(__name__)

# Enough to choose among checkpoints.
VALIDATION_CONVERSATIONS = 512


@dataclass(frozen=True, slots=True)
class Known:
    """What nights before know. Ids are 16 bytes."""

    seen: Collection[bytes]
    """Conversations that nights had which ended."""
    learned: Collection[bytes]
    """Conversations that the champion was trained on, itself or what it started from."""
    learned_prompts: Collection[bytes]
    """Their prompts."""


@dataclass(slots=True)
class Found:
    """What the source holds tonight, by what it may be used for; ids of conversations, in the order of the files."""

    new: list[bytes] = field(default_factory=list)
    fresh: list[bytes] = field(default_factory=list)
    old: list[bytes] = field(default_factory=list)
    validation: list[bytes] = field(default_factory=list)
    recent: list[bytes] = field(default_factory=list)
    num_conversations: int = 0
    num_fixed_prompts: int = 0
    """Conversations left out, because the fixed held-out set has their prompt."""
    num_learned_prompts: int = 0
    """Conversations that would judge or choose, left out because the champion was trained on their prompt."""
    refusals: Refusals = field(default_factory=Refusals)


def conversation_id(conversation: Conversation) -> bytes:
    """16 bytes of all messages: where it lies and what else its record holds does not count."""
    return hashlib.blake2b(conversation.identity.encode(), digest_size=16).digest()


def expand(source: str) -> list[str]:
    """The files of a file, folder or glob on any fsspec URL, sorted. Raises InputError when a glob matches none."""
    try:
        fsspec.core.url_to_fs(source)[0].invalidate_cache()  # a process may live for many nights
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"data.source={source!r} cannot be listed: {' '.join(str(error).split())}") from None
    return expand_source(source)


def known(home: Home, history: History, *, fingerprint: str) -> Known:
    """What the nights of a home know. fingerprint: of tonight's target; for another one nothing was seen or learned."""
    seen: set[bytes] = set()
    for number in home.numbers():
        verdict = home.verdict(number)
        if verdict is not None and verdict.outcome != "abandoned" and home.plan(number).fingerprint == fingerprint:
            seen.update(_rows(home.ids(number, SEEN)))
    learned: set[bytes] = set()
    prompts: set[bytes] = set()
    for entry in history.lineage():
        trained = home.ids(entry.night, TRAINED)
        # Its prompts must not judge it, whatever target it was trained for.
        prompts.update(_rows(trained[:, 16:]))
        if entry.fingerprint == fingerprint:
            learned.update(_rows(trained[:, :16]))
    return Known(seen, learned, prompts)


def sort(files: Sequence[str], config: NightlyConfig, before: Known, fixed_prompts: Collection[bytes]) -> Found:
    """Read all files and say what each conversation may be used for."""
    found, met = Found(), set()
    recent_from = 1.0 - config.nightly.recent_heldout
    prompts: set[bytes] = set()
    for conversation, _ in _stream(files, config, found.refusals):
        identity = conversation_id(conversation)
        if identity in met:
            continue
        met.add(identity)
        prompt = bytes.fromhex(prompt_id(conversation))
        if is_new := identity not in before.seen:
            found.new.append(identity)
        place = int.from_bytes(prompt, "big") / 2.0**128
        held_out = place < config.data.heldout_fraction or place >= recent_from
        if prompt in fixed_prompts:
            found.num_fixed_prompts += 1
        elif held_out and prompt in before.learned_prompts:
            found.num_learned_prompts += 1
        elif place < config.data.heldout_fraction:
            found.validation.append(identity)
        elif place >= recent_from:
            if is_new and prompt not in prompts:
                prompts.add(prompt)
                found.recent.append(identity)
        elif identity in before.learned:
            found.old.append(identity)
        else:
            found.fresh.append(identity)
    found.num_conversations = len(met)
    return found


def choose(found: Found, config: NightlyConfig, *, number: int) -> dict[str, frozenset[bytes]]:
    """Ids by file (TRAIN, VALIDATION, RECENT). number: of the night, which draws the replayed ones."""
    share = config.nightly.replay
    num_replayed = round(len(found.fresh) * share / (1.0 - share))
    salt = number.to_bytes(8, "big")
    replayed = sorted(found.old, key=lambda identity: hashlib.blake2b(salt + identity).digest())[:num_replayed]
    # Ids are hashes, so their order is a draw; the same one every night, so that figures compare.
    validation = sorted(found.validation)[: max(VALIDATION_CONVERSATIONS, config.evaluate.num_prompts)]
    recent = sorted(found.recent)[: config.nightly.num_prompts]
    return {
        TRAIN: frozenset((*found.fresh, *replayed)),
        VALIDATION: frozenset(validation),
        RECENT: frozenset(recent),
    }


def read_fixed(config: NightlyConfig, before: Known) -> tuple[dict[bytes, bytes], frozenset[bytes], str]:
    """The fixed held-out set: lines of at most nightly.num_prompts prompts by conversation id, the ids of all its
    prompts, and a digest of the chosen ones. Raises InputError when fewer than two can judge."""
    url = config.data.heldout_source
    assert url is not None, "the config checks it"
    lines: dict[bytes, tuple[bytes, bytes]] = {}
    prompts: set[bytes] = set()
    settings = config.data
    stream = stream_conversations(
        [url], on_error=settings.on_error, on_truncated=settings.on_truncated, refusals=Refusals()
    )
    for conversation, raw in stream:
        prompt = bytes.fromhex(prompt_id(conversation))
        if prompt not in prompts:
            prompts.add(prompt)
            lines[conversation_id(conversation)] = (prompt, raw)
    judging = sorted(identity for identity, (prompt, _) in lines.items() if prompt not in before.learned_prompts)
    judging = judging[: config.nightly.num_prompts]
    if len(judging) < 2:
        raise InputError(
            f"data.heldout_source={url!r} has {len(judging)} prompts that the champion was not trained on; nights are "
            "judged on two at least, better on a hundred"
        )
    chosen = hashlib.blake2b(b"".join(sorted(lines[identity][0] for identity in judging)), digest_size=16)
    return {identity: lines[identity][1] for identity in judging}, frozenset(prompts), chosen.hexdigest()


def write_night(
    night: Location,
    files: Sequence[str],
    config: NightlyConfig,
    chosen: dict[str, frozenset[bytes]],
    fixed: dict[bytes, bytes],
) -> tuple[dict[str, int], npt.NDArray[np.uint8]]:
    """Copy the chosen lines into the night's folder.

    Returns lines by file, and ids uint8 [n, 32] of what is trained on: conversation, prompt. What vanished from the
    source since it was sorted is missing, with a warning.
    """
    place_of = {identity: name for name, ids in chosen.items() for identity in ids}
    num_wanted = len(place_of)
    counts, trained = dict.fromkeys((TRAIN, VALIDATION, RECENT, FIXED), 0), []
    with tempfile.TemporaryDirectory(prefix="eyas-night-") as scratch:
        with ExitStack() as stack:
            outputs = {name: stack.enter_context(Path(scratch, name).open("wb")) for name in counts}
            for raw in fixed.values():
                _write_line(outputs[FIXED], raw)
            counts[FIXED] = len(fixed)
            for conversation, raw in _stream(files, config, Refusals()):
                identity = conversation_id(conversation)
                name = place_of.pop(identity, None)
                if name is None:
                    continue
                _write_line(outputs[name], raw)
                counts[name] += 1
                if name == TRAIN:
                    trained.append(identity + bytes.fromhex(prompt_id(conversation)))
        if place_of:
            logger.warning("%d of %d conversations vanished while they were read", len(place_of), num_wanted)
        for name in counts:
            night.upload(name, Path(scratch, name))
    return counts, ids_array(trained, width=32)


def _stream(files: Sequence[str], config: NightlyConfig, refusals: Refusals) -> Iterator[tuple[Conversation, bytes]]:
    """Logs are rotated: an empty file is no fault."""
    settings = config.data
    return stream_conversations(
        files, on_error=settings.on_error, on_truncated=settings.on_truncated, refusals=refusals, empty_files=True
    )


def ids_array(ids: Iterable[bytes], *, width: int) -> npt.NDArray[np.uint8]:
    """uint8 [n, width]."""
    return np.frombuffer(b"".join(ids), dtype=np.uint8).reshape(-1, width)


def _write_line(file: BinaryIO, raw: bytes) -> None:
    file.write(raw.rstrip(b"\r\n") + b"\n")  # a file's last line may lack its end


def _rows(ids: npt.NDArray[np.uint8]) -> list[bytes]:
    return [bytes(row) for row in np.ascontiguousarray(ids)]
