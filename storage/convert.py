"""Encoding a store's samples anew, into another store: `lossless` to `near`, 512-token chunks to 1,024, and so on.

Only what the source holds can be written: the k likeliest tokens cannot be made of hidden states without the target's
head, nor the other way round. A lossy source stays as lossy as it is, and its loss adds to that of the new encoding;
the codes are relative to statistics calibrated anew.

It goes on where it stopped: what the destination holds is not done again.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from storage.errors import StoreError
from storage.presets import Encoding
from storage.reader import StoreReader
from storage.schema import Sample, StoreSpec, TopK
from storage.writer import StoreWriter

# Samples read ahead; each holds its bfloat16 states.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion did."""

    num_samples: int
    """Samples written by this call."""
    num_before: int
    """Samples that the destination held already."""
    spec: StoreSpec
    """The destination's spec."""


def convert(
    source: str,
    destination: str,
    *,
    encoding: Encoding,
    fingerprint: str | None = None,
    chunk_tokens: int | None = None,
    shard_tokens: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Write every sample of a fingerprint in `source` into `destination`, under the same fingerprint.

    progress: called with samples done and all. StoreError: an encoding that cannot be made of the source's, a
    destination that holds the fingerprint in another encoding (the source itself, say), and whatever reader and writer
    refuse.
    """
    with StoreReader(source, fingerprint=fingerprint) as reader:
        _require_possible(reader.spec.encoding, encoding)
        spec = dataclasses.replace(
            reader.spec,
            encoding=encoding,
            chunk_tokens=chunk_tokens or reader.spec.chunk_tokens,
            shard_tokens=shard_tokens or reader.spec.shard_tokens,
        )
        with StoreWriter(destination, spec) as writer:
            wanted = sorted(reader.sample_ids())
            missing = [sample_id for sample_id in wanted if sample_id not in writer.committed()]
            num_before = len(wanted) - len(missing)
            progress(num_before, len(wanted))
            for done, sample in enumerate(_read_ahead(reader, missing), start=num_before + 1):
                writer.write(_with_fewer_tokens(sample, encoding.top_k))
                progress(done, len(wanted))
    return Converted(num_samples=len(missing), num_before=num_before, spec=spec)


def _require_possible(stored: Encoding, wanted: Encoding) -> None:
    if stored.last != wanted.last:
        have, want = (
            ("hidden states", "top-k targets") if stored.last == "hidden" else ("top-k targets", "hidden states")
        )
        raise StoreError(
            f"the source holds {have}, and {want} cannot be made of them without the target: capture them into another "
            f"store URL, or convert with last={stored.last}"
        )
    if stored.top_k is not None and wanted.top_k is not None and wanted.top_k > stored.top_k:
        raise StoreError(
            f"the source holds the {stored.top_k} likeliest tokens; top_k {wanted.top_k} is more than that"
        )


def _read_ahead(reader: StoreReader, sample_ids: list[str]) -> Iterator[Sample]:
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="store-convert") as executor:
        ahead: deque[Future[Sample]] = deque()
        waiting = iter(sample_ids)
        try:
            while True:
                for sample_id in waiting:
                    ahead.append(executor.submit(reader.read, sample_id))
                    if len(ahead) > _AHEAD:
                        break
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for reading in ahead:
                reading.cancel()


def _with_fewer_tokens(sample: Sample, top_k: int | None) -> Sample:
    """The sample with the `top_k` likeliest of its tokens; the others' mass joins the tail."""
    if sample.top_k is None or top_k is None or sample.top_k.ids.shape[1] == top_k:
        return sample
    order = np.argsort(-sample.top_k.log_probabilities, axis=1, kind="stable")[:, :top_k]
    return dataclasses.replace(
        sample,
        top_k=TopK(
            np.take_along_axis(sample.top_k.ids, order, axis=1),
            np.take_along_axis(sample.top_k.log_probabilities, order, axis=1),
        ),
    )
