"""What `eyas bench store-step` measures: how long training waits for a store, and how many bytes go to the GPU.

Samples of one length with random states are written to a store under every encoding asked for (channels of unlike
deviation and a massive first token, as real states have; ratios are not what is measured here), then read by
`StoreSource` under the trainer's own step, at random, until the warm-up's prefetch is used up. Reported are the time of
a step and what of it was waiting, host and device, and the bytes that were copied, against bfloat16.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.bench import layouts
from storage.presets import PRESETS
from storage.reader import StoreReader
from storage.schema import Sample, StoreSpec, TopK, target_rows
from storage.writer import StoreWriter
from tasks.trainer.bench.step import DRAFT, TTT_STEPS
from tasks.trainer.bench.step_case import Model, computation_of, make_step
from tasks.trainer.data.prepared import PreparedSample, sample_id
from tasks.trainer.train.sources import StoreSource

logger = logging.getLogger(__name__)

_SINK = 25_000.0  # of a document's first token


@dataclass(frozen=True, slots=True)
class Measured:
    """One encoding on one length; means over the timed steps."""

    preset: str
    tokens: int
    """Of a sample, which is a pack."""
    steps: int
    """Timed steps."""
    step_ms: float
    """A step, waiting included."""
    wait_ms: float
    """What of it was waiting for data."""
    h2d_mb: float
    """Copied to the device a step, 10^6 bytes."""
    h2d_share: float
    """Of what bfloat16 would have been."""
    stored_mb: float
    """Stored bytes a sample, 10^6."""


def prepared_samples(number: int, *, tokens: int, vocab_size: int, layout: str) -> list[PreparedSample]:
    """Random documents of one length."""
    generator = np.random.default_rng(0)
    mask = np.zeros(tokens, dtype=np.bool_)
    for start, end in layouts.supervised_spans(tokens, layout):
        mask[start:end] = True
    made = []
    for _ in range(number):
        ids = generator.integers(0, vocab_size, tokens, dtype=np.int32)
        made.append(PreparedSample(sample_id(ids, mask), ids, mask))
    return made


def random_sample(sample: PreparedSample, spec: StoreSpec, *, seed: int) -> Sample:
    """States with channels of unlike deviation, and a first token far outside."""
    generator = torch.Generator().manual_seed(seed)
    rows, hidden = target_rows(sample.loss_mask), spec.hidden_size
    deviation = torch.exp(torch.empty(4, hidden).normal_(0, 0.7, generator=torch.Generator().manual_seed(0)))

    def states(num_rows: int, of: torch.Tensor) -> npt.NDArray[np.uint16]:
        values = torch.randn(num_rows, *of.shape, generator=generator, dtype=torch.float32).mul_(of)
        if num_rows:
            values[0, ..., 0] = _SINK
        return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    encoding, top_k = spec.encoding, None
    if encoding.top_k is not None:
        first = np.random.default_rng(seed).integers(0, spec.vocab_size - encoding.top_k, (len(rows), 1))
        logits = np.log(0.9) - np.log(encoding.top_k) + np.zeros((len(rows), encoding.top_k))
        top_k = TopK((first + np.arange(encoding.top_k)).astype(np.int32), logits.astype(np.float32))
    return Sample(
        sample_id=sample.sample_id,
        token_ids=sample.token_ids,
        loss_mask=sample.loss_mask,
        aux_hidden=states(len(sample.token_ids), deviation[:3]),
        target_argmax=np.zeros(len(rows), dtype=np.int32),
        target_lse=np.full(len(rows), 12.0, dtype=np.float32),
        last_hidden=states(len(rows), deviation[3]) if top_k is None else None,
        top_k=top_k,
    )


def measure(
    url: str,
    presets: Sequence[str],
    *,
    tokens: int,
    samples: int = 6,
    steps: int = 12,
    warm_up: int = 4,
    layout: str = layouts.ALL,
    device: str = "cuda",
    draft: dict[str, Any] | None = None,
    prefetch_bytes: int = 1 << 30,
) -> list[Measured]:
    """Write the stores that are missing under `url`, then train from each. draft: settings of the model."""
    settings = {**(draft or DRAFT), "ttt_steps": TTT_STEPS}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Model(settings, torch.device(device), dtype)
    computation = computation_of("eyas", model, torch.device(device), dtype)
    documents = prepared_samples(samples, tokens=tokens, vocab_size=settings["target_vocab_size"], layout=layout)
    found = []
    for preset in presets:
        spec = StoreSpec(
            fingerprint=f"bench-{preset}", target="random", aux_layer_ids=(1, 17, 32),
            hidden_size=settings["hidden_size"], vocab_size=settings["target_vocab_size"], encoding=PRESETS[preset],
        )  # fmt: skip
        with StoreWriter(url, spec) as writer:
            for number, document in enumerate(documents):
                if document.sample_id not in writer.committed():
                    writer.write(random_sample(document, spec, seed=number))
        with StoreReader(url, spec) as reader:
            stored = reader.statistics().stored_bytes / samples
            source = StoreSource(reader, device=device, prefetch_bytes=prefetch_bytes)
            order = np.random.default_rng(1).integers(0, samples, warm_up + steps).tolist()
            waited, times, before = 0.0, [], (0, 0, 0.0)
            with closing(source.batches([documents[number]] for number in order)) as batches:
                for number in itertools.count():
                    if number == warm_up:
                        waited = 0.0
                        traffic = source.traffic
                        before = (traffic.h2d_bytes, traffic.h2d_bytes_bf16, traffic.device_wait_s)
                    started = time.monotonic()
                    batch = next(batches, None)
                    if batch is None:
                        break
                    waited += time.monotonic() - started
                    make_step(model, [batch], torch.device(device), computation)()  # ends in a synchronisation
                    times.append(time.monotonic() - started)
            traffic = source.traffic
            moved, raw = traffic.h2d_bytes - before[0], traffic.h2d_bytes_bf16 - before[1]
            waited += traffic.device_wait_s - before[2]
        found.append(
            Measured(
                preset=preset,
                tokens=tokens,
                steps=steps,
                step_ms=1000 * sum(times[warm_up:]) / steps,
                wait_ms=1000 * waited / steps,
                h2d_mb=moved / steps / 1e6,
                h2d_share=moved / raw,
                stored_mb=stored / 1e6,
            )
        )
        logger.info("%s", found[-1])
    return found
