"""Several documents in one forward of the target, kept apart exactly: for GPUs, which short documents leave idle.

A forward of a small target on a chat of a thousand tokens takes longer to launch than to compute. Here the documents of
a pack lie one after the other, each with its own positions, and attention never leaves a document (`document_attention`
in place of the model's own; everything else in a decoder works on one token). The price: matrix products over more rows
round otherwise, so that a third of the bfloat16 values differ by a unit in the last place from those of a document
alone. They are as good, but not the same, which is why `train.deterministic` does without.

Models are many. Whether one keeps documents apart this way is tried on it, before it is used (`why_not`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kernels.document_attention import document_attention

_NAME = "eyas_documents"
# What a layer may tell its attention that changes nothing here. Anything else (a window, a cap, sinks) is not computed.
_HARMLESS = {
    "dropout",
    "scaling",
    "position_ids",
    "use_cache",
    "cache_position",
    "past_key_values",
    "cache",
    "is_causal",
}
# Of a row's norm. What another document leaves behind is largest in the rows after it, and small in random models: a
# hybrid's recurrent layers gave 0.01 there. The same document beside another one goes through the same sums, so nothing
# else should change it.
_LEAK = 2**-9
# Of the median row, against the document alone, whose sums round otherwise: 0.044 for 36 layers of random weights in
# bfloat16, several times less for trained ones. Wrong positions or another attention give 0.3 and more.
_ROUNDING = 0.1
_PROBE_LENGTHS = (40, 56)


class _Unsupported(Exception):
    """A layer asks for attention that is not plain causal."""


@contextmanager
def documents_apart(config: Any, document_lengths: Sequence[int]) -> Iterator[None]:
    """Within, attention of a model of `config` (transformers') stays in documents of these lengths."""
    before = config._attn_implementation
    config._attn_implementation = _NAME
    _Lengths.now = tuple(document_lengths)
    try:
        yield
    finally:
        config._attn_implementation = before
        _Lengths.now = ()


class _Lengths:
    """The documents of the forward under way: what a layer passes on to its attention is the model's choice."""

    now: tuple[int, ...] = ()


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' interface: query [1, H, T, Dh] and so on; returns [1, T, H, Dh]."""
    asked = sorted(name for name, value in options.items() if value is not None and name not in _HARMLESS)
    if attention_mask is not None or asked:
        raise _Unsupported(f"its attention takes {', '.join(asked) or 'a mask'}")
    if not getattr(module, "is_causal", True):
        raise _Unsupported("its attention is not causal")
    rows = (states[0].transpose(0, 1) for states in (query, key, value))
    out = document_attention(*rows, document_lengths=_Lengths.now, scale=options.get("scaling"))
    return out[None], None


AttentionInterface.register(_NAME, _attention)


def positions(document_lengths: Sequence[int]) -> Tensor:
    """Positions in each document, int64 [1, T]."""
    return torch.cat([torch.arange(length) for length in document_lengths])[None]


@torch.no_grad()
def why_not(decoder: nn.Module, config: Any, *, vocab_size: int, device: torch.device) -> str | None:
    """Why documents cannot share a forward of this decoder, or None when they can: two random ones, tried."""
    ids = torch.randint(vocab_size, (1, sum(_PROBE_LENGTHS)), generator=torch.Generator().manual_seed(0)).to(device)
    other = ids.clone()
    other[:, : _PROBE_LENGTHS[0]] = ids[:, : _PROBE_LENGTHS[0]].flip(1)

    def together(tokens: Tensor) -> list[Tensor]:
        with documents_apart(config, _PROBE_LENGTHS):
            output = decoder(input_ids=tokens, position_ids=positions(_PROBE_LENGTHS).to(device), use_cache=False)
        return list(output.last_hidden_state[0].float().split(_PROBE_LENGTHS))

    try:
        first, second = together(ids)
        _, beside_another = together(other)
    except _Unsupported as error:
        return str(error)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"a forward of two documents fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    alone = [
        decoder(input_ids=part, use_cache=False).last_hidden_state[0].float() for part in ids.split(_PROBE_LENGTHS, 1)
    ]
    if (leak := float(_changes(beside_another, second).max())) > _LEAK:
        return f"a document's states change by {leak:.1%} with what lies before it"
    change = max(
        float(_changes(together, apart).median()) for together, apart in ((first, alone[0]), (second, alone[1]))
    )
    return None if change <= _ROUNDING else f"a document's states differ by {change:.1%} from those of it alone"


def _changes(states: Tensor, expected: Tensor) -> Tensor:
    """Relative change of each row, [T]."""
    changes: Tensor = (states - expected).norm(dim=-1) / expected.norm(dim=-1)
    return changes
