"""The training loop: packs in, draft out. Read it top to bottom; both modes run exactly this code.

Resume is exact: a checkpoint holds the masters, the moments and the place in the data, and everything else is a pure
function of the step, so a killed run continues as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from tasks.trainer.config import RunConfig, Train, identity_fields
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.draft.alignment import count_rows
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.ttt import Computation, Objective, unroll
from tasks.trainer.progress import Progress
from tasks.trainer.run_dir import RunDir
from tasks.trainer.train import checkpoint
from tasks.trainer.train.batches import Batch, Packs, Position, sample_lengths
from tasks.trainer.train.computation import choose_computation
from tasks.trainer.train.metrics import MetricsFile, Sums
from tasks.trainer.train.optim import Optimizer
from tasks.trainer.train.sources import StatesSource

logger = logging.getLogger(__name__)


class Interrupted(InterruptedError):
    """SIGTERM arrived; the state was saved after `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped by SIGTERM after step {step}; the checkpoint holds it: start the run again to go on")
        self.step = step


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
) -> dict[str, Any]:
    """Train `draft` (fp32, fresh) for config.train.steps optimizer steps, continuing the newest checkpoint.

    head [Vd, D]: the target's rows of the draft vocabulary. Returns a receipt: steps, tokens, seconds, backends.
    Raises InputError for a choice that this device cannot run, Interrupted on SIGTERM, FloatingPointError when the
    loss or the gradient is not finite (the samples are named).
    """
    settings = config.train
    computation = choose_computation(settings, device=device, dtype=dtype, head_dim=draft.config.head_dim)
    identity = run_identity(config, data.data_hash)
    found = checkpoint.load_latest(run.checkpoints, identity=identity)
    masters = found.draft if found else {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    draft.to(device, dtype)
    optimizer = Optimizer(draft, masters, settings)
    step, position = 0, Position()
    if found:
        step, position = found.step, found.position
        optimizer.restore(found.optimizer, step=step)
        logger.info("continuing after step %d of %d", step, settings.steps)
    order = Packs(sample_lengths(data), pack_tokens=settings.pack_tokens, seed=settings.seed)
    packs = order.read_from(position)
    # The same packs again for the source, which reads ahead, and not past the run's last.
    coming = itertools.islice(order.read_from(position), (settings.steps - step) * settings.grad_accumulation)
    draft_ids = draft.draft_ids()
    first_step, tokens, data_wait, started = step, 0, 0.0, time.monotonic()

    with (
        MetricsFile(run.metrics, step=step) as metrics,
        _stop_on_sigterm() as stop,
        closing(source.batches([data[number] for number in pack] for pack, _ in coming)) as batches,
    ):
        while step < settings.steps:
            step_started = time.monotonic()
            group, position = _next_group(packs, settings.grad_accumulation)
            weights = row_weights(data, group, settings.ttt_steps, settings.step_loss_decay)
            sums = Sums(settings.ttt_steps)
            objective = choose_objective(settings, metrics.last)
            learning_rate = optimizer.learning_rate
            waited, moved = -source.traffic.device_wait_s, -source.traffic.h2d_bytes
            for _ in group:
                asked = time.monotonic()
                batch = next(batches)
                waited += time.monotonic() - asked
                train_pack(draft, batch, sums, optimizer, weights, head, draft_ids, computation, objective)
                tokens += batch.token_ids.shape[0]
            norm = optimizer.step()
            if not math.isfinite(norm) or not math.isfinite(sums.loss):
                samples = [data[number].sample_id for pack in group for number in pack]
                raise FloatingPointError(f"step {step + 1}: loss {sums.loss}, gradient norm {norm}; samples {samples}")
            step += 1
            summary = sums.summary()
            step_tokens = sum(len(data[number].token_ids) for pack in group for number in pack)
            seconds = time.monotonic() - step_started
            waited += source.traffic.device_wait_s
            moved += source.traffic.h2d_bytes
            data_wait += waited
            metrics.write(
                {"step": step, **summary, "grad_norm": norm, "learning_rate": learning_rate, "tokens": step_tokens,
                 "seconds": seconds, "data_wait_s": waited, "h2d_bytes": moved, "epoch": position.epoch}
            )  # fmt: skip
            tau = summary["tau"]
            progress(
                step,
                settings.steps,
                f"loss {summary['loss']:.3f}  acc_0 {summary['acc'][0]:.3f}  "
                f"tau {'-' if tau is None else f'{tau:.2f}'}  {step_tokens / seconds:.0f} tokens/s",
            )
            if step % settings.checkpoint_every == 0 or step == settings.steps or stop.is_set():
                metrics.sync()
                state = {**draft.state_dict(), **optimizer.masters}
                checkpoint.save(
                    run.checkpoints,
                    checkpoint.Checkpoint(step, position, identity, draft.config, state, optimizer.tensors()),
                    keep=settings.keep_checkpoints,
                )
            if stop.is_set() and step < settings.steps:
                raise Interrupted(step)
    return {
        "steps": step,
        "continued_from": first_step,
        "tokens": tokens,
        "seconds": time.monotonic() - started,
        "data_wait_s": data_wait,
        "h2d_bytes": source.traffic.h2d_bytes,
        "h2d_bytes_bf16": source.traffic.h2d_bytes_bf16,
        "attention": computation.attention,
        "loss": computation.loss,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "identity": identity,
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
) -> None:
    """Forward and backward of one pack; its gradients go to the masters, its sums to `sums`."""
    unrolled = unroll(
        draft,
        batch,
        ttt_steps=len(weights),
        row_weight=weights,
        head=head,
        draft_ids=draft_ids,
        computation=computation,
        objective=objective,
        draft_head=optimizer.masters["lm_head.weight"] if computation.loss == "linear" else None,
    )
    unrolled.loss.backward()
    optimizer.collect()
    sums.add(unrolled)


def row_weights(data: PreparedData, group: Sequence[Sequence[int]], ttt_steps: int, decay: float) -> list[float]:
    """decay^k / K / N_k for each TTT step, N_k over all packs of one optimizer step; 0 for a step without rows.

    N_k needs the masks only, so it is known before the first forward.
    """
    rows = torch.zeros(ttt_steps, dtype=torch.int64)
    for pack in group:
        for number in pack:
            mask = torch.from_numpy(data[number].loss_mask.copy())
            rows += count_rows(mask, [mask.shape[0]], ttt_steps)
    return [decay**k / ttt_steps / int(n) if n else 0.0 for k, n in enumerate(rows)]


def _next_group(packs: Iterator[tuple[list[int], Position]], size: int) -> tuple[list[list[int]], Position]:
    """The packs of one optimizer step and the position after them."""
    taken = [next(packs) for _ in range(size)]
    return [pack for pack, _ in taken], taken[-1][1]


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


@contextmanager
def _stop_on_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets; the step in flight is finished first."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # handlers can be set in the main thread only; a stage process always runs there
        return
    before = signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
