"""A process of its own: `python specforge_client.py FOLDER` loads FOLDER/draft with PyPI's specforge and trains a step.

Imports nothing of ours. FOLDER holds draft/ (sglang layout), target/ and batch.safetensors; it receives
found.safetensors (the head's output and the loss of each TTT step), found.json and saved/, the draft as SpecForge
writes it. On a CPU its loss kernel runs in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.modeling.auto import AutoDraftModel
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.contracts import TrainBatch
from specforge.training.model_loading import warm_start_draft_model
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import nn
from transformers import AutoConfig


def main(folder: Path) -> None:
    """Load, run the forward of its trainer on the batch, and leave what came out."""
    assert "tasks" not in sys.modules
    batch = load_file(folder / "batch.safetensors")
    # As its trainer starts from an earlier draft: made anew, then given the weights. (Its from_pretrained alone leaves
    # the RoPE tables unset under transformers 5.)
    config = AutoConfig.from_pretrained(folder / "draft")
    draft = AutoDraftModel.from_config(config, torch_dtype=torch.float32, attention_backend="sdpa")
    warm_start_draft_model(
        draft, str(folder / "draft"), draft_config=config, strategy="eagle3", allow_missing_embedding=True
    )
    draft.load_embedding(str(folder / "target"))
    logits = []
    draft.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0].detach().clone()))
    head = TargetHead.__new__(TargetHead)  # its own constructor reads a checkpoint's files
    nn.Module.__init__(head)
    head.fc = nn.Linear(*reversed(batch["head"].shape), bias=False)
    head.fc.weight.data.copy_(batch["head"])
    model = OnlineEagle3Model(draft, length=int(batch["ttt_steps"]), attention_backend="sdpa")
    tensors = {
        "input_ids": batch["token_ids"][None],
        "attention_mask": torch.ones(1, len(batch["token_ids"]), dtype=torch.long),
        "loss_mask": batch["peer_mask"][None].long(),
        "hidden_state": batch["aux_hidden"][None],
        "target": batch["last_hidden"][None],
    }
    step = Eagle3TrainStrategy(model, target_head=head).forward_loss(
        TrainBatch(["one"], "eagle3", tensors, {"target_repr": "hidden_state"})
    )
    losses = torch.stack([loss.float() for loss in step.metrics["plosses"]])
    save_file({"logits": torch.stack(logits), "losses": losses}, folder / "found.safetensors")
    given = load_file(folder / "draft" / "model.safetensors").keys()
    report = {
        "class": type(draft).__name__,
        "unknown": sorted(given - draft.state_dict().keys()),
        "missing": sorted(draft.state_dict().keys() - given),
        "versions": {name: metadata.version(name) for name in ("specforge", "torch", "transformers")},
    }
    (folder / "found.json").write_text(json.dumps(report))
    draft.save_pretrained(folder / "saved")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
