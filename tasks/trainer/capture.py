"""Fill the store with the states of the samples it lacks; what it has is never computed again.

The target computes, and threads of the store's writer encode, compress and upload what it gave before; a sample counts
once it is committed. Several runs may fill one store: each claims a few hundred samples at a time, leaves those that
others claimed to them, and waits for them at its end. Claims save work, they protect nothing: when two capture the same
sample, the store is right all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from storage.encoding import preset_name
from storage.errors import StoreError
from storage.reader import StoreReader
from storage.schema import Sample, StoreSpec, TopK
from storage.writer import StoreWriter
from tasks.trainer.config import Auto, Offline, RunConfig
from tasks.trainer.data.heldout import choose_heldout
from tasks.trainer.data.prepared import PreparedData, PreparedSample
from tasks.trainer.draft.alignment import target_rows
from tasks.trainer.progress import Progress
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target import Capturing, Document, Target, TargetStates
from tasks.trainer.target_shared import load_shared
from tasks.trainer.train.parallel import START_PATIENCE, Layout, first_on_machine, sum_on_host

logger = logging.getLogger(__name__)

# Samples claimed at once: few enough that a second writer finds work, many enough that claims cost nothing.
CLAIMED_SAMPLES = 256
# Tokens of documents that share a forward: enough to fill a GPU, few enough not to count in its memory.
FORWARD_TOKENS = 8192
_POLL_SECONDS = 2.0


def store_spec(config: RunConfig, prepared: dict[str, Any]) -> StoreSpec:
    """What this run's store must be. prepared: the receipt of the prepare stage."""
    states = config.hidden_states
    assert not isinstance(states, Auto), "the plan decides before anything is captured"
    return StoreSpec(
        fingerprint=prepared["fingerprint"],
        target=config.target.model,
        aux_layer_ids=tuple(prepared["aux_layer_ids"]),
        hidden_size=prepared["hidden_size"],
        vocab_size=prepared["target_vocab_size"],
        encoding=states.encoding(),
        chunk_tokens=states.chunk_tokens,
        shard_tokens=states.shard_tokens,
    )


def capture_missing(
    config: RunConfig, run: RunDir, progress: Progress, *, layout: Layout | None = None
) -> dict[str, Any]:
    """Capture every sample that the store does not hold yet: the training data, and the held-out samples that training
    looks at. Returns the receipt.

    layout: of several ranks, which share the work as several runs do: by claims, each with a target of its own. Where
    they share one target, the first captures and the others help.

    Raises StoreError when samples are missing and `hidden_states.on_missing` is `refuse`, or the store's spec differs,
    or it cannot be written; InputError when the target gives NaN or Inf.
    """
    states = config.hidden_states
    assert isinstance(states, Offline)
    prepared = run.receipt("prepare")
    assert prepared is not None, "prepare comes first"
    spec = store_spec(config, prepared)
    data = list(PreparedData.open(run.train_data))
    if config.train.evaluates:
        # Training looks at them from the same store, so it needs no target.
        data += choose_heldout(PreparedData.open(run.heldout_data), config.train.evaluate_tokens)
    layout = layout or Layout(device=prepared["device"])
    started = time.monotonic()
    captured: list[int] = []
    if states.on_missing == "refuse":
        # Opening a reader says what the store holds when it has nothing of this target.
        held = _committed(states.store_url, spec)
        missing = [sample.sample_id for sample in data if sample.sample_id not in held]
        if missing:
            raise StoreError(
                f"store {states.store_url!r} lacks {len(missing)} of {len(data)} samples (first: {missing[0]}); set "
                "hidden_states.on_missing=capture to add them"
            )
    else:
        with StoreWriter(states.store_url, spec, calibration_tokens=states.calibration_tokens) as writer:
            committed = writer.committed()
            wanted = [sample for sample in data if sample.sample_id not in committed]
            # All ranks ask for the same number of targets: one that opened the store late may find nothing wanting.
            if int(sum_on_host(layout, torch.tensor([len(wanted)]), "the missing samples", patience=START_PATIENCE)):
                if config.target.parallel == "tensor" and layout.world_size > 1:
                    shared = load_shared(config.target, layout, told_by=(0,), patience=START_PATIENCE)
                    if layout.is_first:
                        captured = _capture(shared, writer, wanted, progress)
                        shared.end()
                    else:
                        shared.follow(top_k=spec.encoding.top_k)
                else:
                    with first_on_machine(layout):
                        target = Target.of(
                            config.target, device=prepared["device"], deterministic=config.train.deterministic
                        )
                    captured = _capture(target, writer, wanted, progress)
    figures = torch.tensor([len(captured), sum(captured)])
    num_samples, num_tokens = sum_on_host(layout, figures, "the end of capture").tolist()
    return {
        "store_url": states.store_url,
        "fingerprint": spec.fingerprint,
        "preset": preset_name(spec.encoding),
        "captured_samples": num_samples,
        "captured_tokens": num_tokens,
        "seconds": time.monotonic() - started,
        **store_figures(states.store_url, spec),
    }


