"""The training loop: packs in, draft out. Read it top to bottom; both modes run exactly this code.

Resume is exact: a checkpoint holds the masters, the moments and the place in the data, and everything else is a pure
function of the step, so a killed run continues as if nothing had happened. State changes inside `stop.held()` only:
SIGTERM at any moment finds the state after the last whole step and drops the step in flight.

Several ranks run this same loop. A step's packs are the same for any number of them and are dealt out by cost; what
they must agree on (rows of the step, sums, a stop) is summed on the host. One that has been told to stop says so with
its rows, and all save after the same step.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tasks.trainer.config import RunConfig, Train, identity_fields
from tasks.trainer.data.prepared import PreparedData, PreparedSample
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.ttt import Computation, Objective, Unrolled, unroll
from tasks.trainer.progress import Progress
from tasks.trainer.ranks import check_ranks
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stop import stop
from tasks.trainer.train import checkpoint
from tasks.trainer.train.batches import Batch, Packs, Position
from tasks.trainer.train.computation import choose_computation
from tasks.trainer.train.curves import best_steps
from tasks.trainer.train.dealing import agree, count_step_rows, next_group, own_packs, rounds_of, weights_of_rows
from tasks.trainer.train.evaluation import HeldOut
from tasks.trainer.train.guard import GradientGuard
from tasks.trainer.train.metrics import MetricsFile, Sums
from tasks.trainer.train.optim import Optimizer
from tasks.trainer.train.packing import deal_packs
from tasks.trainer.train.parallel import Layout, from_first
from tasks.trainer.train.profiling import Profiling
from tasks.trainer.train.saving import Saver
from tasks.trainer.train.sharding import begin_step, run_pass, shard
from tasks.trainer.train.sources import StatesSource
from tasks.trainer.train.tracking import Tracking

logger = logging.getLogger(__name__)

# Settings of the first rank alone: who shows the run, and what is watched.
_OF_FIRST_RANK: Mapping[str, Any] = {"trackers": (), "profile": (), "memory_snapshot": ()}


def run_identity(config: RunConfig, data_hash: str) -> str:
    """hash(config fields that change the result, prepared data), 24 hex characters."""
    text = json.dumps([identity_fields(config), data_hash], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def train(
    config: RunConfig,
    run: RunDir,
    *,
    draft: Eagle3Draft,
    head: Tensor,
    data: PreparedData,
    source: StatesSource,
    device: str,
    dtype: torch.dtype,
    progress: Progress,
    heldout: Sequence[PreparedSample] = (),
    layout: Layout | None = None,
) -> dict[str, Any]:
    """Train `draft` (fp32, fresh) for config.train.steps optimizer steps, continuing the newest checkpoint.

    head [Vd, D]: the target's rows of the draft vocabulary. heldout: samples to evaluate on meanwhile; none for never.
    layout: this rank's among several, whose first alone writes to the run. Returns a receipt: steps, tokens, seconds,
    backends. Raises InputError for a choice that this device cannot run, Interrupted on SIGTERM, Diverged when a loss
    or gradient is not finite or out of line (its file names the samples), RankLost when another rank is gone.
    """
    settings, layout = config.train, layout or Layout(device=device)
    check_ranks(settings, layout.world_size)
    computation = choose_computation(
        settings, device=device, dtype=dtype, head_dim=draft.config.head_dim, context_group=layout.context_group
    )
    identity = run_identity(config, data.data_hash)
    if layout.is_first:
        found = checkpoint.load_latest(run.checkpoints, identity=identity, data_hash=data.data_hash)
    found = checkpoint.from_first_rank(layout, found if layout.is_first else None)
    masters = found.draft if found else {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    place_draft(draft, settings, layout, dtype=dtype)
    optimizer = Optimizer(draft, masters, settings, layout=layout)
    step, position = 0, Position()
    torch.manual_seed(settings.seed)  # what the process drew before must not show
    if found:
        step, position = found.step, found.position
        optimizer.restore(found.optimizer, step=step)
        checkpoint.restore_random(found.random, device)
        logger.info("continuing after step %d of %d", step, settings.steps)
    order = Packs(data.lengths, pack_tokens=settings.pack_tokens, seed=settings.seed)
    held_out = HeldOut(heldout, settings) if heldout else None
    packs = order.read_from(position)
    told = settings if layout.is_first else settings.model_copy(update=_OF_FIRST_RANK)
    draft_ids = draft.draft_ids()
    first_step, tokens, data_wait, started = step, 0, 0.0, time.monotonic()
    moved, moved_bf16 = 0, 0

    def snapshot() -> checkpoint.Checkpoint:
        """The state after `step`: it changes in blocks that hold a stop off, so it always is whole."""
        state = {**dict(draft.named_buffers()), **optimizer.masters}
        del state["embedding"]  # the target's
        return checkpoint.Checkpoint(
            step, position, identity, draft.config, state, optimizer.tensors(),
            random=checkpoint.random_state(device), data_hash=data.data_hash,
        )  # fmt: skip

    with _metrics_of(run, layout, step=step, heldout_hash=held_out.samples_hash if held_out else None) as metrics:
        norms = (line["grad_norm"] for line in metrics.recent)
        guard = GradientGuard(norms, max_ratio=settings.max_grad_norm_ratio, run=run, writes=layout.is_first)
        saver = Saver(run, settings, metrics, snapshot, saved=step, layout=layout)
        tracking = Tracking(told, run.trackers, run_name=run.url.rsplit("/", 1)[-1], metrics=run.metrics, step=step)
        profiling = Profiling(told, run.profile, device=device)
        with tracking, profiling, _closed(saver), stop.installed(saver.stopped), _stopped_together(layout):
            while True:
                if held_out and held_out.due(step) and step not in metrics.heldout:
                    shown = _shown(progress, step, settings)
                    measured = held_out.measure(draft, source, head=head, dtype=dtype, progress=shown, layout=layout)
                    with stop.held():
                        metrics.write_heldout(step, measured)
                        tracking.log({"step": step, "heldout": measured})
                        if saver.due(step):
                            saver.save()
                    logger.info("held out, step %d: %s", step, held_out.describe(measured))
                if step == settings.steps:
                    break
                # Up to the next look at held-out samples: the source reads ahead, and not past this.
                last_step = held_out.next_due(step) if held_out else settings.steps
                num_steps, together = last_step - step, source.together
                coming = own_packs(order, position, data, settings, layout, num_steps=num_steps, together=together)
                with closing(source.batches(coming)) as batches:
                    while step < last_step:
                        step_started = time.monotonic()
                        profiling.begin(step + 1)
                        group, after = next_group(packs, settings.grad_accumulation)
                        samples = [[data[number] for number in pack] for pack in group]
                        dealt = deal_packs(group, data.lengths, num_ranks=layout.data_size)
                        own = [group[number] for number in dealt[layout.data_rank]]
                        rows = count_step_rows(data, own, settings.ttt_steps)
                        rows, stopped = agree(layout, rows, step=step + 1)
                        if stopped:
                            raise saver.stopped(stop.seconds_left)
                        weights = weights_of_rows(rows, settings.step_loss_decay)
                        sums = Sums(settings.ttt_steps)
                        objective = choose_objective(settings, metrics.last)
                        learning_rate = optimizer.learning_rate
                        traffic = dataclasses.replace(source.traffic)
                        waited = 0.0
                        begin_step(draft)
                        idle = functools.partial(next, batches) if source.together else None
                        for last in rounds_of(dealt, layout, step=step + 1, idle=idle):
                            asked = time.monotonic()
                            batch = next(batches)
                            waited += time.monotonic() - asked
                            train_pack(
                                draft, batch, sums, optimizer, weights, head, draft_ids, computation, objective,
                                last=last,
                            )  # fmt: skip
                        summary = sums.over(layout, f"the sums of step {step + 1}").summary()
                        step_tokens = sum(len(sample.token_ids) for pack in samples for sample in pack)
                        check = functools.partial(guard.check, loss=summary["loss"], step=step + 1, packs=samples)
                        with stop.held():
                            norm = optimizer.step(check=check)
                            step, position = step + 1, after
                            seconds = time.monotonic() - step_started
                            waited += source.traffic.device_wait_s - traffic.device_wait_s
                            step_moved = source.traffic.h2d_bytes - traffic.h2d_bytes
                            line = {
                                "step": step, **summary, "grad_norm": norm, "learning_rate": learning_rate,
                                "tokens": step_tokens, "seconds": seconds, "data_wait_s": waited,
                                "h2d_bytes": step_moved, "epoch": position.epoch,
                            }  # fmt: skip
                            metrics.write(line)
                            tracking.log(line)  # before a save: trackers must not lack steps before a checkpoint
                            if saver.due(step):
                                saver.save()
                        profiling.end()
                        tokens += step_tokens
                        data_wait += waited
                        moved += step_moved
                        moved_bf16 += source.traffic.h2d_bytes_bf16 - traffic.h2d_bytes_bf16
                        progress(step, settings.steps, describe_step(summary, step_tokens / seconds, metrics.heldout))
        best = best_steps(metrics.heldout)
    return {
        "steps": step,
        "continued_from": first_step,
        "tokens": tokens,
        "seconds": time.monotonic() - started,
        "data_wait_s": data_wait,
        "h2d_bytes": moved,
        "h2d_bytes_bf16": moved_bf16,
        "attention": computation.attention,
        "loss": computation.loss,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "ranks": layout.world_size,
        "sharding": settings.sharding if layout.world_size > 1 else None,
        "identity": identity,
        "best_step": best[0] if best else None,
    }


def train_pack(
    draft: Eagle3Draft,
    batch: Batch,
    sums: Sums,
    optimizer: Optimizer,
    weights: Sequence[float],
    head: Tensor,
    draft_ids: Tensor,
    computation: Computation,
    objective: Objective,
    *,
    last: bool = True,
) -> None:
    """Forward and backward of one pack; its gradients go to the masters, its sums to `sums`.

    last: of this rank's packs in the optimizer step.
    """

    def body(of: nn.Module) -> Unrolled:
        assert isinstance(of, Eagle3Draft)
        return unroll(
            of,
            batch,
            ttt_steps=len(weights),
            row_weight=weights,
            head=head,
            draft_ids=draft_ids,
            computation=computation,
            objective=objective,
            draft_head=optimizer.head_master if computation.loss == "linear" else None,
        )

    unrolled = run_pass(draft, body, last=last)
    optimizer.collect()
    sums.add(unrolled)


def place_draft(draft: Eagle3Draft, settings: Train, layout: Layout, *, dtype: torch.dtype) -> None:
    """Put a float32 draft on the rank's device as the ranks hold it: whole in dtype, or shared out in float32."""
    if layout.world_size == 1 or settings.sharding == "ddp":
        draft.to(layout.device, dtype)
        return
    draft.to(layout.device)
    draft.embedding = draft.embedding.to(dtype)
    shard(draft, layout, dtype)


