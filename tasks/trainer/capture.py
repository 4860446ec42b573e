"""Fill the store with the states of the samples it lacks; what it has is never computed again."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch

from storage.errors import StoreError
from storage.reader import StoreReader
from storage.schema import Sample, StoreSpec
from storage.writer import StoreWriter
from tasks.trainer.config import Offline, RunConfig
from tasks.trainer.data.prepared import PreparedData, PreparedSample
from tasks.trainer.progress import Progress
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target import Target, TargetStates

logger = logging.getLogger(__name__)


def store_spec(config: RunConfig, prepared: dict[str, Any]) -> StoreSpec:
    """What this run's store must be. prepared: the receipt of the prepare stage."""
    states = config.hidden_states
    assert isinstance(states, Offline)
    return StoreSpec(
        fingerprint=prepared["fingerprint"],
        target=config.target.model,
        aux_layer_ids=tuple(prepared["aux_layer_ids"]),
        hidden_size=prepared["hidden_size"],
        vocab_size=prepared["target_vocab_size"],
        codec=states.codec,
        chunk_tokens=states.chunk_tokens,
        shard_tokens=states.shard_tokens,
    )


def capture_missing(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Capture every training sample that the store does not hold yet. Returns the receipt.

    Raises StoreError when samples are missing and `hidden_states.on_missing` is `refuse`, or the store's layout
    differs; InputError when the target gives NaN or Inf.
    """
    states = config.hidden_states
    assert isinstance(states, Offline)
    prepared = run.receipt("prepare")
    assert prepared is not None, "prepare comes first"
    spec = store_spec(config, prepared)
    data = PreparedData.open(run.train_data)
    started = time.monotonic()
    captured = captured_tokens = 0
    if states.on_missing == "refuse":
        # Opening a reader says what the store holds when it has nothing of this target.
        held = StoreReader(states.store_url, spec).sample_ids()
        missing = [sample.sample_id for sample in data if sample.sample_id not in held]
        if missing:
            raise StoreError(
                f"store {states.store_url!r} lacks {len(missing)} of {len(data)} samples (first: {missing[0]}); set "
                "hidden_states.on_missing=capture to add them"
            )
    else:
        with StoreWriter(states.store_url, spec) as writer:
            committed = writer.committed()
            missing_samples = [sample for sample in data if sample.sample_id not in committed]
            if missing_samples:
                target = Target.of(config.target, device=prepared["device"])
                for done, sample in enumerate(missing_samples, 1):
                    token_ids = torch.from_numpy(np.array(sample.token_ids, dtype=np.int64))
                    captured_states = target.capture(token_ids, sample_id=sample.sample_id)
                    writer.write(to_stored(sample, captured_states))
                    captured += 1
                    captured_tokens += len(sample.token_ids)
                    rate = captured_tokens / (time.monotonic() - started)
                    progress(done, len(missing_samples), f"{rate:.0f} tokens/s")
    statistics = StoreReader(states.store_url, spec).statistics()
    return {
        "store_url": states.store_url,
        "fingerprint": spec.fingerprint,
        "captured_samples": captured,
        "captured_tokens": captured_tokens,
        "seconds": time.monotonic() - started,
        "store_samples": statistics.num_samples,
        "store_tokens": statistics.num_tokens,
        "stored_bytes": statistics.stored_bytes,
        "raw_bytes": statistics.raw_bytes,
    }


def to_stored(sample: PreparedSample, states: TargetStates) -> Sample:
    """The store speaks numpy, which has no bfloat16: its bits travel as uint16."""
    hidden_size = states.last_hidden.shape[1]
    return Sample(
        sample_id=sample.sample_id,
        token_ids=np.asarray(sample.token_ids, dtype=np.int32),
        loss_mask=np.asarray(sample.loss_mask, dtype=np.bool_),
        aux_hidden=states.aux_hidden.view(torch.uint16).reshape(-1, 3, hidden_size).cpu().numpy(),
        last_hidden=states.last_hidden.view(torch.uint16).cpu().numpy(),
        target_argmax=states.target_argmax.cpu().numpy(),
        target_lse=states.target_lse.cpu().numpy(),
    )
