"""The goals of the kernels, as data: how each is computed from the rows of one run, its bound, and whether it is met.

`eyas bench goals` prints them; a test recomputes them from the committed results.csv, so a claim cannot outlive the
figures. All ratios are within one run: the newest of the work (and layout) that the goal reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kernels.bench import layouts
from kernels.bench.loss import LINEAR, LOGITS
from kernels.bench.results import Row, Rows, newest_run

_LONG = (16384, 32768)
_SIZES = (8192, 16384, 32768)
# Bytes moved a logit and step: the loss reads two tensors and writes one, a copy reads one and writes one.
_LOSS_BYTES, _COPY_BYTES = 3, 2


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table.

    measure: the values of all cases by name, from the rows of one run; the worst one counts, at most or at least bound.
    layout: the run must have a row of it (a work can be measured in parts). missed: why the goal is known not to be
    met; unmeasured: why results.csv lacks rows for it. Both empty when it is claimed to be met.
    """

    name: str
    work: Literal["attention", "loss", "step", "plan"]
    at: Literal["most", "least"]
    bound: float
    measure: Callable[[Rows], Iterable[tuple[str, float]]]
    layout: str | None = None
    missed: str = ""
    unmeasured: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A goal's worst case in the newest run; value is None when the run lacks rows (why says which)."""

    goal: Goal
    value: float | None
    case: str
    met: bool
    why: str = ""


def evaluate(goal: Goal, rows: Sequence[Row]) -> Outcome:
    """The outcome from the newest run that the goal reads."""
    run = newest_run(rows, goal.work, goal.layout)
    if not run:
        return Outcome(goal, None, "", False, f"no run of {goal.work}" + (f", {goal.layout}" if goal.layout else ""))
    try:
        values = list(goal.measure(run))
    except LookupError as error:
        return Outcome(goal, None, "", False, str(error))
    worst = max if goal.at == "most" else min
    case, value = worst(values, key=lambda named: named[1])
    return Outcome(goal, value, case, value <= goal.bound if goal.at == "most" else value >= goal.bound)


def _cell(row: Row, name: str) -> float:
    """A cell that must be filled: a case that ran out of memory has none."""
    value = getattr(row, name)
    if value is None:
        raise LookupError(f"{row.variant} at {row.tokens} tokens has no {name} ({row.shape})")
    return float(value)


def _tokens(tokens: int) -> str:
    return f"{tokens // 1024}K"


Ratio = Callable[[Rows], Iterator[tuple[str, float]]]


def _attention(over: str, under: str, sizes: Sequence[int], column: str = "ms") -> Ratio:
    """Ratios of two variants on one document."""

    def measure(rows: Rows) -> Iterator[tuple[str, float]]:
        for tokens in sizes:
            top, bottom = (rows.one(name, tokens=tokens, layout=layouts.ONE_DOCUMENT) for name in (over, under))
            yield _tokens(tokens), _cell(top, column) / _cell(bottom, column)

    return measure


def _packed(rows: Rows) -> Iterator[tuple[str, float]]:
    whole = rows.one("fused", tokens=16384, layout=layouts.ONE_DOCUMENT)
    packed = rows.one("fused", tokens=16384, layout=layouts.DOCUMENTS)
    yield "16K", _cell(whole, "ms") / _cell(packed, "ms")


def _mask_time(rows: Rows) -> Iterator[tuple[str, float]]:
    mask = rows.one("flex_mask", tokens=32768)
    attention = rows.one("flex", tokens=32768, layout=layouts.ONE_DOCUMENT)
    # Of the attention alone, the smaller part of a step.
    yield "32K", _cell(mask, "ms") / _cell(attention, "ms")


def _mask_memory(rows: Rows) -> Iterator[tuple[str, float]]:
    yield "128K", _cell(rows.one("flex_mask", tokens=131072), "extra_gib") * 1024


