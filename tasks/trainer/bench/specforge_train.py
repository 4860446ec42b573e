"""Train a draft with SpecForge on packs that Eyas trained on: `python specforge_train.py FOLDER`, a process of its own.

Imports nothing of ours but the file beside it. FOLDER holds packs.safetensors, settings.json and target/ (see
quality.py); it receives draft/, in SpecForge's layout, and peer.json. Each pack is one row, padded to the pack's length
so that nothing is compiled twice; the target runs over the row as it is, as SpecForge's online mode does.
"""

# mypy: ignore-errors
# (the peer is not installed where types are checked)
from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from specforge.runtime.contracts import TrainBatch
from specforge.training.controller import TrainerCore
from specforge_step import Model, versions
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

_WARM_UP_STEPS = 20  # compilation is not counted


class States:
    """The target's states of one row, as SpecForge's batches hold them."""

    def __init__(self, folder: Path, aux_layer_ids: list[int], device: torch.device, dtype: torch.dtype) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval().requires_grad_(False)
        self._layers = aux_layer_ids

    @torch.no_grad()
    def of(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [1, T, 3D] and target [1, T, D] of token_ids [1, T]."""
        output = self.model.get_decoder()(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        return torch.cat([output.hidden_states[layer + 1] for layer in self._layers], -1), output.last_hidden_state


def draft_settings(target: Any) -> dict[str, Any]:
    """What the draft's config takes from the target's."""
    rope = dict(getattr(target, "rope_parameters", None) or {})
    return {
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_parameters": rope,
    }


def main(folder: Path) -> None:
    """Train, then leave the draft and what it took."""
    settings = json.loads((folder / "settings.json").read_text())
    packs = load_file(folder / "packs.safetensors")
    device = torch.device(settings["device"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(settings["seed"])
    target_config = AutoConfig.from_pretrained(folder / "target")
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    model = Model(
        settings["shape"], device, dtype, attention,
        config=draft_settings(target_config),
        optimizer={"lr": settings["learning_rate"], "total_steps": settings["steps"]},
    )  # fmt: skip
    states = States(folder / "target", settings["aux_layer_ids"], device, dtype)
    with torch.no_grad():
        model.draft.embed_tokens.weight.copy_(states.model.get_input_embeddings().weight)
        model.head.fc.weight.copy_(states.model.get_output_embeddings().weight)
        model.draft.t2d.copy_(packs["t2d"].bool())
        model.draft.d2t.copy_(packs["d2t"])
    core = TrainerCore(model.strategy("specforge"), model.backend)
    bounds, length = packs["bounds"].tolist(), settings["pack_tokens"]
    tokens, started, target_seconds, losses = 0, time.monotonic(), 0.0, []
    for step in range(settings["steps"]):
        first, last = bounds[step : step + 2]
        missing = length - (last - first)

        def row(name: str, first: int = first, last: int = last, missing: int = missing) -> Tensor:
            values = packs[name][first:last].long()
            return torch.nn.functional.pad(values, (0, missing))[None].to(device)

        if step == _WARM_UP_STEPS:
            _synchronise(device)
            tokens, started, target_seconds = 0, time.monotonic(), 0.0
        token_ids, loss_mask = row("token_ids"), row("loss_mask")
        asked = time.monotonic()
        hidden, last_hidden = states.of(token_ids)
        target_seconds += time.monotonic() - asked
        tensors = {
            "attention_mask": (torch.arange(length, device=device) < last - first).long()[None],
            "loss_mask": loss_mask,
            "target": last_hidden,
            "hidden_state": hidden,
            "input_ids": token_ids,
        }
        result = core.train_step(TrainBatch(["pack"], "eagle3", tensors, {"target_repr": "hidden_state"}))
        if not math.isfinite(result.loss):
            raise FloatingPointError(f"loss {result.loss} at step {step}")
        losses.append(float(result.loss))
        tokens += last - first
        if (step + 1) % 100 == 0:
            speed = tokens / (time.monotonic() - started)
            print(f"step {step + 1} of {settings['steps']}: loss {losses[-1]:.4f}, {speed:.0f} tokens/s", flush=True)
    _synchronise(device)
    seconds = time.monotonic() - started
    draft = folder / "draft"
    draft.mkdir(exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in model.draft.state_dict().items()}
    save_file(
        {name: value for name, value in weights.items() if "embed_tokens" not in name}, draft / "model.safetensors"
    )
    config = {**model.draft.config.to_dict(), "architectures": ["LlamaForCausalLMEagle3"]}
    (draft / "config.json").write_text(json.dumps(config, indent=1))
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    report = {
        "tokens": int(bounds[settings["steps"]]),
        "tokens_per_s": tokens / seconds,
        "target_launch_s": target_seconds,
        "seconds": seconds,
        "peak_gib": peak,
        "losses": losses[:: max(1, len(losses) // 100)],
        "versions": versions(),
    }
    (folder / "peer.json").write_text(json.dumps(report))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
