"""A process of its own: `python speculators_client.py FOLDER` loads FOLDER/draft with PyPI's speculators and drafts.

Imports nothing of ours. FOLDER holds draft/ (speculators layout) and batch.safetensors; it receives found.safetensors
(the head's output at each TTT step, the tokens it drafted), found.json and saved/, the draft as speculators writes it.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.config import SpeculatorModelConfig


def main(folder: Path) -> None:
    """Load, run the unroll of its trainer on the batch, and leave what came out."""
    assert "tasks" not in sys.modules
    batch = load_file(folder / "batch.safetensors")
    config = SpeculatorModelConfig.from_pretrained(str(folder / "draft"))
    # Its default, flex_attention, would be compiled.
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(str(folder / "draft"), config=config)
    model.eval()
    logits = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0].detach().clone()))
    token_ids = batch["token_ids"]
    with torch.no_grad():
        drafted = model(
            hidden_states=batch["aux_hidden"][None, :-1],
            input_ids=token_ids[None, 1:],
            document_ids=torch.zeros(1, len(token_ids) - 1, dtype=torch.long),
            ttt_steps=int(batch["ttt_steps"]),
        )
    d2t = torch.zeros(model.draft_vocab_size, dtype=torch.long) if model.d2t is None else model.d2t
    save_file(
        {"logits": torch.stack(logits), "drafted": torch.stack(drafted)[:, 0], "d2t": d2t.clone()},
        folder / "found.safetensors",
    )
    given = load_file(folder / "draft" / "model.safetensors").keys()
    report = {
        "class": type(model).__name__,
        "aux_layer_ids": model.target_layer_ids,
        "unknown": sorted(given - model.state_dict().keys()),
        "missing": sorted(model.state_dict().keys() - given),
        "versions": {name: metadata.version(name) for name in ("speculators", "torch", "transformers")},
    }
    (folder / "found.json").write_text(json.dumps(report))
    model.save_pretrained(folder / "saved")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
