"""Where batches come from: the one place of the trainer where online and offline differ.

    OnlineSource     the target, for every sample, every time
    StoreSource      a store, for every sample
    FillingSource    a store, for the samples it has; the target for the others, which it then has

A source turns packs of samples into batches on the training device, in order, and prepares the next pack in a thread
while a step runs. The price is one pack more in memory. What a step still waits for is measured (`Traffic`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Protocol, TypeVar

import numpy as np
import torch

from storage.encoding import EncodedSample, encode_sample, encoded_states
from storage.reader import StoreReader
from storage.schema import Sample
from storage.writer import StoreWriter
from tasks.trainer.capture import capture_samples, to_stored
from tasks.trainer.data.prepared import PreparedSample
from tasks.trainer.draft.context import ContextShare, Sharing
from tasks.trainer.errors import InputError
from tasks.trainer.target import Capturing, Target, TargetStates
from tasks.trainer.target_shared import SharedTarget
from tasks.trainer.train.batches import Batch, assemble
from tasks.trainer.train.staging import Stager, Traffic

Pack = Sequence[PreparedSample]
T = TypeVar("T")
# Samples of a pack encoded at once.
_ENCODERS = 8


def share_of(pack: Pack, sharing: Sharing | None) -> ContextShare | None:
    """This rank's share of a pack; None where packs are not shared."""
    if sharing is None:
        return None
    mask = torch.from_numpy(np.concatenate([sample.loss_mask for sample in pack]))
    return sharing.of(mask, [len(sample.token_ids) for sample in pack])


_NOTHING = torch.empty(0)
NO_BATCH = Batch((), (), _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING)
"""Of an empty pack."""


class StatesSource(Protocol):
    """The target's states of samples, as batches."""

    @property
    def traffic(self) -> Traffic:
        """Counters, from the source's making on."""
        ...

    @property
    def together(self) -> bool:
        """Whether every rank must ask for a batch in each round: for an empty pack where it has none."""
        ...

    def batches(self, packs: Iterable[Pack]) -> Generator[Batch]:
        """A batch for each pack, in order, on the training device. Close it to stop what it prepares."""
        ...


class OnlineSource:
    """Runs the target on every sample, every time it is asked: no store, one forward a pack if the target packs."""

    def __init__(self, target: Capturing, *, device: str = "cpu", sharing: Sharing | None = None) -> None:
        """sharing: of ranks that share packs. Each runs the target on the whole of every document of which it has rows:
        the target's forward is not shared, in time or in memory."""
        self._target = target
        self._device = device
        self._sharing = sharing
        self.together = isinstance(target, SharedTarget)
        self.traffic = Traffic()

    def batches(self, packs: Iterable[Pack]) -> Generator[Batch]:
        made = (self._batch(pack) for pack in packs)
        # In a thread on a GPU only: on a CPU the target's and the draft's OpenMP threads would share the cores and wait
        # for each other. The thread uses the step's own stream: nothing runs at once there, but launches are hidden.
        # Nor where the target's forwards are all ranks', and take turns with the draft's collectives.
        yield from (ahead(made) if self._device.startswith("cuda") and not self.together else made)

    def _batch(self, pack: Pack) -> Batch:
        if not pack:
            capture_samples(self._target, [])  # the others' documents
            return NO_BATCH
        share = share_of(pack, self._sharing)
        wanted = list(range(len(pack)))
        if share is not None:
            wanted = sorted({part.document for part in share.parts([len(sample.token_ids) for sample in pack])})
        states: list[TargetStates | None] = [None] * len(pack)
        for number, captured in zip(wanted, capture_samples(self._target, [pack[n] for n in wanted]), strict=True):
            states[number] = captured
        batch = assemble(pack, states, share=share).to(self._device)
        self.traffic.h2d_bytes += batch.token_ids.nbytes
        return batch


class StoreSource:
    """Reads captured states from a store: no target, checksums verified on each read."""

    together = False

    def __init__(
        self,
        reader: StoreReader,
        *,
        device: str = "cpu",
        prefetch_bytes: int = 1 << 30,
        sharing: Sharing | None = None,
    ) -> None:
        """prefetch_bytes: of decoded samples, read ahead beside the staged pack. sharing: of ranks that share packs;
        each reads the chunks in which its rows lie."""
        self._reader = reader
        self._sharing = sharing
        self._prefetch_bytes = prefetch_bytes
        self._stager = Stager(device)

    @property
    def traffic(self) -> Traffic:
        return self._stager.traffic

    def batches(self, packs: Iterable[Pack]) -> Generator[Batch]:
        staged = (self._stager.stage(pack, encoded, share) for pack, share, encoded in self._read(packs))
        with closing(ahead(staged)) as coming:
            for pack in coming:
                yield self._stager.finish(pack)

    def _read(self, packs: Iterable[Pack]) -> Iterator[tuple[Pack, ContextShare | None, list[EncodedSample]]]:
        asked: deque[tuple[Pack, ContextShare | None, int]] = deque()

        def windows() -> Iterator[tuple[str, int, int | None]]:
            for pack in packs:
                share = share_of(pack, self._sharing)
                wanted: list[tuple[str, int, int | None]] = [(sample.sample_id, 0, None) for sample in pack]
                if share is not None:
                    parts = share.parts([len(sample.token_ids) for sample in pack])
                    wanted = [(pack[part.document].sample_id, part.start, part.stop) for part in parts]
                asked.append((pack, share, len(wanted)))
                yield from wanted

        encoded = self._reader.prefetch(windows(), max_bytes=self._prefetch_bytes)
        for first in encoded:
            pack, share, num_windows = asked.popleft()
            yield pack, share, [first, *(next(encoded) for _ in range(num_windows - 1))]


