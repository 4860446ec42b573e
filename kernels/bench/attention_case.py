"""Our attention variants, as the worker runs them (see `attention` for what each is)."""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import reference
from kernels.ttt_attention import ttt_attention


def _cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The operator behind scaled_dot_product_attention, which picks another kernel where it prefers one."""
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, True, False)[0]
    return out


def _flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # On the GPU by flash or not at all; the CPU's kernel goes by another name.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if query.device.type == "cuda" else nullcontext():
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


_CAUSAL_KERNELS = {"plain_causal_cudnn": _cudnn, "plain_causal_flash": _flash}


class AttentionCase:
    """Queries, keys and values of every step, bounded (uniform in [-1, 1]), and one gradient for all outputs.

    queries K x [A, H, Dh]; keys, values K x [T or A, G, Dh], those of step 0 for all T rows.
    """

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        self.lengths: list[int] = settings["document_lengths"]
        runs = settings.get("query_runs")
        self.runs = None if runs is None else [(start, end) for start, end in runs]
        num_tokens = sum(self.lengths)
        num_queries = num_tokens if self.runs is None else sum(end - start for start, end in self.runs)
        heads, groups, size = settings["heads"], settings["kv_heads"], settings["head_dim"]
        dtype = getattr(torch, settings["dtype"])
        generator = torch.Generator(device=device).manual_seed(0)

        def uniform(rows: int, count: int) -> Tensor:
            return torch.empty(rows, count, size, device=device, dtype=dtype).uniform_(-1, 1, generator=generator)

        steps = settings["steps"]
        rows_of = [num_tokens, *[num_queries] * (steps - 1)]
        self.queries = [uniform(num_queries, heads).requires_grad_() for _ in range(steps)]
        self.keys = [uniform(rows, groups).requires_grad_() for rows in rows_of]
        self.values = [uniform(rows, groups).requires_grad_() for rows in rows_of]
        self.gradient = uniform(num_queries, heads)
        self.leaves = [*self.queries, *self.keys, *self.values]
        self.inputs = [*self.leaves, self.gradient]

    def start(self, variant: str) -> Callable[[], Sequence[Tensor]]:
        """The body of a variant; it returns the gradients."""
        return lambda: self.solve(variant)[1]

    def solve(self, variant: str) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """(outputs K x [A, H, Dh], gradients of queries, keys and values)."""
        outputs = self._outputs(variant)
        gradients = torch.autograd.grad(outputs, self.leaves, [self.gradient] * len(outputs), allow_unused=False)
        return outputs, gradients

    def _outputs(self, variant: str) -> list[Tensor]:
        if variant in _CAUSAL_KERNELS:
            return self._plain_causal(variant)
        if variant == "flex_concat":
            return self._flex_concat()
        runs: dict[str, Any] = {} if self.runs is None else {"query_runs": self.runs}
        return [
            ttt_attention(
                query,
                self.keys[0],
                self.values[0],
                self.keys[1 : step + 1],
                self.values[1 : step + 1],
                document_lengths=self.lengths,
                backend=variant,
                **runs,
            )
            for step, query in enumerate(self.queries)
        ]

    def _plain_causal(self, variant: str) -> list[Tensor]:
        """Each step's query over its own keys: nothing but the calls, not even a sum of key gradients."""
        outputs = []
        for rows in zip(self.queries, self.keys, self.values, strict=True):
            query, key, value = (one.transpose(0, 1).unsqueeze(0) for one in rows)
            outputs.append(_CAUSAL_KERNELS[variant](query, key, value).squeeze(0).transpose(0, 1))
        return outputs

    def _flex_concat(self) -> list[Tensor]:
        flex_attention, create_block_mask = _compiled_flex()
        num_tokens = self.queries[0].shape[0]
        # As a tensor: a Python int in the closure would be compiled in, anew for every length.
        width = torch.tensor(num_tokens, device=self.gradient.device)

        def attends(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return ((column < width) & (column <= row)) | ((column >= width) & (column % width == row))

        outputs = []
        for step, query in enumerate(self.queries):
            key, value = torch.cat(self.keys[: step + 1]), torch.cat(self.values[: step + 1])
            block_mask = create_block_mask(
                attends, 1, 1, num_tokens, num_tokens * (step + 1), device=self.gradient.device
            )
            by_head = [rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value)]
            out = flex_attention(*by_head, block_mask=block_mask, enable_gqa=True)
            outputs.append(out.squeeze(0).transpose(0, 1))
        return outputs


