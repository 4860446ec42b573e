"""A pack is its documents: the same loss, metrics and gradients, document by document, as each of them alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.trainer.data.prepared import PreparedSample, sample_id
from tasks.trainer.draft.alignment import count_rows, target_rows
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.ttt import Computation, Unrolled, unroll
from tasks.trainer.target import TargetStates
from tasks.trainer.train.batches import assemble
from tasks.trainer.train.metrics import Sums
from tests.trainer.draft.conftest import masked
from tests.trainer.drafts import DRAFT_VOCAB, HIDDEN, TARGET_VOCAB, VARIANTS, random_draft

K = 5
# float64: the same sums in another order. The losses and alpha are summed in float32.
EXACT = {"rtol": 0.0, "atol": 1e-13}
SUMMED = {"rtol": 1e-6, "atol": 1e-6}

MASKS = {
    "one token": masked((False, 1)),
    "one supervised token": masked((True, 1)),
    "two tokens": masked((True, 2)),
    "three, shorter than K": masked((True, 3)),
    "as long as K": masked((True, K)),
    "one-token answer": masked((False, 9), (True, 1), (False, 3)),
    "one-token answers": masked((False, 4), (True, 1), (False, 6), (True, 1)),
    "two-token answer": masked((False, 7), (True, 2), (False, 2)),
    "answer shorter than K": masked((False, 12), (True, 4)),
    "turns": masked((False, 40), (True, 9), (False, 45), (True, 1), (False, 2), (True, 20)),
    "all supervised": masked((True, 30)),
}
PACKS = {
    "every kind": list(MASKS),
    "no answer in between": ["all supervised", "one token", "one-token answer", "all supervised"],
    "short ones": ["two tokens", "three, shorter than K", "one supervised token", "two-token answer", "as long as K"],
    "behind long ones": ["turns", "two tokens", "turns", "three, shorter than K"],
}


@dataclass(frozen=True, slots=True)
class Document:
    """A sample with the target's states of it: of every row, of which a batch takes the soft targets."""

    token_ids: Tensor
    loss_mask: Tensor
    aux_hidden: Tensor
    last_hidden: Tensor
    target_argmax: Tensor
    target_lse: Tensor

    def silent(self) -> Document:
        """The same with nothing supervised."""
        return replace(self, loss_mask=torch.zeros_like(self.loss_mask))


def document(loss_mask: Tensor, seed: int) -> Document:
    generator = torch.Generator().manual_seed(seed)
    tokens = loss_mask.shape[0]

    def states(width: int) -> Tensor:
        return torch.rand(tokens, width, generator=generator, dtype=torch.float64) - 0.5

    return Document(
        token_ids=torch.randint(TARGET_VOCAB, (tokens,), generator=generator),
        loss_mask=loss_mask,
        aux_hidden=states(3 * HIDDEN),
        last_hidden=states(HIDDEN),
        target_argmax=torch.randint(TARGET_VOCAB, (tokens,), generator=generator, dtype=torch.int32),
        target_lse=torch.rand(tokens, generator=generator) + 5.0,
    )


def run(
    draft: Eagle3Draft, documents: Sequence[Document], weights: Sequence[float], computation: Computation
) -> tuple[Unrolled, dict[str, Tensor], list[Tensor]]:
    """The unroll of one pack, the draft's gradients, and those of each document's states."""
    draft = copy.deepcopy(draft)
    samples, states = [], []
    for each in documents:
        ids, mask = each.token_ids.numpy().astype(np.int32), each.loss_mask.numpy()
        rows = target_rows(each.loss_mask, [len(ids)])
        samples.append(PreparedSample(sample_id(ids, mask), ids, mask))
        states.append(
            TargetStates(
                aux_hidden=each.aux_hidden,
                last_hidden=each.last_hidden[rows],
                target_argmax=each.target_argmax[rows],
                target_lse=each.target_lse[rows],
            )
        )
    batch = assemble(samples, states)
    aux_hidden = batch.aux_hidden.requires_grad_()
    generator = torch.Generator().manual_seed(5)
    unrolled = unroll(
        draft,
        replace(batch, aux_hidden=aux_hidden),
        ttt_steps=K,
        row_weight=weights,
        head=torch.rand(DRAFT_VOCAB, HIDDEN, generator=generator, dtype=torch.float64) - 0.5,
        draft_ids=draft.draft_ids(),
        computation=computation,
    )
    unrolled.loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in draft.named_parameters()
    }
    of_states = torch.zeros_like(aux_hidden) if aux_hidden.grad is None else aux_hidden.grad
    return unrolled, gradients, list(of_states.split(list(batch.document_lengths)))


