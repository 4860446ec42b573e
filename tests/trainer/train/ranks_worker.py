"""What test_ranks.py has two ranks do, in one start of torchrun: `-m tests.trainer.train.ranks_worker JOBS.json`.

Each job is one dict; its results lie where it says. A rank's failure fails the start.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tasks.trainer.config import Train
from tasks.trainer.data.prepared import PreparedData, PreparedSample
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.shape import draft_shape
from tasks.trainer.draft.ttt import Computation, Objective
from tasks.trainer.progress import silent
from tasks.trainer.recipe import load_config
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import STAGES, run_stage
from tasks.trainer.target import Target
from tasks.trainer.train.dealing import agree, count_step_rows, rounds_of, weights_of_rows
from tasks.trainer.train.loop import place_draft, train_pack
from tasks.trainer.train.metrics import Sums
from tasks.trainer.train.optim import Optimizer
from tasks.trainer.train.packing import deal_packs
from tasks.trainer.train.parallel import START_PATIENCE, Layout, joined, meet
from tasks.trainer.train.sharding import begin_step, whole_tensor
from tasks.trainer.train.sources import OnlineSource

K = 3


def make_draft(target: Target) -> Eagle3Draft:
    """A small draft, the same on every rank."""
    draft = load_config({"target": {"model": "x"}, "data": {"source": "x"}}).draft
    shape = draft_shape(target.config, draft, vocab_size=300, target_vocab_size=300, aux_layer_ids=(1, 3, 4))
    return Eagle3Draft.initialise(
        shape, embedding=target.embedding, head=target.head, d2t=torch.zeros(300, dtype=torch.int64),
        t2d=torch.ones(300, dtype=torch.bool), seed=0,
    )  # fmt: skip


def barely_supervised() -> PreparedSample:
    """A document that counts at no step."""
    mask = np.array([False, False, True, False, False])
    return PreparedSample("barely", np.arange(5, dtype=np.int32), mask)


def gradients(layout: Layout, run: RunDir, *, sharding: str, packs: list[list[int]]) -> dict[str, Tensor]:
    """The masters' gradients of one step over packs of sample numbers (-1: the barely supervised one), and sums."""
    data = PreparedData.open(run.train_data)
    samples = [*data, barely_supervised()]
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64)
    packs = [[number % len(samples) for number in pack] for pack in packs]
    target = Target.load(run.config().target.model, dtype="bfloat16", device=layout.device)
    draft = make_draft(target)
    settings = Train(ttt_steps=K, max_grad_norm=1e9, sharding=sharding)
    masters = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    place_draft(draft, settings, layout, dtype=torch.float32)
    optimizer = Optimizer(draft, masters, settings, layout=layout)
    dealt = deal_packs(packs, lengths, num_ranks=layout.data_size)
    own = [packs[number] for number in dealt[layout.data_rank]]
    rows, stopped = agree(layout, count_step_rows(samples, own, K), step=1)
    assert not stopped
    sums = Sums(K)
    source = OnlineSource(target, device=layout.device)
    batches = source.batches([samples[number] for number in pack] for pack in own)
    begin_step(draft)
    for last in rounds_of(dealt, layout, step=1):
        train_pack(
            draft, next(batches), sums, optimizer, weights_of_rows(rows, 0.8), target.head.float(), draft.draft_ids(),
            Computation(attention="fused", loss="linear"), Objective(), last=last,
        )  # fmt: skip
    batches.close()
    found: dict[str, Tensor] = {}

    def look(norm: float) -> None:
        for name, master in optimizer.masters.items():
            assert master.grad is not None, name
            found[name] = whole_tensor(master.grad).clone().cpu()
        found["norm"] = torch.tensor(norm)

    optimizer.step(check=look)
    summed = sums.over(layout, "the sums")
    found["loss"], found["rows"] = torch.tensor(summed.loss), summed.rows
    found["correct"], found["tau"] = summed.correct_sums, torch.tensor(summed.tau_sum)
    # After the update, whole again: what the next step starts from.
    found |= {
        f"updated.{name}": whole_tensor(master.detach()).clone().cpu() for name, master in optimizer.masters.items()
    }
    return found


def work(job: dict[str, Any], layout: Layout) -> None:
    """One job, on every rank."""
    run = RunDir.open(job["run"])
    if job["do"] == "gradients":
        for name, packs in job["cases"].items():
            for sharding in ("ddp", "fsdp"):
                found = gradients(layout, run, sharding=sharding, packs=packs)
                if layout.is_first:
                    save_file(found, Path(job["out"], f"{name}-{sharding}.safetensors"))
            if layout.is_first:
                alone = gradients(Layout(device=layout.device), run, sharding="ddp", packs=packs)
                save_file(alone, Path(job["out"], f"{name}-alone.safetensors"))
            meet(layout, "the end of a case", patience=START_PATIENCE)
    elif job["do"] == "stage":
        if layout.is_first:
            run_stage(job["stage"], run, silent, layout=layout)
        else:
            meet(layout, "the run's lease", patience=START_PATIENCE)
            STAGES[job["stage"]](run.config(), replace(run, mirror=None), silent, layout)
    elif job["do"] == "alone":
        if layout.is_first:
            run_stage(job["stage"], run, silent)
        meet(layout, "the one", patience=START_PATIENCE)
    elif job["do"] == "forget":  # what a kill after step `after` leaves
        if layout.is_first:
            for path in run.checkpoints.glob("step-*"):
                if int(path.name.removeprefix("step-")) > job["after"]:
                    shutil.rmtree(path)
        meet(layout, "the forgotten", patience=START_PATIENCE)


def main() -> None:
    """A rank's entry."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    with joined(device=jobs["device"], patience_s=120) as layout:
        for job in jobs["jobs"]:
            work(job, layout)


if __name__ == "__main__":
    main()
