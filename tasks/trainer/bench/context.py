"""Context parallelism in `eyas bench ranks`: n ranks train one document of n times the tokens of one GPU.

    1 GPU     T tokens, and n T tokens where that fits
    n ranks   n T tokens, shared

The ideal is n ranks that lose nothing: one GPU's time for n T tokens divided by n. Attention grows with the square of
the tokens, so T tokens on one GPU would be no measure. Where n T tokens do not fit on one GPU, its time is extrapolated
from T/2 and T, as a T + c T^2. Steps are the trainer's own (packs on the device, gradients summed over the ranks,
clipping, AdamW), one document, every token supervised; first, on a short one, the ranks' gradients are held against
those of one rank.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from kernels.bench import layouts
from tasks.trainer.bench.ranks_telling import Telling
from tasks.trainer.bench.step_case import Model, make_batch
from tasks.trainer.draft.alignment import count_rows
from tasks.trainer.draft.context import Sharing
from tasks.trainer.draft.ttt import Objective
from tasks.trainer.train.batches import Batch, rows_of_parts
from tasks.trainer.train.computation import choose_computation
from tasks.trainer.train.dealing import weights_of_rows
from tasks.trainer.train.loop import train_pack
from tasks.trainer.train.metrics import Sums
from tasks.trainer.train.optim import Optimizer
from tasks.trainer.train.parallel import START_PATIENCE, Layout, meet, sum_gradients

_CHECKED_TOKENS = 4096
# Of one parameter. In bfloat16 either side is a few percent from the truth; keys whose gradients got lost between the
# ranks would be half of theirs.
_MAX_DIFFERENCE = 0.3


def measure_context(settings: dict[str, Any], layout: Layout, telling: Telling) -> None:
    """One GPU at T and n T tokens, n ranks at n T; each is told once it is known.

    settings: those of `ranks`; context_tokens is T. Every rank takes part. Raises ArithmeticError when the ranks'
    gradients are not those of one rank.
    """
    assert layout.world_size > 1, "context parallelism takes several ranks"
    together = shared_layout(layout)
    tokens, num_ranks = settings["context_tokens"], layout.world_size
    telling.say(f"context: gradients of {num_ranks} ranks against one rank's")
    difference = _difference(settings, layout, together)
    ones: dict[int, list[float]] = {}
    for length in (tokens, num_ranks * tokens, tokens // 2) if layout.is_first else ():
        if length < tokens and num_ranks * tokens in ones:
            continue
        telling.say(f"context: one rank, {length:,} tokens")
        found = _timed(settings, Layout(device=layout.device), length)
        if found is not None:
            ones[length] = found[0]
            telling.found(_line(settings, length, 1, *found, about=""))
    if layout.is_first and tokens not in ones:
        raise MemoryError(f"one GPU has no room for {tokens} tokens; name fewer with --context-tokens")
    meet(layout, "the end of one GPU's turns", patience=START_PATIENCE)
    telling.say(f"context: {num_ranks} ranks, {num_ranks * tokens:,} tokens")
    found = _timed(settings, together, num_ranks * tokens)
    meet(layout, "the end of the ranks' turn", patience=START_PATIENCE)
    if layout.is_first:
        assert found is not None
        ideal, how = ideal_ms({length: _mean_ms(seconds) for length, seconds in ones.items()}, tokens, num_ranks)
        about = f"{_mean_ms(found[0]) / ideal:.3f} x ideal, {how}; gradients within {difference:.1%} of one rank's"
        telling.found(_line(settings, num_ranks * tokens, num_ranks, *found, about=about))


def shared_layout(layout: Layout) -> Layout:
    """All ranks as one context group."""
    group = dist.new_group(list(range(layout.world_size)), timeout=2 * layout.patience)
    return replace(
        layout, data_rank=0, data_size=1, context_rank=layout.rank, context_size=layout.world_size, context_group=group
    )


def ideal_ms(of_one: dict[int, float], tokens: int, num_ranks: int) -> tuple[float, str]:
    """What n T tokens take if n ranks lose nothing, and how that is known. of_one: one GPU's time by tokens."""
    length = num_ranks * tokens
    if length in of_one:
        return of_one[length] / num_ranks, f"1/{num_ranks} of one GPU"
    half, whole = of_one[tokens // 2] / (tokens // 2), of_one[tokens] / tokens
    slope = (whole - half) / (tokens - tokens // 2)  # t / T = a + c T
    return (whole + slope * (length - tokens)) * length / num_ranks, f"1/{num_ranks} of one GPU, extrapolated"


def _line(
    settings: dict[str, Any], tokens: int, gpus: int, seconds: list[float], peak: int | None, *, about: str
) -> dict[str, Any]:
    notes = [f"one document; checkpointing {settings['context_checkpointing']}", *([about] if about else [])]
    return {
        "variant": "context", "gpus": gpus, "layout": layouts.ALL, "about": "; ".join(notes), "tokens": tokens,
        "ms": _mean_ms(seconds), "peak_bytes": peak, "seconds": seconds,
    }  # fmt: skip


def _mean_ms(seconds: list[float]) -> float:
    return 1e3 * sum(seconds) / len(seconds)


def _timed(settings: dict[str, Any], layout: Layout, tokens: int) -> tuple[list[float], int | None] | None:
    """Seconds of each timed step, and the most bytes that a rank held (of the ranks that share, the worst one's). None
    where there is no room."""
    _forget(layout)
    try:
        seconds = _turns(settings, layout, tokens)
    except torch.OutOfMemoryError:
        if layout.world_size > 1:
            raise  # the others wait for this rank
        seconds = []
    if layout.device != "cuda":
        return (seconds, None) if seconds else None
    peak = torch.tensor(torch.cuda.max_memory_allocated())
    _forget(layout)
    if layout.host_group is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=layout.host_group)
    return (seconds, int(peak)) if seconds else None


def _forget(layout: Layout) -> None:
    """Give back what the turn before held."""
    gc.collect()
    if layout.device == "cuda":
        torch.cuda.empty_cache()


def _turns(settings: dict[str, Any], layout: Layout, tokens: int) -> list[float]:
    """Seconds of each timed step."""
    model, step = _stepping(settings, layout, tokens)
    seconds = []
    for turn in range(settings["steps"] + 1):  # the first compiles and warms up
        if layout.device == "cuda" and turn == 1:
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        step()
        model.optimizer.step()  # reads the norm: the device is done
        if turn:
            seconds.append(time.monotonic() - started)
    return seconds


def _stepping(settings: dict[str, Any], layout: Layout, tokens: int) -> tuple[Model, Callable[[], float]]:
    """A model, and what runs forward and backward of one document of so many tokens; it returns the loss of all."""
    device, dtype = torch.device(layout.device), getattr(torch, settings["dtype"])
    model = Model(settings, device, dtype)
    masters = {name: parameter.detach().float() for name, parameter in model.draft.named_parameters()}
    model.optimizer = Optimizer(model.draft, masters, model.settings, layout=layout)
    batch = make_batch({**settings, "tokens": tokens, "layout": layouts.ALL, "states": "device"}, device)
    rows = count_rows(batch.loss_mask, batch.document_lengths, model.settings.ttt_steps)
    weights = weights_of_rows(rows, model.settings.step_loss_decay)
    if layout.context_group is not None:
        batch = shared(batch, Sharing(layout.context_rank, layout.context_size, model.settings.ttt_steps))
    computation = choose_computation(
        model.settings.model_copy(update={"checkpointing": settings["context_checkpointing"]}),
        device=layout.device, dtype=dtype, head_dim=model.draft.config.head_dim, context_group=layout.context_group,
    )  # fmt: skip

    def step() -> float:
        sums = Sums(model.settings.ttt_steps)
        train_pack(
            model.draft, batch, sums, model.optimizer, weights, model.head, model.draft_ids, computation, Objective()
        )
        loss = sums.over(layout, "the sums").loss
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss {loss}")
        return loss

    return model, step


def shared(batch: Batch, sharing: Sharing) -> Batch:
    """A rank's share of a whole batch, of which nothing is kept."""
    share = sharing.of(batch.loss_mask, batch.document_lengths)
    rows = rows_of_parts(batch.loss_mask, batch.document_lengths, share.parts(batch.document_lengths))
    own = share.own_rows.to(batch.aux_hidden.device)
    at = torch.searchsorted(batch.target_rows, rows).to(batch.aux_hidden.device)
    assert batch.last_hidden is not None
    return replace(
        batch,
        share=share,
        aux_hidden=batch.aux_hidden[own],
        target_rows=rows,
        target_argmax=batch.target_argmax[at],
        target_lse=batch.target_lse[at],
        last_hidden=batch.last_hidden[at],
    )


def _difference(settings: dict[str, Any], layout: Layout, together: Layout) -> float:
    """Relative L2 difference of the ranks' gradients from one rank's, of the parameter where it is largest. Raises
    ArithmeticError when it is no rounding."""
    tokens = min(_CHECKED_TOKENS, settings["context_tokens"])
    found = []
    for of in (together, Layout(device=layout.device)):
        model, step = _stepping(settings, of, tokens)
        step()
        gradients = {name: master.grad for name, master in model.optimizer.masters.items() if master.grad is not None}
        sum_gradients(of, list(gradients.values()))
        found.append(gradients)
    ranks, one = found
    differences = {name: float((ranks[name] - gradient).norm() / gradient.norm()) for name, gradient in one.items()}
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= _MAX_DIFFERENCE:
        raise ArithmeticError(
            f"{together.context_size} ranks' gradient of {worst} is off one rank's by {differences[worst]:.2%}"
        )
    return differences[worst]
