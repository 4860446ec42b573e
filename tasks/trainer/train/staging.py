"""From the stored form of a pack's samples to a batch: codes to the device, values there.

On a GPU the codes of a whole pack are gathered in one pinned buffer and copied on a stream of their own, a quarter to a
half of the bytes that bfloat16 would be; the step's stream waits for the copy's event, not the host, and dequantises
straight into the draft's input. On a CPU the same code runs without pins, streams and copies. Lossless states are their
own values: they only move.

Two threads share the work: `Stager.stage` runs ahead in the source's, `Stager.finish` in the trainer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.dequantize import dequantize
from storage.encoding import EncodedSample
from storage.quantise import Quantised
from storage.schema import TopK
from tasks.trainer.data.prepared import PreparedSample
from tasks.trainer.draft.alignment import target_rows
from tasks.trainer.draft.context import ContextShare
from tasks.trainer.errors import InputError
from tasks.trainer.target import TopTokens
from tasks.trainer.train.batches import Batch, rows_of_parts


@dataclass(slots=True)
class Traffic:
    """What a source has moved so far."""

    h2d_bytes: int = 0
    """Bytes copied from the host to the training device; on a CPU, bytes handed to the trainer."""
    h2d_bytes_bf16: int = 0
    """What the same states would have been as bfloat16."""
    device_wait_s: float = 0.0
    """Seconds the device stood still until a copy had arrived (the host's wait is the loop's to measure)."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows [start, stop) of documents whose codes mean the same: one launch. Exceptions count from `start`."""

    start: int
    stop: int
    scale: Tensor
    offset: Tensor
    exception_at: Tensor
    exception_bits: Tensor


@dataclass(frozen=True, slots=True)
class _States:
    """N rows on the device: int8 codes [N, C] and what they mean, or bfloat16 values [N, C] and no runs."""

    codes: Tensor
    runs: tuple[_Run, ...]


@dataclass(slots=True)
class _Cargo:
    """What was copied for one pack: the tensors that the copy's stream made, and bytes."""

    tensors: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Staged:
    """A pack on its way: everything of its batch but the values."""

    sample_ids: tuple[str, ...]
    document_lengths: tuple[int, ...]
    loss_mask: Tensor
    target_rows: Tensor
    token_ids: Tensor
    target_argmax: Tensor
    target_lse: Tensor
    aux: _States
    last: _States | TopTokens
    cargo: _Cargo
    arrived: Any
    """torch.cuda.Event after the last copy; None on a CPU."""
    share: ContextShare | None


