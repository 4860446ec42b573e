"""One run of the codec-quality experiment: train (or go on), evaluate, leave one file. A process of its own.

`python -m tasks.trainer.bench.codec_quality_run RUN_DIR` exits 0 with `quality.json` in the run's folder, and as a
stage does otherwise: 2 when the input is wrong, 75 when SIGTERM stopped it with its checkpoint saved.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from storage.errors import StoreError
from tasks.trainer.config import RunConfig
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.shape import trained_draft
from tasks.trainer.draft.ttt import unroll
from tasks.trainer.errors import InputError
from tasks.trainer.files import write_json
from tasks.trainer.progress import silent
from tasks.trainer.run_dir import RunDir
from tasks.trainer.stages import EXIT_INPUT, run_stage
from tasks.trainer.stop import EXIT_INTERRUPTED
from tasks.trainer.target import Target
from tasks.trainer.train import checkpoint
from tasks.trainer.train.computation import evaluation_computation
from tasks.trainer.train.sources import OnlineSource

QUALITY = "quality.json"


@dataclass(slots=True)
class Quality:
    """What a draft is worth on each held-out conversation, teacher-forced, on the target's exact states.

    Sums, so that any set of conversations has its tau and acc_k: tau = 1 + sum(tau_sum) / sum(tau_rows), and acc_k =
    sum(correct[:, k]) / sum(rows[:, k]); both are [conversations, K].
    """

    step: int
    sample_ids: list[str] = field(default_factory=list)
    tau_sum: list[float] = field(default_factory=list)
    tau_rows: list[int] = field(default_factory=list)
    correct: list[list[float]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)


def evaluate(config: RunConfig, run: RunDir) -> Quality:
    """Held-out metrics of the newest checkpoint, a conversation each."""
    prepared, found = run.receipt("prepare"), checkpoint.load_latest(run.checkpoints)
    assert prepared is not None
    assert found is not None
    target = Target.of(config.target, device=prepared["device"])
    draft = trained_draft(found.shape, found.draft, embedding=target.embedding, dtype=target.dtype)
    return evaluate_draft(draft, target, run, ttt_steps=config.train.ttt_steps, step=found.step)


@torch.no_grad()
def evaluate_draft(draft: Eagle3Draft, target: Target, run: RunDir, *, ttt_steps: int, step: int) -> Quality:
    """Any draft on the run's held-out conversations; step: what it was trained for, for the record."""
    computation = evaluation_computation(device=target.device.type, dtype=target.dtype, head_dim=draft.config.head_dim)
    head, draft_ids, steps = draft.target_head(target.head), draft.draft_ids(), ttt_steps
    quality = Quality(step=step)
    data = PreparedData.open(run.heldout_data)
    for batch in OnlineSource(target, device=target.device.type).batches([sample] for sample in data):
        unrolled = unroll(
            draft,
            batch,
            ttt_steps=steps,
            row_weight=[1.0] * steps,
            head=head,
            draft_ids=draft_ids,
            computation=computation,
        )
        quality.sample_ids.append(batch.sample_ids[0])
        quality.tau_sum.append(float(unrolled.tau_sum))
        quality.tau_rows.append(unrolled.tau_rows)
        quality.correct.append([float(correct) for correct in unrolled.correct_sums])
        quality.rows.append([int(rows) for rows in unrolled.rows])
    return quality


def main(arguments: list[str]) -> int:
    """Entry of the process."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    for noisy in ("httpx", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    run = RunDir.open(arguments[0])
    try:
        if run.receipt("train") is None:
            run_stage("train", run, silent)
        document: dict[str, Any] = asdict(evaluate(run.config(), run))
    except (InputError, StoreError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_INPUT
    except InterruptedError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_INTERRUPTED
    write_json(run.root / QUALITY, document)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
