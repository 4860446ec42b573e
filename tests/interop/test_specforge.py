"""PyPI's specforge loads our export, drafts the same logits and has the same losses, and what it writes comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tasks.trainer.draft.alignment import align
from tasks.trainer.export.warm_start import read_parent
from tests.interop.cases import (
    TOKENS,
    TTT_STEPS,
    Case,
    ask,
    make_case,
    our_logits,
    our_loss_sums,
)

pytestmark = pytest.mark.interop

# One layer and a draft vocabulary: it knows no more layers, and refuses a folder without d2t and t2d; with them, vLLM
# would stop where the vocabulary is the target's.
SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "long context": {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    },
}  # fmt: skip
TOLERANCE = 1e-3  # of logits of order 10, in float32
LOSS_TOLERANCE = 1e-4  # relative: sums of some dozen row losses of order 10


@pytest.mark.parametrize("shape", SHAPES)
def test_it_drafts_and_weighs_what_we_do(shape: str, target_folder: Path, tmp_path: Path) -> None:
    """Red when it lacks a tensor or knows none of ours, drafts other logits, or has another loss for the same rows.

    It counts row p of step k by the mask of token p + k, ours by those of tokens p + 1 to p + 2 + k: with this mask of
    its, both count the same rows. It divides a step's sum by all rows, we by those that count.
    """
    case = make_case(target_folder, **SHAPES[shape])
    folder = tmp_path / "with"
    everything = torch.ones(TOKENS, dtype=torch.bool)
    same_rows = torch.arange(TOKENS) <= TOKENS - 3
    report = ask("specforge_client.py", case, target_folder, folder, layout="sglang", peer_mask=same_rows)
    assert report["versions"]["specforge"] == "0.2.0"
    assert report["class"] == "LlamaForCausalLMEagle3"
    assert report["unknown"] == []
    assert report["missing"] == ["embed_tokens.weight"], "that is the target's"
    found, expected = load_file(folder / "found.safetensors"), our_logits(case)
    for step in range(TTT_STEPS):
        rows = slice(0, TOKENS - 1 - step)
        torch.testing.assert_close(found["logits"][step, rows], expected[step, rows], rtol=0, atol=TOLERANCE)
    sums, rows_of_steps = our_loss_sums(case, everything)
    assert rows_of_steps.tolist() == [TOKENS - 2 - step for step in range(TTT_STEPS)]
    torch.testing.assert_close(found["losses"].double() * TOKENS, sums, rtol=LOSS_TOLERANCE, atol=0)
    back = read_parent(str(folder / "saved"), case.draft.config)
    assert back.config == case.draft.config
    for name, tensor in case.draft.state_dict().items():
        assert torch.equal(back.tensors[name], tensor), name


def row_losses(case: Case) -> Tensor:
    """Loss of row p at step k from our logits, float64 [K, T]: 0 where the target's token is none of the draft's, or
    where there is no target."""
    logits, target = our_logits(case).double(), (case.last_hidden @ case.head.T).double()
    losses = torch.zeros(TTT_STEPS, TOKENS, dtype=torch.float64)
    for step in range(TTT_STEPS):
        for row in range(TOKENS - 1 - step):
            of_target = target[row + 1 + step]
            if bool(case.draft.t2d[of_target.argmax()]):
                soft = of_target[case.draft.target_ids].softmax(-1)
                losses[step, row] = -(soft * logits[step, row].log_softmax(-1)).sum()
    return losses


def test_the_stated_difference_is_the_only_one(target_folder: Path, tmp_path: Path) -> None:
    """Red when the losses of a chat differ by anything but the rows that count: two answers, each mask taken as it is.

    SpecForge shifts tokens and targets, not the mask: it leaves out the round that begins before an answer's first
    token, and counts rounds that run past its last.
    """
    case = make_case(target_folder)
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[6:15] = mask[22:36] = True
    ask("specforge_client.py", case, target_folder, tmp_path / "with", layout="sglang", peer_mask=mask)
    theirs = load_file(tmp_path / "with" / "found.safetensors")["losses"].double() * TOKENS
    ours, _ = our_loss_sums(case, mask)
    losses, counts = row_losses(case), align(mask, [TOKENS], TTT_STEPS).counts
    torch.testing.assert_close(ours, (losses * counts).sum(1), rtol=LOSS_TOLERANCE, atol=0)
    of_peer = torch.stack([torch.nn.functional.pad(mask, (0, step))[step:] for step in range(TTT_STEPS)])
    torch.testing.assert_close(theirs, (losses * of_peer).sum(1), rtol=LOSS_TOLERANCE, atol=0)
    missed, beyond = (counts & ~of_peer).sum(1), (of_peer & ~counts).sum(1)
    # Step 0: the round before each of the two answers; the two rounds at the end of each.
    assert (int(missed[0]), int(beyond[0])) == (2, 4)
