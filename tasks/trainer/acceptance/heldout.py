"""Teacher-forced metrics on held-out documents: cheap, exact, and comparable between runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.ttt import Computation, unroll
from tasks.trainer.progress import Progress
from tasks.trainer.train.metrics import Sums
from tasks.trainer.train.sources import StatesSource


@torch.no_grad()
def heldout_metrics(
    draft: Eagle3Draft,
    source: StatesSource,
    data: PreparedData,
    *,
    head: Tensor,
    ttt_steps: int,
    computation: Computation,
    progress: Progress,
) -> dict[str, Any]:
    """step_losses, acc, alpha by depth and simulated tau over all documents; head [Vd, D] as in training."""
    sums = Sums(ttt_steps)
    draft_ids = draft.draft_ids()
    for done, batch in enumerate(source.batches([sample] for sample in data), start=1):
        # Weight 1: the sums of row losses are wanted, not a training loss.
        unrolled = unroll(
            draft,
            batch,
            ttt_steps=ttt_steps,
            row_weight=[1.0] * ttt_steps,
            head=head,
            draft_ids=draft_ids,
            computation=computation,
        )
        sums.add(unrolled)
        progress(done, len(data), "teacher-forced")
    summary = sums.summary()
    summary.pop("loss")
    return summary
