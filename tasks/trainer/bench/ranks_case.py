"""One rank of `eyas bench ranks` (see `ranks`, whose process this runs in)."""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from kernels.bench import layouts
from storage.presets import PRESETS
from storage.reader import StoreReader
from storage.schema import StoreSpec
from storage.writer import StoreWriter
from tasks.trainer.bench.packed import chat_lengths
from tasks.trainer.bench.ranks import counts_of, ranks_of
from tasks.trainer.bench.ranks_telling import Telling
from tasks.trainer.bench.step_case import Model
from tasks.trainer.capture import capture_samples, to_stored
from tasks.trainer.data.prepared import PreparedSample, sample_id
from tasks.trainer.draft.ttt import Computation, Objective
from tasks.trainer.target import Target
from tasks.trainer.train.computation import choose_computation
from tasks.trainer.train.dealing import agree, count_step_rows, rounds_of, weights_of_rows
from tasks.trainer.train.loop import train_pack
from tasks.trainer.train.metrics import Sums
from tasks.trainer.train.optim import Optimizer
from tasks.trainer.train.packing import deal_packs, pack_documents
from tasks.trainer.train.parallel import START_PATIENCE, Layout, among_first, joined, meet
from tasks.trainer.train.sources import OnlineSource, StatesSource, StoreSource

_WARM_UP = 1  # steps before the timed ones of a turn: the source reads ahead by then
_WRITERS = 4  # threads of a rank that encode for its store
_KINDS_OF_STEPS = 2  # as many different steps at the most ranks; they come again


@dataclass(frozen=True, slots=True)
class Documents:
    """The samples, and packs of them by their numbers."""

    samples: list[PreparedSample]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    packs: list[list[int]]

    def __getitem__(self, number: int) -> PreparedSample:
        return self.samples[number]


