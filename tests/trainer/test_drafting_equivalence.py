"""The definitive test of the training-time test: its logits are those of the draft as it is served.

The draft is run one row at a time with a key/value cache (acceptance/drafter.py), fed the document's own tokens, and
every logit is compared with the unroll's. Each mutant breaks one rule of the unroll as public trainers have broken
it, and must be noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.draft import ttt
from tasks.trainer.draft.alignment import Alignment, align
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.ttt import Computation, unroll_hidden
from tests.trainer.drafts import TARGET_VOCAB, random_draft

TTT_STEPS = 7
# Shorter than K, of one token (no row reads a token), and longer; packed in one row.
LENGTHS = (12, 1, 3, 23, 7, 2)
# fp64: rounding of ~100 operations on values of order 1 is 1e-14; RoPE's fp32 tables are the same numbers on both
# sides. fp32: the same argument gives 1e-5. A wrong rule is off by more than 1e-2 (the mutants).
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
NOTICED = 1e-2


def make_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(TARGET_VOCAB, (sum(LENGTHS),), generator=generator)
    return token_ids, (torch.rand(sum(LENGTHS), 96, generator=generator) - 0.5).to(dtype)


def unrolled_logits(draft: Eagle3Draft, attention: str, *, alignment: Alignment | None = None) -> Tensor:
    """[K, T, Vd]."""
    token_ids, aux_hidden = make_inputs(draft.fc.weight.dtype)
    if alignment is None:
        alignment = align(torch.ones_like(token_ids, dtype=torch.bool), LENGTHS, TTT_STEPS)
    with torch.no_grad():
        steps = unroll_hidden(
            draft,
            aux_hidden=aux_hidden,
            token_ids=token_ids,
            document_lengths=LENGTHS,
            alignment=alignment,
            computation=Computation(attention=attention, loss="torch"),
        )
        return torch.stack([draft.lm_head(hidden) for hidden in steps])


def drafted_logits(draft: Eagle3Draft) -> tuple[Tensor, Tensor]:
    """[K, T, Vd] by serving, and bool [K, T]: the steps whose token input exists in the row's document."""
    token_ids, aux_hidden = make_inputs(draft.fc.weight.dtype)
    logits = torch.zeros(TTT_STEPS, sum(LENGTHS), draft.config.vocab_size, dtype=aux_hidden.dtype)
    exists = torch.zeros(TTT_STEPS, sum(LENGTHS), dtype=torch.bool)
    start = 0
    for length in LENGTHS:
        end = start + length
        drafter = Drafter(draft)
        for row in range(start, end - 1):
            drafter.extend(token_ids[row + 1 : row + 2], aux_hidden[row : row + 1])
            forced = token_ids[row + 2 : min(row + 1 + TTT_STEPS, end)]
            steps = len(forced) + 1
            logits[:steps, row] = drafter.forced_logits(forced)
            exists[:steps, row] = True
        start = end
    return logits, exists


def difference(unrolled: Tensor, drafted: tuple[Tensor, Tensor]) -> float:
    logits, exists = drafted
    return float((unrolled - logits)[exists].abs().max())


SHAPES: dict[str, dict[str, Any]] = {
    "4 query heads, 2 key heads": {},
    "one key head": {"num_kv_heads": 1},
    "as many key heads": {"num_heads": 2},
    "two layers": {"num_layers": 2},
    "three layers, whole vocabulary": {"num_layers": 3, "vocab_size": TARGET_VOCAB},
    "eagle3.1": {"variant": "eagle3.1"},
    "eagle3.1, two layers": {"variant": "eagle3.1", "num_layers": 2},
}


