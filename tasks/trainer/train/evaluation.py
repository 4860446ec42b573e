"""Held-out metrics while training: teacher-forced, on the same few samples every time.

Their states come from where training's come from: the target itself, or the store, which then holds them, too. So the
look costs evaluate_tokens of target and draft forwards; decoding, the truth, waits for the evaluate stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tasks.trainer.acceptance.heldout import heldout_metrics
from tasks.trainer.config import Train
from tasks.trainer.data.prepared import PreparedSample
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.progress import Progress
from tasks.trainer.train.batches import Packs
from tasks.trainer.train.computation import evaluation_computation
from tasks.trainer.train.parallel import Layout
from tasks.trainer.train.sharding import whole
from tasks.trainer.train.sources import StatesSource


class HeldOut:
    """The held-out packs of a run."""

    def __init__(self, samples: Sequence[PreparedSample], settings: Train) -> None:
        self._settings = settings
        ids = "".join(sample.sample_id for sample in samples)
        self.samples_hash = hashlib.blake2b(ids.encode(), digest_size=8).hexdigest()
        """Says which samples were looked at."""
        lengths = [len(sample.token_ids) for sample in samples]
        order = Packs(lengths, pack_tokens=settings.pack_tokens, seed=0)
        self._packs = [[samples[number] for number in pack] for pack in order.epoch(0)]

    def due(self, step: int) -> bool:
        """Whether to measure after `step` optimizer steps."""
        return step > 0 and (step % self._settings.evaluate_every == 0 or step == self._settings.steps)

    def next_due(self, step: int) -> int:
        """The next step after which to measure."""
        every = self._settings.evaluate_every
        return min((step // every + 1) * every, self._settings.steps)

    def measure(
        self,
        draft: Eagle3Draft,
        source: StatesSource,
        *,
        head: Tensor,
        dtype: torch.dtype,
        progress: Progress,
        layout: Layout,
    ) -> dict[str, Any]:
        """What heldout_metrics gives, of the draft as it computes now, in dtype, and samples_hash."""
        with whole(draft):
            measured = heldout_metrics(
                draft,
                source,
                self._packs,
                head=head,
                ttt_steps=self._settings.ttt_steps,
                step_loss_decay=self._settings.step_loss_decay,
                # Nothing compiled: the training step's graphs are for gradients.
                computation=evaluation_computation(
                    device=layout.device,
                    dtype=dtype,
                    head_dim=draft.config.head_dim,
                    context_group=layout.context_group,
                ),
                progress=progress,
                layout=layout,
            )
        return {**measured, "samples_hash": self.samples_hash}

    @staticmethod
    def describe(measured: dict[str, Any]) -> str:
        """A line for the log."""
        acc = " ".join(f"{value:.3f}" for value in measured["acc"])
        return f"loss {measured['loss']:.4f}, acc {acc}, tau {measured['tau']}"
