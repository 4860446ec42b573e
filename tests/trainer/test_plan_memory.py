"""The memory account, against peaks that were recorded on a GPU and against the trainer's own objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.bench import layouts, results
from tasks.trainer.bench.step import DRAFT
from tasks.trainer.bench.step_case import Model
from tasks.trainer.plan_data import sample_rows
from tasks.trainer.plan_memory import GIB, PARTS, Choices, PackRows, num_parameters, step_memory

SHAPE: Any = SimpleNamespace(**DRAFT, num_layers=1)
RECORDED = [
    row
    for row in results.read(results.RESULTS)
    if row.work == "step" and row.variant in ("eyas", "eyas_ckpt") and row.layout != "longest" and row.peak_gib
]


def rows_of(tokens: int, layout: str) -> PackRows:
    mask = np.zeros(tokens, dtype=np.bool_)
    for start, end in layouts.supervised_spans(tokens, layout):
        mask[start:end] = True
    return sample_rows(mask, 7)


LONGEST = [row for row in results.read(results.RESULTS) if row.work == "step" and row.variant == "eyas_ckpt"
           and row.layout == "longest" and row.peak_gib]  # fmt: skip


@pytest.mark.parametrize("row", [*RECORDED, *LONGEST], ids=lambda row: f"{row.variant}-{row.tokens}-{row.layout}")
def test_predicted_peak_is_the_recorded_one(row: results.Row) -> None:
    """Red when the account misses what the trainer keeps, on an H200: every recorded step within 5%."""
    checkpointing = "step" if row.variant == "eyas_ckpt" else "none"
    choices = Choices(checkpointing=checkpointing, mlp_chunk_rows=32768 if checkpointing == "step" else None)
    layout = layouts.ALL if row.layout == "longest" else row.layout
    predicted = step_memory(SHAPE, rows_of(row.tokens, layout), choices, ahead=0)
    assert row.peak_gib is not None
    assert predicted.peak / GIB == pytest.approx(row.peak_gib, rel=0.05)


def test_parameters_are_the_drafts() -> None:
    """Red when a projection or a norm is left out: the count is that of the real module."""
    settings = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48,
                "vocab_size": 40, "target_vocab_size": 64, "ttt_steps": 2}  # fmt: skip
    draft = Model(settings, torch.device("cpu"), torch.float32).draft
    shape: Any = SimpleNamespace(**settings, num_layers=1)
    assert num_parameters(shape) == sum(parameter.numel() for parameter in draft.parameters())


def test_parts_sum_to_the_peak_and_choices_act_as_they_should() -> None:
    """Red when a part is left out of the peak, or a choice that saves memory does not."""
    pack = rows_of(16384, layouts.ALL)

    def peak(**changes: Any) -> int:
        memory = step_memory(SHAPE, pack, Choices(**changes))
        assert memory.peak == sum(getattr(memory, part) for part in PARTS)
        return memory.peak

    assert peak(checkpointing="step") < peak(checkpointing="mlp") < peak()
    assert peak(checkpointing="step", mlp_chunk_rows=4096) < peak(checkpointing="step")
    assert peak(optimizer="muon") < peak() < peak(grad_accumulation=2)
    assert peak() < peak(attention="flex") < peak(attention="eager")
    assert peak() < peak(loss="triton") < peak(loss="torch")
    assert peak(compiled=True) < peak(compiled=False)


def test_only_active_rows_need_activations() -> None:
    """Red when a long prompt with a short answer is planned as if all of it were trained on."""
    full = step_memory(SHAPE, rows_of(16384, layouts.ALL), Choices())
    answer = step_memory(SHAPE, rows_of(16384, layouts.ANSWER), Choices())
    assert answer.activations < 0.35 * full.activations
    assert answer.optimizer == full.optimizer
