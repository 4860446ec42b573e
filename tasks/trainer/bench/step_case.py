"""Our training step, as the worker runs it (see `step`): the trainer's own code on random states."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.bench import layouts
from tasks.trainer.config import Train
from tasks.trainer.draft.alignment import count_rows, target_rows
from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.draft.ttt import Computation, Objective
from tasks.trainer.train.batches import Batch
from tasks.trainer.train.computation import choose_computation
from tasks.trainer.train.loop import train_pack
from tasks.trainer.train.metrics import Sums
from tasks.trainer.train.optim import Optimizer

_DRAFT_KEYS = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
               "target_vocab_size")  # fmt: skip
_MLP_CHUNK = 32768  # train.mlp_chunk_rows of eyas_ckpt: only longer contexts notice
_CHUNK = 8192  # rows of random states made at once


class Model:
    """A random draft with its optimizer, and the target's head rows [Vd, D]."""

    def __init__(self, settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        shape = {name: settings[name] for name in _DRAFT_KEYS}
        config = DraftConfig(**shape, rms_norm_eps=1e-6, max_position_embeddings=2**20, aux_layer_ids=(1, 17, 32))
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.empty(size, device=device, dtype=dtype).normal_(0.0, 0.02, generator=generator)

        vocab = config.vocab_size
        with device:  # made where they stay: 400 million random numbers take the CPU seconds
            self.draft = Eagle3Draft(
                config,
                embedding=normal(config.target_vocab_size, config.hidden_size),
                d2t=torch.zeros(vocab, dtype=torch.int64),
                t2d=torch.arange(config.target_vocab_size) < vocab,
            )
        with torch.no_grad():
            for parameter in self.draft.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.02, generator=generator)
        masters = {name: tensor.detach().float() for name, tensor in self.draft.named_parameters()}
        self.draft.to(device, dtype)
        self.settings = Train(steps=10**6, ttt_steps=settings["ttt_steps"])
        self.optimizer = Optimizer(self.draft, masters, self.settings)
        self.head = normal(vocab, config.hidden_size)
        self.draft_ids = self.draft.draft_ids()

    def tensors(self) -> list[Tensor]:
        """Everything that stays between steps."""
        state = [value for moments in self.optimizer.adam.state.values() for value in moments.values()]
        kept = [*self.draft.parameters(), *self.draft.buffers(), *self.optimizer.masters.values(), self.head]
        return [*kept, self.draft_ids, *(value for value in state if isinstance(value, Tensor))]


def make_step(
    model: Model, batches: Sequence[Batch], device: torch.device, computation: Computation
) -> Callable[[], None]:
    """The trainer's step on batches, as `loop.train` takes it: the one place that knows the trainer's calls."""
    ttt_steps = model.settings.ttt_steps
    counts = [count_rows(batch.loss_mask, batch.document_lengths, ttt_steps) for batch in batches]
    rows = torch.stack(counts).sum(0).tolist()
    weights = [model.settings.step_loss_decay**k / ttt_steps / n if n else 0.0 for k, n in enumerate(rows)]

    def step() -> None:
        sums = Sums(ttt_steps)
        for batch in batches:
            train_pack(
                model.draft,
                batch.to(str(device)),
                sums,
                model.optimizer,
                weights,
                model.head,
                model.draft_ids,
                computation,
                Objective(),
            )
        norm = model.optimizer.step()
        if not math.isfinite(norm) or not math.isfinite(sums.loss):
            raise FloatingPointError(f"loss {sums.loss}, gradient norm {norm}")

    return step


def computation_of(variant: str, model: Model, device: torch.device, dtype: torch.dtype) -> Computation:
    """What train.* chooses on this device, with checkpointing and MLP chunks for eyas_ckpt."""
    changes: dict[str, Any] = {}
    if variant == "eyas_ckpt":
        changes = {"checkpointing": "step", "mlp_chunk_rows": _MLP_CHUNK}
    settings = model.settings.model_copy(update=changes)
    return choose_computation(settings, device=device.type, dtype=dtype, head_dim=model.draft.config.head_dim)


