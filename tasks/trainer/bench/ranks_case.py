"""One rank of `eyas bench ranks` (see `ranks`, whose process this runs in)."""

# mypy: allow-untyped-calls
from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
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
from tasks.trainer.bench.step_case import Model
from tasks.trainer.capture import capture_samples, to_stored
from tasks.trainer.data.prepared import PreparedSample, sample_id
from tasks.trainer.draft.ttt import Computation, Objective
from tasks.trainer.files import write_json
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


def fill_store(url: str, documents: Documents, target: Target) -> None:
    """Write the states of all documents."""
    with StoreWriter(url, spec_of(target)) as writer:
        for pack in documents.packs:
            samples = [documents[number] for number in pack]
            for sample, states in zip(samples, capture_samples(target, samples), strict=True):
                writer.write(to_stored(sample, states))


class Turns:
    """Takes turns of steps at any number of the ranks."""

    def __init__(self, settings: dict[str, Any], layout: Layout, documents: Documents, model: Model) -> None:
        self._settings, self._documents, self._model = settings, documents, model
        self._layouts = {count: among_first(layout, count) for count in range(1, layout.world_size)}
        self._layouts[layout.world_size] = layout
        masters = {name: parameter.detach().float() for name, parameter in model.draft.named_parameters()}
        self._optimizers = {
            count: Optimizer(model.draft, masters, model.settings, layout=own)
            for count, own in self._layouts.items()
            if own is not None
        }
        dtype = model.draft.fc.weight.dtype
        self._computation: Computation = choose_computation(
            model.settings, device=layout.device, dtype=dtype, head_dim=model.draft.config.head_dim
        )

    def take(self, source: StatesSource, count: int) -> tuple[list[float], list[int]] | None:
        """Timed steps at so many ranks: seconds and tokens of each; None on a rank that only waits."""
        layout = self._layouts[count]
        if layout is None:
            return None
        steps = _WARM_UP + self._settings["steps"]
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


def measure(settings: dict[str, Any], layout: Layout) -> list[dict[str, Any]]:
    """A line a variant and number of ranks; on the first rank they are whole."""
    lines = measure_packs(settings, layout) if {"online", "offline"} & set(settings["variants"]) else []
    if "context" in settings["variants"]:
        from tasks.trainer.bench.context import measure_context

        lines += measure_context(settings, layout)
    return lines


def measure_packs(settings: dict[str, Any], layout: Layout) -> list[dict[str, Any]]:
    """online and offline."""
    device, dtype = torch.device(layout.device), getattr(torch, settings["dtype"])
    documents = make_documents(settings, num_packs=_KINDS_OF_STEPS * settings["packs"] * layout.world_size)
    target = random_target(settings, device, dtype)
    model = Model(settings, device, dtype)
    turns = Turns(settings, layout, documents, model)
    lines = []
    with ExitStack() as stack:
        sources: dict[str, StatesSource] = {}
        if "online" in settings["variants"]:
            sources["online"] = OnlineSource(target, device=layout.device)
        if "offline" in settings["variants"]:
            url = str(Path(settings["folder"], "store"))
            if layout.is_first:
                fill_store(url, documents, target)
            meet(layout, "the store", patience=START_PATIENCE)
            reader = stack.enter_context(StoreReader(url, spec_of(target)))
            sources["offline"] = StoreSource(reader, device=layout.device)
        for variant, source in sources.items():
            taken: dict[int, list[tuple[list[float], list[int]]]] = {}
            peaks: dict[int, int] = {}
            for turn in range(settings["rounds"] + 1):
                # The first turn is for compiling, which all ranks do at once.
                for count in range(1 if turn else layout.world_size, layout.world_size + 1):
                    if device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    found = turns.take(source, count)
                    meet(layout, "the end of a turn", patience=START_PATIENCE)
                    if found is None or turn == 0:
                        continue
                    taken.setdefault(count, []).append(found)
                    if device.type == "cuda":
                        peaks[count] = max(peaks.get(count, 0), torch.cuda.max_memory_allocated())
            for count, of_turns in taken.items():
                seconds = [second for turn_seconds, _ in of_turns for second in turn_seconds]
                tokens = [number for _, turn_tokens in of_turns for number in turn_tokens]
                lines.append({
                    "variant": variant, "gpus": count, "layout": layouts.CHAT,
                    "about": f"{settings['packs']} packs of {settings['pack_tokens']} a rank; target of "
                    f"{settings['num_layers']} layers; ddp",
                    "tokens": sum(tokens) / len(tokens), "ms": 1e3 * sum(seconds) / len(seconds),
                    "peak_bytes": peaks.get(count), "seconds": seconds,
                })  # fmt: skip
    return lines


def report(settings: dict[str, Any], found: Path) -> None:
    """Measure as one of the ranks that torchrun started; the first writes what was found."""
    # Patient: the ranks compile in the first turn, each at its own pace.
    with joined(device=settings["device"], patience_s=300.0) as layout:
        lines = measure(settings, layout)
        versions = {"torch": str(torch.__version__)}
        gpu = "cpu"
        if layout.device == "cuda":
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
            versions |= {"cuda": str(torch.version.cuda), "nccl": nccl}
            gpu = torch.cuda.get_device_name()
        if layout.is_first:
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            write_json(found, {"lines": lines, "gpu": gpu, "versions": text})
