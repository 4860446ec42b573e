"""The quality benchmark: the peer gets what ours was trained on, and both drafts meet the same evaluator."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from kernels.bench.errors import BenchError
from kernels.bench.runner import Group
from tasks.trainer.bench.quality import measure, table
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.export.stage import export_run
from tasks.trainer.run_dir import RunDir
from tasks.trainer.train import checkpoint
from tasks.trainer.train.batches import Packs, Position

Values = Callable[..., dict[str, Any]]

# Instead of training it hands over the draft that `given` holds, in the layout of a serving folder.
_PEER = """
import json, shutil, sys
from pathlib import Path
folder = Path(sys.argv[1])
assert "tasks" not in sys.modules
assert (folder / "target" / "config.json").is_file()
if {fails}:
    sys.exit("no memory left")
shutil.copytree({given!r}, folder / "draft")
(folder / "peer.json").write_text(json.dumps({{"tokens": 7, "tokens_per_s": 3.0}}))
"""


def peer(tmp_path: Path, given: Path, *, fails: bool = False) -> Group:
    script = tmp_path / "peer.py"
    script.write_text(_PEER.format(given=str(given), fails=fails))
    return Group(str(script), path=(), python=sys.executable)


def test_peer_and_ours_meet_one_evaluator(recipe_values: Values, tmp_path: Path) -> None:
    """Red when the peer's packs are others or in another order, its draft is read wrongly, its figures are mixed up
    with ours, or a second start trains again."""
    values = recipe_values(train={"steps": 4, "checkpoint_every": 2})
    out = tmp_path / "out"
    alone = measure(values, out, peer=None, seed=1)
    run = RunDir.open(str(out / "runs/exact-1"))
    export_run(run.config(), run, tmp_path / "given")
    before = run.metrics.stat().st_mtime_ns
    rows = measure(values, out, peer=peer(tmp_path, tmp_path / "given"), seed=1)
    assert run.metrics.stat().st_mtime_ns == before
    assert [row.trainer for row in rows] == ["eyas", "specforge"]
    assert rows[0] == alone[0]
    # The same draft, so the same figures; but for the tokens that the peer tells.
    assert rows[1].acc == pytest.approx(rows[0].acc)
    assert rows[1].tau == pytest.approx(rows[0].tau)
    assert (rows[1].tokens, rows[1].tokens_per_s) == (7, 3.0)
    assert rows[0].tokens == sum(json.loads(line)["tokens"] for line in run.metrics.read_text().splitlines())
    assert "| specforge | 7 | 3 | " in table(rows)

    packs = load_file(out / "specforge-1/packs.safetensors")
    data = PreparedData.open(run.train_data)
    order = Packs(data.lengths, pack_tokens=run.config().train.pack_tokens, seed=1).read_from(Position())
    bounds = packs["bounds"].tolist()
    for number, (pack, _) in enumerate(itertools.islice(order, 4)):
        rows_of_pack = slice(bounds[number], bounds[number + 1])
        assert np.array_equal(packs["token_ids"][rows_of_pack], np.concatenate([data[n].token_ids for n in pack]))
        assert np.array_equal(packs["loss_mask"][rows_of_pack], np.concatenate([data[n].loss_mask for n in pack]))
    found = checkpoint.load_latest(run.checkpoints)
    assert found is not None
    assert packs["d2t"].equal(found.draft["d2t"])
    settings = json.loads((out / "specforge-1/settings.json").read_text())
    assert settings["shape"]["vocab_size"] == len(packs["d2t"])
    assert settings["aux_layer_ids"] == list(found.shape.aux_layer_ids)


def test_a_peer_that_fails_says_why(recipe_values: Values, tmp_path: Path) -> None:
    """Red when a failed peer passes for a result, or gradient accumulation gives the peer other batches."""
    values = recipe_values(train={"steps": 2})
    with pytest.raises(BenchError, match="specforge failed: no memory left"):
        measure(values, tmp_path / "out", peer=peer(tmp_path, tmp_path, fails=True), seed=0)
    with pytest.raises(BenchError, match=r"set train\.grad_accumulation=1"):
        measure(recipe_values(train={"steps": 2, "grad_accumulation": 2}), tmp_path / "other", peer=None, seed=0)