def store_figures(url: str, spec: StoreSpec) -> dict[str, Any]:
    """What the store of a spec holds and takes, for a receipt; bytes are bytes."""
    with StoreReader(url, spec) as reader:
        statistics = reader.statistics()
    return {
        "store_samples": statistics.num_samples,
        "store_tokens": statistics.num_tokens,
        "stored_bytes": statistics.stored_bytes,
        "raw_bytes": statistics.raw_bytes,
        "ratio": statistics.raw_bytes / statistics.stored_bytes if statistics.stored_bytes else None,
    }


def _capture(target: Capturing, writer: StoreWriter, wanted: Sequence[PreparedSample], progress: Progress) -> list[int]:
    """Capture what no other writer does, then wait for the others' part. Returns the tokens of each sample captured."""
    started, before = time.monotonic(), writer.stored_bytes
    captured: list[int] = []
    top_k = writer.spec.encoding.top_k

    def fill(samples: Sequence[PreparedSample]) -> list[PreparedSample]:
        """Capture those of the samples that can be claimed; returns those that others have claimed."""
        by_id = {sample.sample_id: sample for sample in samples}
        ids = writer.claim(list(by_id))
        # In this order: what another writer had claimed is in its claim until it is committed.
        committed = writer.committed_by_now()
        mine = [by_id.pop(sample_id) for sample_id in ids]
        claimed = (sample for sample in mine if sample.sample_id not in committed)
        for together in _forwards(claimed, FORWARD_TOKENS if target.packs else 0):
            for sample, given in zip(together, capture_samples(target, together, top_k=top_k), strict=True):
                writer.write(to_stored(sample, given))
                captured.append(len(sample.token_ids))
            seconds = time.monotonic() - started
            stored = (writer.stored_bytes - before) / 1e6
            progress(len(captured), len(wanted), f"{sum(captured) / seconds:.0f} tokens/s  {stored:,.1f} MB stored")
        return list(by_id.values())

    others: list[PreparedSample] = []
    for first in range(0, len(wanted), CLAIMED_SAMPLES):
        others += fill(wanted[first : first + CLAIMED_SAMPLES])
    writer.flush()
    while others:
        committed = writer.committed_by_now()
        others = [sample for sample in others if sample.sample_id not in committed]
        left = fill(others)
        writer.flush()
        if left == others and left:
            progress(len(wanted) - len(left), len(wanted), f"another run captures {len(left)} of the samples")
            time.sleep(_POLL_SECONDS)
        others = left
    return captured


def _committed(url: str, spec: StoreSpec) -> frozenset[str]:
    with StoreReader(url, spec) as reader:
        return reader.sample_ids()


def capture_samples(
    target: Capturing, samples: Sequence[PreparedSample], *, top_k: int | None = None
) -> list[TargetStates]:
    """The target's states of prepared samples, in one forward if the target packs. Raises InputError as
    Target.capture."""
    documents = []
    for sample in samples:
        mask = torch.from_numpy(np.array(sample.loss_mask))
        token_ids = torch.from_numpy(np.array(sample.token_ids, dtype=np.int64))
        documents.append(Document(token_ids, target_rows(mask, [len(mask)]), sample.sample_id))
    return target.capture(documents, top_k=top_k)


def _forwards(samples: Iterable[PreparedSample], most_tokens: int) -> Iterator[list[PreparedSample]]:
    """The samples, in order, in lists of at most so many tokens; a longer one alone."""
    together: list[PreparedSample] = []
    for sample in samples:
        if together and sum(len(one.token_ids) for one in together) + len(sample.token_ids) > most_tokens:
            yield together
            together = []
        together.append(sample)
    if together:
        yield together


def to_stored(sample: PreparedSample, states: TargetStates) -> Sample:
    """The store speaks numpy, which has no bfloat16: its bits travel as uint16."""
    num_tokens, width = states.aux_hidden.shape
    hidden, top = states.last_hidden, states.top_k
    return Sample(
        sample_id=sample.sample_id,
        token_ids=np.array(sample.token_ids, dtype=np.int32),
        loss_mask=np.array(sample.loss_mask, dtype=np.bool_),
        aux_hidden=states.aux_hidden.view(torch.uint16).reshape(num_tokens, 3, width // 3).cpu().numpy(),
        target_argmax=states.target_argmax.cpu().numpy(),
        target_lse=states.target_lse.cpu().numpy(),
        last_hidden=None if hidden is None else hidden.view(torch.uint16).cpu().numpy(),
        top_k=None if top is None else TopK(top.ids.cpu().numpy(), top.log_probabilities.cpu().numpy()),
    )
