"""How a run's steps are computed on the device it got: backends chosen, checked, and logged with the reason."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from kernels.soft_target_loss import choose_loss_backend
from kernels.ttt_attention import choose_attention_backend
from tasks.trainer.config import Train
from tasks.trainer.draft.layer import Memory, Pieces, compiled_pieces
from tasks.trainer.draft.ttt import Computation
from tasks.trainer.errors import InputError

logger = logging.getLogger(__name__)


def choose_computation(
    settings: Train,
    *,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    context_group: dist.ProcessGroup | None = None,
) -> Computation:
    """Resolve every "auto" of the train settings. context_group: the ranks that share a pack. Raises InputError for a
    choice that this device cannot run."""
    try:
        attention, why = choose_attention_backend(settings.attention, device, dtype, head_dim, training=True)
        logger.info("attention: %s (%s)", attention, why)
        row_kernel, why = choose_loss_backend("auto" if settings.loss == "linear" else settings.loss, device)
        loss = "linear" if settings.loss in ("auto", "linear") else row_kernel
        logger.info("loss: %s, rows by %s (%s)", loss, row_kernel, why)
    except ValueError as error:
        raise InputError(f"train: {error}") from None
    compiled = settings.compile == "always" or (settings.compile == "auto" and device == "cuda")
    logger.info("layer: %s, checkpointing %s", "compiled" if compiled else "eager", settings.checkpointing)
    return Computation(
        attention=attention,
        loss=loss,
        loss_backend=row_kernel,
        pieces=compiled_pieces() if compiled else Pieces(),
        memory=Memory(settings.checkpointing, settings.mlp_chunk_rows),
        context_group=context_group,
    )


def evaluation_computation(
    *, device: str, dtype: torch.dtype, head_dim: int, context_group: dist.ProcessGroup | None = None
) -> Computation:
    """For teacher-forced metrics: the same kernels, nothing compiled."""
    return Computation(
        attention=choose_attention_backend("auto", device, dtype, head_dim, training=False)[0],
        loss="linear",
        loss_backend=choose_loss_backend("auto", device)[0],
        context_group=context_group,
    )
