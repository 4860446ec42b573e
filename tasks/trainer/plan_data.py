"""What the plan must know of the data and the target: how many rows of what kind, and how large the target is.

Rows come from the masks by the trainer's own rules, and the target's size from its config alone: its weights are never
read, so a plan for a target of 235B parameters takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.trainer.draft.alignment import active_runs, align
from tasks.trainer.plan_memory import PackRows, TargetSize


def sample_rows(loss_mask: npt.NDArray[np.bool_], ttt_steps: int) -> PackRows:
    """The rows of one document by the trainer's rules. loss_mask bool [T]."""
    mask = torch.from_numpy(np.array(loss_mask, dtype=np.bool_))
    length = [len(mask)]
    counts = align(mask, length, ttt_steps).counts
    active = sum(end - start for start, end in active_runs(counts, length))
    return PackRows(len(mask), active, int(counts[0].sum()), int(counts.sum()))


@dataclass(frozen=True, slots=True)
class DataRows:
    """A data set, as the plan sees it."""

    samples: int
    """Training samples."""
    tokens: int
    """Their tokens."""
    targets: int
    """Their target rows: what a store holds soft targets for."""
    packs: tuple[PackRows, ...]
    """The packs of an epoch, or of the part of it that was read."""
    source: str
    """Where the figures are from, for people."""
    share: float = 1.0
    """Of the data set that was read; the figures above are of the whole, estimated from it."""

    @property
    def packs_an_epoch(self) -> int:
        """Packs of the whole."""
        return max(1, round(len(self.packs) / self.share))

    @property
    def mean_pack(self) -> PackRows:
        """What a step's pack is like on average, rounded."""
        total = PackRows(0, 0, 0, 0, 0)
        for pack in self.packs:
            total += pack
        count = len(self.packs)
        values = (total.tokens, total.active, total.targets, total.counted, total.documents)
        return PackRows(*(max(1, round(value / count)) for value in values))

    def largest_packs(self) -> list[PackRows]:
        """Packs one of which needs the most memory: of the most tokens, and of the most active rows."""
        return [max(self.packs, key=lambda pack: (pack.tokens, pack.active)),
                max(self.packs, key=lambda pack: (pack.active, pack.tokens))]  # fmt: skip


def data_rows(
    loss_masks: Iterable[npt.NDArray[np.bool_]],
    packs: Sequence[Sequence[int]],
    *,
    ttt_steps: int,
    source: str,
    share: float = 1.0,
) -> DataRows:
    """The rows of samples. packs: an epoch's, as sample numbers (train.batches.Packs). share: what part of the data
    set the samples are."""
    samples = [sample_rows(mask, ttt_steps) for mask in loss_masks]
    none = PackRows(0, 0, 0, 0, 0)
    return DataRows(
        samples=round(len(samples) / share),
        tokens=round(sum(sample.tokens for sample in samples) / share),
        targets=round(sum(sample.targets for sample in samples) / share),
        packs=tuple(sum((samples[number] for number in pack), start=none) for pack in packs),
        source=source,
        share=share,
    )


def target_size(config: Any, *, itemsize: int) -> TargetSize:
    """What a target of this transformers config (its text config) needs on the GPU."""
    return TargetSize(
        weights=count_parameters(config) * itemsize,
        row=itemsize * max(_mlp_columns(config), _attention_columns(config)),
        vocab_size=int(config.vocab_size),
    )


def count_parameters(config: Any) -> int:
    """Parameters of the model that transformers would build, tied ones once; nothing is allocated."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def active_parameters(config: Any) -> int:
    """Parameters that one token goes through: of experts, those that it is sent to; without embedding and head."""
    total = count_parameters(config)
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    experts = _experts(config)
    if experts is None:
        return int(total - ends)
    num_experts, chosen, width = experts
    an_expert = 3 * config.hidden_size * width
    return int(total - ends - config.num_hidden_layers * (num_experts - chosen) * an_expert)


def _experts(config: Any) -> tuple[int, int, int] | None:
    """(experts, chosen by a token, width of one), None for a dense MLP."""
    number = next((getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")
                   if getattr(config, name, None)), None)  # fmt: skip
    if number is None:
        return None
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return int(number), int(config.num_experts_per_tok), int(width)


def _mlp_columns(config: Any) -> int:
    """Elements a token in the middle of an MLP: silu(gate), up, their product; the residual and two norms."""
    size, experts = int(config.hidden_size), _experts(config)
    if experts is None:
        return 3 * int(config.intermediate_size) + 3 * size
    _, chosen, width = experts
    # Experts take a copy of the row for each, and give one back.
    return chosen * (2 * size + 3 * width) + 3 * size


def _attention_columns(config: Any) -> int:
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    # Query, key and value of every head, and the output; the residual and its norm.
    return 4 * heads * head_dim + 2 * int(config.hidden_size)