def make_batch(settings: dict[str, Any], device: torch.device) -> Batch:
    """One document of random tokens and states; on the device, or on the CPU for settings["states"] = "cpu"."""
    tokens, size = settings["tokens"], settings["hidden_size"]
    place = device if settings["states"] == "device" else torch.device("cpu")
    generator = torch.Generator(device=device).manual_seed(1)

    def states(num_rows: int, width: int) -> Tensor:
        made = torch.empty(num_rows, width, dtype=torch.bfloat16, device=place)
        for rows in made.split(_CHUNK):  # random numbers from the device, in pieces that it has room for
            rows.copy_(
                torch.empty(rows.shape, dtype=torch.bfloat16, device=device).uniform_(-1, 1, generator=generator)
            )
        return made

    def integers(num_rows: int, high: int) -> Tensor:
        return torch.randint(high, (num_rows,), device=device, generator=generator).to(place)

    mask = torch.zeros(tokens, dtype=torch.bool)
    for start, end in layouts.supervised_spans(tokens, settings["layout"]):
        mask[start:end] = True
    rows = target_rows(mask, [tokens])
    return Batch(
        sample_ids=("random",),
        document_lengths=(tokens,),
        token_ids=integers(tokens, settings["target_vocab_size"]),
        loss_mask=mask,
        aux_hidden=states(tokens, 3 * size),
        target_rows=rows,
        target_argmax=integers(len(rows), settings["target_vocab_size"]).int(),
        target_lse=torch.full((len(rows),), math.log(settings["target_vocab_size"]) + 1.0, device=place),
        last_hidden=states(len(rows), size),
    )


class StepCase:
    """One batch and the model that all cases of a shape share."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        self._device = device
        self._dtype = getattr(torch, settings["dtype"])
        self._model = shared_model(settings, device, self._dtype)
        self._batch = make_batch(settings, device)

    @property
    def inputs(self) -> list[Tensor]:
        """The model's and the batch's tensors; the moments exist from the second step on."""
        tensors = (*self._model.tensors(), *batch_tensors(self._batch))
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]

    def start(self, variant: str) -> Callable[[], Sequence[Tensor]]:
        """A step; it returns nothing, the gradients are spent."""
        computation = computation_of(variant, self._model, self._device, self._dtype)
        step = make_step(self._model, [self._batch], self._device, computation)

        def body() -> list[Tensor]:
            step()
            return []

        return body


def open_case(settings: dict[str, Any], device: torch.device) -> StepCase:
    """The worker's entry."""
    return StepCase(settings, device)


def error_of(variant: str, problem: dict[str, Any], device: torch.device) -> float:
    """Relative L2 error of all gradients against float32 with dense attention and the reference loss."""
    batches = [make_batch(problem, device)]
    return gradient_error(variant, problem, device, own=batches, exact=batches)


def gradient_error(
    variant: str, problem: dict[str, Any], device: torch.device, *, own: Sequence[Batch], exact: Sequence[Batch]
) -> float:
    """The same, of a step on `own`, against one on `exact`, which holds the same documents."""
    dtype = getattr(torch, problem["dtype"])
    model = Model(problem, device, dtype)
    wide = Model(problem, device, torch.float32)
    for name, parameter in wide.draft.state_dict().items():
        parameter.copy_(model.draft.state_dict()[name])
    wide.draft.embedding.copy_(model.draft.embedding)
    wide.head.copy_(model.head)
    found = _gradients(model, own, device, computation_of(variant, model, device, dtype))
    true = _gradients(wide, exact, device, Computation(attention="eager", loss="torch"))
    wrong = math.fsum(float((found[name].double() - true[name].double()).square().sum()) for name in true)
    return math.sqrt(wrong / math.fsum(float(gradient.double().square().sum()) for gradient in true.values()))


def _gradients(
    model: Model, batches: Sequence[Batch], device: torch.device, computation: Computation
) -> dict[str, Tensor]:
    """The masters' gradients of a step whose update is left out."""
    found: dict[str, Tensor] = {}

    def keep() -> float:
        found.update({name: master.grad for name, master in model.optimizer.masters.items() if master.grad is not None})
        return 0.0

    model.optimizer.step = keep  # type: ignore[method-assign,assignment]
    make_step(model, batches, device, computation)()
    return found


def batch_tensors(batch: Batch) -> list[Tensor]:
    """What of a batch may be on the device."""
    assert batch.last_hidden is not None
    return [batch.token_ids, batch.aux_hidden, batch.last_hidden, batch.target_argmax, batch.target_lse]


def shared_model(settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Model:
    """The model of these settings, the same one for all cases of a shape."""
    shape = {name: settings[name] for name in (*_DRAFT_KEYS, "ttt_steps")}
    return _model(json.dumps(shape, sort_keys=True), device, dtype)


@functools.lru_cache(maxsize=1)
def _model(shape: str, device: torch.device, dtype: torch.dtype) -> Model:
    return Model(json.loads(shape), device, dtype)
