"""The export stage: the trained draft as a folder that engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tasks.trainer.config import RunConfig
from tasks.trainer.draft.shape import trained_draft
from tasks.trainer.errors import InputError
from tasks.trainer.export.sglang import export_draft, load_exported
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target_ends import load_ends
from tasks.trainer.train import checkpoint


def export_run(config: RunConfig, run: RunDir, folder: Path) -> dict[str, Any]:
    """Export the best or newest checkpoint (train.export) to `folder`, read it back and compare every tensor.

    Returns the receipt. Raises InputError when the run has no checkpoint, or `folder` holds something that is
    no earlier export.
    """
    prepared = run.receipt("prepare")
    found = checkpoint.load_chosen(run, config.train.export)
    if prepared is None or found is None:
        raise InputError(f"{run.root} has no trained draft yet; run `eyas train` first")
    ends = load_ends(config.target, device=prepared["device"])
    dtype = ends.head.dtype
    draft = trained_draft(found.shape, found.draft, embedding=ends.embedding, dtype=dtype)
    export_draft(draft, folder, target_name=config.target.model, dtype=dtype)
    again = load_exported(folder, embedding=ends.embedding)
    for name, tensor in draft.state_dict().items():
        if not torch.equal(tensor, again.state_dict()[name].to(tensor)):
            raise RuntimeError(f"{folder}: {name} does not read back as it was written")
    return {"folder": str(folder), "step": found.step, "dtype": str(dtype).removeprefix("torch.")}
