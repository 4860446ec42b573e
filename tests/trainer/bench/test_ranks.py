"""The benchmark of ranks: every number of them is measured by the trainer's own step, and recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.bench import checkout, results
from kernels.bench.errors import BenchError
from tasks.trainer.bench import ranks
from tasks.trainer.bench.cli import main
from tasks.trainer.bench.ranks_case import make_documents


def test_every_number_of_ranks_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when ranks that wait are waited for, a variant is left out, or a rank trains other than its own packs."""
    monkeypatch.setattr(checkout, "clean_commit", lambda *, written: "f" * 40)
    out = tmp_path / "results.csv"
    command = ["ranks", "--tiny", "--device", "cpu", "--steps", "1", "--rounds", "1", "--variants", "online,offline"]
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--out", str(out)])
    assert not exit_.value.code
    rows = results.read(out)
    assert [(row.work, row.variant, row.gpus) for row in rows] == [
        ("ranks", "online", 1), ("ranks", "online", 2), ("ranks", "offline", 1), ("ranks", "offline", 2),
    ]  # fmt: skip
    for one, two in (rows[:2], rows[2:]):
        # The packs of two ranks are twice those of one, and all nearly full.
        assert 1.8 < two.tokens / one.tokens < 2.2
        assert one.tokens_per_s is not None
        assert one.ms is not None
        assert one.tokens_per_s == pytest.approx(one.tokens / one.ms * 1e3, rel=1e-3)


def test_packs_are_full_and_the_same_on_every_rank() -> None:
    """Red when scaling is measured on packs of unlike size, or ranks make documents of their own."""
    settings = ranks.settings_of(
        target="qwen3-8b", pack_tokens=8192, packs=2, steps=1, rounds=1, device="cpu", tiny=True
    )
    one, other = (make_documents(settings, num_packs=8) for _ in range(2))
    assert [sample.sample_id for sample in one.samples] == [sample.sample_id for sample in other.samples]
    filled = [int(one.lengths[pack].sum()) for pack in one.packs]
    assert min(filled) > 0.9 * settings["pack_tokens"]
    assert sorted(number for pack in one.packs for number in pack) == list(range(len(one.samples)))


def test_an_unknown_target_is_named() -> None:
    """Red when a shape is made up for it."""
    with pytest.raises(BenchError, match="--target gpt is unknown: use qwen3-1"):
        ranks.settings_of(target="gpt", pack_tokens=8192, packs=2, steps=1, rounds=1, device="cpu", tiny=False)
