"""Ranks that share a pack train what one rank trains: processes over gloo, compared sum by sum."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tasks.trainer.draft.layer import Memory
from tests.trainer.draft.conftest import masked
from tests.trainer.draft.context_ranks import Case, run_case, run_ranks, together
from tests.trainer.drafts import VARIANTS

# float64: the same sums in another order. Row losses and alpha are summed in float32.
EXACT = {"rtol": 1e-12, "atol": 1e-13}
SUMMED = {"rtol": 1e-6, "atol": 1e-6}

PACKS = {
    "one document": (masked((True, 90)), (90,)),
    "a long prompt": (masked((False, 150), (True, 25)), (175,)),
    "turns": (masked((False, 40), (True, 9), (False, 50), (True, 33), (False, 36), (True, 12), (False, 40)), (220,)),
    "ragged": (masked((False, 38), (True, 7), (True, 6), (False, 50), (True, 141)), (45, 6, 1, 49, 141)),
    "like ones": (masked(*[(False, 5), (True, 8)] * 12), (13,) * 12),
    "a row": (masked((True, 3)), (3,)),
    "a row among many": (masked((False, 50), (True, 2), (False, 50)), (102,)),
    "nothing counts": (masked((False, 30), (True, 1), (False, 30)), (61,)),
}
SUPERVISED = PACKS["turns"], PACKS["ragged"]


def random_pack(seed: int) -> tuple[Tensor, list[int]]:
    """Documents of 1 to 120 tokens, in runs of supervised ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(120 ** float(torch.rand((), generator=generator))) for _ in range(6)]
    runs = torch.rand(sum(lengths), generator=generator) < 0.2
    return runs.cumsum(0) % 3 != 0, lengths


CASES = {
    **{name: Case([pack]) for name, pack in PACKS.items()},
    "accumulated": Case(list(PACKS.values())),
    "random": Case([random_pack(seed) for seed in range(8)]),
    **{f"draft: {name}": Case(SUPERVISED, draft=draft) for name, draft in VARIANTS.items() if draft},
    "eager, logits": Case(SUPERVISED, attention="eager", loss="torch"),
    "top k": Case(SUPERVISED, top_k=12),
    "steps run again": Case(SUPERVISED, memory=Memory("step")),
    "steps run again, two layers": Case(SUPERVISED, draft=VARIANTS["eagle3.1, two layers"], memory=Memory("step")),
    "MLP runs again in chunks": Case(SUPERVISED, memory=Memory("mlp", 7)),
    "evaluation": Case(SUPERVISED, gradients=False),
    "evaluation, three layers": Case(SUPERVISED, draft=VARIANTS["three layers"], gradients=False),
    "float32": Case(list(PACKS.values()), dtype=torch.float32),
    "bfloat16": Case(list(PACKS.values()), dtype=torch.bfloat16, rounded=True),
}
SOME = {
    name: CASES[name] for name in ("one document", "accumulated", "random", "draft: three layers", "steps run again")
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[dict[str, Tensor]]]:
    """What the ranks found, by their number and the case."""
    results = {}
    for num_ranks, cases in ((2, CASES), (3, SOME)):
        folder = tmp_path_factory.mktemp(f"ranks-{num_ranks}")
        results |= {(num_ranks, name): of for name, of in run_ranks(cases, num_ranks, Path(folder)).items()}
    return results


@cache
def alone(name: str) -> dict[str, Tensor]:
    return run_case(CASES[name])


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [*((2, name) for name in CASES if CASES[name].dtype == torch.float64), *((3, name) for name in SOME)],
)
def test_ranks_together_are_one_rank(
    num_ranks: int, name: str, found: dict[tuple[int, str], list[dict[str, Tensor]]]
) -> None:
    """Red when a key or its gradient is lost, doubled or misplaced on its way, a step reads a neighbour's token or
    soft target, a row counts twice or on no rank, or ranks without rows leave the others waiting."""
    sums, expected = together(found[num_ranks, name]), alone(name)
    assert sums.keys() == {key for key in expected if not key.startswith("rows ")}
    for key, value in sums.items():
        tolerance = SUMMED if key in ("loss", "loss_sums", "alpha_sums") else EXACT
        torch.testing.assert_close(value, expected[key], **tolerance, msg=lambda text, key=key: f"{key}: {text}")
    if CASES[name].gradients and name not in ("nothing counts", "a row", "a row among many"):
        assert expected["gradient midlayer.self_attn.k_proj.weight"].abs().max() > 1e-3, "rounding is no gradient"


def test_float32_is_as_close_as_its_sums(found: dict[tuple[int, str], list[dict[str, Tensor]]]) -> None:
    """Red when gradients of ranks differ from one rank's by more than float32's own error of a sum, 1e-5."""
    sums, expected = together(found[2, "float32"]), alone("float32")
    for key in sums:
        if key.startswith(("gradient", "aux_hidden")):
            error = (sums[key] - expected[key]).norm() / expected[key].norm().clamp(min=1e-30)
            assert error < 1e-5, f"{key}: {error:.1e}"


def test_bfloat16_loses_no_more_than_one_rank_does(found: dict[tuple[int, str], list[dict[str, Tensor]]]) -> None:
    """Red when gradients of keys lose on their way back what they do not lose on one rank. Truth: float64 on the same
    weights and states; the bound: twice one rank's own error, for a norm's gradient is 32 rounded numbers."""
    truth = run_case(replace(CASES["bfloat16"], dtype=torch.float64))
    sums, one = together(found[2, "bfloat16"]), alone("bfloat16")
    for key in sums:
        if key.startswith(("gradient", "aux_hidden")):
            own, bound = (float((of[key].double() - truth[key]).norm()) for of in (sums, one))
            assert own <= 2 * bound + 1e-12, f"{key}: {own:.3e} against {bound:.3e}"
