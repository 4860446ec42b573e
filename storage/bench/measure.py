"""What a store makes of real states: bytes by array, and how fast they are written and read.

Everything is measured on stores that are written, with the public writer and reader, not on codecs by themselves: a
ratio includes chunk checksums, shard indexes, what pads the last chunk of a sample, and exceptions.

| metric | meaning |
|---|---|
| `ratio` | bytes without a store (storage.schema.raw_bytes) to all bytes under the fingerprint's folder |
| `aux ratio`, `last ratio` | bfloat16 bytes to those of the array and its exceptions |
| `topk bytes` | bytes of the array `topk` a target row |
| `beside` | share of all bytes that are not in arrays of states or top-k entries |
| `write MB/s`, `read MB/s`, `codes MB/s` | bfloat16 megabytes a second: writer, reader to bfloat16, reader to codes |
| `latency ms` | median over random samples of reading one to codes |
| `GETs` | requests for a sample, the median sample |
| `gpu share` | bytes handed to the GPU to those of bfloat16 |
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.inventory import Inventory, take_inventory
from storage.presets import PRESETS, Encoding
from storage.reader import StoreReader
from storage.schema import Sample, StoreSpec, TopK, target_rows
from storage.segment import shard_layouts
from storage.writer import StoreWriter

_LOSSLESS = PRESETS["lossless"]
AUX_STEPS = (0.1, 0.3, 0.5, 0.8)
LAST_STEPS = (0.05, 0.1)
_RANDOM_READS = 40


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One sample with both forms of its soft targets."""

    sample: Sample
    """With last hidden states."""
    top_k: TopK
    """The likeliest tokens of its target rows, likeliest first; as many as any encoding needs."""

    def as_stored(self, encoding: Encoding) -> Sample:
        """The sample as a store of that encoding takes it."""
        if encoding.top_k is None:
            return self.sample
        kept = TopK(
            np.ascontiguousarray(self.top_k.ids[:, : encoding.top_k]),
            np.ascontiguousarray(self.top_k.log_probabilities[:, : encoding.top_k]),
        )
        return dataclasses.replace(self.sample, last_hidden=None, top_k=kept)

    @property
    def state_bytes(self) -> int:
        """Bytes of its bfloat16 states."""
        assert self.sample.last_hidden is not None
        return self.sample.aux_hidden.nbytes + self.sample.last_hidden.nbytes


Figure = tuple[str, str, float]
"""Variant, metric, value."""


def array_ratios(captured: Sequence[Captured], spec: StoreSpec, folder: str) -> Iterator[Figure]:
    """Aux and last states each at every step, beside lossless ones, so that exceptions are theirs."""
    for step in (None, *AUX_STEPS):
        held = _write(captured, spec, dataclasses.replace(_LOSSLESS, aux_step=step), folder)
        yield "aux lossless" if step is None else f"aux step {step:g}", "aux ratio", _ratio(held, "aux")
        if step is None:
            yield "last lossless", "last ratio", _ratio(held, "last")
    for step in LAST_STEPS:
        held = _write(captured, spec, dataclasses.replace(_LOSSLESS, last_step=step), folder)
        yield f"last step {step:g}", "last ratio", _ratio(held, "last")


