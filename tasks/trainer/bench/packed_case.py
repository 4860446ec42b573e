"""Packs and padded batches, as the worker runs them (see `packed`): the trainer's step on the same random documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tasks.trainer.bench.packed import budget_batches
from tasks.trainer.bench.step_case import batch_tensors, computation_of, gradient_error, make_step, shared_model
from tasks.trainer.draft.alignment import target_rows
from tasks.trainer.train.batches import Batch

_ALL_ROWS = ("padded", "padded_budget")  # their padding is trained on


def make_batches(variant: str, settings: dict[str, Any], device: torch.device) -> list[Batch]:
    """The batches of one optimizer step. alone: each document by itself, as the truth has them."""
    packs: Sequence[Sequence[int]] = settings["packs"]
    if variant == "alone":
        packs = [[length] for pack in packs for length in pack]
    elif variant == "padded_budget":
        packs = budget_batches(packs, settings["pack_tokens"])
    batches, number = [], 0
    for pack in packs:
        width = max(pack) if variant.startswith("padded") else None
        batches.append(
            _batch(pack, width, first=number, settings=settings, train_padding=variant in _ALL_ROWS, device=device)
        )
        number += len(pack)
    return batches


def _batch(
    lengths: Sequence[int],
    width: int | None,
    *,
    first: int,
    settings: dict[str, Any],
    train_padding: bool,
    device: torch.device,
) -> Batch:
    """Documents number first, first + 1, ... of these lengths, each followed by zeros up to width (None: no zeros)."""
    size, vocab = settings["hidden_size"], settings["target_vocab_size"]
    widths = [width or length for length in lengths]
    total = sum(widths)
    mask = torch.zeros(total, dtype=torch.bool)
    ids = torch.zeros(total, dtype=torch.int64, device=device)
    aux_hidden = torch.zeros(total, 3 * size, dtype=torch.bfloat16, device=device)
    last_hidden = torch.zeros(total, size, dtype=torch.bfloat16, device=device)
    argmax = torch.zeros(total, dtype=torch.int32, device=device)
    start = 0
    for number, (length, own) in enumerate(zip(lengths, widths, strict=True), start=first):
        rows = slice(start, start + length)
        # Of the number alone: a document is the same in every batch.
        generator = torch.Generator(device=device).manual_seed(number)
        mask[rows] = True
        ids[rows] = torch.randint(vocab, (length,), device=device, generator=generator)
        argmax[rows] = torch.randint(vocab, (length,), device=device, generator=generator).int()
        for states in (aux_hidden[rows], last_hidden[rows]):
            states.uniform_(-1, 1, generator=generator)
        start += own
    if train_padding:
        mask[:] = True
    rows_read = target_rows(mask, widths)
    read = rows_read.to(device)
    return Batch(
        sample_ids=tuple(str(number) for number in range(first, first + len(lengths))),
        document_lengths=tuple(widths),
        token_ids=ids,
        loss_mask=mask,
        aux_hidden=aux_hidden,
        target_rows=rows_read,
        target_argmax=argmax[read],
        target_lse=torch.full((len(rows_read),), math.log(vocab) + 1.0, device=device),
        last_hidden=last_hidden[read],
    )


class PackedCase:
    """The documents in the batches of one variant at a time, and the model."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._dtype = getattr(torch, settings["dtype"])
        self._model = shared_model(settings, device, self._dtype)
        self._batches: list[Batch] = []

    @property
    def inputs(self) -> list[Tensor]:
        """The model's tensors and those of the newest variant's batches."""
        return [*self._model.tensors(), *(tensor for batch in self._batches for tensor in batch_tensors(batch))]

    def start(self, variant: str) -> Callable[[], Sequence[Tensor]]:
        """One optimizer step over all documents; it returns nothing, the gradients are spent."""
        self._batches = []  # another variant's go first
        self._batches = make_batches(variant, self._settings, self._device)
        computation = computation_of(variant, self._model, self._device, self._dtype)
        step = make_step(self._model, self._batches, self._device, computation)

        def body() -> list[Tensor]:
            step()
            return []

        return body


def open_case(settings: dict[str, Any], device: torch.device) -> PackedCase:
    """The worker's entry."""
    return PackedCase(settings, device)


def error_of(variant: str, problem: dict[str, Any], device: torch.device) -> float | None:
    """Relative L2 error of all gradients against the documents alone; None where the padding is trained on."""
    if variant in _ALL_ROWS:
        return None
    own, alone = (make_batches(name, problem, device) for name in (variant, "alone"))
    return gradient_error(variant, problem, device, own=own, exact=alone)