def make_documents(settings: dict[str, Any], *, num_packs: int) -> Documents:
    """num_packs full packs of random documents, every token supervised; the same on every rank."""
    pack_tokens, vocab = settings["pack_tokens"], settings["target_vocab_size"]
    num = 4 * num_packs * max(1, pack_tokens // settings["median_tokens"])
    lengths = chat_lengths(num, longest=pack_tokens, median=settings["median_tokens"])
    packs = pack_documents(lengths, np.arange(num), pack_tokens=pack_tokens)
    fullest = sorted(packs, key=lambda pack: -int(lengths[pack].sum()))[:num_packs]
    generator = np.random.default_rng(0)
    samples: list[PreparedSample] = []
    own: list[list[int]] = []
    for pack in fullest:
        own.append(list(range(len(samples), len(samples) + len(pack))))
        for number in pack:
            ids = generator.integers(0, vocab, int(lengths[number]), dtype=np.int32)
            mask = np.ones(len(ids), dtype=np.bool_)
            samples.append(PreparedSample(sample_id(ids, mask), ids, mask))
    return Documents(samples, np.array([len(sample.token_ids) for sample in samples], dtype=np.int64), own)


def random_target(settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Target:
    """A target of Qwen3's architecture with random weights; nothing is downloaded."""
    config = Qwen3Config(
        vocab_size=settings["target_vocab_size"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        num_hidden_layers=settings["num_layers"],
        num_attention_heads=settings["num_heads"],
        num_key_value_heads=settings["num_kv_heads"],
        head_dim=settings["head_dim"],
        max_position_embeddings=1 << 17,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return Target(model, None, name="random", pack_documents=device.type == "cuda")


def spec_of(target: Target) -> StoreSpec:
    """Of the store of its states."""
    return StoreSpec(
        fingerprint="bench-ranks", target="random", aux_layer_ids=target.aux_layer_ids,
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, encoding=PRESETS["near"],
    )  # fmt: skip


def fill_store(url: str, documents: Documents, target: Target, layout: Layout) -> None:
    """Write the states of all documents, each rank its part. The first pack, the first rank's, calibrates the store."""

    def write(packs: Sequence[Sequence[int]]) -> None:
        with StoreWriter(url, spec_of(target), workers=_WRITERS, calibration_tokens=1) as writer:
            for pack in packs:
                samples = [documents[number] for number in pack]
                for sample, states in zip(samples, capture_samples(target, samples), strict=True):
                    writer.write(to_stored(sample, states))

    if layout.is_first:
        write(documents.packs[:1])
    meet(layout, "the store's first pack", patience=START_PATIENCE)
    write(documents.packs[1 + layout.rank :: layout.world_size])
    meet(layout, "the store", patience=START_PATIENCE)


def over(optimizer: Optimizer, layout: Layout) -> Optimizer:
    """The same optimizer, masters and moments, for other ranks."""
    other = copy.copy(optimizer)
    other._layout = layout
    return other


class Turns:
    """Takes turns of steps at any number of the ranks."""

    def __init__(self, settings: dict[str, Any], layout: Layout, documents: Documents, model: Model) -> None:
        self._settings, self._documents, self._model = settings, documents, model
        self.counts = counts_of(layout.world_size)
        self._layouts = {count: among_first(layout, count) for count in self.counts[:-1]}
        self._layouts[layout.world_size] = layout
        # The numbers of ranks share masters and moments, or each rank would hold a set for every number.
        self._optimizers = {count: over(model.optimizer, own) for count, own in self._layouts.items() if own}
        dtype = model.draft.fc.weight.dtype
        self._computation: Computation = choose_computation(
            model.settings, device=layout.device, dtype=dtype, head_dim=model.draft.config.head_dim
        )

    def take(self, source: StatesSource, count: int, steps: int) -> tuple[list[float], list[int]] | None:
        """Timed steps at so many ranks: seconds and tokens of each; None on a rank that only waits."""
        layout = self._layouts[count]
        if layout is None:
            return None
        steps += _WARM_UP
        seconds, tokens = [], []
        with closing(source.batches(self._own_packs(layout, steps))) as batches:
            for step in range(steps):
                started = time.monotonic()
                self._step(batches, layout, step)
                seconds.append(time.monotonic() - started)
                tokens.append(sum(int(self._documents.lengths[pack].sum()) for pack in self._group(layout, step)))
        return seconds[_WARM_UP:], tokens[_WARM_UP:]

    def _step(self, batches: Iterator[Any], layout: Layout, step: int) -> None:
        """One optimizer step as `loop.train` takes it."""
        model, settings = self._model, self._model.settings
        group = self._group(layout, step)
        dealt = deal_packs(group, self._documents.lengths, num_ranks=layout.data_size)
        own = [group[number] for number in dealt[layout.data_rank]]
        rows, _ = agree(layout, count_step_rows(self._documents, own, settings.ttt_steps), step=step)
        weights = weights_of_rows(rows, settings.step_loss_decay)
        sums, optimizer = Sums(settings.ttt_steps), self._optimizers[layout.world_size]
        for last in rounds_of(dealt, layout, step=step):
            train_pack(
                model.draft, next(batches), sums, optimizer, weights, model.head, model.draft_ids, self._computation,
                Objective(), last=last,
            )  # fmt: skip
        sums.over(layout, "the sums")
        optimizer.step()  # reads the norm: the device is done

    def _group(self, layout: Layout, step: int) -> list[list[int]]:
        packs, size = self._documents.packs, self._settings["packs"] * layout.data_size
        return [packs[(step * size + number) % len(packs)] for number in range(size)]

    def _own_packs(self, layout: Layout, steps: int) -> Iterator[Sequence[PreparedSample]]:
        for step in range(steps):
            group = self._group(layout, step)
            for number in deal_packs(group, self._documents.lengths, num_ranks=layout.data_size)[layout.data_rank]:
                yield [self._documents[sample] for sample in group[number]]


def measure(settings: dict[str, Any], layout: Layout, telling: Telling) -> None:
    """Every variant; what is found is told as soon as it is known."""
    if {"online", "offline"} & set(settings["variants"]):
        measure_packs(settings, layout, telling)
    if "context" in settings["variants"]:
        from tasks.trainer.bench.context import measure_context

        measure_context(settings, layout, telling)


def measure_packs(settings: dict[str, Any], layout: Layout, telling: Telling) -> None:
    """online and offline."""
    device, dtype = torch.device(layout.device), getattr(torch, settings["dtype"])
    documents = make_documents(settings, num_packs=_KINDS_OF_STEPS * settings["packs"] * layout.world_size)
    telling.say(f"a random target of {settings['num_layers']} layers")
    target = random_target(settings, device, dtype)
    telling.say("the draft and its optimizers")
    model = Model(settings, device, dtype)
    turns = Turns(settings, layout, documents, model)
    if "online" in settings["variants"]:
        _take_turns(settings, layout, telling, turns, "online", OnlineSource(target, device=layout.device))
    if "offline" in settings["variants"]:
        telling.say(f"offline: states of {int(documents.lengths.sum()):,} tokens into the store")
        url, spec = str(Path(settings["folder"], "store")), spec_of(target)
        fill_store(url, documents, target, layout)
        del target  # training from a store holds none
        with StoreReader(url, spec) as reader:
            _take_turns(settings, layout, telling, turns, "offline", StoreSource(reader, device=layout.device))


def _take_turns(
    settings: dict[str, Any], layout: Layout, telling: Telling, turns: Turns, variant: str, source: StatesSource
) -> None:
    """Tell a line a number of ranks. The numbers take turns; before them all ranks compile at once."""
    on_gpu = layout.device == "cuda"
    taken: dict[int, list[tuple[list[float], list[int]]]] = {}
    peaks: dict[int, int] = {}
    telling.say(f"{variant}: {layout.world_size} ranks warm up and compile")
    turns.take(source, layout.world_size, _KINDS_OF_STEPS - _WARM_UP)
    meet(layout, "the end of the warm-up", patience=START_PATIENCE)
    for turn in range(settings["rounds"]):
        for count in turns.counts:
            telling.say(f"{variant}: {ranks_of(count)}, turn {turn + 1} of {settings['rounds']}")
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            found = turns.take(source, count, settings["steps"])
            meet(layout, "the end of a turn", patience=START_PATIENCE)
            if found is None:
                continue
            taken.setdefault(count, []).append(found)
            if on_gpu:
                peaks[count] = max(peaks.get(count, 0), torch.cuda.max_memory_allocated())
    for count, of_turns in taken.items():
        seconds = [second for turn_seconds, _ in of_turns for second in turn_seconds]
        tokens = [number for _, turn_tokens in of_turns for number in turn_tokens]
        telling.found({
            "variant": variant, "gpus": count, "layout": layouts.CHAT,
            "about": f"{settings['packs']} packs of {settings['pack_tokens']} a rank; target of "
            f"{settings['num_layers']} layers; ddp",
            "tokens": sum(tokens) / len(tokens), "ms": 1e3 * sum(seconds) / len(seconds),
            "peak_bytes": peaks.get(count), "seconds": seconds,
        })  # fmt: skip


def take_part(settings: dict[str, Any], telling: Telling) -> None:
    """Measure as one of the ranks that torchrun started; the first tells what was found."""
    versions = {"torch": str(torch.__version__)}
    gpu = "cpu"
    if settings["device"] == "cuda":
        torch.set_num_threads(1)  # as the trainer does, and whatever OMP_NUM_THREADS says
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"cuda": str(torch.version.cuda), "nccl": nccl}
        gpu = torch.cuda.get_device_name()
    facts = {"gpu": gpu, "versions": ", ".join(f"{name} {version}" for name, version in versions.items())}
    telling = replace(telling, facts=facts)
    telling.say("the ranks have imported their packages and look for each other")
    # Patient: the ranks compile in the first turn, each at its own pace.
    with joined(device=settings["device"], patience_s=300.0) as layout:
        measure(settings, layout, telling)
        telling.say("the ranks part")
