"""The goals: computable from what the benchmarks record, and true of the committed results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kernels.bench import attention, layouts, loss, results
from kernels.bench.goals import GOALS, Goal, evaluate
from kernels.bench.results import Row
from kernels.bench.runner import Case
from tasks.trainer.bench import packed, plan, step

Make = Callable[..., Row]

# A machine on which every goal is just met: time and memory by variant, in made-up units.
MS = {"plain_causal": 100.0, "fused": 104.0, "flex": 180.0, "flex_concat": 230.0, "eager": 900.0, "flex_mask": 0.1,
      "triton": 1.0, "compile": 1.1, "copy": 0.6, "linear": 10.0, "matmul": 8.1, "specforge": 11.0,
      "eyas": 6.0, "eyas_ckpt": 8.0, "packed": 4.0, "padded": 10.4, "padded_budget": 8.0,
      "padded_skip": 6.0}  # fmt: skip
GIB = {"flex_mask": 0.05, "flex": 2.0, "eager": 100.0, "linear": 0.9, "triton": 20.0, "specforge": 29.0,
       "eyas": 17.0, "eyas_ckpt": 9.5}  # fmt: skip
MS["measured"] = 1.0


def rows_of(cases: Sequence[Case], row: Make) -> list[Row]:
    """The rows that the runner would record for these cases, made up."""
    found = []
    for case in cases:
        names = {variant: name for name, variants in case.fastest.items() for variant in variants}
        for variant in dict.fromkeys(names.get(variant, variant) for variant in case.variants):
            ms = MS[variant] * (0.15 if case.shape.startswith(layouts.DOCUMENTS) else 1.0)
            ms *= 0.3 if case.supervised < 1 else 1.0
            gib = GIB.get(variant, 1.0)
            found.append(
                row(work=case.work, variant=variant, tokens=case.tokens, vocab=case.vocab, supervised=case.supervised,
                    shape=case.shape, ms=ms, peak_gib=gib, extra_gib=gib / (10 if variant == "linear" else 1),
                    tokens_per_s=case.tokens / ms * 1e3)
            )  # fmt: skip
    return found


@pytest.fixture
def met(row: Make) -> list[Row]:
    """Results of a full run of everything, every goal met."""
    longest = [row(work="step", variant="eyas_ckpt", tokens=262144, shape="longest; 7 steps"),
               row(work="step", variant="specforge", tokens=57344, shape="longest; 7 steps")]  # fmt: skip
    return [
        *rows_of(attention.cases(), row),
        *rows_of(loss.cases(against=True), row),
        *rows_of(step.cases(step.TOKENS, against=True), row),
        *rows_of(packed.cases(), row),
        *(
            pair
            for case in rows_of(plan.cases(), row)
            for pair in (replace(case, peak_gib=10.0), replace(case, variant="predicted", peak_gib=10.9, ms=None))
        ),
        *(replace(one, run="20260102T000000Z-0000") for one in longest),
    ]


def test_every_goal_is_computed_from_what_the_benchmarks_record(met: list[Row]) -> None:
    """Red when a goal asks for a case, variant or cell that no benchmark records."""
    for goal in GOALS:
        outcome = evaluate(goal, met)
        assert outcome.value is not None, (goal.name, outcome.why)
        assert outcome.met, (goal.name, outcome.value)


@pytest.mark.parametrize(
    ("variant", "cells", "change", "missed"),
    [
        ("fused", {"tokens": 32768}, {"ms": 120.0}, {"fused attention: time / plain causal, 16K and 32K",
                                                     "fused attention: times faster than flex over concatenated K/V, "
                                                     "16K and 32K"}),
        ("linear", {"tokens": 8192, "vocab": 64000, "supervised": 1.0}, {"extra_gib": 3.0},
         {"linear + loss: extra memory / SpecForge's, T >= 8K"}),
        ("linear", {"tokens": 4096, "vocab": 151936, "supervised": 0.25}, {"ms": 3.6},
         {"linear + loss: time with 25% supervised / with all"}),
        ("eyas", {"tokens": 16384, "layout": layouts.TURNS}, {"ms": 2.8},
         {"step: time with 25% supervised / with all, 16K and 32K"}),
        ("padded", {"layout": layouts.CHAT}, {"tokens_per_s": 20e6},
         {"packs: supervised tokens/s / padded batches of the same documents"}),
        ("packed", {"layout": layouts.CHAT}, {"shape": f"{layouts.CHAT}; unfilled 0.0301"},
         {"packs: share left unfilled"}),
        ("eyas_ckpt", {"layout": "longest"}, {"tokens": 131072}, {"longest context trained on one GPU, tokens"}),
        ("measured", {"tokens": 20480}, {"peak_gib": 12.2}, {"plan: predicted peak memory, off from the measured"}),
    ],
)  # fmt: skip
def test_one_bad_case_misses_its_goal_and_no_other(
    met: list[Row], variant: str, cells: dict[str, object], change: dict[str, object], missed: set[str]
) -> None:
    """Red when a goal takes the best case or an average instead of the worst one, or reads the wrong rows."""
    rows = [
        replace(one, **change)  # type: ignore[arg-type]
        if one.variant == variant and all(getattr(one, name) == value for name, value in cells.items())
        else one
        for one in met
    ]
    assert {goal.name for goal in GOALS if not evaluate(goal, rows).met} == missed


def test_rows_that_are_missing_meet_nothing(met: list[Row]) -> None:
    """Red when a goal counts as met because the case that would miss it was not measured."""
    for goal in GOALS:
        assert not evaluate(goal, []).met
    without = [one for one in met if (one.variant, one.tokens) != ("fused", 32768)]
    outcome = evaluate(GOALS[0], without)
    assert (outcome.met, outcome.value) == (False, None)
    assert "32768" in outcome.why


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.name)
def test_the_committed_results_say_what_is_claimed(goal: Goal) -> None:
    """Red when a claimed goal is not met by results.csv or has no rows there, or one listed as missed or unmeasured
    is met or measured."""
    outcome = evaluate(goal, results.read(results.RESULTS))
    if goal.unmeasured:
        assert outcome.value is None, f"{outcome.value:.4g} at {outcome.case}: {goal.unmeasured}"
        return
    assert outcome.value is not None, outcome.why
    assert outcome.met != bool(goal.missed), f"{outcome.value:.4g} at {outcome.case}, bound {goal.bound}: {goal.missed}"