def _loss(
    over: str, under: str, sizes: Sequence[tuple[int, int]], layout: str, column: str = "ms", factor: float = 1.0
) -> Ratio:
    """Ratios of two variants with all rows supervised."""

    def measure(rows: Rows) -> Iterator[tuple[str, float]]:
        for tokens, vocab in sizes:
            cell = {"tokens": tokens, "vocab": vocab, "supervised": 1.0, "layout": layout}
            top, bottom = rows.one(over, **cell), rows.one(under, **cell)
            yield f"{_tokens(tokens)} x {vocab}", factor * _cell(top, column) / _cell(bottom, column)

    return measure


def _loss_share(rows: Rows) -> Iterator[tuple[str, float]]:
    for tokens, vocab in LINEAR:
        part, whole = (
            rows.one("linear", tokens=tokens, vocab=vocab, supervised=share, layout="linear") for share in (0.25, 1.0)
        )
        yield f"{_tokens(tokens)} x {vocab}", _cell(part, "ms") / _cell(whole, "ms")


def _step(over: str, under: str, column: str) -> Ratio:
    """Ratios of two variants of the whole step, all rows supervised."""

    def measure(rows: Rows) -> Iterator[tuple[str, float]]:
        for tokens in _LONG:
            top, bottom = (rows.one(name, tokens=tokens, layout=layouts.ALL) for name in (over, under))
            yield _tokens(tokens), _cell(top, column) / _cell(bottom, column)

    return measure


def _step_share(rows: Rows) -> Iterator[tuple[str, float]]:
    for tokens in _LONG:
        whole = _cell(rows.one("eyas", tokens=tokens, layout=layouts.ALL), "ms")
        for layout in (layouts.ANSWER, layouts.TURNS):
            yield f"{_tokens(tokens)}, {layout}", _cell(rows.one("eyas", tokens=tokens, layout=layout), "ms") / whole


def _longest(variant: str) -> Ratio:
    def measure(rows: Rows) -> Iterator[tuple[str, float]]:
        row = rows.one(variant, layout="longest")
        yield f"{_cell(row, 'peak_gib'):.0f} GiB", float(row.tokens)

    return measure


def _packs(rows: Rows) -> Iterator[tuple[str, float]]:
    packed, padded = (rows.one(name, layout=layouts.CHAT) for name in ("packed", "padded"))
    yield "packs of 16K", _cell(packed, "tokens_per_s") / _cell(padded, "tokens_per_s")


def _plan_error(rows: Rows) -> Iterator[tuple[str, float]]:
    for measured in rows.all("measured"):
        predicted = rows.one("predicted", tokens=measured.tokens, vocab=measured.vocab, shape=measured.shape)
        error = abs(_cell(predicted, "peak_gib") / _cell(measured, "peak_gib") - 1.0)
        yield f"{_tokens(measured.tokens)} x {measured.vocab}", error


def _unfilled(rows: Rows) -> Iterator[tuple[str, float]]:
    items = rows.one("packed", layout=layouts.CHAT).shape.split("; ")
    yield "packs of 16K", next(float(item.split()[1]) for item in items if item.startswith("unfilled "))


_CONCAT = "flex over concatenated K/V takes 780 ms at 32K, cuDNN's own seven calls 388: 2.01 is their ratio"
_SHORT = "flash attention's own calls take 18.1 of the 22.3 ms (cuDNN's with cumulative lengths 980): 5.7 at most"
_LAUNCHES = "at 1,024 rows a step's kernel takes 0.12 ms and its launch from Python more; 0.75 to 0.82 from 8K rows on"
_NARROW = (
    "at 32,000 columns the fp32 sum of the head's gradient is read and written once a chunk, and larger chunks take "
)
_NARROW += "the memory of the next two lines; 0.89 to 0.93 over 64,000 and 151,936 columns, and at 16K"
_HOST = "7 ms of launches from Python, which a training step hides behind other work, against 9 ms of products at 1K x "
_HOST += "32,000; met everywhere else"
_CHUNK = "0.105 at 8K x 32,000 alone: a smaller chunk meets it and costs the time of the line above"
_FLOOR = "0.13 GiB beside the chunk's logits at 1K x 32,000; met from 1K x 64,000 on"

_PAST_8K = [size for size in LINEAR if size[0] >= 8192]
_BELOW_8K = [size for size in LINEAR if size[0] < 8192]