@pytest.mark.parametrize("attention", ["eager", "fused", "flex"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_unroll_equals_drafting(attention: str, dtype: torch.dtype, shape: str) -> None:
    """Red under every mutant below, for a wrong head group, when an attention backend is wrong for short or packed
    documents, and when a layer reads another layer's keys or another layer's output."""
    draft = random_draft(dtype, **SHAPES[shape])
    drafted = drafted_logits(draft)
    assert drafted[0].abs().max() > 0.5, "the logits must be of order 1 for the tolerances to mean anything"
    assert int(drafted[1].sum()) > 0
    assert difference(unrolled_logits(draft, attention), drafted) <= TOLERANCE[dtype]


def test_packing_changes_nothing() -> None:
    """Red when the drafter or the unroll lets one document see another: each alone must equal the packed one."""
    draft = random_draft(torch.float64)
    token_ids, aux_hidden = make_inputs(torch.float64)
    packed = unrolled_logits(draft, "fused")
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        alone = unroll_hidden(
            draft,
            aux_hidden=aux_hidden[rows],
            token_ids=token_ids[rows],
            document_lengths=(length,),
            alignment=align(torch.ones(length, dtype=torch.bool), (length,), TTT_STEPS),
            computation=Computation(attention="fused", loss="torch"),
        )
        with torch.no_grad():
            for step, hidden in enumerate(alone):
                torch.testing.assert_close(draft.lm_head(hidden), packed[step, rows], rtol=0, atol=1e-12)
        start += length


def dense_attention(base_allowed: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """ttt_attention with another rule for the base block: base_allowed(row [T, 1], key [1, T], step) -> bool [T, T]."""

    def attention(
        query: Tensor,
        base_key: Tensor,
        base_value: Tensor,
        step_keys: Sequence[Tensor] = (),
        step_values: Sequence[Tensor] = (),
        *,
        document_lengths: Sequence[int],
        query_runs: None,
        backend: str,
    ) -> Tensor:
        share = query.shape[1] // base_key.shape[1]
        document = torch.repeat_interleave(torch.arange(len(document_lengths)), torch.tensor(document_lengths))
        row = torch.arange(query.shape[0])
        allowed = base_allowed(row[:, None], row[None, :], len(step_keys))
        allowed = allowed & (document[:, None] == document[None, :])
        keys = [base_key, *step_keys]
        scores = []
        for step, key in enumerate(keys):
            every = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(share, 1)) * query.shape[-1] ** -0.5
            own = allowed if step == 0 else row[:, None] == row[None, :]
            scores.append(every.masked_fill(~own, -1e30))
        weights = torch.cat(scores, -1).softmax(-1).chunk(len(keys), -1)
        return sum(
            torch.einsum("hqk,khd->qhd", weight, value.repeat_interleave(share, 1))
            for weight, value in zip(weights, [base_value, *step_values], strict=True)
        )

    return attention


MASKS: dict[str, tuple[Callable[[Tensor, Tensor, int], Tensor], bool]] = {
    "the rule": (lambda row, key, step: row >= key, False),
    "shrinking with the step": (lambda row, key, step: row - step >= key, True),
    "one row short": (lambda row, key, step: row > key, True),
    "one row ahead": (lambda row, key, step: row + 1 >= key, True),
}


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_mask_mutants_are_noticed(name: str, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the comparison cannot tell a wrong base block. "the rule" shows that the mutants' own code is right."""
    base_allowed, wrong = MASKS[name]
    draft = random_draft(torch.float64, num_layers=num_layers)
    drafted = drafted_logits(draft)
    monkeypatch.setattr(ttt, "ttt_attention", dense_attention(base_allowed))
    error = difference(unrolled_logits(draft, "eager"), drafted)
    assert error > NOTICED if wrong else error <= TOLERANCE[torch.float64]


POSITIONS: dict[str, tuple[Callable[[Tensor, int], Tensor], bool]] = {
    "the rule": (lambda positions, step: positions, False),
    "not shifted by the step": (lambda positions, step: positions - step, True),
    "a gap after step 0": (lambda positions, step: positions + min(step, 1), True),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_position_mutants_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the comparison cannot tell a wrong RoPE position. (A constant offset is no mutant: RoPE is relative.)"""
    mutate, wrong = POSITIONS[name]
    draft = random_draft(torch.float64)
    drafted = drafted_logits(draft)
    rule, step = draft.rope.angles, iter(range(TTT_STEPS))
    monkeypatch.setattr(draft.rope, "angles", lambda positions: rule(mutate(positions, next(step))))
    error = difference(unrolled_logits(draft, "fused"), drafted)
    assert error > NOTICED if wrong else error <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_token_mutants_are_noticed(offset: int) -> None:
    """Red when the comparison cannot tell that a step reads the token before or after its own."""
    draft = random_draft(torch.float64)
    rule = align(torch.ones(sum(LENGTHS), dtype=torch.bool), LENGTHS, TTT_STEPS)
    moved = Alignment(rule.positions, (rule.shifted + offset).clamp(0, sum(LENGTHS) - 1), rule.counts)
    error = difference(unrolled_logits(draft, "fused", alignment=moved), drafted_logits(draft))
    assert error > NOTICED if offset else error <= TOLERANCE[torch.float64]


OUTPUTS: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], str]] = {
    "un-normed to the next step": (lambda output, normed: (output, normed), "eagle3"),
    "normed to the next step": (lambda output, normed: (normed, normed), "eagle3.1"),
    "un-normed to the head": (lambda output, normed: (normed, output), ""),
}


@pytest.mark.parametrize("variant", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_output_mutants_are_noticed(name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the comparison cannot tell one variant's outputs from the other's."""
    mutate, right_for = OUTPUTS[name]
    draft = random_draft(torch.float64, variant=variant)
    drafted = drafted_logits(draft)
    monkeypatch.setattr(draft, "outputs", lambda output: mutate(output, draft.norm(output)))
    error = difference(unrolled_logits(draft, "fused"), drafted)
    assert error <= TOLERANCE[torch.float64] if variant == right_for else error > NOTICED


# --- which rows count ---------------------------------------------------------------------------------------------


def random_documents(generator: torch.Generator) -> tuple[Tensor, tuple[int, ...]]:
    """Packed documents of several turns: supervised runs of any length, at either end of a document too."""
    lengths, masks = [], []
    for _ in range(6):
        runs = int(torch.randint(1, 5, (), generator=generator))
        value = bool(torch.randint(2, (), generator=generator))
        mask: list[bool] = []
        for _ in range(runs):
            mask += [value] * int(torch.randint(1, 13, (), generator=generator))
            value = not value
        lengths.append(len(mask))
        masks += mask
    return torch.tensor(masks), tuple(lengths)


def visited_by_serving(loss_mask: Tensor, lengths: Sequence[int], generator: torch.Generator) -> Tensor:
    """bool [K, T]: the (step, row) pairs of one simulated serving of every answer, with random acceptances.

    A round starts from row m-1, where x[m] is the newest token. Step k drafts x[m+1+k]; it counts when what it
    read was accepted and the answer has such a token. `accepted` proposals and the target's own token follow.
    """
    visited = torch.zeros(TTT_STEPS, loss_mask.shape[0], dtype=torch.bool)
    mask = loss_mask.tolist()
    start = 0
    for length in lengths:
        end = start + length
        at = start
        while at < end:
            if not mask[at]:
                at += 1
                continue
            answer_end = at
            while answer_end < end and mask[answer_end]:
                answer_end += 1
            # x[newest] comes with the prompt's forward; a document that starts with an answer has x[0] as its prompt.
            newest = max(at, start + 1)
            while newest < answer_end - 1:
                accepted = int(torch.randint(TTT_STEPS + 1, (), generator=generator))
                for step in range(min(accepted + 1, TTT_STEPS)):
                    if newest + 1 + step < answer_end:
                        visited[step, newest - 1] = True
                newest += accepted + 1
            at = answer_end
        start = end
    return visited


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_count_are_those_that_serving_visits(seed: int) -> None:
    """Red when the mask is not shifted like the tokens, crosses a document, leaves out x[p+1] or checks only the
    predicted token: such a rule counts rows that are never served or misses some that are."""
    generator = torch.Generator().manual_seed(seed)
    loss_mask, lengths = random_documents(generator)
    counts = align(loss_mask, lengths, TTT_STEPS).counts
    union = torch.zeros_like(counts)
    for _ in range(300):
        visited = visited_by_serving(loss_mask, lengths, generator)
        assert not (visited & ~counts).any(), "serving visited a row that does not count"
        union |= visited
    assert torch.equal(union, counts)


def test_other_rules_count_other_rows() -> None:
    """Red when the trial is too weak to tell the rule from one that checks only the predicted token."""
    generator = torch.Generator().manual_seed(0)
    loss_mask, lengths = random_documents(generator)
    counts = align(loss_mask, lengths, TTT_STEPS).counts
    ends = torch.repeat_interleave(torch.tensor(lengths).cumsum(0), torch.tensor(lengths))
    rows = torch.arange(loss_mask.shape[0])
    predicted = rows + 2 + torch.arange(TTT_STEPS)[:, None]
    only_predicted = (predicted < ends) & loss_mask[predicted.clamp(max=loss_mask.shape[0] - 1)]
    assert (counts & ~only_predicted).sum() == 0
    assert (only_predicted & ~counts).sum() > 0
