"""From prepared samples to batches: deterministic packs, and the one place where online and offline differ.

A batch is one row of whole documents. Packs are filled in shuffled order, next-fit: simple and deterministic from
(seed, epoch); the price is a few percent of unfilled tokens, which cost nothing because rows are not padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from storage.reader import StoreReader
from tasks.trainer.data.prepared import PreparedData, PreparedSample
from tasks.trainer.target import Target, TargetStates


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed row of whole documents, T tokens; the mask stays on the host, all else is on one device.

    token_ids int64 [T]; loss_mask bool [T], from which every index is made before the forward (draft/alignment.py);
    document_lengths sum to T; aux_hidden bfloat16 [T, 3D]; last_hidden bfloat16 [T, D]; target_argmax int32 [T];
    target_lse float32 [T].
    """

    sample_ids: tuple[str, ...]
    document_lengths: tuple[int, ...]
    token_ids: Tensor
    loss_mask: Tensor
    aux_hidden: Tensor
    last_hidden: Tensor
    target_argmax: Tensor
    target_lse: Tensor

    def to(self, device: str) -> Batch:
        """The same batch on another device."""
        tensors = ("token_ids", "aux_hidden", "last_hidden", "target_argmax", "target_lse")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})


class StatesSource(Protocol):
    """Where the target's states of a sample come from."""

    def states(self, sample: PreparedSample) -> TargetStates:
        """The states of one sample, bfloat16."""
        ...


class OnlineSource:
    """Runs the target on every sample, every time it is asked: no memory, no disk, one forward."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def states(self, sample: PreparedSample) -> TargetStates:
        token_ids = torch.from_numpy(np.array(sample.token_ids, dtype=np.int64))
        return self._target.capture(token_ids, sample_id=sample.sample_id)


class StoreSource:
    """Reads captured states from a store: no target, checksums verified on each read."""

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader

    def states(self, sample: PreparedSample) -> TargetStates:
        stored = self._reader.read(sample.sample_id)
        return TargetStates(
            aux_hidden=torch.from_numpy(stored.aux_hidden).view(torch.bfloat16).flatten(1),
            last_hidden=torch.from_numpy(stored.last_hidden).view(torch.bfloat16),
            target_argmax=torch.from_numpy(stored.target_argmax),
            target_lse=torch.from_numpy(stored.target_lse),
        )


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the data: the pack to read next."""

    epoch: int = 0
    pack: int = 0


class Packs:
    """The packs of every epoch, as lists of sample numbers.

    lengths: tokens of each sample. pack_tokens: a pack holds whole documents up to this many tokens; a longer document
    is a pack alone. The same (seed, epoch) always gives the same packs, whatever was read before.
    """

    def __init__(self, lengths: Sequence[int], *, pack_tokens: int, seed: int) -> None:
        assert len(lengths) > 0
        self._lengths = lengths
        self._pack_tokens = pack_tokens
        self._seed = seed

    def epoch(self, epoch: int) -> list[list[int]]:
        """All packs of one epoch; each sample is in exactly one."""
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._lengths))
        packs: list[list[int]] = []
        free = 0
        for sample in order.tolist():
            length = self._lengths[sample]
            if not packs or length > free:
                packs.append([])
                free = self._pack_tokens
            packs[-1].append(sample)
            free -= length
        return packs

    def read_from(self, position: Position) -> Iterator[tuple[list[int], Position]]:
        """Endless: each pack with the position after it."""
        epoch, first = position.epoch, position.pack
        while True:
            packs = self.epoch(epoch)
            for number in range(first, len(packs)):
                done = number + 1 == len(packs)
                yield packs[number], Position(epoch + 1, 0) if done else Position(epoch, number + 1)
            epoch, first = epoch + 1, 0


def assemble(samples: Sequence[PreparedSample], source: StatesSource) -> Batch:
    """Put whole documents one after another into a batch."""
    states = [source.states(sample) for sample in samples]
    return Batch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        document_lengths=tuple(len(sample.token_ids) for sample in samples),
        token_ids=torch.from_numpy(np.concatenate([s.token_ids for s in samples]).astype(np.int64)),
        loss_mask=torch.from_numpy(np.concatenate([s.loss_mask for s in samples])),
        aux_hidden=torch.cat([s.aux_hidden for s in states]),
        last_hidden=torch.cat([s.last_hidden for s in states]),
        target_argmax=torch.cat([s.target_argmax for s in states]),
        target_lse=torch.cat([s.target_lse for s in states]),
    )


def sample_lengths(data: PreparedData) -> list[int]:
    """Tokens of each prepared sample."""
    return [len(data[number].token_ids) for number in range(len(data))]
