"""What a file of conversations is made of, as training would see it: nothing is written, no weights are loaded.

Everything is counted in one pass over the conversations (`limit` of them, if asked), with the run's own reading,
rendering and masks; a few conversations are kept whole to be shown. Tokens by role are those of the contents tokenised
alone, so that they add up to a little more or less than the template's rendering, which has the rest.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoConfig, AutoTokenizer

from tasks.trainer.config import RunConfig
from tasks.trainer.config import Target as TargetConfig
from tasks.trainer.data.conversation import Conversation, Refusals
from tasks.trainer.data.mask import ChatRenderer, RefusedConversationError
from tasks.trainer.data.mixing import draw_limits, stream_sources
from tasks.trainer.data.prepared import make_samples, prompt_id
from tasks.trainer.data.vocabulary import build_vocabulary, special_tokens
from tasks.trainer.errors import InputError
from tasks.trainer.target_files import PACKAGE_SCHEME, resolve, unpacked
from tasks.trainer.target_text import find_eos_token_ids, pick_dtype

SIZES = (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)
"""Of draft vocabularies whose coverage is told."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens in a row that are treated alike."""

    text: str
    is_supervised: bool
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Shown:
    """One row of a conversation, to look at."""

    where: str
    num_tokens: int
    num_supervised: int
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Inspection:
    """Counts; all of them before anything is cut, but for what says otherwise."""

    sources: tuple[str, ...]
    max_tokens: int
    num_conversations: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    refusals: Refusals = field(default_factory=Refusals)
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Tokens of each sample, int64 [n]."""
    answer_lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Supervised tokens in a row, int64 [answers]."""
    role_tokens: dict[str, int] = field(default_factory=dict)
    num_cut: int = 0
    """Samples over max_tokens."""
    supervised_cut: int = 0
    """Supervised tokens past max_tokens."""
    num_same_prompt: int = 0
    """Conversations whose prompt another one had before."""
    coverage: dict[int, float] = field(default_factory=dict)
    """By draft vocabulary size."""
    vocab_size: int = 0
    """The draft vocabulary that the config asks for."""
    shown: list[Shown] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As JSON; without text."""
        quantiles = (
            {f"p{q}": int(np.percentile(self.lengths, q)) for q in (5, 50, 95, 100)} if len(self.lengths) else {}
        )
        return {
            "sources": list(self.sources),
            "conversations": self.num_conversations,
            "samples": self.num_samples,
            "tokens": self.num_tokens,
            "supervised": self.num_supervised,
            "lengths": quantiles,
            "answers": len(self.answer_lengths),
            "max_tokens": self.max_tokens,
            "cut": self.num_cut,
            "supervised_cut": self.supervised_cut,
            "role_tokens": self.role_tokens,
            "refused": self.refusals.counts,
            "refused_first": self.refusals.first,
            "same_prompt": self.num_same_prompt,
            "vocab_size": self.vocab_size,
            "coverage": {str(size): share for size, share in self.coverage.items()},
        }


def inspect_data(config: RunConfig, *, num_shown: int, limit: int | None = None) -> Inspection:
    """Read what config.data names, as config.target's tokenizer and template see it.

    num_shown: conversations kept to be shown, drawn by their hashes. limit: conversations read; None: all.

    Raises:
        InputError: the files, the tokenizer or the template are unusable, or nothing is left to count.
    """
    settings = config.data
    tokenizer, eos, vocab_size = read_tokenizer(config.target)
    renderer = ChatRenderer(tokenizer, eos, template_arguments={"date_string": settings.date_string})
    found = Inspection(settings.sources, settings.max_tokens)
    kept: list[tuple[int, int, Conversation]] = []
    seen: set[bytes] = set()
    roles: Counter[str] = Counter()

    def noting(stream: Iterator[Conversation]) -> Iterator[Conversation]:
        for conversation in stream:
            found.num_conversations += 1
            identity = prompt_id(conversation)
            found.num_same_prompt += bytes.fromhex(identity) in seen
            seen.add(bytes.fromhex(identity))
            for message in conversation.messages:
                roles[message.role] += _count(renderer, message.content)
                if message.reasoning:
                    roles["assistant's reasoning"] += _count(renderer, message.reasoning)
            # The lowest hashes: the same ones every time, from everywhere in the files.
            entry = (-int(identity, 16), -found.num_conversations, conversation)
            if len(kept) < num_shown:
                heapq.heappush(kept, entry)
            elif kept and entry[:2] > kept[0][:2]:
                heapq.heapreplace(kept, entry)
            yield conversation

    counts = np.zeros(vocab_size, dtype=np.int64)
    occurrences = np.zeros(vocab_size, dtype=np.int64)
    lengths, answers = [], []
    stream = itertools.islice(stream_sources(settings, draw_limits(settings), found.refusals), limit)
    for sample in make_samples(
        noting(stream), renderer, supervise=settings.supervise, workers=settings.workers, refusals=found.refusals
    ):
        if int(sample.token_ids.max()) >= vocab_size:
            raise InputError(f"{sample.where} holds a token id beyond the target's {vocab_size} tokens")
        mask = sample.loss_mask
        lengths.append(len(mask))
        found.num_supervised += int(mask.sum())
        found.supervised_cut += int(mask[settings.max_tokens :].sum())
        edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
        answers.extend((edges[1::2] - edges[::2]).tolist())
        counts += np.bincount(sample.token_ids[mask], minlength=vocab_size)
        occurrences += np.bincount(sample.token_ids, minlength=vocab_size)
    found.lengths, found.answer_lengths = np.array(lengths, dtype=np.int64), np.array(answers, dtype=np.int64)
    found.num_samples, found.num_tokens = len(lengths), sum(lengths)
    found.num_cut = int((found.lengths > settings.max_tokens).sum())
    found.role_tokens = dict(roles.most_common())
    found.vocab_size = min(config.draft.vocab_size or vocab_size, vocab_size)
    if found.num_supervised:
        special = special_tokens(tokenizer, eos, counts)
        for size in sorted({*(size for size in SIZES if len(special) < size < vocab_size), found.vocab_size}):
            found.coverage[size] = build_vocabulary(counts, size, special, occurrences=occurrences).coverage
    for _, _, conversation in sorted(kept, key=lambda entry: -entry[1]):
        found.shown.extend(_shown(renderer, conversation, config))
    return found


def _count(renderer: ChatRenderer, text: str) -> int:
    return len(renderer.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def _shown(renderer: ChatRenderer, conversation: Conversation, config: RunConfig) -> Iterator[Shown]:
    settings = config.data
    try:
        rows = renderer.rows(conversation, supervise=settings.supervise)
    except RefusedConversationError:
        return  # counted already
    for number, (ids, mask) in enumerate(rows, start=1):
        cut = np.arange(len(ids)) >= settings.max_tokens
        kind = mask * 2 + cut
        edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(ids)]
        pieces = tuple(
            Piece(renderer.tokenizer.decode(ids[a:b].tolist()), bool(mask[a]), bool(cut[a]))
            for a, b in itertools.pairwise(edges)
        )
        of = f", row {number} of {len(rows)}" if len(rows) > 1 else ""
        yield Shown(conversation.where + of, len(ids), int(mask.sum()), pieces)


def read_tokenizer(target: TargetConfig) -> tuple[Any, tuple[int, ...], int]:
    """The tokenizer with its template, the end-of-turn ids and the vocabulary's size; no weights but a GGUF's, which is
    unpacked into the cache once.

    Raises:
        InputError: there is no such target, or no template.
    """
    path = Path(target.model).expanduser()
    try:
        if path.is_dir():
            folder = path
        elif target.model.startswith((PACKAGE_SCHEME, "/", ".", "~")) or target.model.endswith(".gguf"):
            files = resolve(target.model)
            folder = unpacked(files, str(pick_dtype(target.dtype, "cpu")).removeprefix("torch."))
        else:
            from huggingface_hub import snapshot_download

            wanted = ["*.json", "*.jinja", "*.model", "*.txt"]
            folder = Path(snapshot_download(target.model, revision=target.revision, allow_patterns=wanted))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if target.chat_template is not None:
            tokenizer.chat_template = Path(target.chat_template).read_text(encoding="utf-8")
        eos = find_eos_token_ids(folder, tokenizer)
        return tokenizer, eos, int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(
            f"target.model={target.model!r}: its config and tokenizer cannot be read "
            f"({' '.join(str(error).split())[:200]}); give a model folder or a hub id"
        ) from None