def row_weights(documents: Sequence[Document]) -> list[float]:
    rows = sum(count_rows(each.loss_mask, [each.loss_mask.shape[0]], K) for each in documents)
    assert isinstance(rows, Tensor)
    return [0.8**k / K / int(n) if n else 0.0 for k, n in enumerate(rows)]


OTHERS = [variant for variant in VARIANTS if variant != "one layer"]
COMPUTATIONS = {
    "fused, linear": Computation(attention="fused", loss="linear"),
    "eager, from logits": Computation(attention="eager", loss="torch"),
}


@pytest.mark.parametrize("computation", COMPUTATIONS)
@pytest.mark.parametrize(
    ("name", "variant"), [*((name, "one layer") for name in PACKS), *(("every kind", other) for other in OTHERS)]
)
def test_a_pack_is_its_documents(name: str, variant: str, computation: str) -> None:
    """Red when a document attends to its neighbour, a TTT shift reads or predicts past its end, a row of it counts for
    another, or a metric is averaged over documents."""
    draft = random_draft(**VARIANTS[variant])
    documents = [document(MASKS[kind], seed) for seed, kind in enumerate(PACKS[name], start=7)]
    weights, how = row_weights(documents), COMPUTATIONS[computation]
    packed, gradients, of_states = run(draft, documents, weights, how)
    alone = [run(draft, [each], weights, how) for each in documents]

    together, summed = Sums(K), Sums(K)
    together.add(packed)
    for number, (unrolled, _, (of_document,)) in enumerate(alone):
        summed.add(unrolled)
        torch.testing.assert_close(of_states[number], of_document, **EXACT, msg=lambda text, n=number: f"{n}: {text}")
        # What the document adds to the pack's sums: the pack with all others there, and nothing of theirs supervised.
        others = [each if place == number else each.silent() for place, each in enumerate(documents)]
        only, _, _ = run(draft, others, weights, how)
        for sums in ("loss", "rows", "loss_sums", "correct_sums", "alpha_sums"):
            torch.testing.assert_close(getattr(only, sums), getattr(unrolled, sums), **SUMMED)
        assert (only.tau_sum, only.tau_rows) == (unrolled.tau_sum, unrolled.tau_rows)
    for parameter, gradient in gradients.items():
        expected = torch.stack([found[parameter] for _, found, _ in alone]).sum(0)
        torch.testing.assert_close(gradient, expected, **EXACT, msg=lambda text, p=parameter: f"{p}: {text}")
    found, expected_metrics = together.summary(), summed.summary()
    assert found["rows"] == expected_metrics["rows"]
    assert found["tau"] == expected_metrics["tau"]
    for metric in ("loss", "step_losses", "acc", "alpha"):
        assert found[metric] == pytest.approx(expected_metrics[metric], rel=1e-6)
    for parameter in ("lm_head", "fc", "midlayer.self_attn.q_proj"):
        assert gradients[f"{parameter}.weight"].abs().max() > 1e-3, "rounding is no gradient"


@pytest.mark.parametrize("kind", ["one token", "one supervised token", "one-token answer", "one-token answers"])
def test_documents_without_a_row_train_nothing(kind: str, draft: Eagle3Draft) -> None:
    """Red when a pack in which no row counts gives NaN, a gradient, or a tau of rows that are not there."""
    documents = [document(MASKS[kind], 0), document(MASKS["one token"], 1)]
    for how in COMPUTATIONS.values():
        unrolled, gradients, of_states = run(draft, documents, row_weights(documents), how)
        assert float(unrolled.loss.detach()) == 0.0
        assert not any(gradient.any() for gradient in [*gradients.values(), *of_states])
        assert not unrolled.rows.any()
        sums = Sums(K)
        sums.add(unrolled)
        assert sums.summary()["tau"] is None
        assert sums.summary()["acc"] == [0.0] * K
