"""The model card (README.md) of an exported draft: a function of its config.json alone (about.py says why)."""

from __future__ import annotations

import json
import re
from typing import Any

from tasks.trainer.draft.eagle3 import DraftConfig
from tasks.trainer.export.about import About, Training
from tasks.trainer.export.commands import serving_commands

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ENGINES = {"sglang": "SGLang and vLLM", "vllm": "vLLM", "speculators": "vLLM, and the package speculators"}


def model_card(config: DraftConfig, about: About, *, layout: str, dtype: str) -> str:
    """README.md as text. dtype: of the weights, by name."""
    # What is no hub id would be a broken link there.
    base = [f"base_model: {about.target}"] if _HUB_ID.fullmatch(about.target) else []
    name = about.target.rstrip("/").rsplit("/", 1)[-1]
    parts = [
        "\n".join(["---", *base, "tags:", "- eagle3", "- speculative-decoding", "---"]),
        f"# EAGLE-3 draft for {name}",
        f"A draft model for speculative decoding: it proposes tokens, `{about.target}` checks them, and the output "
        f"stays the target's own. It is of no use alone. The folder is in the `{layout}` layout, for "
        f"{_ENGINES[layout]}.",
        "## Serve it",
        "`FOLDER` is this folder.",
        serving_commands(target=about.target, draft="FOLDER", draft_tokens=about.draft_tokens, layout=layout),
        "## Acceptance",
        *_acceptance(about),
        "## Training",
        _training(about.training),
        "## Shape",
        _table(["", ""], _shape(config, dtype)),
    ]
    return "\n\n".join(parts) + "\n"


def _acceptance(about: About) -> list[str]:
    if not about.taus:
        return ["Not measured."]
    rows = []
    for tau in about.taus:
        interval = "-" if tau.low is None or tau.high is None else f"{tau.low:.2f} to {tau.high:.2f}"
        rows.append([tau.prompts, tau.num_prompts, tau.drafting, f"{tau.tau:.3f}", interval])
    return [
        "tau: tokens emitted per forward of the target, its own token included, measured by speculative decoding.",
        _table(["prompts", "number", "drafting", "tau", "95% interval"], rows),
    ]


def _training(training: Training | None) -> str:
    if training is None:
        return "Not trained by Eyas, or before it kept these facts."
    return _table(
        ["", ""],
        [
            ["trained with", "Eyas"],
            ["data", f"`{training.data_hash}`"],
            ["samples", f"{training.samples:,}"],
            ["supervised tokens of an epoch", f"{training.supervised_tokens:,}"],
            ["optimizer steps", f"{training.steps:,}"],
            ["target's states", f"{training.states}, fingerprint `{training.fingerprint}`"],
        ],
    )


def _shape(config: DraftConfig, dtype: str) -> list[list[Any]]:
    return [
        ["variant", config.variant],
        ["decoder layers", config.num_layers],
        ["hidden size", config.hidden_size],
        ["draft vocabulary", f"{config.vocab_size:,} of {config.target_vocab_size:,} tokens"],
        ["reads the outputs of layers", ", ".join(map(str, config.aux_layer_ids)) + " (0-based)"],
        ["longest context", f"{config.max_position_embeddings:,} tokens"],
        ["RoPE", f"`{json.dumps(config.rope_parameters, sort_keys=True)}`"],
        ["weights", dtype],
    ]


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
