"""One case of `eyas bench plan`, as the worker runs it: optimizer steps of the trainer's own code (see `plan`)."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.trainer.bench.step_case import Model, batch_tensors, make_step
from tasks.trainer.data.prepared import PreparedSample
from tasks.trainer.draft.alignment import target_rows
from tasks.trainer.plan_data import sample_rows, target_size
from tasks.trainer.plan_memory import Choices, PackRows, step_memory
from tasks.trainer.target import Target
from tasks.trainer.train.batches import Batch
from tasks.trainer.train.computation import choose_computation
from tasks.trainer.train.sources import OnlineSource

_STEPS = 2  # of an online case: the second pack is made while the first is trained on


def masks(settings: Mapping[str, Any]) -> list[np.ndarray[Any, np.dtype[np.bool_]]]:
    """bool [T] of each document: its last tokens are supervised."""
    made = []
    for length in settings["document_lengths"]:
        mask = np.zeros(length, dtype=np.bool_)
        mask[length - math.ceil(settings["supervised"] * length) :] = True
        made.append(mask)
    return made


def predict(settings: Mapping[str, Any]) -> int:
    """Bytes at the peak, by the plan."""
    rows = sum((sample_rows(mask, settings["ttt_steps"]) for mask in masks(settings)), start=PackRows(0, 0, 0, 0, 0))
    choices = Choices(
        ttt_steps=settings["ttt_steps"],
        checkpointing=settings["checkpointing"],
        mlp_chunk_rows=settings["mlp_chunk_rows"],
        itemsize=getattr(torch, settings["dtype"]).itemsize,
    )
    online = settings["target"] is not None
    target = target_size(target_config(settings), itemsize=choices.itemsize) if online else None
    shape: Any = SimpleNamespace(**settings, num_layers=1)
    return step_memory(shape, rows, choices, target=target, ahead=1 if online else 0).peak


def target_config(settings: Mapping[str, Any]) -> Any:
    """A Qwen3 of the draft's widths."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=settings["target_vocab_size"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        num_attention_heads=settings["num_heads"],
        num_key_value_heads=settings["num_kv_heads"],
        head_dim=settings["head_dim"],
        max_position_embeddings=2**17,
        tie_word_embeddings=False,
        **settings["target"],
    )


class PlanCase:
    """A model, and either a batch of random states or a target that makes them."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        self._settings, self._device = settings, device
        dtype = getattr(torch, settings["dtype"])
        self._model = _model(tuple(sorted((k, v) for k, v in settings.items() if k in _MODEL_KEYS)), device, dtype)
        train = self._model.settings.model_copy(
            update={name: settings[name] for name in ("checkpointing", "mlp_chunk_rows")}
        )
        self._computation = choose_computation(train, device=device.type, dtype=dtype, head_dim=settings["head_dim"])
        self._batch: Batch | None = None
        self._target: Target | None = None
        if settings["target"] is None:
            self._batch = _random_batch(settings, device)
        else:
            self._target = _random_target(settings, device, dtype)

    @property
    def inputs(self) -> list[Tensor]:
        """Tensors that are there before a step."""
        of_batch = [] if self._batch is None else batch_tensors(self._batch)
        of_target = [] if self._target is None else list(self._target.model.parameters())
        return [*self._model.tensors(), *of_batch, *of_target]

    def start(self, variant: str) -> Callable[[], Sequence[Tensor]]:
        """The optimizer steps of a case; gradients are spent, nothing is returned."""
        assert variant == "measured"

        def body() -> list[Tensor]:
            if self._batch is not None:
                self._step(self._batch)
                return []
            assert self._target is not None
            samples = _random_samples(self._settings)
            with closing(OnlineSource(self._target, device=str(self._device)).batches([samples] * _STEPS)) as batches:
                for batch in batches:
                    self._step(batch)
            return []

        return body

    def _step(self, batch: Batch) -> None:
        make_step(self._model, [batch], self._device, self._computation)()


def open_case(settings: dict[str, Any], device: torch.device) -> PlanCase:
    """The worker's entry."""
    return PlanCase(settings, device)


_MODEL_KEYS = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
               "target_vocab_size", "ttt_steps")  # fmt: skip


@functools.lru_cache(maxsize=1)
def _model(shape: tuple[tuple[str, int], ...], device: torch.device, dtype: torch.dtype) -> Model:
    torch._dynamo.reset()  # pieces are compiled for one width each, and only so many of them
    return Model(dict(shape), device, dtype)


def _random_batch(settings: Mapping[str, Any], device: torch.device) -> Batch:
    lengths = list(settings["document_lengths"])
    mask = torch.from_numpy(np.concatenate(masks(settings)))
    rows, vocab, size = target_rows(mask, lengths), settings["target_vocab_size"], settings["hidden_size"]
    generator = torch.Generator(device=device).manual_seed(1)

    def states(num_rows: int, width: int) -> Tensor:
        made = torch.empty(num_rows, width, dtype=torch.bfloat16, device=device)
        return made.uniform_(-1, 1, generator=generator)

    def integers(num_rows: int) -> Tensor:
        return torch.randint(vocab, (num_rows,), device=device, generator=generator)

    return Batch(
        sample_ids=tuple(map(str, range(len(lengths)))),
        document_lengths=tuple(lengths),
        token_ids=integers(len(mask)),
        loss_mask=mask,
        aux_hidden=states(len(mask), 3 * size),
        target_rows=rows,
        target_argmax=integers(len(rows)).int(),
        target_lse=torch.full((len(rows),), math.log(vocab) + 1.0, device=device),
        last_hidden=states(len(rows), size),
    )


def _random_samples(settings: Mapping[str, Any]) -> list[PreparedSample]:
    chance = np.random.default_rng(2)
    return [
        PreparedSample(
            f"{number:032x}", chance.integers(settings["target_vocab_size"], size=len(mask), dtype=np.int32), mask
        )
        for number, mask in enumerate(masks(settings))
    ]


def _random_target(settings: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Target:
    """Weights are drawn on the device, in the dtype: nothing is downloaded, and nothing larger is ever there."""
    from transformers import AutoModelForCausalLM

    with device:
        model = AutoModelForCausalLM.from_config(target_config(settings), dtype=dtype, attn_implementation="sdpa")
    layers = settings["target"]["num_hidden_layers"]
    aux = (0, layers // 2, layers - 1)
    return Target(model, None, name="random", aux_layer_ids=aux, pack_documents=device.type == "cuda")
