"""A target whose weights are spread over the ranks: transformers' tensor parallelism, for targets that do not fit
beside the draft on each GPU.

A forward is then everybody's: every rank must bring the same document at the same time. So whoever has documents tells
them to all, all run the target, and who asked keeps the states (ranks that share a pack ask for the same documents,
which run once). The draft and its packs are divided as ever. The price is that the ranks' targets do not run at once: n
forwards of 1/n of the work each, and two all-reduces a layer. The head's statistics are computed whole on every rank.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from tasks.trainer.config import Target as TargetChoice
from tasks.trainer.target import Document, Target, TargetStates
from tasks.trainer.target_files import resolve, unpacked
from tasks.trainer.target_text import files_dtype
from tasks.trainer.train.parallel import Layout, first_on_machine, from_rank


class SharedTarget:
    """Captures as a Target does; every rank must call `capture` as often, with documents or with none."""

    packs = False
    """One document a forward: every rank would have to plan packed ones alike."""

    def __init__(
        self, target: Target, layout: Layout, *, told_by: Sequence[int] | None = None, patience: timedelta | None = None
    ) -> None:
        """told_by: the ranks that have documents at all; None for each. patience: as of parallel.meet."""
        self._target = target
        self._layout = layout
        self._told_by = range(layout.world_size) if told_by is None else told_by
        self._patience = patience
        self.aux_layer_ids = target.aux_layer_ids

    def capture(self, documents: Sequence[Document], *, top_k: int | None = None) -> list[TargetStates]:
        """The states of this rank's documents. Raises InputError on every rank for NaN or Inf in one of them."""
        return self._turns(documents, top_k=top_k) or []

    def follow(self, *, top_k: int | None = None) -> None:
        """Take part in what the others capture, until one of them ends it."""
        while self._turns((), top_k=top_k) is not None:
            pass

    def end(self) -> None:
        """Release the ranks that follow."""
        self._turns(None)

    def _turns(self, documents: Sequence[Document] | None, *, top_k: int | None = None) -> list[TargetStates] | None:
        asked: dict[str, list[Any]] = {}
        for rank in self._told_by:
            told: list[Any] | None = None
            if rank == self._layout.rank and documents is not None:
                told = [[one.token_ids.tolist(), one.target_rows.tolist(), one.sample_id] for one in documents]
            told = from_rank(self._layout, told, rank, "the target's documents", patience=self._patience)
            if told is None:
                return None
            asked |= {of[2]: of for of in told}
        own = {one.sample_id: one for one in documents or ()}
        states: dict[str, TargetStates] = {}
        for token_ids, rows, sample_id in asked.values():
            document = Document(torch.tensor(token_ids), torch.tensor(rows, dtype=torch.int64), sample_id)
            found = self._target.capture([document], top_k=top_k)
            if sample_id in own:
                states[sample_id] = found[0]
        return [states[one.sample_id] for one in documents or ()]


def load_shared(
    chosen: TargetChoice,
    layout: Layout,
    *,
    told_by: Sequence[int] | None = None,
    patience: timedelta | None = None,
) -> SharedTarget:
    """Load a target together; the arguments are SharedTarget's. Its files are found on one rank of a machine first."""
    with first_on_machine(layout):
        unpacked_files(chosen, layout.device)
    target = Target.of(chosen, device=layout.device, over_ranks=layout.world_size)
    return SharedTarget(target, layout, told_by=told_by, patience=patience)


def unpacked_files(chosen: TargetChoice, device: str) -> None:
    """Download, or unpack, what Target.load then finds."""
    files = resolve(chosen.model, revision=chosen.revision)
    unpacked(files, str(files_dtype(files, chosen.dtype, device)).removeprefix("torch."))


def parallel_arguments(world_size: int) -> dict[str, Any]:
    """What from_pretrained wants to spread a model over all ranks: transformers has renamed it."""
    from transformers.distributed import DistributedConfig

    fields = {field.name for field in dataclasses.fields(DistributedConfig)}
    if {"tp_plan", "tp_size"} <= fields:
        return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=world_size)}
    return {"tp_plan": "auto", "tp_size": world_size}


@contextmanager
def own_gpu_is_first() -> Iterator[None]:
    """transformers takes GPU number LOCAL_RANK, and a rank sees its own alone."""
    before = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = before
