"""PyPI's speculators loads our export, drafts the same logits, and what it writes comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.trainer.export.warm_start import read_parent
from tests.interop.cases import TARGET_VOCAB, TOKENS, TTT_STEPS, ask, make_case, our_logits

pytestmark = pytest.mark.interop

SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "whole vocabulary, two layers": {"vocab_size": TARGET_VOCAB, "num_layers": 2},
    "eagle3.1, yarn": {
        "variant": "eagle3.1",
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
                            "original_max_position_embeddings": 16},
    },
}  # fmt: skip
# float32, in another order of operations, on logits of order 10. Its rows start at position 1 and ours at 0: the same
# drafts, for RoPE tells differences only.
TOLERANCE = 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_it_drafts_what_we_trained(shape: str, target_folder: Path, tmp_path: Path) -> None:
    """Red when a tensor is missing or unknown to it, a key means something else to it, or it drafts other logits."""
    case = make_case(target_folder, **SHAPES[shape])
    folder = tmp_path / "with"
    mask = torch.ones(TOKENS, dtype=torch.bool)
    report = ask("speculators_client.py", case, target_folder, folder, layout="speculators", peer_mask=mask)
    assert report["class"] == "Eagle3DraftModel"
    assert report["versions"]["speculators"] == "0.9.0"
    assert report["unknown"] == []
    # The target's own, which it reads from the target.
    assert report["missing"] == ["embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"]
    # Its ids are of the states that enter a layer.
    assert report["aux_layer_ids"] == [layer + 1 for layer in case.draft.config.aux_layer_ids]
    found, expected = load_file(folder / "found.safetensors"), our_logits(case)
    assert torch.equal(found["d2t"], case.draft.d2t)
    assert found["logits"].shape[0] == TTT_STEPS
    for step in range(TTT_STEPS):
        rows = slice(0, TOKENS - 1 - step)
        torch.testing.assert_close(found["logits"][step, rows], expected[step, rows], rtol=0, atol=TOLERANCE)
        assert torch.equal(found["drafted"][step, rows], expected[step, rows].argmax(-1))
    # And back: what it saves is the same draft.
    back = read_parent(str(folder / "saved"), case.draft.config)
    assert back.config == case.draft.config
    for name, tensor in case.draft.state_dict().items():
        assert torch.equal(back.tensors[name], tensor), name