GOALS = (
    Goal("fused attention: time / plain causal, 16K and 32K", "attention", "most", 1.05,
         _attention("fused", "plain_causal", _LONG)),
    Goal("fused attention: times faster than flex over concatenated K/V, 16K and 32K", "attention", "least", 2.0,
         _attention("flex_concat", "fused", _LONG), missed=_CONCAT),
    Goal("fused attention: 16K in documents of ~1K, times faster than one document", "attention", "least", 6.0,
         _packed, missed=_SHORT),
    Goal("flex attention: time / flex over concatenated K/V", "attention", "most", 0.8,
         _attention("flex", "flex_concat", _SIZES)),
    Goal("flex attention: times less memory than dense softmax, 8K", "attention", "least", 10.0,
         _attention("eager", "flex", (8192,), "peak_gib")),
    Goal("flex mask: time / attention, 32K", "attention", "most", 0.01, _mask_time),
    Goal("flex mask: MiB at 128K", "attention", "most", 64.0, _mask_memory),
    Goal("loss, logits given: memory / SpecForge's kernel", "loss", "most", 1.0,
         _loss("triton", "specforge", LOGITS, "logits", "peak_gib"), "logits"),
    Goal("loss, logits given: time / torch.compile", "loss", "most", 1.0,
         _loss("triton", "compile", LOGITS, "logits"), "logits"),
    Goal("loss, logits given: share of a copy's bandwidth", "loss", "least", 0.8,
         _loss("copy", "triton", LOGITS, "logits", factor=_LOSS_BYTES / _COPY_BYTES), "logits", missed=_LAUNCHES),
    Goal("linear + loss: time / SpecForge's logits + loss", "loss", "most", 0.95,
         _loss("linear", "specforge", LINEAR, "linear"), "linear", missed=_NARROW),
    Goal("linear + loss: extra memory / SpecForge's, T >= 8K", "loss", "most", 0.1,
         _loss("linear", "specforge", _PAST_8K, "linear", "extra_gib"), "linear", missed=_CHUNK),
    Goal("linear + loss: extra memory / SpecForge's, T < 8K", "loss", "most", 1 / 3,
         _loss("linear", "specforge", _BELOW_8K, "linear", "extra_gib"), "linear", missed=_FLOOR),
    Goal("linear + loss: share of the speed of the matrix products alone", "loss", "least", 0.8,
         _loss("matmul", "linear", LINEAR, "linear"), "linear", missed=_HOST),
    Goal("linear + loss: time with 25% supervised / with all", "loss", "most", 0.35, _loss_share, "linear",
         missed=_HOST),
    Goal("step: tokens/s / SpecForge's, 16K and 32K", "step", "least", 1.6,
         _step("eyas", "specforge", "tokens_per_s"), layouts.ALL),
    Goal("step: peak memory / SpecForge's", "step", "most", 0.6, _step("eyas", "specforge", "peak_gib"), layouts.ALL),
    Goal("step, checkpointed: tokens/s / SpecForge's", "step", "least", 1.25,
         _step("eyas_ckpt", "specforge", "tokens_per_s"), layouts.ALL),
    Goal("step, checkpointed: peak memory / SpecForge's", "step", "most", 0.33,
         _step("eyas_ckpt", "specforge", "peak_gib"), layouts.ALL),
    Goal("step: time with 25% supervised / with all, 16K and 32K", "step", "most", 0.45, _step_share, layouts.ALL),
    Goal("longest context trained on one GPU, tokens", "step", "least", 262144, _longest("eyas_ckpt"), "longest"),
    Goal("SpecForge's longest context is measured in the same run, tokens", "step", "least", 1,
         _longest("specforge"), "longest"),
    Goal("packs: supervised tokens/s / padded batches of the same documents", "step", "least", 2.5, _packs,
         layouts.CHAT),
    Goal("packs: share left unfilled", "step", "most", 0.03, _unfilled, layouts.CHAT),
    Goal("plan: predicted peak memory, off from the measured", "plan", "most", 0.1, _plan_error),
)  # fmt: skip
