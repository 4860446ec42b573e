"""Teacher-forced metrics on held-out documents: cheap, exact, and comparable between runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tasks.trainer.data.prepared import PreparedSample
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.ttt import Computation, unroll
from tasks.trainer.progress import Progress
from tasks.trainer.train.metrics import Sums
from tasks.trainer.train.parallel import Layout, meet
from tasks.trainer.train.sources import StatesSource


@torch.no_grad()
def heldout_metrics(
    draft: Eagle3Draft,
    source: StatesSource,
    packs: Sequence[Sequence[PreparedSample]],
    *,
    head: Tensor,
    ttt_steps: int,
    step_loss_decay: float,
    computation: Computation,
    progress: Progress,
    layout: Layout | None = None,
) -> dict[str, Any]:
    """loss (cross entropy, weighted over the depths as in training); step_losses, acc, alpha by depth and simulated
    tau, over all documents of all packs. head [Vd, D] as in training. layout: of ranks that divide the packs."""
    layout = layout or Layout()
    sums = Sums(ttt_steps)
    draft_ids = draft.draft_ids()
    own = list(packs[layout.data_rank :: layout.data_size])
    rounds, num_own = -(-len(packs) // layout.data_size), len(own)
    if source.together:
        own += [()] * (rounds - num_own)
    batches = source.batches(own)
    for done in range(1, rounds + 1):
        meet(layout, f"round {done} of held-out packs")
        if done > len(own):
            continue
        batch = next(batches)
        if done > num_own:
            continue
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
        progress(done, rounds, "teacher-forced")
    summary = sums.over(layout, "the held-out sums").summary()
    summary["loss"] = sum(step_loss_decay**k / ttt_steps * loss for k, loss in enumerate(summary["step_losses"]))
    return summary