def preset_figures(
    captured: Sequence[Captured],
    spec: StoreSpec,
    folder: str,
    *,
    presets: Sequence[str] = tuple(PRESETS),
    rounds: int = 3,
) -> Iterator[Figure]:
    """Ratio, parts and speeds of each preset, on a store at the URL `folder`."""
    megabytes = sum(one.state_bytes for one in captured) / 1e6
    rng = np.random.default_rng(0)
    for preset in presets:
        encoding = PRESETS[preset]
        samples = [one.as_stored(encoding) for one in captured]
        seconds = []
        for turn in range(rounds):
            url = f"{folder}/{preset}-{turn}"
            started = time.perf_counter()
            with StoreWriter(url, dataclasses.replace(spec, encoding=encoding)) as writer:
                for sample in samples:
                    writer.write(sample)
            seconds.append(time.perf_counter() - started)
        yield preset, "write MB/s", megabytes / statistics.median(seconds)
        held = take_inventory(url, spec.fingerprint)
        yield preset, "ratio", held.ratio
        states = sum(size for name, size in held.array_bytes.items() if name.startswith(("aux", "last", "topk")))
        yield preset, "beside", 1 - states / held.total_bytes
        if "topk" in held.array_bytes:
            yield preset, "topk bytes", held.array_bytes["topk"] / held.num_targets
        with StoreReader(url) as reader:
            ids = [sample.sample_id for sample in samples]
            for metric, read in (("read MB/s", reader.read), ("codes MB/s", reader.read_encoded)):
                seconds = []
                for _ in range(rounds):
                    started = time.perf_counter()
                    for sample_id in ids:
                        read(sample_id)
                    seconds.append(time.perf_counter() - started)
                yield preset, metric, megabytes / statistics.median(seconds)
            seconds = []
            for sample_id in rng.choice(ids, _RANDOM_READS):
                started = time.perf_counter()
                reader.read_encoded(str(sample_id))
                seconds.append(time.perf_counter() - started)
            yield preset, "latency ms", 1e3 * statistics.median(seconds)
            yield preset, "GETs", statistics.median(num_gets(reader, sample_id) for sample_id in ids)
            yield preset, "gpu share", sum(reader.read_encoded(sample_id).nbytes for sample_id in ids) / 1e6 / megabytes


def num_gets(reader: StoreReader, sample_id: str) -> int:
    """Requests that reading a whole sample takes: one a shard."""
    entry = reader.entries[sample_id]
    layouts = shard_layouts(reader.spec).values()
    return sum(layout.num_shards(entry.rows[layout.array.axis][1]) for layout in layouts)


def gaussian_sample(num_tokens: int, hidden_size: int, vocab_size: int) -> Captured:
    """One long sample of independent normal states, every token supervised: for speed, where values do not matter."""
    rng = np.random.default_rng(0)
    mask = np.ones(num_tokens, dtype=np.bool_)
    rows = len(target_rows(mask))
    sample = Sample(
        sample_id="gaussian",
        token_ids=rng.integers(0, vocab_size, num_tokens, dtype=np.int32),
        loss_mask=mask,
        aux_hidden=_normal_bits(rng, num_tokens * 3, hidden_size).reshape(num_tokens, 3, hidden_size),
        target_argmax=rng.integers(0, vocab_size, rows, dtype=np.int32),
        target_lse=rng.standard_normal(rows, dtype=np.float32),
        last_hidden=_normal_bits(rng, rows, hidden_size),
    )
    return Captured(sample, TopK(np.empty((rows, 0), np.int32), np.empty((rows, 0), np.float32)))


def _normal_bits(rng: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.uint16]:
    bits = np.empty((rows, columns), dtype=np.uint16)
    for start in range(0, rows, 1024):
        part = bits[start : start + 1024]
        part[...] = rng.standard_normal(part.shape, dtype=np.float32).view(np.uint32) >> 16
    return bits


def _write(captured: Sequence[Captured], spec: StoreSpec, encoding: Encoding, folder: str) -> Inventory:
    url = f"{folder}/aux-{encoding.aux_step}-last-{encoding.last_step}"
    with StoreWriter(url, dataclasses.replace(spec, encoding=encoding)) as writer:
        for one in captured:
            writer.write(one.as_stored(encoding))
    return take_inventory(url, spec.fingerprint)


def _ratio(held: Inventory, what: str) -> float:
    hidden = 2 * held.spec.hidden_size
    raw = held.num_tokens * 3 * hidden if what == "aux" else held.num_targets * hidden
    stored = sum(size for name, size in held.array_bytes.items() if name.startswith(what))
    return raw / (stored + held.array_bytes.get("exceptions", 0))
