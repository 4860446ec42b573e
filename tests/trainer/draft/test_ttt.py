"""What may be left out, shared, chunked, compiled or computed twice without changing the loss or a gradient."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tasks.trainer.draft import ttt
from tasks.trainer.draft.alignment import align, count_rows
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.layer import Memory, Pieces, compiled_pieces
from tasks.trainer.draft.ttt import Computation, Objective, Unrolled, unroll
from tasks.trainer.target import TopTokens
from tasks.trainer.train.batches import Batch
from tests.trainer.draft.conftest import make_batch, masked
from tests.trainer.drafts import DRAFT_VOCAB, HIDDEN, TARGET_VOCAB, VARIANTS, random_draft

K = 4
# fp64: the same sums in another order.
EXACT = {"rtol": 0.0, "atol": 1e-13}

MASKS = {
    "all": (masked((True, 40)), (40,)),
    "an answer": (masked((False, 60), (True, 15)), (75,)),
    "turns": (masked((False, 40), (True, 9), (False, 50), (True, 3), (False, 36), (True, 12), (False, 40)), (190,)),
    "packed": (masked((False, 38), (True, 7), (True, 6), (False, 50), (True, 40)), (45, 6, 1, 49, 40)),
    "one row": (masked((False, 50), (True, 2), (False, 50)), (102,)),
}


def run(
    draft: Eagle3Draft, batch: Batch, computation: Computation, **options: Any
) -> tuple[Unrolled, dict[str, torch.Tensor]]:
    """The unroll's results and the draft's gradients."""
    draft = copy.deepcopy(draft)
    rows = count_rows(batch.loss_mask, batch.document_lengths, K)
    generator = torch.Generator().manual_seed(5)
    unrolled = unroll(
        draft,
        batch,
        ttt_steps=K,
        row_weight=[0.8**k / max(int(n), 1) for k, n in enumerate(rows)],
        head=torch.rand(DRAFT_VOCAB, HIDDEN, generator=generator, dtype=torch.float64) - 0.5,
        draft_ids=draft.draft_ids(),
        computation=computation,
        **options,
    )
    unrolled.loss.backward()
    return unrolled, {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}


def assert_same(
    found: tuple[Unrolled, dict[str, torch.Tensor]], expected: tuple[Unrolled, dict[str, torch.Tensor]]
) -> None:
    for name in ("loss", "rows", "loss_sums", "correct_sums", "alpha_sums"):
        # The loss and alpha are summed in float32.
        torch.testing.assert_close(getattr(found[0], name), getattr(expected[0], name), rtol=1e-6, atol=1e-6)
    assert (found[0].tau_sum, found[0].tau_rows) == (expected[0].tau_sum, expected[0].tau_rows)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("attention", ["fused", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MASKS)
def test_only_active_rows_need_computing(name: str, variant: str, attention: str, monkeypatch: Any) -> None:
    """Red when a row that is left out mattered: its key, its value, its share of fc or of a lower layer; or when runs
    see wrong keys."""
    draft = random_draft(**VARIANTS[variant])
    mask, lengths = MASKS[name]
    batch = make_batch(mask, lengths)
    computation = Computation(attention=attention, loss="linear")
    active = run(draft, batch, computation)
    calls = []

    def all_rows(counts: torch.Tensor, document_lengths: Any) -> Any:
        calls.append(counts)
        return tuple(itertools.pairwise(itertools.accumulate(document_lengths, initial=0)))

    monkeypatch.setattr(ttt, "active_runs", all_rows)
    assert_same(active, run(draft, batch, computation))
    assert calls


@pytest.mark.parametrize("name", ["turns", "packed"])
def test_row_losses_pair_the_rows_of_the_rule(name: str, draft: Eagle3Draft) -> None:
    """Red when row p of step k is held against another row than p+1+k, or other rows count: written out row by row."""
    mask, lengths = MASKS[name]
    batch = make_batch(mask, lengths)
    computation = Computation(attention="eager", loss="linear")
    found, _ = run(draft, batch, computation)
    head = torch.rand(DRAFT_VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64) - 0.5
    draft_ids, sums = draft.draft_ids(), torch.zeros(K, dtype=torch.float64)
    outputs = ttt.unroll_hidden(
        draft,
        aux_hidden=batch.aux_hidden,
        token_ids=batch.token_ids,
        document_lengths=lengths,
        alignment=align(mask, lengths, K),
        computation=computation,
    )
    assert batch.last_hidden is not None
    place = {row: number for number, row in enumerate(batch.target_rows.tolist())}
    with torch.no_grad():
        for step, hidden in enumerate(outputs):
            for start, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
                for row in range(start, end - 2 - step):
                    target = row + 1 + step
                    if not mask[row + 1 : row + 3 + step].all():
                        continue
                    if draft_ids[batch.target_argmax[place[target]].long()] >= 0:
                        p = (head @ batch.last_hidden[place[target]]).softmax(-1)
                        sums[step] -= (p * draft.lm_head(hidden[row]).log_softmax(-1)).sum()
    assert sums.all()
    torch.testing.assert_close(found.loss_sums, sums, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss", ["linear", "torch"])
@pytest.mark.parametrize("checkpointing", ["none", "step"])
def test_a_pack_without_rows_adds_nothing(checkpointing: str, loss: str, draft: Eagle3Draft) -> None:
    """Red when a pack whose supervised tokens stand alone fails, or gives a gradient."""
    batch = make_batch(masked((False, 20), (True, 1), (False, 60), (True, 1)), (21, 61))
    computation = Computation(attention="fused", loss=loss, memory=Memory(checkpointing))
    unrolled, gradients = run(draft, batch, computation)
    assert (unrolled.loss.item(), unrolled.tau_sum, unrolled.tau_rows) == (0.0, 0.0, 0)
    assert unrolled.rows.tolist() == [0] * K
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("name", ["all", "turns", "packed"])
def test_simulated_tau_follows_each_row_through_the_steps(name: str, draft: Eagle3Draft, monkeypatch: Any) -> None:
    """Red when a row's hit at one step is joined with another row's at the next, or rows that end early count."""
    mask, lengths = MASKS[name]
    counts = align(mask, lengths, K).counts
    hits = torch.rand(counts.shape, generator=torch.Generator().manual_seed(3)) < 0.7
    original = ttt.compute_losses

    def with_hits(*arguments: Any) -> Any:
        total, sums, _, alpha = original(*arguments)
        return total, sums, [of_step[rows] for of_step, rows in zip(hits, counts, strict=True)], alpha

    monkeypatch.setattr(ttt, "compute_losses", with_hits)
    unrolled, _ = run(draft, make_batch(mask, lengths), Computation(attention="eager", loss="linear"))
    rows = [row for row in range(len(mask)) if counts[-1, row]]
    tokens = [len(list(itertools.takewhile(bool, hits[:, row].tolist()))) for row in rows]
    assert len(set(tokens)) > 1
    assert (int(unrolled.tau_sum), unrolled.tau_rows) == (sum(tokens), len(rows))


def test_rows_are_really_left_out(draft: Eagle3Draft, monkeypatch: Any) -> None:
    """Red when all rows are computed after all: the loss would not tell."""
    seen = []
    original = ttt.ttt_attention

    def watching(query: torch.Tensor, *tensors: Any, **options: Any) -> torch.Tensor:
        seen.append(query.shape[0])
        return original(query, *tensors, **options)

    monkeypatch.setattr(ttt, "ttt_attention", watching)
    mask, lengths = MASKS["an answer"]
    run(draft, make_batch(mask, lengths), Computation(attention="fused", loss="linear"))
    assert seen == [16] * K, "15 supervised tokens: 14 rows that count, and 2 to the end"
    seen.clear()
    run(random_draft(num_layers=2), make_batch(mask, lengths), Computation(attention="fused", loss="linear"))
    assert seen == [75, 16] + [16, 16] * (K - 1), "the lower layer runs step 0, and only that, on all rows"


@pytest.mark.parametrize(
    "memory", [Memory("mlp"), Memory("step"), Memory("none", 7), Memory("mlp", 7), Memory("step", 7)]
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["all", "turns"])
def test_memory_choices_change_nothing(name: str, variant: str, memory: Memory) -> None:
    """Red when what is computed again differs from what was computed first, or a chunk is lost."""
    draft = random_draft(**VARIANTS[variant])
    batch = make_batch(*MASKS[name])
    expected = run(draft, batch, Computation(attention="fused", loss="linear"))
    assert_same(run(draft, batch, Computation(attention="fused", loss="linear", memory=memory)), expected)


def test_step_checkpointing_runs_every_layer_again(monkeypatch: Any) -> None:
    """Red when a layer's step is kept after all: each is run once more in the backward."""
    calls = []
    original = ttt.ttt_attention
    monkeypatch.setattr(ttt, "ttt_attention", lambda *a, **options: (calls.append(1), original(*a, **options))[1])
    computation = Computation(attention="fused", loss="linear", memory=Memory("step"))
    run(random_draft(num_layers=2), make_batch(*MASKS["an answer"]), computation)
    assert len(calls) == 2 * 2 * K


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["all", "packed"])
def test_loss_backends_agree(name: str, variant: str) -> None:
    """Red when the linear loss pairs a row with another target than the loss from logits does, or writes over a
    hidden state that something else still reads."""
    draft = random_draft(**VARIANTS[variant])
    batch = make_batch(*MASKS[name])
    expected = run(draft, batch, Computation(attention="fused", loss="torch"))
    assert_same(run(draft, batch, Computation(attention="fused", loss="linear")), expected)


