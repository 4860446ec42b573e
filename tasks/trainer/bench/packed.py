"""What `eyas bench step --packed` measures: one optimizer step over packs, and over padded batches of their documents.

Document lengths are log-normal like those of chat data, median 1,024 tokens, up to 16,384 (seeded); every token of a
document is supervised, so that packing alone makes the difference. The trainer packs an epoch of them; timed are packs
at equal distances in the order of what padding would make of them, so that few stand for all. Draft, states and step
are those of `eyas bench step`.

    packed          the packs, as they are trained
    padded          a batch a pack: its documents, padded to its longest, and every row computed, the loss and head of
                    the padding as well, as trainers do that mask it out afterwards
    padded_budget   the same, of as many documents, in that order, as padded take no more tokens than a pack holds
    padded_skip     the batches of `padded` as Eyas trains them: rows that count at no step are left out

Tokens are the documents', so tokens/s compare. The error is that of all gradients, relative L2, against each document
alone in float32 with dense attention; where the padding is trained on there is none. `shape` tells what is left
unfilled of the whole epoch's packs, and the share of padding in the two kinds of batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.bench import layouts
from kernels.bench.runner import Case, Group
from tasks.trainer.bench.step import DRAFT, TINY, TTT_STEPS, shape_of
from tasks.trainer.train.packing import Integers, pack_documents, unfilled_share

VARIANTS = ("packed", "padded", "padded_budget", "padded_skip")
PACK_TOKENS = 16384
_NUM_DOCUMENTS = 4096  # of the epoch
_NUM_PACKS = 8  # of them timed
_ROUNDS = 3  # a round takes half a minute on an H200
_PROBLEM = [[200, 30, 7], [120, 90, 3, 2]]


def groups() -> dict[str, Group]:
    """The process of all variants."""
    return {"ours": Group("tasks.trainer.bench.packed_case")}


def chat_lengths(num: int, *, longest: int = 16384, median: int = 1024, seed: int = 0) -> Integers:
    """Log-normal document lengths, int64 [num], at least 16 tokens; longer ones are cut."""
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(median), 1.0, num))
    return np.clip(lengths.round(), min(16, longest), longest).astype(np.int64)


def cases(*, device: str = "cuda", tiny: bool = False) -> list[Case]:
    """The only case. tiny: for a test on the CPU."""
    pack_tokens, median, num_documents = (128, 32, 200) if tiny else (PACK_TOKENS, 1024, _NUM_DOCUMENTS)
    lengths = chat_lengths(num_documents, longest=pack_tokens, median=median)
    order = np.random.default_rng(0).permutation(num_documents)
    packs = pack_documents(lengths, order, pack_tokens=pack_tokens)
    timed = typical([lengths[pack].tolist() for pack in packs], 2 if tiny else _NUM_PACKS)
    settings: dict[str, Any] = {
        **(TINY if tiny else DRAFT),
        "ttt_steps": 2 if tiny else TTT_STEPS,
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "packs": timed,
        "pack_tokens": pack_tokens,
    }
    unfilled = unfilled_share(lengths, packs, pack_tokens=pack_tokens)
    padding = padding_share(timed), padding_share(budget_batches(timed, pack_tokens))
    return [
        Case(
            work="step",
            tokens=sum(map(sum, timed)),
            vocab=settings["vocab_size"],
            supervised=1.0,
            shape=f"{shape_of(layouts.CHAT, settings)}; {len(timed)} packs of {pack_tokens}; unfilled {unfilled:.4f}; "
            f"padding {padding[0]:.3f}; padding in budget {padding[1]:.3f}",
            settings=settings,
            problem={**settings, "packs": _PROBLEM, "pack_tokens": 256},
            variants=dict.fromkeys(VARIANTS, "ours"),
            rounds=_ROUNDS,
            trim=True,
        )
    ]


def typical(packs: Sequence[list[int]], num: int) -> list[list[int]]:
    """num of the packs, in their order: those in the middle of as many equal parts, by size when padded."""
    by_size = sorted(range(len(packs)), key=lambda number: max(packs[number]) * len(packs[number]))
    return [
        packs[number] for number in sorted(by_size[(2 * part + 1) * len(packs) // (2 * num)] for part in range(num))
    ]


def budget_batches(packs: Sequence[Sequence[int]], most_tokens: int) -> list[list[int]]:
    """The packs' document lengths, in order, in batches of at most so many tokens when padded to the longest."""
    batches: list[list[int]] = []
    for length in (length for pack in packs for length in pack):
        if batches and max(length, *batches[-1]) * (len(batches[-1]) + 1) <= most_tokens:
            batches[-1].append(length)
        else:
            batches.append([length])
    return batches


def padding_share(batches: Sequence[Sequence[int]]) -> float:
    """The share of padding in batches of documents padded to the longest."""
    return 1.0 - sum(map(sum, batches)) / sum(max(batch) * len(batch) for batch in batches)
