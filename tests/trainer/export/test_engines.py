"""A folder of each layout as the engines run it, and what `--check` finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.export.about import About
from tasks.trainer.export.check import check_folder
from tasks.trainer.export.commands import LAYOUTS
from tasks.trainer.export.engines import ENGINES_OF, EngineDraft
from tasks.trainer.export.folder import export_draft
from tests.trainer.drafts import TARGET_VOCAB, random_draft

SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "whole vocabulary": {"vocab_size": TARGET_VOCAB},
    "eagle3.1": {"variant": "eagle3.1"},
    "eagle3.1, two layers": {"variant": "eagle3.1", "num_layers": 2},
    "yarn": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
                            "original_max_position_embeddings": 16},
    },
}  # fmt: skip
PLACES = [(layout, engine) for layout in LAYOUTS for engine in ENGINES_OF[layout]]
# float32, some hundred operations on logits of order 10.
TOLERANCE = 1e-3


@pytest.mark.parametrize(("layout", "engine"), PLACES)
@pytest.mark.parametrize("shape", SHAPES)
def test_engines_draft_what_we_trained(shape: str, layout: str, engine: str, tmp_path: Path) -> None:
    """Red when a weight has another name or role than an engine gives it, or a key in config.json tells it of another
    draft: the first and the second drafted token's logits differ."""
    draft = random_draft(torch.float32, **SHAPES[shape])
    export_draft(draft, tmp_path / "out", about=About("t"), dtype=torch.float32, layout=layout)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(TARGET_VOCAB, (10,), generator=generator)
    aux_hidden = torch.rand(9, 96, generator=generator) - 0.5
    drafter = Drafter(draft)
    drafter.extend(token_ids[:9], aux_hidden)
    expected = drafter.forced_logits(token_ids[9:])
    served = EngineDraft(tmp_path / "out", engine)
    assert served.aux_layer_ids == list(draft.config.aux_layer_ids)
    with torch.no_grad():
        fused, embeds = served.fuse(aux_hidden), draft.embed(token_ids)
        first, fed = served.forward(fused, embeds[:9])
        second, _ = served.forward(torch.cat((fused, fed[-1:])), embeds)
    found = torch.stack((first[-1], second[-1]))
    assert float((expected[0] - expected[1]).abs().max()) > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_the_twins_rope_is_transformers_own(tmp_path: Path) -> None:
    """Red when the twin and our draft share a mistake in the angles: transformers' own module reads the same file."""
    export_draft(random_draft(**SHAPES["yarn"]), tmp_path / "out", about=About("t"), dtype=torch.float32)
    rotary = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path / "out"))
    positions = torch.arange(64)[None]
    cos, _ = rotary(torch.zeros(1), positions)
    served = EngineDraft(tmp_path / "out", "vLLM")
    angles = positions[0, :, None] * served._frequencies
    torch.testing.assert_close(cos[0, :, :8], angles.cos() * served._scale)


def _config(**changes: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: config.update(changes)


def _swap(one: str, other: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def swap(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return swap


FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], None], str]] = {
    "gate and up": (_swap("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"), "would draft otherwise"),
    "the two norms": (
        _swap("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"),
        "would draft otherwise",
    ),
    "the fed output": (_config(norm_output=True), "would draft otherwise"),
    "the residual": (_config(norm_before_residual=True), "would draft otherwise"),
    "the rope": (
        _config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        "would draft otherwise",
    ),
    "layers of vLLM": (_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), "vLLM feeds it layers"),
    "layers of SGLang": (
        _config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
        "SGLang feeds it layers",
    ),
    "the map": (lambda config, tensors: tensors["d2t"].add_(1), "to other tokens"),
    "a number that is none": (lambda config, tensors: tensors["norm.weight"].fill_(torch.nan), "by nan"),
}


def test_a_check_of_each_layout(tmp_path: Path) -> None:
    """Red when a sound folder fails, or bfloat16's rounding is not told from a fault."""
    draft = random_draft(torch.float32)
    for layout in LAYOUTS:
        for dtype in (torch.float32, torch.bfloat16):
            export_draft(draft, tmp_path / "out", about=About("t"), dtype=dtype, layout=layout)
            check = check_folder(tmp_path / "out", draft, dtype=dtype, layout=layout)
            assert check.engines == ENGINES_OF[layout]
            assert check.logits == 3 * draft.config.vocab_size
            assert check.difference < 1e-4
            assert (check.rounding == 0) == (dtype == torch.float32)


@pytest.mark.parametrize("name", FAULTS)
def test_a_check_finds_what_is_wrong(name: str, tmp_path: Path) -> None:
    """Red when a folder that an engine would run otherwise passes: each fault is one of a single name or key."""
    damage, message = FAULTS[name]
    draft, folder = random_draft(torch.float32), tmp_path / "out"
    export_draft(draft, folder, about=About("t"), dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    damage(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RuntimeError, match=message):
        check_folder(folder, draft, dtype=torch.float32, layout="sglang")
