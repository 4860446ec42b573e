"""Our loss variants, as the worker runs them (see `loss` for what each is)."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.bench import layouts
from kernels.soft_target_loss import soft_target_loss

_DECAY = 0.8


class _Computed(torch.autograd.Function):
    """Gives a buffer out as if it had been computed: not a leaf, without a copy, and its gradient is not kept."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, buffer: Tensor) -> Tensor:
        alias = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        alias.set_(buffer.untyped_storage(), buffer.storage_offset(), buffer.shape, buffer.stride())
        return alias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(()), None


def _computed(buffers: Sequence[Tensor]) -> list[Tensor]:
    anchor = torch.zeros((), device=buffers[0].device, dtype=buffers[0].dtype, requires_grad=True)
    return [_Computed.apply(anchor, buffer) for buffer in buffers]


def _row_weights(rows: Sequence[int]) -> list[float]:
    """decay^k / K / N_k."""
    return [_DECAY**step / len(rows) / max(count, 1) for step, count in enumerate(rows)]


class LogitsCase:
    """K float32 logits tensors [T, Vd] and one target [T, Vd]: its logits for ours, its probabilities for compile."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        tokens, vocab, steps = settings["tokens"], settings["vocab"], settings["steps"]
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.target = torch.empty(tokens, vocab, device=device)
        self.logits = [torch.empty(tokens, vocab, device=device) for _ in range(steps)]
        self.target_index = torch.randint(vocab, (tokens,), device=device, generator=self.generator)
        self.target_lse = torch.full((tokens,), math.log(vocab) + 1.0, device=device)
        self.weights = _row_weights([tokens] * steps)
        self.inputs = [self.target, *self.logits, self.target_index, self.target_lse]

    def start(self, variant: str) -> Callable[[], Sequence[Tensor]]:
        """New logits, because ours and the copy write over them; in place, because the peak counts them once."""
        for logits in (*self.logits, self.target):
            logits.normal_(generator=self.generator)
        if variant == "compile":
            self.target.exp_().div_(self.target.sum(-1, keepdim=True))
        return {"triton": self._triton, "compile": self._compile, "copy": self._copy}[variant]

    def _triton(self) -> list[Tensor]:
        from kernels.soft_target_rows_triton import log_sum_exp

        target_draft_lse = log_sum_exp(self.target, 1.0)  # once for all steps, as training would
        results = [
            soft_target_loss(
                logits,
                self.target,
                target_index=self.target_index,
                target_lse=self.target_lse,
                target_draft_lse=target_draft_lse,
                weight=weight,
                backend="triton",
            )
            for logits, weight in zip(_computed(self.logits), self.weights, strict=True)
        ]
        torch.stack([result.loss for result in results]).sum().backward()
        return self.logits

    def _compile(self) -> list[Tensor]:
        leaves = [logits.detach().requires_grad_() for logits in self.logits]
        formula = _compiled_formula()
        losses = [
            weight * formula(_dynamic_rows(leaf), _dynamic_rows(self.target))
            for leaf, weight in zip(leaves, self.weights, strict=True)
        ]
        torch.stack(losses).sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def _copy(self) -> list[Tensor]:
        for source, into in zip(self.logits, (*self.logits[1:], self.logits[0]), strict=True):
            into.copy_(source)
        return self.logits

    def truth(self, variant: str) -> list[Tensor]:
        """Gradients of the logits in float64, from what `start` has just prepared."""
        target = self.target.double() if variant == "compile" else self.target.double().softmax(-1)
        return [
            weight * (logits.double().softmax(-1) - target)
            for logits, weight in zip(self.logits, self.weights, strict=True)
        ]


class LinearCase:
    """Hidden states K x [T, D], heads [Vd, D] and the rows that count, bfloat16 with a float32 master of the head."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        tokens, vocab, size = settings["tokens"], settings["vocab"], settings["hidden"]
        self.dtype = getattr(torch, settings["dtype"])
        self.generator = torch.Generator(device=device).manual_seed(0)
        steps = settings["steps"]

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=self.dtype)

        self.hidden = [empty(tokens, size) for _ in range(steps)]
        self.last_hidden = self._uniform(empty(tokens, size))
        self.head = self._uniform(empty(vocab, size), 0.03)
        self.target_head = self._uniform(empty(vocab, size), 0.03)
        self.master = self.head.float()
        if self.master is self.head:
            self.master = self.head.clone()
        spans = layouts.supervised_spans(tokens, settings["layout"])
        # On the host, where a trainer has them from the masks.
        self.rows = [_indices(layouts.counting_rows(spans, step)) for step in range(steps)]
        self.target_rows = [rows + 1 + step for step, rows in enumerate(self.rows)]
        self.weights = _row_weights([rows.shape[0] for rows in self.rows])
        self.target_index = torch.randint(vocab, (tokens,), device=device, generator=self.generator)
        self.target_lse = torch.full((tokens,), math.log(vocab) + 1.0, device=device)
        self.inputs = [*self.hidden, self.last_hidden, self.head, self.target_head, self.master,
                       self.target_index, self.target_lse]  # fmt: skip

    def _uniform(self, tensor: Tensor, bound: float = 1.0) -> Tensor:
        return tensor.uniform_(-bound, bound, generator=self.generator)

    def start(self, variant: str) -> Callable[[], Sequence[Tensor]]:
        """New hidden states, because ours writes their gradients over them."""
        for rows in self.hidden:
            self._uniform(rows)
        if variant == "linear":
            return self._linear
        if variant == "compile":
            return self._compile
        return self._matmul(*self._products())

    def _linear(self) -> list[Tensor]:
        from kernels.linear_soft_target_loss import HiddenTargets, linear_soft_target_loss

        master = self.master.detach().requires_grad_()
        result = linear_soft_target_loss(
            _computed(self.hidden),
            master,
            HiddenTargets(last_hidden=self.last_hidden, head=self.target_head),
            head_compute=self.head,
            rows=self.rows,
            target_rows=self.target_rows,
            target_index=self.target_index,
            target_lse=self.target_lse,
            row_weight=self.weights,
            overwrite_hidden=True,
            backend="triton",
        )
        result.loss.backward()
        assert master.grad is not None
        return [*self.hidden, master.grad]

    def _compile(self) -> list[Tensor]:
        hidden = [rows.detach().requires_grad_() for rows in self.hidden]
        head = self.head.detach().requires_grad_()
        with torch.no_grad():
            target = torch.softmax(self.last_hidden @ self.target_head.T, dim=-1, dtype=torch.float32)
        formula = _compiled_formula()
        losses = []
        for step, (rows, weight) in enumerate(zip(hidden, self.weights, strict=True)):
            # All rows are supervised where this variant is measured: those that count at a step are one range.
            count = self.rows[step].shape[0]
            logits = rows[:count] @ head.T
            losses.append(weight * formula(_dynamic_rows(logits), _dynamic_rows(target[step + 1 : step + 1 + count])))
        return list(torch.autograd.grad(torch.stack(losses).sum(), [*hidden, head]))

    def _products(self) -> tuple[Tensor, Tensor, Tensor]:
        tokens, vocab = self.last_hidden.shape[0], self.head.shape[0]
        empty = functools.partial(torch.empty, device=self.head.device, dtype=self.dtype)
        logits = empty(tokens, vocab)
        return self._uniform(logits, 0.01), empty(self.hidden[0].shape), empty(self.head.shape)

    def _matmul(self, logits: Tensor, grad_hidden: Tensor, grad_head: Tensor) -> Callable[[], list[Tensor]]:
        def body() -> list[Tensor]:
            torch.mm(self.last_hidden, self.target_head.T, out=logits)
            for rows in self.hidden:
                torch.mm(rows, self.head.T, out=logits)
                torch.mm(logits, self.head, out=grad_hidden)
                torch.mm(logits.T, rows, out=grad_head)
            return []

        return body

    def truth(self, variant: str) -> list[Tensor]:
        """Gradients of the hidden states and the head in float64."""
        hidden = [rows.detach().double().requires_grad_() for rows in self.hidden]
        head = self.head.detach().double().requires_grad_()
        target = (self.last_hidden.double() @ self.target_head.double().T).softmax(-1)
        total = torch.zeros((), dtype=torch.float64, device=head.device)
        for rows, own, its, weight in zip(hidden, self.rows, self.target_rows, self.weights, strict=True):
            total = total - weight * (target[its] * (rows[own] @ head.T).log_softmax(-1)).sum()
        return list(torch.autograd.grad(total, [*hidden, head]))


