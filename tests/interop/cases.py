"""One draft and one batch, ours and a client's: what is handed over, and what our unroll makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.trainer.draft.alignment import align, target_rows
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.draft.ttt import Computation, unroll, unroll_hidden
from tasks.trainer.export.about import About
from tasks.trainer.export.folder import export_draft
from tasks.trainer.train.batches import Batch
from tests.trainer.drafts import random_draft

TOKENS, TTT_STEPS, TARGET_VOCAB = 40, 3, 300
COMPUTATION = Computation(attention="eager", loss="torch")


@dataclass(frozen=True, slots=True)
class Case:
    """A draft for the tiny target, one document of random tokens and states, and the target's head [V, D]."""

    draft: Eagle3Draft
    token_ids: Tensor
    aux_hidden: Tensor
    last_hidden: Tensor
    head: Tensor


def make_case(target: Path, **shape: Any) -> Case:
    """The draft has random weights and the target's embedding."""
    shape = {"target_vocab_size": TARGET_VOCAB, **shape}
    draft = random_draft(torch.float32, **shape)
    draft.embedding.copy_(load_file(target / "model.safetensors")["model.embed_tokens.weight"].float())
    generator = torch.Generator().manual_seed(3)
    size = draft.config.hidden_size
    return Case(
        draft,
        torch.randint(TARGET_VOCAB, (TOKENS,), generator=generator),
        torch.rand(TOKENS, 3 * size, generator=generator) - 0.5,
        torch.rand(TOKENS, size, generator=generator) - 0.5,
        4 * torch.rand(TARGET_VOCAB, size, generator=generator) - 2,
    )


def our_logits(case: Case) -> Tensor:
    """[K, T, Vd] of all rows; row p of step k is real where p + 1 + k < T."""
    everything = torch.ones(TOKENS, dtype=torch.bool)
    hidden = unroll_hidden(
        case.draft,
        aux_hidden=case.aux_hidden,
        token_ids=case.token_ids,
        document_lengths=[TOKENS],
        alignment=align(everything, [TOKENS], TTT_STEPS),
        computation=COMPUTATION,
    )
    with torch.no_grad():
        return torch.stack([case.draft.lm_head(rows) for rows in hidden])


def our_loss_sums(case: Case, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the row losses of each step and the numbers of rows, float64 [K]."""
    logits = case.last_hidden @ case.head.T
    rows = target_rows(loss_mask, [TOKENS])
    batch = Batch(
        sample_ids=("one",),
        document_lengths=(TOKENS,),
        token_ids=case.token_ids,
        loss_mask=loss_mask,
        aux_hidden=case.aux_hidden,
        target_rows=rows,
        target_argmax=logits.argmax(-1)[rows].int(),
        target_lse=logits.logsumexp(-1)[rows],
        last_hidden=case.last_hidden[rows],
    )
    found = unroll(
        case.draft,
        batch,
        ttt_steps=TTT_STEPS,
        row_weight=[1.0] * TTT_STEPS,
        head=case.draft.target_head(case.head),
        draft_ids=case.draft.draft_ids(),
        computation=COMPUTATION,
    )
    return found.loss_sums, found.rows


def ask(client: str, case: Case, target: Path, folder: Path, *, layout: str, peer_mask: Tensor) -> dict[str, Any]:
    """Hand the exported draft and the batch to a client's process; its report. Fails with its last words."""
    folder.mkdir()
    about = About(str(target), ("LlamaForCausalLM",))
    export_draft(case.draft, folder / "draft", about=about, dtype=torch.float32, layout=layout)
    (folder / "target").symlink_to(target)
    tensors = {
        "token_ids": case.token_ids,
        "aux_hidden": case.aux_hidden,
        "last_hidden": case.last_hidden,
        "head": case.head,
        "peer_mask": peer_mask,
        "ttt_steps": torch.tensor(TTT_STEPS),
    }
    save_file(tensors, folder / "batch.safetensors")
    script = Path(__file__).with_name(client)
    # -P: neither the repository nor this folder is on its path. Nothing is compiled: it would take minutes on a CPU.
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(clients_folder()),
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(folder)], env=env, cwd=folder, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return report


def clients_folder() -> Path:
    """Where `make interop` installs the clients."""
    folder = Path(os.environ.get("EYAS_INTEROP", Path(sys.prefix) / "interop"))
    assert (folder / "speculators").is_dir(), f"no clients in {folder}: run `make interop`, which installs them"
    return folder
