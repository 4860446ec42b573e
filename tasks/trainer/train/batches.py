"""Batches, and which samples are in each: deterministic packs of whole documents.

A batch is one row of whole documents: no padding, and nothing of one document reaches another. An epoch's packs are a
pure function of (seed, epoch), made at once (packing.py) when the epoch begins, so a place in the data is two numbers.
The price is a list of every sample in memory. Where the states come from is the business of sources.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tasks.trainer.data.prepared import PreparedSample
from tasks.trainer.draft.alignment import target_rows
from tasks.trainer.draft.context import ContextShare, Part
from tasks.trainer.target import TargetStates, TopTokens
from tasks.trainer.train.packing import pack_documents


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed row of whole documents, T tokens, R target rows; masks and rows stay on the host, all else is on one
    device.

    token_ids int64 [T]; loss_mask bool [T], from which every index is made before the forward (draft/alignment.py);
    document_lengths sum to T; aux_hidden bfloat16 [T, 3D]; target_rows int64 [R]: ascending rows of the pack. Of these:
    target_argmax int32 [R], target_lse float32 [R], and one of last_hidden bfloat16 [R, D] and top_k.

    share: of a rank that shares its packs. Then aux_hidden is that of its L own rows, and the target rows are those
    that its rows read, and few more; ids, mask and lengths are still the whole pack's.
    """

    sample_ids: tuple[str, ...]
    document_lengths: tuple[int, ...]
    token_ids: Tensor
    loss_mask: Tensor
    aux_hidden: Tensor
    target_rows: Tensor
    target_argmax: Tensor
    target_lse: Tensor
    last_hidden: Tensor | None = None
    top_k: TopTokens | None = None
    share: ContextShare | None = None

    def to(self, device: str) -> Batch:
        """The same batch on another device."""
        tensors = ("token_ids", "aux_hidden", "target_argmax", "target_lse")
        moved = {name: getattr(self, name).to(device) for name in tensors}
        last_hidden = None if self.last_hidden is None else self.last_hidden.to(device)
        top_k = self.top_k and TopTokens(self.top_k.ids.to(device), self.top_k.log_probabilities.to(device))
        return replace(self, **moved, last_hidden=last_hidden, top_k=top_k)


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the data: the pack to read next."""

    epoch: int = 0
    pack: int = 0


class Packs:
    """The packs of every epoch, as lists of sample numbers.

    lengths [n]: tokens of each sample. pack_tokens: a pack holds whole documents up to this many tokens; a longer
    document is a pack alone. The same (seed, epoch) always gives the same packs, whatever was read before, and in
    whatever process.
    """

    def __init__(self, lengths: Sequence[int] | npt.NDArray[np.int64], *, pack_tokens: int, seed: int) -> None:
        assert len(lengths) > 0
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._pack_tokens = pack_tokens
        self._seed = seed
        self._made: tuple[int, list[list[int]]] | None = None

    def epoch(self, epoch: int) -> list[list[int]]:
        """All packs of one epoch; each sample is in exactly one. Not to be changed: readers share the newest."""
        made = self._made
        if made is None or made[0] != epoch:
            chance = np.random.default_rng([self._seed, epoch])
            order = chance.permutation(len(self._lengths))
            packs = pack_documents(self._lengths, order, pack_tokens=self._pack_tokens)
            # Packs are closed as they fill up: those of one long document first, those packed anew last.
            made = epoch, [packs[number] for number in chance.permutation(len(packs))]
            self._made = made
        return made[1]

    def read_from(self, position: Position) -> Iterator[tuple[list[int], Position]]:
        """Endless: each pack with the position after it."""
        epoch, first = position.epoch, position.pack
        while True:
            packs = self.epoch(epoch)
            for number in range(first, len(packs)):
                done = number + 1 == len(packs)
                yield packs[number], Position(epoch + 1, 0) if done else Position(epoch, number + 1)
            epoch, first = epoch + 1, 0


def assemble(
    samples: Sequence[PreparedSample], states: Sequence[TargetStates | None], *, share: ContextShare | None = None
) -> Batch:
    """Put whole documents one after another into a batch; states: theirs, in the same order.

    share: of a rank that shares its packs; it needs no states of documents of which it has no part.
    """
    lengths = tuple(len(sample.token_ids) for sample in samples)
    loss_mask = torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples]))
    if share is None:
        kept, rows = [s for s in states if s is not None], target_rows(loss_mask, lengths)
        assert len(kept) == len(samples)
    else:
        parts = share.parts(lengths)
        kept, rows = (
            [_part_of(samples[p.document], states[p.document], p) for p in parts],
            rows_of_parts(loss_mask, lengths, parts),
        )
    hidden = [s.last_hidden for s in kept if s.last_hidden is not None]
    top = [s.top_k for s in kept if s.top_k is not None]
    assert len(hidden) in (0, len(kept)), "soft targets of two kinds in one pack"
    return Batch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        document_lengths=lengths,
        token_ids=torch.from_numpy(np.concatenate([s.token_ids for s in samples]).astype(np.int64)),
        loss_mask=loss_mask,
        aux_hidden=torch.cat([s.aux_hidden for s in kept]),
        target_rows=rows,
        target_argmax=torch.cat([s.target_argmax for s in kept]),
        target_lse=torch.cat([s.target_lse for s in kept]),
        last_hidden=torch.cat(hidden) if hidden else None,
        top_k=TopTokens(torch.cat([t.ids for t in top]), torch.cat([t.log_probabilities for t in top]))
        if top
        else None,
        share=share,
    )


def rows_of_parts(loss_mask: Tensor, document_lengths: Sequence[int], parts: Sequence[Part]) -> Tensor:
    """The target rows of a share: those of each part's tokens, as if they were a document. int64, ascending, rows of
    the pack: what the parts' rows read (draft/alignment.py) and up to their last token but one."""
    first = [0, *np.cumsum(document_lengths).tolist()]
    rows = []
    for part in parts:
        start, stop = first[part.document] + part.start, first[part.document] + part.stop
        rows.append(target_rows(loss_mask[start:stop], [stop - start]) + start)
    return torch.cat(rows)


def _part_of(sample: PreparedSample, states: TargetStates | None, part: Part) -> TargetStates:
    """The states of one part: auxiliary ones of its rows, soft targets of its tokens' target rows."""
    assert states is not None, f"no states of sample {sample.sample_id}, of which the share has rows"
    rows = target_rows(torch.from_numpy(np.array(sample.loss_mask)), [len(sample.loss_mask)])
    low, high = torch.searchsorted(rows, torch.tensor([part.start + 1, part.stop - 1])).tolist()
    targets = slice(low, max(low, high))
    top = states.top_k and TopTokens(states.top_k.ids[targets], states.top_k.log_probabilities[targets])
    return TargetStates(
        aux_hidden=states.aux_hidden[part.start : part.end],
        target_argmax=states.target_argmax[targets],
        target_lse=states.target_lse[targets],
        last_hidden=None if states.last_hidden is None else states.last_hidden[targets],
        top_k=top,
    )
