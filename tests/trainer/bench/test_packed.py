"""The packed benchmark: all variants take the same documents, and the ones said to give the right gradient do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.bench import checkout, layouts, results
from kernels.bench.errors import BenchError
from tasks.trainer.bench import packed
from tasks.trainer.bench.cli import main, step
from tasks.trainer.bench.packed_case import PackedCase, make_batches
from tasks.trainer.draft.alignment import count_rows
from tasks.trainer.train.batches import Packs


def tiny() -> dict[str, Any]:
    (case,) = packed.cases(device="cpu", tiny=True)
    return dict(case.settings)


def test_lengths_are_those_of_chat_data() -> None:
    """Red when the distribution is not the one that the figures are said to be of, or changes from run to run."""
    lengths = packed.chat_lengths(20000)
    assert 950 < float(torch.from_numpy(lengths).double().median()) < 1100
    assert lengths.max() == 16384
    assert lengths.min() >= 16
    assert (lengths > 8192).mean() > 0.01, "a tail"
    assert (packed.chat_lengths(20000) == lengths).all()


def test_the_case_is_of_packs_as_trained() -> None:
    """Red when the timed packs are not those of an epoch, or what is unfilled or padding is told wrong."""
    (case,) = packed.cases()
    packs = case.settings["packs"]
    assert all(sum(pack) <= packed.PACK_TOKENS for pack in packs)
    assert case.tokens == sum(map(sum, packs))
    told = dict(item.rsplit(" ", 1) for item in case.shape.split("; ") if item.startswith(("unfilled", "padding")))
    assert 0 < float(told["unfilled"]) < 0.03
    padded = sum(max(pack) * len(pack) for pack in packs)
    assert float(told["padding"]) == pytest.approx(1 - case.tokens / padded, abs=1e-3)
    assert float(told["padding in budget"]) < float(told["padding"])


def test_the_timed_packs_stand_for_all() -> None:
    """Red when the timed packs are easier or harder to pad than the epoch's: 0.668 of its padded batches is padding."""
    lengths = packed.chat_lengths(4096)
    packs = [lengths[pack].tolist() for pack in Packs(lengths, pack_tokens=packed.PACK_TOKENS, seed=1).epoch(0)]
    timed = packed.typical(packs, 8)
    assert [packs.index(pack) for pack in timed] == sorted(packs.index(pack) for pack in timed)
    assert packed.padding_share(timed) == pytest.approx(packed.padding_share(packs), abs=0.02)


def test_budget_batches_keep_documents_and_budget() -> None:
    """Red when a document is lost, or a batch takes more padded tokens than a pack holds."""
    packs = [[5, 30, 7], [100, 1, 1], [20, 20, 20, 20, 20, 20]]
    batches = packed.budget_batches(packs, 100)
    assert batches == [[5, 30, 7], [100], [1, 1, 20, 20, 20], [20, 20, 20]]
    assert packed.padding_share([[1, 3], [2]]) == pytest.approx(2 / 8)


@pytest.mark.parametrize("variant", packed.VARIANTS)
def test_every_variant_has_the_same_documents(variant: str) -> None:
    """Red when a variant leaves a document out or changes one, or pads where it should not."""
    settings, device = {**tiny(), "packs": [[35, 16, 18], [50, 7, 3, 1]]}, torch.device("cpu")
    whole = [35, 16, 18, 50, 7, 3, 1]
    alone = make_batches("alone", settings, device)
    batches = make_batches(variant, settings, device)
    places = [
        (batch, start, end - start)
        for batch in batches
        for start, end in itertools.pairwise(itertools.accumulate(batch.document_lengths, initial=0))
    ]
    for (batch, start, width), length, expected in zip(places, whole, alone, strict=True):
        rows = slice(start, start + length)
        assert torch.equal(batch.token_ids[rows], expected.token_ids)
        assert torch.equal(batch.aux_hidden[rows], expected.aux_hidden)
        assert batch.loss_mask[rows].all()
        trained = variant in ("padded", "padded_budget")
        assert batch.loss_mask[start + length : start + width].all() == (trained or width == length)
    rows = sum(int(count_rows(batch.loss_mask, batch.document_lengths, 1)) for batch in batches)
    of_documents = sum(max(length - 2, 0) for length in whole)
    assert rows == of_documents if variant in ("packed", "padded_skip") else rows > of_documents


def test_a_step_trains() -> None:
    """Red when the timed step leaves out the update."""
    case = PackedCase(tiny(), torch.device("cpu"))
    masters = case._model.optimizer.masters
    case.start("packed")()  # with the learning rate 0, where warm-up begins
    before = {name: master.detach().clone() for name, master in masters.items()}
    case.start("packed")()
    assert all(not torch.equal(before[name], master) for name, master in masters.items())


def test_the_command_records_every_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when packs or skipped padding change a gradient, or a variant gets no row."""
    monkeypatch.setattr(checkout, "clean_commit", lambda *, written: "f" * 40)
    out = tmp_path / "results.csv"
    with pytest.raises(SystemExit) as exit_:
        main(["step", "--packed", "--tiny", "--device", "cpu", "--rounds", "1", "--out", str(out)])
    assert not exit_.value.code
    rows = {row.variant: row for row in results.read(out)}
    assert tuple(rows) == packed.VARIANTS
    assert {(row.work, row.layout) for row in rows.values()} == {("step", layouts.CHAT)}
    assert len({row.tokens for row in rows.values()}) == 1
    assert rows["padded"].error is None
    assert rows["padded_budget"].error is None
    for variant in ("packed", "padded_skip"):
        error = rows[variant].error
        # float32 against float32 in another order.
        assert error is not None
        assert error < 1e-4


def test_what_does_not_go_together_is_refused() -> None:
    """Red when an option is ignored in silence."""
    with pytest.raises(BenchError, match="--packed measures one set of documents"):
        step(packed=True, tokens="64", device="cpu")