def with_top_k(batch: Batch, draft: Eagle3Draft, k: int) -> tuple[Batch, Batch]:
    """The batch with the statistics of its last hidden states under one head over the whole vocabulary, and the same
    with the k most probable tokens in place of the states. The head's rows of draft tokens are those of `run`."""
    generator = torch.Generator().manual_seed(5)
    full = torch.empty(TARGET_VOCAB, HIDDEN, dtype=torch.float64)
    full[draft.target_ids] = torch.rand(DRAFT_VOCAB, HIDDEN, generator=generator, dtype=torch.float64) - 0.5
    outside = draft.draft_ids() < 0
    full[outside] = torch.rand(int(outside.sum()), HIDDEN, generator=generator, dtype=torch.float64) - 0.5
    assert batch.last_hidden is not None
    logits = batch.last_hidden @ full.T
    lse = logits.logsumexp(-1)
    hidden = replace(batch, target_argmax=logits.argmax(-1).int(), target_lse=lse.float())
    values, ids = logits.topk(k)
    return hidden, replace(hidden, last_hidden=None, top_k=TopTokens(ids.int(), values - lse[:, None]))


@pytest.mark.parametrize("name", ["turns", "packed"])
def test_top_k_targets_reach_the_loss(name: str, draft: Eagle3Draft) -> None:
    """Red when stored tokens are not mapped to draft-vocabulary indices, or to another row: with all tokens stored the
    loss is that of the hidden states."""
    computation = Computation(attention="fused", loss="linear")
    hidden, stored = with_top_k(make_batch(*MASKS[name]), draft, TARGET_VOCAB)
    expected = run(draft, hidden, computation)
    found = run(draft, stored, computation)
    # target_lse is float32; the stored log-probabilities are not.
    torch.testing.assert_close(found[0].loss_sums, expected[0].loss_sums, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[0].correct_sums, expected[0].correct_sums)
    for key, gradient in expected[1].items():
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-6, atol=1e-9, msg=key)
    few = run(draft, with_top_k(make_batch(*MASKS[name]), draft, 4)[1], computation)
    assert 0 < few[0].loss.item() < found[0].loss.item(), "a lumped tail has less entropy"