class MaskCase:
    """Construction of the flex backend's BlockMask; what it returns is the mask's tables."""

    def __init__(self, settings: dict[str, Any], device: torch.device) -> None:
        self._lengths = tuple(settings["document_lengths"])
        self._device = device
        self.inputs: list[Tensor] = []

    def start(self, variant: str) -> Callable[[], Sequence[Tensor]]:
        """Builds the mask anew. It returns nothing, so that extra_gib counts all that is alive at the peak."""
        from kernels.flex_base_block import document_causal_block_mask

        def body() -> list[Tensor]:
            document_causal_block_mask.__wrapped__(self._lengths, None, self._device)
            return []

        return body


def open_case(settings: dict[str, Any], device: torch.device) -> AttentionCase | MaskCase:
    """The worker's entry."""
    torch._dynamo.config.recompile_limit = 64  # several shapes of several functions; past it, compile gives up silently
    return MaskCase(settings, device) if settings.get("mask_only") else AttentionCase(settings, device)


def error_of(variant: str, problem: dict[str, Any], device: torch.device) -> float:
    """Relative L2 error, the worst of all outputs and gradients, against float64; a key head at a time."""
    case = AttentionCase(problem, device)
    outputs, gradients = case.solve(variant)
    found = [*outputs, *gradients]
    wrong, total = torch.zeros(len(found), dtype=torch.float64), torch.zeros(len(found), dtype=torch.float64)
    num_groups = case.keys[0].shape[1]
    for group in range(num_groups):
        truth = _truth(case, variant, group)
        for index, (own, true) in enumerate(zip(found, truth, strict=True)):
            heads = own.shape[1] // num_groups
            own = own[:, group * heads : (group + 1) * heads].double()
            wrong[index] += (own - true).square().sum().cpu()
            total[index] += true.square().sum().cpu()
    return float((wrong / total).sqrt().max())


def _truth(case: AttentionCase, variant: str, group: int) -> list[Tensor]:
    """Outputs and gradients in float64 of one key head and its query heads."""

    per_key = case.queries[0].shape[1] // case.keys[0].shape[1]
    queries = [q.detach()[:, group * per_key : (group + 1) * per_key].double().requires_grad_() for q in case.queries]
    keys = [key.detach()[:, group : group + 1].double().requires_grad_() for key in case.keys]
    values = [value.detach()[:, group : group + 1].double().requires_grad_() for value in case.values]
    gradient = case.gradient[:, group * per_key : (group + 1) * per_key].double()
    rows = None
    if case.runs is not None:
        rows = torch.cat([torch.arange(start, end, device=gradient.device) for start, end in case.runs])
    outputs = []
    for step, query in enumerate(queries):
        plain = variant in _CAUSAL_KERNELS
        base, first, last = (step, 0, 0) if plain else (0, 1, step + 1)
        step_rows = [keys[first:last], values[first:last]]
        if rows is not None:  # the reference of all rows, of which the active ones are taken
            query, *step_rows = _spread(rows, sum(case.lengths), query, *step_rows)
        out = reference.ttt_attention(
            query, keys[base], values[base], *step_rows, document_lengths=case.lengths, scale=query.shape[-1] ** -0.5
        )
        outputs.append(out if rows is None else out[rows])
    gradients = torch.autograd.grad(outputs, [*queries, *keys, *values], [gradient] * len(outputs))
    return [*outputs, *gradients]


def _spread(rows: Tensor, num_tokens: int, query: Tensor, *lists: Sequence[Tensor]) -> list[Any]:
    """Active rows back at their places among all rows, zeros elsewhere."""

    def spread(active: Tensor) -> Tensor:
        return torch.zeros(num_tokens, *active.shape[1:], dtype=active.dtype, device=active.device).index_put(
            (rows,), active
        )

    return [spread(query), *([spread(tensor) for tensor in tensors] for tensors in lists)]


@functools.cache
def _compiled_flex() -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask)
