"""Does a written folder draft what was trained? Its logits in each engine that loads it, against the draft's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tasks.trainer.acceptance.drafter import Drafter
from tasks.trainer.draft.eagle3 import Eagle3Draft
from tasks.trainer.export.engines import ENGINES_OF, EngineDraft

_ROWS, _STEPS = 24, 3
# Both sides compute in float32 on the same rounded weights, in another order: differences are of some hundred roundings
# of the logits' spread. A wrong switch, name or layer moves them by a tenth of it and more.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Check:
    """What was compared."""

    engines: tuple[str, ...]
    logits: int
    """Compared, of each engine."""
    difference: float
    """Largest, as a share of the logits' standard deviation."""
    rounding: float
    """What the folder's data type moves the trained draft's logits by, in the same measure; 0 for float32."""


def check_folder(folder: Path, trained: Eagle3Draft, *, dtype: torch.dtype, layout: str) -> Check:
    """Draft on random states with the folder, read as each engine reads it, and with the trained draft.

    trained: float32 on the CPU. dtype: the folder's. Raises RuntimeError naming the engine whose logits, target ids or
    auxiliary layers are not the trained draft's: that is a fault of the exporter.
    """
    config = trained.config
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(trained.embedding.shape[0], (_ROWS + _STEPS - 1,), generator=generator)
    aux_hidden = torch.randn(_ROWS, 3 * config.hidden_size, generator=generator)
    exact = _logits(trained, token_ids, aux_hidden)
    rounded = _logits(_copied(trained, dtype), token_ids, aux_hidden)
    spread = float(rounded.std())
    largest = 0.0
    for engine in ENGINES_OF[layout]:
        served = EngineDraft(folder, engine)
        if served.aux_layer_ids != list(config.aux_layer_ids):
            raise RuntimeError(f"{folder}: {engine} feeds it layers {served.aux_layer_ids}, not {config.aux_layer_ids}")
        if not torch.equal(served.target_ids, trained.target_ids):
            raise RuntimeError(f"{folder}: {engine} gives its logits to other tokens than it was trained for")
        embeds = trained.embed(token_ids).to(dtype).float()
        hidden, rows = served.fuse(aux_hidden), []
        with torch.no_grad():
            for step in range(_STEPS):
                logits, fed = served.forward(hidden, embeds[: _ROWS + step])
                rows.append(logits[-1])
                hidden = torch.cat((hidden, fed[-1:]))
        difference = float((torch.stack(rows) - rounded).abs().max()) / spread
        if not difference <= _TOLERANCE:
            raise RuntimeError(f"{folder}: {engine} would draft otherwise, by {difference:.2g} of the logits' spread")
        largest = max(largest, difference)
    moved = float((exact - rounded).abs().max()) / spread
    return Check(ENGINES_OF[layout], rounded.numel(), largest, moved)


def _logits(draft: Eagle3Draft, token_ids: Tensor, aux_hidden: Tensor) -> Tensor:
    """[_STEPS, Vd]: prefill, then one forced token after another."""
    drafter = Drafter(draft)
    drafter.extend(token_ids[:_ROWS], aux_hidden)
    return drafter.forced_logits(token_ids[_ROWS:])


def _copied(draft: Eagle3Draft, dtype: torch.dtype) -> Eagle3Draft:
    """The draft after a round through dtype, float32 again."""
    copy = Eagle3Draft(
        draft.config, embedding=draft.embedding.to(dtype).float(), d2t=draft.d2t.clone(), t2d=draft.t2d.clone()
    )
    weights = {name: value.to(dtype).float() for name, value in draft.named_parameters()}
    copy.load_state_dict({**draft.state_dict(), **weights})
    return copy.requires_grad_(False)
