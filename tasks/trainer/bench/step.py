"""What `eyas bench step` measures: forward, backward, clipping and AdamW with float32 masters, for one batch.

The draft has the shape for Qwen3-8B; states, token ids and weights are random, one document a batch.

    eyas        the trainer's own `train_pack` and `Optimizer` as train.* defaults run them on the GPU
    eyas_ckpt   the same with train.checkpointing=step and train.mlp_chunk_rows=32768
    specforge   `TrainerCore.train_step` of SpecForge with its Eagle3TrainStrategy, OnlineEagle3Model (flex_attention),
                FSDPTrainingBackend left unwrapped (on one GPU wrapping only costs) and BF16Optimizer. Its offline
                target path both ways, full logits by TargetHead and the compact teacher; the faster counts (see shape).

The error is that of all gradients of one small batch, relative L2, against the same trainer in float32 with dense
attention.

The longest context: states stay on the CPU and are moved inside the step, as offline training does; sizes double until
one does not fit or the cap is reached (ours begins there), then the range is halved down to a grain. One step a
size, not warmed up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels.bench import layouts
from kernels.bench.results import Row
from kernels.bench.runner import Bench, Case, Group

TTT_STEPS = 7
TOKENS = (8192, 16384, 32768)
LONGEST = "longest"
_PARTLY = 16384  # from here on also with a quarter of the rows supervised
_LONG = 32768  # three rounds are enough
DRAFT = {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 12288,
         "vocab_size": 32000, "target_vocab_size": 151936}  # fmt: skip
TINY = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48,
         "vocab_size": 40, "target_vocab_size": 64}  # fmt: skip
_PEER_VARIANTS = ("specforge_full", "specforge_compact")


def groups(peer: Group | None) -> dict[str, Group]:
    """The processes: ours, and the peer's when there is one."""
    ours = {"ours": Group("tasks.trainer.bench.step_case")}
    return ours if peer is None else {**ours, "specforge": peer}


def specforge_file() -> str:
    """What the peer's process loads."""
    return str(Path(__file__).parent / "specforge_step.py")


def cases(tokens: Sequence[int], *, against: bool, device: str = "cuda", tiny: bool = False) -> list[Case]:
    """Every case of the tables. tiny: shapes for a test on the CPU."""
    found = []
    for length in tokens:
        variants = {"eyas": "ours", "eyas_ckpt": "ours"}
        if against:
            variants |= dict.fromkeys(_PEER_VARIANTS, "specforge")
        found.append(_case(length, layouts.ALL, variants, device=device, tiny=tiny))
        if length >= _PARTLY or tiny:
            for layout in (layouts.ANSWER, layouts.TURNS):
                found.append(_case(length, layout, {"eyas": "ours"}, device=device, tiny=tiny))
    return found


def _case(
    tokens: int, layout: str, variants: Mapping[str, str], *, device: str, tiny: bool, states: str = "device"
) -> Case:
    draft = TINY if tiny else DRAFT
    steps = 2 if tiny else TTT_STEPS
    dtype = "float32" if device == "cpu" else "bfloat16"
    settings: dict[str, Any] = {**draft, "ttt_steps": steps, "dtype": dtype}
    return Case(
        work="step",
        tokens=tokens,
        vocab=draft["vocab_size"],
        supervised=1.0 if layout in (layouts.ALL, LONGEST) else 0.25,
        shape=shape_of(layout, settings),
        settings={**settings, "tokens": tokens, "layout": layouts.ALL if layout == LONGEST else layout,
                  "states": states},
        problem={**settings, "tokens": 64 if tiny else 512, "layout": layouts.ALL, "states": "device"},
        variants=variants,
        rounds=3 if tokens >= _LONG else 99,
        trim=True,
        fastest={"specforge": _PEER_VARIANTS} if _PEER_VARIANTS[0] in variants else {},
    )  # fmt: skip


def shape_of(layout: str, settings: Mapping[str, Any]) -> str:
    """The shape cell of a case's rows."""
    return (
        f"{layout}; {settings['ttt_steps']} steps; D {settings['hidden_size']}; {settings['num_heads']}/"
        f"{settings['num_kv_heads']} heads x {settings['head_dim']}; MLP {settings['intermediate_size']}; "
        f"V {settings['target_vocab_size']}; {settings['dtype']}"
    )


def measure(bench: Bench, found: Sequence[Case]) -> None:
    """Take the cases in order. Raises BenchError in the end when some could not be measured."""
    for case in found:
        bench.measure(case)
    bench.finish()


def measure_longest(
    bench: Bench,
    *,
    against: bool,
    start: int = 32768,
    cap: int = 262144,
    grain: int = 8192,
    device: str = "cuda",
    tiny: bool = False,
) -> None:
    """The longest context of eyas_ckpt (up to cap) and of the peer (without one), a row each, layout "longest"."""

    def attempt(tokens: int, variants: Mapping[str, str]) -> tuple[list[Row], list[dict[str, Any]]]:
        case = _case(tokens, LONGEST, variants, device=device, tiny=tiny, states="cpu")
        return bench.take(replace(case, problem=None, rounds=1, warm=False))

    # Ours is tried at the cap first: it fits where this was written, and a step there takes most of a minute.
    searches: list[tuple[Mapping[str, str], int]] = [({"eyas_ckpt": "ours"}, cap)]
    if against:
        # The compact teacher never holds logits of the whole vocabulary, so it is what reaches furthest.
        searches.append(({"specforge_compact": "specforge"}, start))
    for variants, first in searches:
        best: tuple[list[Row], list[dict[str, Any]]] | None = None
        tokens, lost = first, 0
        while tokens:
            rows, raw = attempt(tokens, variants)
            if not rows:  # it failed otherwise than by running out of memory
                bench.finish()
            if rows[0].ms is None:
                lost = tokens
            else:
                best = rows, raw
            tokens = _next_size(best[0][0].tokens if best else 0, lost, cap=cap, grain=grain)
        if best is None:
            bench.say(f"{next(iter(variants))} does not train {grain} tokens")
            continue
        note = f"out of memory at {lost}" if lost else f"not tried past {cap}"
        bench.record([replace(row, variant=row.variant.removesuffix("_compact"), shape=f"{row.shape}; {note}")
                      for row in best[0]], best[1])  # fmt: skip


def _next_size(good: int, lost: int, *, cap: int, grain: int) -> int:
    """The size to try after `good` fitted and `lost` did not (0: none yet); 0 when the search is over."""
    if not lost:
        return min(2 * good, cap) if good < cap else 0
    middle = (good + lost) // 2 // grain * grain
    return middle if good < middle < lost else 0
