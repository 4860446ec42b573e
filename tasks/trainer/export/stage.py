"""The export stage: the trained draft as a folder that engines load; and an exported folder as another one."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.trainer.config import RunConfig
from tasks.trainer.draft.eagle3 import DraftConfig
from tasks.trainer.draft.shape import trained_draft
from tasks.trainer.errors import InputError
from tasks.trainer.export.about import About, Training, measured_taus
from tasks.trainer.export.check import check_folder
from tasks.trainer.export.folder import export_draft, load_exported, read_exported, write_exported
from tasks.trainer.files import read_json
from tasks.trainer.run_dir import RunDir
from tasks.trainer.target_ends import TargetEnds, load_ends
from tasks.trainer.train import checkpoint

# Tokens that a check embeds; a folder alone has no embedding.
_CHECK_TOKENS = 64


def export_run(
    config: RunConfig,
    run: RunDir,
    folder: Path,
    *,
    layout: str | None = None,
    target_name: str | None = None,
    check: bool = False,
) -> dict[str, Any]:
    """Export the best or newest checkpoint (train.export) to `folder`, read it back and compare every tensor.

    layout: None for train.export_layout. target_name: how engines name the target; None for target.model. check: also
    run the folder as its engines do (check.py). Returns the receipt. Raises InputError when the run has no checkpoint,
    or `folder` holds something that is no earlier export.
    """
    prepared = run.receipt("prepare")
    found = checkpoint.load_chosen(run, config.train.export)
    if prepared is None or found is None:
        raise InputError(f"{run.root} has no trained draft yet; run `eyas train` first")
    layout = layout or config.train.export_layout
    ends = load_ends(config.target, device=prepared["device"])
    dtype = ends.head.dtype
    draft = trained_draft(found.shape, found.draft, embedding=ends.embedding, dtype=dtype)
    about = _about(config, run, prepared, ends, step=found.step)
    if target_name is not None:
        about = replace(about, target=target_name)
    export_draft(draft, folder, about=about, dtype=dtype, layout=layout)
    again = load_exported(folder, embedding=ends.embedding)
    for name, tensor in draft.state_dict().items():
        if not torch.equal(tensor, again.state_dict()[name].to(tensor)):
            raise RuntimeError(f"{folder}: {name} does not read back as it was written")
    receipt = {"folder": str(folder), "step": found.step, "dtype": str(dtype).removeprefix("torch."), "layout": layout}
    if check:
        receipt["check"] = _check(folder, found.shape, found.draft, ends.embedding, dtype=dtype, layout=layout)
    return receipt


def export_folder(
    source: Path, folder: Path, *, layout: str | None = None, target_name: str | None = None, check: bool = False
) -> dict[str, Any]:
    """Write an exported draft again, in another layout or for another name of its target.

    Byte for byte the same where neither changes. Arguments and receipt as export_run's. Raises InputError when `source`
    is damaged, leaves something out or is a draft that Eyas does not train.
    """
    exported = read_exported(source)
    exported = replace(
        exported,
        layout=layout or exported.layout,
        about=replace(exported.about, target=target_name or exported.about.target),
    )
    write_exported(exported, folder)
    dtype = str(exported.dtype).removeprefix("torch.")
    receipt: dict[str, Any] = {"folder": str(folder), "dtype": dtype, "layout": exported.layout}
    if check:
        generator = torch.Generator().manual_seed(1)
        embedding = torch.randn(_CHECK_TOKENS, exported.config.hidden_size, generator=generator).to(exported.dtype)
        receipt["check"] = _check(
            folder, exported.config, exported.tensors, embedding, dtype=exported.dtype, layout=exported.layout
        )
    return receipt


def _check(
    folder: Path, shape: DraftConfig, tensors: dict[str, Tensor], embedding: Tensor, *, dtype: torch.dtype, layout: str
) -> dict[str, Any]:
    """On a few of the target's tokens: all of them, in float32 and twice, would take gigabytes."""
    few = replace(shape, target_vocab_size=min(_CHECK_TOKENS, embedding.shape[0]))
    some_rows = embedding[: few.target_vocab_size].cpu()
    own = {**tensors, "t2d": tensors["t2d"][: few.target_vocab_size]}
    trained = trained_draft(few, own, embedding=some_rows, dtype=torch.float32)
    return asdict(check_folder(folder, trained, dtype=dtype, layout=layout))


def _about(config: RunConfig, run: RunDir, prepared: dict[str, Any], ends: TargetEnds, *, step: int) -> About:
    """The card's facts; a table of another checkpoint is left out."""
    evaluation = read_json(run.evaluation) if run.evaluation.is_file() else None
    acceptance = evaluation["acceptance"] if evaluation is not None and evaluation["step"] == step else None
    return About(
        target=config.target.model,
        architectures=tuple(ends.config.architectures or ()),
        draft_tokens=config.evaluate.draft_tokens,
        training=Training(
            data_hash=prepared["data_hash"],
            samples=prepared["train"]["samples"],
            supervised_tokens=prepared["train"]["supervised"],
            steps=step,
            states=config.hidden_states.mode,
            fingerprint=prepared["fingerprint"],
        ),
        taus=() if acceptance is None else measured_taus(acceptance, run.evaluation),
    )
