"""Ranks that share packs, as processes of their own, and the same packs on one rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tasks.trainer.data.prepared import PreparedSample, sample_id
from tasks.trainer.draft.alignment import count_rows, target_rows
from tasks.trainer.draft.context import Sharing
from tasks.trainer.draft.layer import Memory
from tasks.trainer.draft.ttt import Computation, unroll
from tasks.trainer.target import TargetStates, TopTokens
from tasks.trainer.train.batches import Batch, assemble
from tests.trainer.drafts import DRAFT_VOCAB, HIDDEN, TARGET_VOCAB, random_draft
from tests.trainer.ranks import run_as_ranks

K = 4


@dataclass(frozen=True, slots=True)
class Case:
    """Packs of one optimizer step, each (loss mask, lengths), and how they are computed."""

    packs: Sequence[tuple[Tensor, Sequence[int]]]
    draft: dict[str, Any] = field(default_factory=dict)
    attention: str = "fused"
    loss: str = "linear"
    memory: Memory = field(default_factory=Memory)
    top_k: int | None = None
    dtype: torch.dtype = torch.float64
    rounded: bool = False
    """Whether weights and states have bfloat16's values, in whatever dtype."""
    gradients: bool = True
    device: str = "cpu"

    def values(self, drawn: Tensor) -> Tensor:
        """Drawn numbers as this case has them."""
        return (drawn.to(torch.bfloat16) if self.rounded else drawn).to(self.dtype)


def run_case(case: Case, sharing: Sharing | None = None, group: Any = None) -> dict[str, Tensor]:
    """What one rank finds: sums, the draft's gradients, and of each pack those of the auxiliary states of its rows."""
    draft = random_draft(torch.bfloat16 if case.rounded else case.dtype, **case.draft).to(case.device, case.dtype)
    computation = Computation(attention=case.attention, loss=case.loss, memory=case.memory, context_group=group)
    rows = sum((count_rows(mask, lengths, K) for mask, lengths in case.packs), start=torch.zeros(K))
    weights = [0.8**k / K / int(n) if n else 0.0 for k, n in enumerate(rows)]
    found: dict[str, Tensor] = {}
    with torch.set_grad_enabled(case.gradients):
        for number, (mask, lengths) in enumerate(case.packs):
            batch = make_batch(mask, lengths, case, sharing, seed=number).to(case.device)
            aux_hidden = batch.aux_hidden.requires_grad_(case.gradients)
            generator = torch.Generator().manual_seed(5)
            unrolled = unroll(
                draft,
                batch,
                ttt_steps=K,
                row_weight=weights,
                head=case.values(torch.rand(DRAFT_VOCAB, HIDDEN, generator=generator) - 0.5).to(case.device),
                draft_ids=draft.draft_ids(),
                computation=computation,
            )
            if case.gradients:
                unrolled.loss.backward()
                assert aux_hidden.grad is not None
                found[f"aux_hidden {number}"] = aux_hidden.grad.cpu()
                share = batch.share
                found[f"rows {number}"] = torch.arange(len(mask)) if share is None else share.own_rows
            for name in ("loss", "rows", "loss_sums", "correct_sums", "alpha_sums", "tau_sum"):
                found[name] = found.get(name, torch.zeros(())) + getattr(unrolled, name).detach().double().cpu()
            found["tau_rows"] = found.get("tau_rows", torch.zeros(())) + unrolled.tau_rows
    if case.gradients:
        for name, parameter in draft.named_parameters():
            assert parameter.grad is not None, name
            found[f"gradient {name}"] = parameter.grad.cpu()
    return found


def make_batch(mask: Tensor, lengths: Sequence[int], case: Case, sharing: Sharing | None, *, seed: int) -> Batch:
    """Random tokens and states under a mask, whole or a rank's share."""
    generator = torch.Generator().manual_seed(seed)
    samples, states = [], []
    for of_document in mask.split(list(lengths)):
        tokens = of_document.shape[0]
        ids = torch.randint(TARGET_VOCAB, (tokens,), generator=generator, dtype=torch.int32).numpy()
        samples.append(PreparedSample(sample_id(ids, of_document.numpy()), ids, of_document.numpy()))
        rows = len(target_rows(of_document, [tokens]))
        aux_hidden = case.values(torch.rand(tokens, 3 * HIDDEN, generator=generator) - 0.5)
        last_hidden = case.values(torch.rand(rows, HIDDEN, generator=generator) - 0.5)
        argmax = torch.randint(TARGET_VOCAB, (rows,), generator=generator, dtype=torch.int32)
        lse = torch.rand(rows, generator=generator) + 5.0
        top = None
        if case.top_k is not None:
            ids_of_top = torch.rand(rows, TARGET_VOCAB, generator=generator).topk(case.top_k, dim=-1).indices
            log_probabilities = torch.rand(rows, case.top_k, generator=generator).log_softmax(-1) - 0.1
            top = TopTokens(ids_of_top.to(torch.int32), log_probabilities)
        states.append(TargetStates(aux_hidden, argmax, lse, last_hidden=None if top else last_hidden, top_k=top))
    share = None
    if sharing is not None:
        share = sharing.of(mask, lengths)
        parts = {part.document for part in share.parts(lengths)}
        # What a rank need not have, it does not get.
        states = [of if number in parts else None for number, of in enumerate(states)]  # type: ignore[misc]
    return assemble(samples, states, share=share)


def run_ranks(cases: dict[str, Case], num_ranks: int, folder: Path) -> dict[str, list[dict[str, Tensor]]]:
    """What each rank finds, by case. The ranks are processes that run all cases."""
    run_as_ranks(_rank, cases, folder, num_ranks=num_ranks)
    found = [torch.load(folder / f"rank-{rank}", weights_only=True) for rank in range(num_ranks)]
    return {name: [of_rank[name] for of_rank in found] for name in cases}


def _rank(cases: dict[str, Case], folder: Path) -> None:
    on_gpu = any(case.device == "cuda" for case in cases.values())
    if on_gpu:
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sharing = Sharing(rank, num_ranks, K)
    found = {name: run_case(case, sharing, dist.group.WORLD) for name, case in cases.items()}
    torch.save(found, folder / f"rank-{rank}")
    dist.destroy_process_group()


def together(ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums over the ranks; states' gradients row by row."""
    found: dict[str, Tensor] = {}
    for name in ranks[0]:
        if name.startswith("aux_hidden"):
            rows = torch.cat([of_rank[name.replace("aux_hidden", "rows")] for of_rank in ranks])
            assert torch.equal(rows.sort().values, torch.arange(len(rows))), "every row is one rank's"
            found[name] = torch.cat([of_rank[name] for of_rank in ranks])[rows.argsort()]
        elif not name.startswith("rows "):
            found[name] = torch.stack([of_rank[name] for of_rank in ranks]).sum(0)
    return found
