"""The optimizer: masters catch what bfloat16 cannot, and a restored one goes on as if it had never stopped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tasks.trainer.config import Train
from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.errors import InputError
from tasks.trainer.train.optim import Optimizer, make_schedule

SETTINGS = Train(steps=20, warmup_steps=4, learning_rate=1e-4, weight_decay=0.1)


def make(dtype: torch.dtype) -> Eagle3Draft:
    config = DraftConfig(
        hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24, vocab_size=20,
        target_vocab_size=20, rms_norm_eps=1e-5, max_position_embeddings=64, aux_layer_ids=(1, 2, 3),
    )  # fmt: skip
    torch.manual_seed(0)
    return Eagle3Draft.initialise(
        config,
        embedding=torch.randn(20, 16),
        head=torch.randn(20, 16),
        d2t=torch.zeros(20, dtype=torch.int64),
        t2d=torch.ones(20, dtype=torch.bool),
        seed=0,
    ).to(dtype)


def give_gradients(draft: Eagle3Draft, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in draft.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def run(draft: Eagle3Draft, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(draft, step)
        optimizer.collect()
        optimizer.step()


def test_masters_follow_an_fp32_run_where_bfloat16_would_stall() -> None:
    """Red when updates go to the bfloat16 weights: at 1e-4 a norm weight of 1.0 would never move."""
    draft = make(torch.bfloat16)
    optimizer = Optimizer(draft, {n: t.float() for n, t in make(torch.float32).state_dict().items()}, SETTINGS)
    run(draft, optimizer, range(6))
    moved = optimizer.masters["norm.weight"] - 1
    assert (moved.abs() > 1e-6).all()
    assert {master.dtype for master in optimizer.masters.values()} == {torch.float32}
    for name, parameter in draft.named_parameters():
        assert torch.equal(parameter, optimizer.masters[name].to(torch.bfloat16)), name


# Every schedule with its own fields, in 20 steps of which 4 warm up; factors of the learning rate at these steps by the
# formulas of their papers.
STEPS = (0, 2, 4, 12, 16, 19)
WARM = (0.0, 0.5, 1.0)
SCHEDULES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "cosine": ({}, (*WARM, *(0.5 + 0.5 * math.cos(math.pi * x / 16) for x in (8, 12, 15)))),
    "linear": ({}, (*WARM, 8 / 16, 4 / 16, 1 / 16)),
    "constant_with_warmup": ({}, (*WARM, 1.0, 1.0, 1.0)),
    "cosine_with_min_lr": (
        {"min_learning_rate_ratio": 0.2},
        (*WARM, *(0.2 + 0.8 * (0.5 + 0.5 * math.cos(math.pi * x / 16)) for x in (8, 12, 15))),
    ),
    "cosine_with_restarts": ({"restarts": 1}, (*WARM, 1.0, 0.5, 0.5 + 0.5 * math.cos(math.pi * 7 / 8))),
    "inverse_sqrt": ({}, (*WARM, math.sqrt(4 / 12), math.sqrt(4 / 16), math.sqrt(4 / 19))),
    "warmup_stable_decay": ({"decay_steps": 8}, (*WARM, 1.0, 1 - math.sqrt(4 / 8), 1 - math.sqrt(7 / 8))),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_their_formulas(name: str) -> None:
    """Red when a field does not reach its schedule, or a schedule is another than its name says."""
    fields, expected = SCHEDULES[name]
    config = Train(steps=20, warmup_steps=4, learning_rate=2e-3, schedule=name, **fields)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule = make_schedule(optimizer, config)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"] / 2e-3)
        optimizer.step()
        schedule.step()
    assert [rates[step] for step in STEPS] == pytest.approx(expected)


def test_every_schedule_of_the_config_is_tested_here() -> None:
    """Red when a schedule joins the config without its formula."""
    assert set(Train.model_json_schema()["properties"]["schedule"]["enum"]) == set(SCHEDULES)


@pytest.mark.parametrize(
    ("schedule", "optimizer"), [*((name, "adamw") for name in SCHEDULES), ("warmup_stable_decay", "muon")]
)
def test_restore_continues_exactly(schedule: str, optimizer: str) -> None:
    """Red when moments, momentum, step count or learning rate of a resumed optimizer differ."""
    fields = {**SETTINGS.model_dump(), "schedule": schedule, "optimizer": optimizer, **SCHEDULES[schedule][0]}
    settings = Train.model_validate(fields)
    whole = make(torch.float32)
    expected = Optimizer(whole, whole.state_dict(), settings)
    run(whole, expected, range(9))
    for cut in (1, 4, 8):
        draft = make(torch.float32)
        first = Optimizer(draft, draft.state_dict(), settings)
        assert not first.tensors()
        run(draft, first, range(cut))
        again = make(torch.float32)
        second = Optimizer(again, dict(first.masters), settings)
        second.restore({name: tensor.clone() for name, tensor in first.tensors().items()}, step=cut)
        assert second.learning_rate == first.learning_rate
        run(again, second, range(cut, 9))
        assert second.learning_rate == expected.learning_rate
        for name, master in expected.masters.items():
            assert torch.equal(master, second.masters[name]), (cut, name)
        assert second.tensors().keys() == expected.tensors().keys()
        for name, tensor in expected.tensors().items():
            assert torch.equal(tensor, second.tensors()[name]), (cut, name)


def test_muon_moves_the_inner_matrices_and_adamw_the_rest() -> None:
    """Red when Muon takes the head or a norm, its updates are not orthogonal, or are not of AdamW's size."""
    settings = Train(steps=20, warmup_steps=0, learning_rate=1e-2, max_grad_norm=1e9)
    drafts, optimizers = {}, {}
    for name in ("adamw", "muon"):
        drafts[name] = make(torch.float32)
        changed = Train.model_validate({**settings.model_dump(), "optimizer": name})
        optimizers[name] = Optimizer(drafts[name], drafts[name].state_dict(), changed)
    before = {name: master.detach().clone() for name, master in optimizers["muon"].masters.items()}
    for name, draft in drafts.items():
        run(draft, optimizers[name], range(1))
    inner = {name.removesuffix(".momentum_buffer") for name in optimizers["muon"].tensors() if "momentum" in name}
    assert inner == {name for name, master in before.items() if master.ndim == 2} - {"lm_head.weight"}
    for name, master in optimizers["muon"].masters.items():
        if name not in inner:
            assert torch.equal(master, optimizers["adamw"].masters[name]), name
            continue
        update = (before[name] - master).detach() / 1e-2
        # Newton-Schulz in bfloat16 leaves singular values in about [0.7, 1.2], times 0.2 sqrt(longer side).
        values = torch.linalg.svdvals(update) / (0.2 * math.sqrt(max(master.shape)))
        assert 0.5 < float(values.min()) <= float(values.max()) < 1.4, name
        # A matrix of rank r = shorter side has a root mean square of 0.2 then: AdamW's first update has 1.
        assert 0.1 < float(update.square().mean().sqrt()) < 0.3, name


def test_a_torch_without_muon_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when an old torch ends in an AttributeError."""
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(InputError, match=r"needs torch 2\.9 .* use train\.optimizer=adamw"):
        Optimizer(make(torch.float32), make(torch.float32).state_dict(), Train(optimizer="muon"))


def test_accumulation_sums_in_fp32_and_decays_matrices_only() -> None:
    """Red when gradients of packs are summed in bfloat16, or norms are decayed."""
    draft = make(torch.bfloat16)
    optimizer = Optimizer(draft, draft.state_dict(), SETTINGS)
    total = torch.zeros_like(optimizer.masters["fc.weight"])
    for step in range(8):
        give_gradients(draft, step)
        total += draft.fc.weight.grad.float()  # type: ignore[union-attr]
        optimizer.collect()
        assert draft.fc.weight.grad is None
    assert torch.equal(optimizer.masters["fc.weight"].grad, total)  # type: ignore[arg-type]
    decays = {len(group["params"]): group["weight_decay"] for group in optimizer.adam.param_groups}
    assert decays == {9: 0.1, 4: 0.0}