def test_losses_from_logits_refuse_top_k(draft: Eagle3Draft) -> None:
    """Red when a loss that needs the target's states trains on something else instead."""
    _, stored = with_top_k(make_batch(*MASKS["turns"]), draft, 4)
    with pytest.raises(ValueError, match="use linear"):
        run(draft, stored, Computation(attention="fused", loss="torch"))


def test_the_heads_master_takes_its_gradient(draft: Eagle3Draft) -> None:
    """Red when the gradient goes to the compute copy, or to both."""
    batch = make_batch(*MASKS["turns"])
    computation = Computation(attention="fused", loss="linear")
    expected = run(draft, batch, computation)[1]["lm_head.weight"]
    master = draft.lm_head.weight.detach().clone().requires_grad_()
    _, gradients = run(draft, batch, computation, draft_head=master)
    assert "lm_head.weight" not in gradients
    assert master.grad is not None
    torch.testing.assert_close(master.grad, expected, **EXACT)


def test_objectives_reach_the_loss(draft: Eagle3Draft) -> None:
    """Red when the objective, the temperature or the mixing chosen is not the one computed."""
    batch = make_batch(*MASKS["turns"])
    computation = Computation(attention="fused", loss="linear")
    objectives = [
        Objective(),
        Objective("lk_alpha"),
        Objective("total_variation"),
        Objective("lk_lambda"),
        Objective("lk_lambda", mixing=(0.5,) * K),
        Objective(temperature=2.0),
    ]
    losses = [run(draft, batch, computation, objective=o)[0].loss.item() for o in objectives]
    assert len({round(loss, 6) for loss in losses}) == len(objectives), losses
    lambda_one = run(draft, batch, computation, objective=Objective("lk_lambda", mixing=(1.0,) * K))
    assert_same(lambda_one, run(draft, batch, computation))


def test_one_graph_a_piece_for_all_lengths(draft: Eagle3Draft) -> None:
    """Red when a piece breaks its graph (fullgraph raises), or a new length compiles anew."""
    counter = CompileCounter()
    pieces = compiled_pieces(counter)
    torch._dynamo.reset()
    for number, length in enumerate((40, 57, 90, 33)):
        batch = make_batch(masked((True, length)), (length,), seed=number)
        computation = Computation(attention="fused", loss="linear")
        expected = run(draft, batch, computation)
        compiled = Computation(attention="fused", loss="linear", pieces=pieces)
        assert_same(run(draft, batch, compiled), expected)
    assert counter.frame_count == 3, "attention inputs, attention output, MLP"
    for number, answer in enumerate((20, 31, 44)):
        mask = masked((False, 50), (True, answer))
        run(draft, make_batch(mask, (len(mask),), seed=number), Computation("fused", "linear", pieces=pieces))
        # Step 0's queries alone, its keys and values alone, and attention inputs whose token rows begin their tensor.
        assert counter.frame_count == 6
    frames = counter.frame_count
    for number, answer in enumerate((20, 31, 44)):
        mask = masked((False, 50), (True, answer))
        batch = make_batch(mask, (len(mask),), seed=number)
        of_two = random_draft(num_layers=2)
        compiled = run(of_two, batch, Computation("fused", "linear", pieces=pieces))
        assert_same(compiled, run(of_two, batch, Computation("fused", "linear")))
        # The layer above: keys and values, queries, and attention inputs, all without a token's half.
        assert counter.frame_count == frames + 3
    assert pieces is compiled_pieces(counter)
    assert Pieces().mlp is not pieces.mlp
