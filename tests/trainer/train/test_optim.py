"""The optimizer: masters catch what bfloat16 cannot, and a restored one goes on as if it had never stopped."""

from __future__ import annotations

import torch

from tasks.trainer.config import Train
from tasks.trainer.draft.eagle3 import DraftConfig, Eagle3Draft
from tasks.trainer.train.optim import Optimizer

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


def test_restore_continues_exactly() -> None:
    """Red when moments, step count or learning rate of a resumed optimizer differ."""
    whole = make(torch.float32)
    expected = Optimizer(whole, whole.state_dict(), SETTINGS)
    run(whole, expected, range(9))
    for cut in (1, 4, 8):
        draft = make(torch.float32)
        first = Optimizer(draft, draft.state_dict(), SETTINGS)
        run(draft, first, range(cut))
        again = make(torch.float32)
        second = Optimizer(again, dict(first.masters), SETTINGS)
        second.restore({name: tensor.clone() for name, tensor in first.tensors().items()}, step=cut)
        assert second.learning_rate == first.learning_rate
        run(again, second, range(cut, 9))
        assert second.learning_rate == expected.learning_rate
        for name, master in expected.masters.items():
            assert torch.equal(master, second.masters[name]), (cut, name)


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
