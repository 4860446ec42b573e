"""The train stage: build draft and source, then loop. The `if` on the mode is the only one of the whole trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from storage.cache import ShardCache
from storage.encoding import preset_name
from storage.reader import StoreReader
from storage.writer import StoreWriter
from tasks.trainer.capture import store_figures, store_spec
from tasks.trainer.config import Offline, Online, RunConfig
from tasks.trainer.data.heldout import choose_heldout
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.data.vocabulary import Vocabulary
from tasks.trainer.draft.context import Sharing
from tasks.trainer.draft.shape import draft_shape, fresh_draft
from tasks.trainer.progress import Progress
from tasks.trainer.ranks import check_ranks
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target import Target
from tasks.trainer.target_ends import load_ends
from tasks.trainer.target_shared import load_shared
from tasks.trainer.target_text import pick_dtype
from tasks.trainer.train.batches import Packs
from tasks.trainer.train.loop import train
from tasks.trainer.train.parallel import START_PATIENCE, Layout, first_on_machine, meet, sum_on_host
from tasks.trainer.train.sources import FillingSource, OnlineSource, StatesSource, StoreSource

logger = logging.getLogger(__name__)


def train_draft(config: RunConfig, run: RunDir, progress: Progress, *, layout: Layout | None = None) -> dict[str, Any]:
    """Train from prepared data; returns the receipt of the loop. layout: this rank's, among several."""
    prepared = run.receipt("prepare")
    assert prepared is not None, "prepare comes first"
    device: str = prepared["device"]
    if device == "cuda" and config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    if device == "cuda":
        # The host's part is index arithmetic on a few thousand numbers. With a thread a core each operation waits for
        # all of them to wake: up to 8 ms, 300 ms a step, on a virtual machine of 32 cores.
        torch.set_num_threads(1)
    layout = layout or Layout(device=device)
    check_ranks(config.train, layout.world_size)  # before anything is loaded
    with first_on_machine(layout):
        ends = load_ends(config.target, device=device, with_last_layer=config.draft.start == "target_layer")
    vocabulary = Vocabulary.load(run.vocabulary)
    d2t, t2d = torch.from_numpy(vocabulary.d2t), torch.from_numpy(vocabulary.t2d)
    shape = draft_shape(
        ends.config,
        config.draft,
        vocab_size=len(d2t),
        target_vocab_size=ends.head.shape[0],
        aux_layer_ids=tuple(prepared["aux_layer_ids"]),
    )
    draft, head_rows_of_parent = fresh_draft(shape, config.draft, ends, d2t=d2t, t2d=t2d, seed=config.train.seed)
    head = draft.target_head(ends.head)
    del ends  # the draft has its own embedding: on a GPU these are gigabytes
    data = PreparedData.open(run.train_data)
    heldout = []
    if config.train.evaluates:
        heldout = choose_heldout(PreparedData.open(run.heldout_data), config.train.evaluate_tokens)
    with _states_source(config, prepared, data, layout) as source:
        receipt = train(
            config,
            run,
            draft=draft,
            head=head,
            data=data,
            source=source,
            device=device,
            dtype=pick_dtype(config.train.dtype, device),
            progress=progress,
            heldout=heldout,
            layout=layout,
        )
    receipt["head_rows_of_parent"] = head_rows_of_parent
    receipt["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    if isinstance(source, FillingSource):
        states = config.hidden_states
        assert states.store_url is not None
        spec = store_spec(config, prepared)
        captured = sum_on_host(layout, torch.tensor([source.captured_samples]), "the store's figures")
        receipt["store"] = {
            "store_url": states.store_url,
            "fingerprint": spec.fingerprint,
            "preset": preset_name(spec.encoding),
            "captured_samples": int(captured),
            **store_figures(states.store_url, spec),
        }
    return receipt


@contextmanager
def _states_source(
    config: RunConfig, prepared: dict[str, Any], data: PreparedData, layout: Layout
) -> Iterator[StatesSource]:
    """What the config's hidden_states chooses."""
    states, device = config.hidden_states, layout.device
    sharing = None
    if layout.context_size > 1:
        sharing = Sharing(layout.context_rank, layout.context_size, config.train.ttt_steps)
    if isinstance(states, Offline):
        cache = states.cache_dir and ShardCache(Path(states.cache_dir), budget=int(states.cache_gb * 1e9))
        with StoreReader(states.store_url, store_spec(config, prepared), cache=cache or None) as reader:
            yield StoreSource(reader, device=device, prefetch_bytes=int(states.prefetch_gb * 1e9), sharing=sharing)
        return
    assert isinstance(states, Online), "the plan decides before anything is trained"
    if config.target.parallel == "tensor" and layout.world_size > 1:
        yield OnlineSource(load_shared(config.target, layout), device=device, sharing=sharing)
        return
    with first_on_machine(layout):
        target = Target.of(config.target, device=device, deterministic=config.train.deterministic)
    if states.store_url is None:
        yield OnlineSource(target, device=device, sharing=sharing)
        return
    assert sharing is None, "the config refuses packs that are shared and stored"
    budget = None if states.store_budget_gb is None else int(states.store_budget_gb * 1e9)
    spec = store_spec(config, prepared)
    if not layout.is_first:
        # The first one's statistics are everybody's: they are in the store before others open it.
        meet(layout, "the store's statistics", patience=START_PATIENCE)
    with StoreWriter(
        states.store_url, spec, byte_budget=budget, calibration_tokens=states.calibration_tokens
    ) as writer:
        source = FillingSource(target, writer, url=states.store_url, device=device)
        order = Packs(data.lengths.tolist(), pack_tokens=config.train.pack_tokens, seed=config.train.seed)
        source.calibrate(data[number] for pack in order.epoch(0) for number in pack)
        if layout.is_first:
            meet(layout, "the store's statistics", patience=START_PATIENCE)
        with closing(source):
            yield source
        logger.info(
            "store: %s samples through the target, %.3f GB%s",
            source.captured_samples,
            writer.stored_bytes / 1e9,
            ", budget used up" if writer.full else "",
        )