def open_case(settings: dict[str, Any], device: torch.device) -> LogitsCase | LinearCase:
    """The worker's entry."""
    case = LogitsCase if settings["part"] == "logits" else LinearCase
    return case(settings, device)


def error_of(variant: str, problem: dict[str, Any], device: torch.device) -> float | None:
    """Relative L2 error, the worst of all gradients, against float64; None for what computes no loss."""
    if variant in ("copy", "matmul"):
        return None
    case = open_case(problem, device)
    body = case.start(variant)
    truth = case.truth(variant)  # before the body: it writes the gradients over its inputs
    return max(_distance(own, true) for own, true in zip(body(), truth, strict=True))


def _distance(own: Tensor, true: Tensor) -> float:
    # A step that no row counts at has a gradient of zeros.
    return float((own.double() - true).norm() / true.norm().clamp_min(1e-30))


def _indices(ranges: Sequence[layouts.Span]) -> Tensor:
    none = [torch.empty(0, dtype=torch.int64)]
    return torch.cat(none + [torch.arange(start, end) for start, end in ranges])


def _dynamic_rows(tensor: Tensor) -> Tensor:
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def _formula(logits: Tensor, target: Tensor) -> Tensor:
    """Sum of the rows' soft cross entropies; logits [N, Vd], target probabilities float32 [N, Vd]."""
    return -(target * logits.float().log_softmax(-1)).sum()


@functools.cache
def _compiled_formula() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(_formula)
