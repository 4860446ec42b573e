"""The evaluate stage: what the trained draft is worth on held-out prompts."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import numpy as np

from tasks.trainer.acceptance.evaluate import evaluate_acceptance
from tasks.trainer.acceptance.heldout import heldout_metrics
from tasks.trainer.config import RunConfig
from tasks.trainer.data.prepared import PreparedData
from tasks.trainer.draft.shape import fresh_draft, trained_draft
from tasks.trainer.errors import InputError
from tasks.trainer.files import write_json
from tasks.trainer.progress import Progress
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target import Target
from tasks.trainer.target_ends import load_ends
from tasks.trainer.train import checkpoint
from tasks.trainer.train.computation import evaluation_computation
from tasks.trainer.train.sources import OnlineSource

logger = logging.getLogger(__name__)


def evaluate_draft(config: RunConfig, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Decode held-out prompts with the checkpoint that is exported; writes evaluation.json and returns the receipt.

    Raises InputError when the run has no checkpoint or no held-out prompts.
    """
    prepared = run.receipt("prepare")
    found = checkpoint.load_chosen(run, config.train.export)
    if prepared is None or found is None:
        raise InputError(f"{run.root} has no trained draft yet; run `eyas train` first")
    settings = config.evaluate
    device: str = prepared["device"]
    target = Target.of(config.target, device=device, compute_dtype=settings.dtype)
    draft = trained_draft(found.shape, found.draft, embedding=target.embedding, dtype=target.dtype)
    ends = load_ends(config.target, device=device, with_last_layer=config.draft.start == "target_layer")
    untrained, _ = fresh_draft(
        found.shape, config.draft, ends, d2t=found.draft["d2t"], t2d=found.draft["t2d"], seed=config.train.seed
    )
    untrained.to(target.device, target.dtype)
    data = PreparedData.open(run.heldout_data)
    computation = evaluation_computation(device=target.device.type, dtype=target.dtype, head_dim=found.shape.head_dim)
    heldout = heldout_metrics(
        draft,
        OnlineSource(target, device=device),
        [[sample] for sample in data],
        head=draft.target_head(target.head),
        ttt_steps=config.train.ttt_steps,
        step_loss_decay=config.train.step_loss_decay,
        computation=computation,
        progress=progress,
    )
    # The prompt is everything before the first supervised token: header included, as the target would be served.
    prompts = []
    for sample in data:
        first = int(np.argmax(sample.loss_mask))
        prompts.append(np.array(sample.token_ids[:first], dtype=np.int32))
    acceptance = evaluate_acceptance(
        target,
        draft,
        untrained,
        prompts[: settings.num_prompts],
        num_draft_tokens=settings.draft_tokens,
        max_new_tokens=settings.max_new_tokens,
        tie_margin=settings.tie_margin,
        bootstrap_samples=settings.bootstrap_samples,
        seed=settings.seed,
        domains=prepared.get("heldout_domains", [])[: settings.num_prompts] or None,
        progress=progress,
    )
    evaluation = {
        "step": found.step,
        "settings": settings.model_dump(mode="json"),
        "dtype": str(target.dtype).removeprefix("torch."),
        "heldout": heldout,
        "heldout_samples": len(data),
        "acceptance": asdict(acceptance),
    }
    write_json(run.evaluation, evaluation)
    return {"tau": acceptance.tau, "lossless": acceptance.lossless, "step": found.step}
