"""SpecForge's loss, for the worker: in its own process, importing nothing of ours (see `loss` for what is driven)."""

# mypy: ignore-errors
# (the peer is not installed where types are checked)
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from specforge.core.loss import LogSoftmaxLoss, _compute_loss
from torch import Tensor
from torch.nn import functional

# Above it LogSoftmaxLoss raises RuntimeError.
_WIDEST = 131072


def versions() -> dict[str, str]:
    """Its version, where it is installed with its metadata."""
    from importlib import metadata

    try:
        return {"specforge": metadata.version("specforge")}
    except metadata.PackageNotFoundError:
        return {"specforge": "unpacked"}


def _loss(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return (LogSoftmaxLoss.apply if logits.shape[-1] <= _WIDEST else _compute_loss)(logits, target, mask)


class Logits:
    """Its benchmark: float32 leaf logits, target probabilities, all rows count."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        shape = (1, settings["tokens"], settings["vocab"])
        generator = torch.Generator(device=device).manual_seed(0)
        self.target = torch.empty(shape, device=device).normal_(generator=generator).softmax(-1)
        self.mask = torch.ones(*shape[:2], 1, dtype=torch.bool, device=device)
        self.logits = [torch.empty(shape, device=device) for _ in range(settings["steps"])]
        self.generator = generator
        self.inputs = [self.target, self.mask, *self.logits]

    def start(self, variant: str) -> Callable[[], Sequence[Tensor]]:
        for logits in self.logits:
            logits.normal_(generator=self.generator)
        leaves = [logits.detach().requires_grad_() for logits in self.logits]

        def body() -> list[Tensor]:
            losses = [_loss(leaf, self.target, self.mask) for leaf in leaves]
            (sum(0.8**step * loss for step, loss in enumerate(losses)) / len(losses)).backward()
            return [leaf.grad for leaf in leaves]

        return body

    def truth(self) -> list[Tensor]:
        scale = 1 / (self.target.shape[1] * len(self.logits))
        return [
            0.8**step * scale * (logits.double().softmax(-1) - self.target.double())
            for step, logits in enumerate(self.logits)
        ]


class Linear:
    """Its trainer's path from hidden states, draft vocabulary only."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        tokens, vocab, size = settings["tokens"], settings["vocab"], settings["hidden"]
        dtype = getattr(torch, settings["dtype"])
        generator = torch.Generator(device=device).manual_seed(0)

        def uniform(*shape: int, bound: float = 1.0) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound, generator=generator)

        self.hidden = [uniform(1, tokens, size).requires_grad_() for _ in range(settings["steps"])]
        self.last_hidden = uniform(1, tokens, size)
        self.head = uniform(vocab, size, bound=0.03).requires_grad_()
        self.target_head = uniform(vocab, size, bound=0.03)
        self.mask = torch.ones(1, tokens, 1, dtype=torch.int32, device=device)
        self.inputs = [*self.hidden, self.last_hidden, self.head, self.target_head, self.mask]

    def _total(self, hidden: Sequence[Tensor], head: Tensor, last_hidden: Tensor, target_head: Tensor) -> Tensor:
        tokens, steps = hidden[0].shape[1], len(hidden)
        with torch.no_grad():
            logits = functional.linear(last_hidden, target_head)
            target = torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
            del logits
            target = functional.pad(target, (0, 0, 0, steps), value=1 / target.shape[-1])
        losses = []
        for step, rows in enumerate(hidden):
            aligned = target[:, step : step + tokens].contiguous()
            logits = functional.linear(rows, head)
            if logits.dtype == torch.float64:
                losses.append(-(aligned * logits.log_softmax(-1)).sum(-1).mean())
            else:
                losses.append(_loss(logits, aligned, self.mask))
        return sum(0.8**step * loss for step, loss in enumerate(losses)) / steps

    def start(self, variant: str) -> Callable[[], Sequence[Tensor]]:
        leaves = [*self.hidden, self.head]
        return lambda: torch.autograd.grad(
            self._total(self.hidden, self.head, self.last_hidden, self.target_head), leaves
        )

    def truth(self) -> list[Tensor]:
        hidden = [rows.detach().double().requires_grad_() for rows in self.hidden]
        head = self.head.detach().double().requires_grad_()
        total = self._total(hidden, head, self.last_hidden.double(), self.target_head.double())
        return list(torch.autograd.grad(total, [*hidden, head]))


def open_case(settings: dict[str, Any], device: torch.device) -> Logits | Linear:
    """The worker's entry."""
    return Logits(settings, device) if settings["part"] == "logits" else Linear(settings, device)


def error_of(variant: str, problem: dict[str, Any], device: torch.device) -> float:
    """Relative L2 error, the worst of all gradients, against float64."""
    case = open_case(problem, device)
    body = case.start(variant)
    truth = case.truth()  # before the body: it writes the gradients over the logits
    return max(float((own.double() - true).norm() / true.norm()) for own, true in zip(body(), truth, strict=True))
