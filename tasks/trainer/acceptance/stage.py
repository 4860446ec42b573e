"""The evaluate stage: what the trained draft is worth on held-out prompts and on those of files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tasks.trainer.acceptance.evaluate import evaluate_acceptance
from tasks.trainer.acceptance.heldout import heldout_metrics
from tasks.trainer.acceptance.prompts import Prompt, heldout_prompt, lengthen, read_prompts
from tasks.trainer.config import RunConfig
from tasks.trainer.config_evaluate import HELDOUT, Evaluate
from tasks.trainer.data.mask import ChatRenderer
from tasks.trainer.data.prepared import PreparedData, PreparedSample
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
    renderer = ChatRenderer(
        target.tokenizer, target.eos_token_ids, template_arguments={"date_string": config.data.date_string}
    )
    acceptance = evaluate_acceptance(
        target,
        draft,
        untrained,
        chosen_prompts(settings, data, prepared.get("heldout_domains", []), renderer),
        settings,
        renderer=renderer,
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


def chosen_prompts(
    settings: Evaluate, data: Sequence[PreparedSample], domains: Sequence[str], renderer: ChatRenderer
) -> list[Prompt]:
    """What evaluate.prompts and evaluate.context_lengths ask for. domains: of each held-out sample; may be empty."""
    several = len(settings.prompts) > 1
    prompts = []
    for name in settings.prompts:
        if name != HELDOUT:
            prompts += read_prompts(name, renderer, limit=settings.num_prompts)
            continue
        own = []
        for number in range(min(settings.num_prompts, len(data))):
            domain = domains[number] if domains else ""
            domain = "/".join(filter(None, (HELDOUT, domain))) if several else domain
            own.append(heldout_prompt(data[number], number, domain))
        prompts += own
        for length in settings.context_lengths:
            for number, prompt in enumerate(own):
                others = (data[(number + offset) % len(data)] for offset in range(1, len(data)))
                prompts.append(lengthen(prompt, others, length))
    return prompts
