"""The train stage: build draft and source, then loop. The `if` on the mode is the only one of the whole trainer."""

from __future__ import annotations

import logging
from typing import Any

import torch

from storage.reader import StoreReader
from tasks.trainer.capture import store_spec
from tasks.trainer.config import Offline, RunConfig
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.data.vocabulary import Vocabulary
from tasks.trainer.draft.shape import draft_shape, fresh_draft
from tasks.trainer.progress import Progress
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target import Target
from tasks.trainer.target_ends import load_ends
from tasks.trainer.target_text import pick_dtype
from tasks.trainer.train.batches import OnlineSource, StatesSource, StoreSource
from tasks.trainer.train.loop import train

logger = logging.getLogger(__name__)


def train_draft(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Train from prepared data; returns the receipt of the loop."""
    prepared = run.receipt("prepare")
    assert prepared is not None, "prepare comes first"
    device: str = prepared["device"]
    if device == "cuda" and config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    ends = load_ends(config.target, device=device, with_last_layer=config.draft.start == "target_layer")
    source: StatesSource
    if isinstance(config.hidden_states, Offline):
        source = StoreSource(StoreReader(config.hidden_states.store_url, store_spec(config, prepared)))
    else:
        source = OnlineSource(Target.of(config.target, device=device))
    vocabulary = Vocabulary.load(run.vocabulary)
    d2t, t2d = torch.from_numpy(vocabulary.d2t), torch.from_numpy(vocabulary.t2d)
    shape = draft_shape(
        ends.config,
        config.draft,
        vocab_size=len(d2t),
        target_vocab_size=ends.head.shape[0],
        aux_layer_ids=tuple(prepared["aux_layer_ids"]),
    )
    draft = fresh_draft(shape, config.draft, ends, d2t=d2t, t2d=t2d, seed=config.train.seed)
    return train(
        config,
        run,
        draft=draft,
        head=ends.head[draft.target_ids.to(ends.head.device)],
        data=PreparedData.open(run.train_data),
        source=source,
        device=device,
        dtype=pick_dtype(config.train.dtype, device),
        progress=progress,
    )