class FillingSource:
    """Online training that fills a store as it goes, and reads what is there.

    Whether a sample comes from the target or from the store never shows in what is trained: what the target gives takes
    the way through the store's encoding and back. A lossy encoding needs statistics for that, so where the store has
    none, the run's first samples (in its own order, whatever step it continues at) are captured and written before the
    first step. Once the byte budget is used up nothing is written any more, and the rest goes through the target in
    every epoch, encoded and decoded all the same.
    """

    together = False

    def __init__(self, target: Target, writer: StoreWriter, *, url: str, device: str = "cpu") -> None:
        """writer: of the store at url, and this source's alone until it is closed."""
        self._target = target
        self._writer = writer
        self._url = url
        self._reader = StoreReader(url, writer.spec)
        self._taken: set[str] = set()
        self._encoders = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encode")
        self._device = device
        self._stager = Stager(device)
        self.captured_samples = 0
        """Samples that went through the target."""

    @property
    def traffic(self) -> Traffic:
        return self._stager.traffic

    def calibrate(self, first: Iterable[PreparedSample]) -> None:
        """Freeze the store's statistics, if its encoding needs some that it lacks, from the first samples of the run.

        Raises InputError when the byte budget has no room for one sample.
        """
        if not self._writer.spec.encoding.needs_statistics or self._writer.statistics is not None:
            return
        for sample in first:
            if self._writer.statistics is not None:
                break
            list(self._capture([sample]))
        self._writer.flush()
        if self._writer.statistics is None:
            raise InputError(
                "hidden_states.store_budget_gb has no room for the samples that calibrate the store; raise it"
            )

    def batches(self, packs: Iterable[Pack]) -> Generator[Batch]:
        staged = (self._stager.stage(pack, self._encoded(pack)) for pack in packs)
        # On a CPU in no thread, as OnlineSource.
        with closing(ahead(staged) if self._device.startswith("cuda") else staged) as coming:
            for pack in coming:
                yield self._stager.finish(pack)

    def close(self) -> None:
        """Give up the reader and threads. The writer is the caller's."""
        self._reader.close()
        self._encoders.shutdown()

    def _encoded(self, pack: Pack) -> list[EncodedSample]:
        known = self._reader.entries
        if any(sample.sample_id not in known and self._was_committed(sample.sample_id) for sample in pack):
            # Since the reader was opened: about once an epoch, for all of the epoch before are then there.
            self._reader.close()
            self._reader = StoreReader(self._url, self._writer.spec)
            known = self._reader.entries
        read = self._reader.prefetch((sample.sample_id, 0, None) for sample in pack if sample.sample_id in known)
        given = self._from_target([sample for sample in pack if sample.sample_id not in known])
        return [next(read) if sample.sample_id in known else next(given) for sample in pack]

    def _from_target(self, samples: Sequence[PreparedSample]) -> Iterator[EncodedSample]:
        spec, statistics = self._writer.spec, self._writer.statistics

        def encoded(states: Sample) -> EncodedSample:
            arrays = encode_sample(states, spec, statistics)
            return encoded_states(arrays, sample_id=states.sample_id, spec=spec, statistics=statistics)

        # numpy lets other threads run while it computes; short samples leave no work to share inside one.
        yield from self._encoders.map(encoded, self._capture(samples))

    def _was_committed(self, sample_id: str) -> bool:
        return sample_id in self._taken and sample_id in self._writer.committed()

    def _capture(self, samples: Sequence[PreparedSample]) -> Iterator[Sample]:
        """The samples' states as stored, each written on its way."""
        given = capture_samples(self._target, samples, top_k=self._writer.spec.encoding.top_k)
        for sample, of_target in zip(samples, given, strict=True):
            states = to_stored(sample, of_target)
            self.captured_samples += 1
            if self._writer.write(states):
                self._taken.add(sample.sample_id)
            yield states


def ahead(items: Iterator[T]) -> Generator[T]:
    """The same items, each made in a thread while the consumer works with the one before.

    An error is raised where its item would have come. Closing waits for the item being made.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        end = object()
        coming = thread.submit(next, items, end)
        try:
            while (item := coming.result()) is not end:
                coming = thread.submit(next, items, end)
                yield item  # type: ignore[misc]
        finally:
            coming.exception()
            if isinstance(items, Generator):
                thread.submit(items.close).result()
