"""The draft vocabulary: the target's tokens that the draft can propose.

Most answers are made of few tokens, so a draft head over the most frequent ones costs a fraction of the full one. The
price: where the target's choice is not among them the draft always misses (`coverage` says how rarely that is).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tasks.trainer.errors import InputError
from tasks.trainer.files import sync_file, sync_folder
from tasks.trainer.parent import find_parent


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Draft index i stands for target token i + d2t[i], in ascending order.

    d2t: int64 [Vd], offsets. t2d: bool [V], membership. coverage: share of the supervised tokens that are members.
    """

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    coverage: float

    def __len__(self) -> int:
        return len(self.d2t)

    @property
    def target_ids(self) -> npt.NDArray[np.int64]:
        """The member tokens' target ids, int64 [Vd], ascending."""
        return self.d2t + np.arange(len(self.d2t), dtype=np.int64)

    @property
    def draft_index(self) -> npt.NDArray[np.int64]:
        """The draft index of each target token, int64 [V]; -1 where it is no member."""
        index = np.full(len(self.t2d), -1, dtype=np.int64)
        index[self.target_ids] = np.arange(len(self.d2t), dtype=np.int64)
        return index

    def save(self, path: str | Path) -> None:
        """Write as safetensors (`d2t`, `t2d`; coverage in the metadata), whole or not at all."""
        path = Path(path)
        scratch = path.with_name(f".{path.name}")
        save_file({"d2t": self.d2t, "t2d": self.t2d}, scratch, metadata={"coverage": repr(self.coverage)})
        sync_file(scratch)
        scratch.replace(path)
        sync_folder(path.parent)

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read what `save` wrote.

        Raises:
            InputError: the file is missing or damaged, or its d2t and t2d do not name the same tokens.
        """
        try:
            with safe_open(path, framework="np") as file:
                d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
                vocabulary = cls(d2t, t2d, float((file.metadata() or {})["coverage"]))
        except (OSError, SafetensorError, KeyError):
            raise InputError(f"{path} holds no draft vocabulary: run the prepare stage again") from None
        same = d2t.dtype == np.int64 and t2d.dtype == np.bool_
        if not same or not np.array_equal(vocabulary.target_ids, np.flatnonzero(t2d)):
            raise InputError(f"{path}: d2t (offsets) and t2d (membership) do not name the same tokens")
        return vocabulary


def build_vocabulary(
    counts: npt.NDArray[np.int64],
    size: int | None,
    special: Collection[int] = (),
    *,
    occurrences: npt.NDArray[np.int64] | None = None,
) -> Vocabulary:
    """Choose `size` (Vd) of the target's V tokens.

    First the `special` ones (the end-of-turn tokens at least: without them a draft can never propose an end), then by
    falling count; where answers hold fewer different tokens than `size`, the list is filled by falling `occurrences`,
    then by rising id. Equal counts go by these two as well. None or `size` >= V: all of them.

    Args:
        counts: int64 [V], how often each token is supervised.
        occurrences: int64 [V], how often each token occurs at all, prompts included.

    Raises:
        InputError: nothing was counted, `size` has no room for the special tokens, or one lies outside V.
    """
    num_target = len(counts)
    total = int(counts.sum())
    if total == 0:
        raise InputError("no supervised token was counted: the draft vocabulary needs answers")
    outside = [token for token in special if not 0 <= token < num_target]
    if outside:
        raise InputError(f"special token {outside[0]} is outside the target's vocabulary of {num_target}")
    size = num_target if size is None else min(size, num_target)
    first = sorted(set(special))
    if size < max(1, len(first)):
        raise InputError(f"draft.vocab_size={size} has no room for the {len(first)} special tokens: raise it")
    rank = counts.astype(np.int64)
    rank[first] = np.iinfo(np.int64).max
    then = np.zeros(num_target, dtype=np.int64) if occurrences is None else occurrences
    order = np.lexsort((np.arange(num_target), -then, -rank))  # by the last key first
    target_ids = np.sort(order[:size]).astype(np.int64)
    t2d = np.zeros(num_target, dtype=np.bool_)
    t2d[target_ids] = True
    return Vocabulary(
        d2t=target_ids - np.arange(size, dtype=np.int64), t2d=t2d, coverage=int(counts[t2d].sum()) / total
    )


def special_tokens(tokenizer: Any, eos_token_ids: Collection[int], counts: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """What is in every draft vocabulary: the end-of-turn tokens, and of the tokenizer's added tokens those that answers
    hold or that the chat template writes (the start of a thought or of a tool call). Reserved ones, of which some
    tokenizers have a thousand, are not. Ascending ids."""
    template = str(tokenizer.chat_template or "")
    used = {
        int(token_id)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token_id < len(counts) and (counts[token_id] > 0 or token.content in template)
    }
    return tuple(sorted({*eos_token_ids, *used}))


def coverage_of(vocabulary: Vocabulary, counts: npt.NDArray[np.int64]) -> float:
    """Share of other supervised tokens that are members. counts: int64 [V]."""
    return int(counts[vocabulary.t2d].sum()) / max(1, int(counts.sum()))


def parent_vocabulary(init: str, counts: npt.NDArray[np.int64]) -> Vocabulary:
    """The vocabulary of an earlier draft (draft.init), with its coverage of tonight's data.

    Args:
        counts: int64 [V], how often each token is supervised.

    Raises:
        InputError: the draft cannot be read, or its d2t is not of this target.
    """
    files = find_parent(init)
    d2t = None
    for path in files.weights:
        try:
            with safe_open(path, framework="np") as file:
                if "d2t" in file.keys():  # noqa: SIM118 - no mapping
                    d2t = file.get_tensor("d2t").astype(np.int64)
        except (OSError, SafetensorError) as error:
            raise InputError(f"draft.init={init!r}: {path.name} is damaged ({str(error).splitlines()[0]})") from None
    if d2t is None:  # the target's whole vocabulary
        d2t = np.zeros(len(counts), dtype=np.int64)
    target_ids = d2t + np.arange(len(d2t), dtype=np.int64)
    rising = len(target_ids) > 0 and bool((np.diff(target_ids) > 0).all())
    if not rising or target_ids[0] < 0 or target_ids[-1] >= len(counts):
        raise InputError(
            f"draft.init={init!r}: its d2t names no tokens of this target's {len(counts)}; use draft.vocabulary=data, "
            "or give a draft of this target"
        )
    t2d = np.zeros(len(counts), dtype=np.bool_)
    t2d[target_ids] = True
    return Vocabulary(d2t=d2t, t2d=t2d, coverage=int(counts[t2d].sum()) / max(1, int(counts.sum())))