def choose_objective(settings: Train, last: Mapping[str, Any] | None) -> Objective:
    """The objective of the next optimizer step; last: the metrics of the one before.

    lk_mixing "step" takes lambda from that step's mean alpha, and 1 before the first: a pure function of what a
    resumed run has, too.
    """
    mixing = None
    if settings.objective == "lk_lambda" and settings.lk_mixing == "step":
        alpha = [0.0] * settings.ttt_steps if last is None else last["alpha"]
        mixing = tuple(math.exp(-settings.lk_decay * value) for value in alpha)
    return Objective(settings.objective, settings.temperature, settings.lk_decay, mixing)


def _metrics_of(run: RunDir, layout: Layout, *, step: int, heldout_hash: str | None) -> MetricsFile:
    """The run's metrics on its first rank, and what they tell on others."""
    metrics = MetricsFile(run.metrics, step=step, heldout_hash=heldout_hash) if layout.is_first else None
    told = from_first(layout, metrics.telling() if metrics else None, "the metrics so far")
    return metrics or MetricsFile.of_first(told)


@contextmanager
def _stopped_together(layout: Layout) -> Iterator[None]:
    """Of several ranks none stops by itself: the loop asks at each step."""
    if layout.world_size == 1:
        yield
        return
    with stop.held():
        yield


@contextmanager
def _closed(saver: Saver) -> Iterator[None]:
    """A run that ends well waits for its uploads; one that does not has no time for them."""
    whole = False
    try:
        yield
        whole = True
    finally:
        saver.close(whole=whole)


def describe_step(
    summary: Mapping[str, Any], tokens_per_second: float, heldout: Mapping[int, Mapping[str, Any]]
) -> str:
    """A step's figures for the progress bar."""
    text = f"loss {summary['loss']:.3f}  acc_0 {summary['acc'][0]:.3f}  tau {_tau(summary)}"
    if heldout:
        measured = max(heldout)
        text += f"  held-out tau {_tau(heldout[measured])} at {measured}"
    return f"{text}  {tokens_per_second:.0f} tokens/s"


def _tau(metrics: Mapping[str, Any]) -> str:
    """No row may be valid at all K steps."""
    return "-" if metrics["tau"] is None else f"{metrics['tau']:.2f}"


def _shown(progress: Progress, step: int, settings: Train) -> Progress:
    """A look at held-out samples, shown at the step it belongs to."""
    return lambda done, total, note="": progress(step, settings.steps, f"held-out packs {done}/{total}")