class Stager:
    """Stages packs for one device. traffic: what it has moved."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._on_gpu else None
        self._traffic = Traffic()
        self._waits: deque[tuple[Any, Any]] = deque()
        # Scale and offset of each segment, copied once. Keyed by content: a reader makes them anew for each sample.
        self._constants: dict[tuple[bytes, bytes], tuple[Tensor, Tensor]] = {}

    @property
    def traffic(self) -> Traffic:
        """What has been moved, and waited for, up to the last finished pack."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._traffic.device_wait_s += before.elapsed_time(after) / 1000
        return self._traffic

    def stage(
        self, pack: Sequence[PreparedSample], encoded: Sequence[EncodedSample], share: ContextShare | None = None
    ) -> Staged:
        """Gather a pack and start its copy. encoded: whole samples, in the pack's order; of a share, its parts' tokens.

        Raises InputError when a stored sample is not the prepared one.
        """
        lengths = tuple(len(sample.token_ids) for sample in pack)
        loss_mask = torch.from_numpy(np.concatenate([sample.loss_mask for sample in pack]))
        if share is None:
            of, aux, rows = list(pack), [s.aux for s in encoded], target_rows(loss_mask, lengths)
        else:
            parts = share.parts(lengths)
            of, rows = [pack[part.document] for part in parts], rows_of_parts(loss_mask, lengths, parts)
            aux = [s.aux.rows(0, part.end - part.start) for s, part in zip(encoded, parts, strict=True)]
        for sample, stored in zip(of, encoded, strict=True):
            tokens = slice(stored.start, stored.stop)
            same_ids = np.array_equal(sample.token_ids[tokens], stored.token_ids)
            if not (same_ids and np.array_equal(sample.loss_mask[tokens], stored.loss_mask)):
                raise InputError(
                    f"sample {sample.sample_id}: the store holds other tokens under this id than this run prepared; "
                    "see `eyas store verify`"
                )
        cargo = _Cargo()
        arrived = None if self._stream is None else torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):  # None: does nothing
            staged = Staged(
                sample_ids=tuple(sample.sample_id for sample in pack),
                document_lengths=lengths,
                loss_mask=loss_mask,
                target_rows=rows,
                token_ids=self._moved([np.asarray(s.token_ids, dtype=np.int32) for s in pack], cargo).long(),
                target_argmax=self._moved([s.target_argmax for s in encoded], cargo),
                target_lse=self._moved([s.target_lse for s in encoded], cargo),
                aux=self._states(aux, cargo),
                last=self._last([s.last for s in encoded], cargo),
                cargo=cargo,
                arrived=arrived,
                share=share,
            )
            if arrived is not None:
                arrived.record(self._stream)
        return staged

    def finish(self, staged: Staged) -> Batch:
        """The batch, its values made on the caller's stream once the copy is there."""
        self._traffic.h2d_bytes += staged.cargo.num_bytes
        self._traffic.h2d_bytes_bf16 += _bf16_bytes(staged)
        if staged.arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            stream.wait_event(staged.arrived)
            after.record(stream)
            self._waits.append((before, after))
            for tensor in (*staged.cargo.tensors, staged.token_ids):
                # Made on the copy's stream: its allocator must not give them away while ours reads them.
                tensor.record_stream(stream)
        return Batch(
            sample_ids=staged.sample_ids,
            document_lengths=staged.document_lengths,
            token_ids=staged.token_ids,
            loss_mask=staged.loss_mask,
            aux_hidden=_values(staged.aux),
            target_rows=staged.target_rows,
            target_argmax=staged.target_argmax,
            target_lse=staged.target_lse,
            last_hidden=None if isinstance(staged.last, TopTokens) else _values(staged.last),
            top_k=staged.last if isinstance(staged.last, TopTokens) else None,
            share=staged.share,
        )

    def _last(self, parts: Sequence[Quantised | TopK], cargo: _Cargo) -> _States | TopTokens:
        top = [part for part in parts if isinstance(part, TopK)]
        if top:
            return TopTokens(
                ids=self._moved([part.ids for part in top], cargo),
                log_probabilities=self._moved([part.log_probabilities for part in top], cargo),
            )
        return self._states([part for part in parts if isinstance(part, Quantised)], cargo)

    def _states(self, parts: Sequence[Quantised], cargo: _Cargo) -> _States:
        codes = self._moved([part.codes.view(np.int16) if part.scale is None else part.codes for part in parts], cargo)
        if parts[0].scale is None:
            return _States(codes.view(torch.bfloat16), ())
        runs, first = [], 0
        while first < len(parts):
            last = first + 1
            while last < len(parts) and _same_constants(parts[first], parts[last]):
                last += 1
            start = sum(len(part.codes) for part in parts[:first])
            runs.append(self._run(start, parts[first:last], cargo))
            first = last
        return _States(codes, tuple(runs))

    def _run(self, start: int, parts: Sequence[Quantised], cargo: _Cargo) -> _Run:
        bounds = np.cumsum([0, *(part.codes.size for part in parts)])
        at = [part.exception_at + bound for part, bound in zip(parts, bounds[:-1], strict=True)]
        # A position takes four bytes on its way where four are enough.
        narrow = np.int32 if bounds[-1] <= 2**31 else np.int64
        scale, offset = self._constants_of(parts[0], cargo)
        return _Run(
            start=start,
            stop=start + sum(len(part.codes) for part in parts),
            scale=scale,
            offset=offset,
            exception_at=self._moved([positions.astype(narrow) for positions in at], cargo),
            exception_bits=self._moved([part.exception_bits.view(np.int16) for part in parts], cargo),
        )

    def _constants_of(self, part: Quantised, cargo: _Cargo) -> tuple[Tensor, Tensor]:
        scale, offset = part.scale, part.offset
        assert scale is not None
        assert offset is not None
        key = scale.tobytes(), offset.tobytes()
        if key not in self._constants:
            # Kept for good, so that no stream ever sees them freed: a plain copy, which waits.
            self._constants[key] = torch.tensor(scale, device=self._device), torch.tensor(offset, device=self._device)
            cargo.num_bytes += scale.nbytes + offset.nbytes
        return self._constants[key]

    def _moved(self, parts: Sequence[npt.NDArray[Any]], cargo: _Cargo) -> Tensor:
        """The parts one after another, on the device (or on its way there)."""
        dtype = torch.from_numpy(np.empty(0, dtype=parts[0].dtype)).dtype
        rows = sum(len(part) for part in parts)
        gathered = torch.empty((rows, *parts[0].shape[1:]), dtype=dtype, pin_memory=self._on_gpu)
        np.concatenate(parts, out=gathered.numpy())
        cargo.num_bytes += gathered.nbytes
        if not self._on_gpu:
            return gathered
        moved = gathered.to(self._device, non_blocking=True)
        cargo.tensors.append(moved)
        return moved


def _same_constants(one: Quantised, other: Quantised) -> bool:
    return np.array_equal(one.scale, other.scale) and np.array_equal(one.offset, other.offset)  # type: ignore[arg-type]


def _values(states: _States) -> Tensor:
    """bfloat16 [N, C]."""
    if states.codes.dtype == torch.bfloat16:
        return states.codes
    out = torch.empty(states.codes.shape, dtype=torch.bfloat16, device=states.codes.device)
    for run in states.runs:
        dequantize(
            states.codes[run.start : run.stop],
            run.scale,
            run.offset,
            run.exception_at.long(),
            run.exception_bits,
            out=out[run.start : run.stop],
        )
    return out


def _bf16_bytes(staged: Staged) -> int:
    states = [staged.aux.codes.numel()]
    if isinstance(staged.last, _States):
        states.append(staged.last.codes.numel())
    else:
        # What top-k tokens stand for: a last hidden state is a third of the auxiliary ones.
        states.append(staged.last.ids.shape[0] * staged.aux.codes.shape[1] // 3)
    return 2 * sum(states)
