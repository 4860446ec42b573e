"""What a failed launch tells: the cause, not what followed from it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tasks.trainer.ranks import explain, see_own_gpu

LOST = "RankLost: rank 1 ended before pack 2 of step 6"
HUNG = "RankHung: rank 1 did not come to pack 2 of step 6 within 30 s"
GLOO = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:5034"


@pytest.mark.parametrize(
    ("ends", "code", "message"),
    [
        # (exit code, what it wrote) of ranks 0, 1, ... in the order in which they ended.
        ([(1, LOST), (1, "OSError: disk full")], 1, "rank 1 failed: OSError: disk full"),
        ([(1, GLOO), (1, "OSError: disk full")], 1, "rank 1 failed: OSError: disk full"),
        ([(1, LOST), (-9, None)], 1, "rank 1 was killed by SIGKILL (kill -9, or the system ran out of memory)"),
        ([(1, "DistBackendError: NCCL"), (-9, None)], 1,
         "rank 1 was killed by SIGKILL (kill -9, or the system ran out of memory)"),
        # The launcher, or its peer, kills what hangs.
        ([(1, HUNG), (-9, None)], 1, f"rank 0 failed: {HUNG}"),
        ([(2, "InputError: no such file"), (1, LOST)], 2, "no such file"),
        ([(75, None), (75, None)], 75, ""),
        ([(-15, None), (2, "Diverged: stopped before step 3: loss nan")], 2, "stopped before step 3: loss nan"),
    ],
)  # fmt: skip
def test_the_cause_is_told(ends: list[tuple[int, str | None]], code: int, message: str, tmp_path: Path) -> None:
    """Red when the loss of a rank hides why it was lost."""
    failures = {}
    for rank, (exit_code, text) in enumerate(ends):
        path = tmp_path / f"{rank}.json"
        if text is not None:
            path.write_text(json.dumps({"message": {"message": text, "extraInfo": {"timestamp": str(100 + rank)}}}))
        failures[rank] = ProcessFailure(local_rank=rank, pid=10 + rank, exitcode=exit_code, error_file=str(path))
    found = explain(ChildFailedError("stage", failures))
    assert found == (code, message)


@pytest.mark.parametrize(("visible", "own"), [(None, "1"), ("4,6", "6"), ("GPU-aa,GPU-bb", "GPU-bb")])
def test_a_rank_sees_its_own_gpu(visible: str | None, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when two ranks would take one GPU, or one that the worker was not given."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "0,1")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    see_own_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
