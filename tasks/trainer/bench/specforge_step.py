"""SpecForge's training step, for the worker: in its own process, importing nothing of ours (see `step`)."""

# mypy: ignore-errors
# (the peer is not installed where types are checked)
from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerCore
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import Tensor, nn
from transformers import LlamaConfig

_SHAPE_KEYS = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
               "target_vocab_size", "ttt_steps")  # fmt: skip
_MAX_POSITIONS = 40960  # the target's; its RoPE table is made that long
_CHUNK = 8192


def versions() -> dict[str, str]:
    """Its version, where it is installed with its metadata."""
    from importlib import metadata

    try:
        return {"specforge": metadata.version("specforge")}
    except metadata.PackageNotFoundError:
        return {"specforge": "unpacked"}


class Model:
    """A random draft, its optimizer and the target's head, put together as SpecForge's assembly does.

    config: settings of the draft's LlamaConfig over those of the benchmark. optimizer: arguments of BF16Optimizer.
    """

    def __init__(
        self,
        shape: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        attention: str,
        *,
        config: dict[str, Any] | None = None,
        optimizer: dict[str, Any] | None = None,
    ) -> None:
        settings = {
            "hidden_size": shape["hidden_size"],
            "intermediate_size": shape["intermediate_size"],
            "num_hidden_layers": 1,
            "num_attention_heads": shape["num_heads"],
            "num_key_value_heads": shape["num_kv_heads"],
            "head_dim": shape["head_dim"],
            "vocab_size": shape["target_vocab_size"],
            "max_position_embeddings": shape.get("max_positions", _MAX_POSITIONS),
            "rms_norm_eps": 1e-6,
            "pad_token_id": 0,
            "pretraining_tp": 1,
            "tie_word_embeddings": False,
        }
        config = LlamaConfig(**{**settings, **(config or {})})
        config.draft_vocab_size = shape["vocab_size"]
        with device:
            draft = LlamaForCausalLMEagle3(config, attention_backend=attention)
            draft.t2d.copy_(torch.arange(config.vocab_size) < config.draft_vocab_size)
            self.head = TargetHead.__new__(TargetHead)  # its own constructor reads a checkpoint's files
            nn.Module.__init__(self.head)
            self.head.fc = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        generator = torch.Generator(device=device).manual_seed(0)
        with torch.no_grad():
            for parameter in (*draft.parameters(), *self.head.parameters()):
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.02, generator=generator)
        draft.freeze_embedding()
        self.head.freeze_weights()
        self.head.eval().to(device=device, dtype=dtype)
        self.draft = draft.to(device=device, dtype=dtype)
        self.online = OnlineEagle3Model(self.draft, length=shape["ttt_steps"], attention_backend=attention).to(
            device=device, dtype=dtype
        )
        self.backend = FSDPTrainingBackend(
            ParallelConfig.from_distributed(),
            optimizer_factory=lambda module: BF16Optimizer(module, **(optimizer or {"lr": 1e-4, "total_steps": 10**6})),
        )
        self.backend.prepare_model(self.online, wrap=False, optimizer_target=self.draft)

    def strategy(self, variant: str) -> Eagle3TrainStrategy:
        compact = variant == "specforge_compact"
        return Eagle3TrainStrategy(self.online, target_head=self.head, compact_teacher=compact)

    def tensors(self) -> list[Tensor]:
        optimizer = self.backend.optimizer
        state = [value for moments in optimizer.optimizer.state.values() for value in moments.values()]
        return [*self.draft.parameters(), *self.draft.buffers(), *self.head.parameters(), *optimizer.fp32_params,
                *(value for value in state if isinstance(value, Tensor))]  # fmt: skip


def make_batch(settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> TrainBatch:
    """One document of random tokens and states, normalised as its offline reader does; every token is supervised."""
    tokens, size = settings["tokens"], settings["hidden_size"]
    place = device if settings["states"] == "device" else torch.device("cpu")
    generator = torch.Generator(device=device).manual_seed(1)

    def states(width: int) -> Tensor:
        made = torch.empty(tokens, width, dtype=torch.bfloat16, device=place)
        for rows in made.split(_CHUNK):
            rows.copy_(
                torch.empty(rows.shape, dtype=torch.bfloat16, device=device).uniform_(-1, 1, generator=generator)
            )
        return made.unsqueeze(0).to(dtype)

    loss_mask = torch.ones(1, tokens, dtype=torch.long, device=place)
    loss_mask[0, -1] = 0
    token_ids = torch.randint(settings["target_vocab_size"], (1, tokens), device=device, generator=generator)
    tensors = {
        "attention_mask": torch.ones(1, tokens, dtype=torch.long, device=place),
        "loss_mask": loss_mask,
        "target": states(size),
        "hidden_state": states(3 * size),
        "input_ids": token_ids.to(place),
    }
    return TrainBatch(["random"], "eagle3", tensors, {"target_repr": "hidden_state"})


class StepCase:
    """One batch and the model that all cases of a shape share."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        dtype = getattr(torch, settings["dtype"])
        # A longer row needs a longer table: in powers of two, not to build the model anew for each.
        longer = {"max_positions": 2 ** (settings["tokens"] + 64).bit_length()}
        longer = longer if settings["tokens"] + 64 > _MAX_POSITIONS else {}
        shape = json.dumps({name: settings[name] for name in _SHAPE_KEYS} | longer)
        self._device = device
        self._model = _model(shape, device, dtype)
        self._batch = make_batch(settings, device, dtype)

    @property
    def inputs(self) -> list[Tensor]:
        tensors = (*self._model.tensors(), *self._batch.tensors.values())
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]

    def start(self, variant: str) -> Callable[[], Sequence[Tensor]]:
        core = TrainerCore(self._model.strategy(variant), self._model.backend)

        def body() -> list[Tensor]:
            result = core.train_step(self._batch)
            if not math.isfinite(result.loss):
                raise FloatingPointError(f"loss {result.loss}")
            return []

        return body


def open_case(settings: dict[str, Any], device: torch.device) -> StepCase:
    """The worker's entry."""
    return StepCase(settings, device)


def error_of(variant: str, problem: dict[str, Any], device: torch.device) -> float:
    """Relative L2 error of all gradients against its own model in float32 with dense attention."""
    dtype = getattr(torch, problem["dtype"])
    model = Model(problem, device, dtype, _attention(device))
    exact = Model(problem, device, torch.float32, "sdpa")
    exact.draft.load_state_dict(model.draft.state_dict())
    exact.head.load_state_dict(model.head.state_dict())
    own, true = (
        _gradients(one, make_batch(problem, device, kind), variant)
        for one, kind in ((model, dtype), (exact, torch.float32))
    )
    wrong = math.fsum(float((own[name] - true[name]).square().sum()) for name in true)
    return math.sqrt(wrong / math.fsum(float(gradient.square().sum()) for gradient in true.values()))


def _gradients(model: Model, batch: TrainBatch, variant: str) -> dict[str, Tensor]:
    model.strategy(variant).forward_loss(batch).loss.backward()
    return {
        name: parameter.grad.double()
        for name, parameter in model.draft.named_parameters()
        if parameter.grad is not None
    }


def _attention(device: torch.device) -> str:
    return "flex_attention" if device.type == "cuda" else "sdpa"


@functools.lru_cache(maxsize=1)
def _model(shape: str, device: torch.device, dtype: torch.dtype) -> Model:
    return Model(json.loads(shape), device, dtype, _attention(device))
