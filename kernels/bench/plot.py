"""The figures of the README, from results.csv: attention.png, loss.png and step.png.

Colours are Okabe and Ito's, told apart by colour-blind readers as well; markers and hatches tell the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.bench import layouts
from kernels.bench.checkout import ROOT
from kernels.bench.errors import BenchError
from kernels.bench.results import Row, Rows, newest_run

FOLDER = ROOT / "docs" / "bench"
_INK, _PALE = "#1f2a37", "#8b98a8"
# name: colour, marker, label
_STYLES: Mapping[str, tuple[str, str, str]] = {
    "fused": ("#0072B2", "o", "Eyas, fused"),
    "flex": ("#56B4E9", "s", "Eyas, flex"),
    "flex_concat": ("#D55E00", "^", "flex over concatenated K/V"),
    "plain_causal": ("#000000", "x", "plain causal attention, 7 calls"),
    "linear": ("#0072B2", "o", "Eyas, linear + loss"),
    "triton": ("#0072B2", "o", "Eyas, logits given"),
    "compile": ("#E69F00", "s", "logits + torch.compile"),
    "matmul": ("#000000", "x", "matrix products alone"),
    "eyas": ("#0072B2", "o", "Eyas"),
    "eyas_ckpt": ("#56B4E9", "s", "Eyas, step checkpointing"),
    "specforge": ("#D55E00", "^", "SpecForge"),
}
_LOSS_VOCAB = 32000


def draw(rows: Sequence[Row], folder: Path = FOLDER) -> list[Path]:
    """Write the figures that the rows suffice for. Raises BenchError when they suffice for none."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _PALE,
        "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.titlesize": 11,
        "axes.titleweight": "bold", "axes.titlelocation": "left", "figure.dpi": 120, "axes.grid": True,
        "grid.color": "#e5e9ee", "grid.linewidth": 0.8, "axes.axisbelow": True,
    }  # fmt: skip
    figures: dict[str, tuple[str, str, Callable[[Any, Rows], None]]] = {
        "attention": ("attention", layouts.ONE_DOCUMENT, _attention),
        "loss": ("loss", "linear", _loss),
        "step": ("step", layouts.ALL, _step),
    }
    written = []
    with plt.rc_context(style):
        for name, (work, layout, fill) in figures.items():
            run = newest_run(rows, work, layout)
            if not run:
                continue
            figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
            fill(axes, run)
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
            first = next(row for row in run if row.layout == layout)
            figure.suptitle(f"{first.gpu}, {first.shape.split('; ', 1)[1]}", x=0.01, ha="left", fontsize=9, color=_PALE)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}.png"
            figure.savefig(path, metadata={"Software": None})
            plt.close(figure)
            written.append(path)
    if not written:
        raise BenchError("there are no results to draw: run `eyas bench attention`, `loss` or `step` first")
    return written


def _attention(axes: Any, run: Rows) -> None:
    variants = ("plain_causal", "fused", "flex", "flex_concat")
    where = {"layout": layouts.ONE_DOCUMENT}
    _lines(axes[0], run, variants, "ms", where)
    axes[0].set(title="TTT attention, forward + backward, ms", xlabel="tokens")
    _log_scale(axes[0])
    _lines(axes[1], run, variants, "peak_gib", where)
    axes[1].set(title="Peak memory, GiB", xlabel="tokens")
    axes[1].set_ylim(bottom=0)


def _loss(axes: Any, run: Rows) -> None:
    where = {"layout": "linear", "vocab": _LOSS_VOCAB, "supervised": 1.0}
    variants = ("matmul", "linear", "compile", "specforge")
    _lines(axes[0], run, variants, "ms", where)
    axes[0].set(title=f"Head and loss, draft vocabulary {_LOSS_VOCAB:,}, ms", xlabel="tokens")
    _log_scale(axes[0])
    _lines(axes[1], run, variants[1:], "extra_gib", where)
    axes[1].set(title="Extra memory, GiB", xlabel="tokens")
    _log_scale(axes[1])


def _step(axes: Any, run: Rows) -> None:
    where = {"layout": layouts.ALL}
    variants = ("eyas", "eyas_ckpt", "specforge")
    _bars(axes[0], run, variants, "tokens_per_s", where)
    axes[0].set(title="Whole training step, tokens/s", xlabel="tokens in the batch")
    _bars(axes[1], run, variants, "peak_gib", where)
    axes[1].set(title="Peak memory, GiB", xlabel="tokens in the batch")


def _log_scale(axes: Any) -> None:
    """Logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _points(run: Rows, variant: str, column: str, where: Mapping[str, Any]) -> list[tuple[int, float]]:
    rows = sorted(run.all(variant, **where), key=lambda row: row.tokens)
    return [(row.tokens, getattr(row, column)) for row in rows if getattr(row, column) is not None]


def _lines(axes: Any, run: Rows, variants: Sequence[str], column: str, where: Mapping[str, Any]) -> None:
    ticks: set[int] = set()
    for variant in variants:
        points = _points(run, variant, column, where)
        if points:
            color, marker, label = _STYLES[variant]
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, label=label, linewidth=1.8, markersize=6)
            ticks |= {tokens for tokens, _ in points}
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [_short(tokens) for tokens in sorted(ticks)])
    axes.minorticks_off()


def _bars(axes: Any, run: Rows, variants: Sequence[str], column: str, where: Mapping[str, Any]) -> None:
    sizes = sorted({row.tokens for variant in variants for row in run.all(variant, **where)})
    width = 0.8 / len(variants)
    for place, (variant, hatch) in enumerate(zip(variants, ("", "//", ".."), strict=True)):
        color, _, label = _STYLES[variant]
        values = dict(_points(run, variant, column, where))
        at = [index + (place - (len(variants) - 1) / 2) * width for index in range(len(sizes))]
        heights = [values.get(tokens, 0.0) for tokens in sizes]
        bars = axes.bar(at, heights, width, color=color, label=label, hatch=hatch, edgecolor="white")
        texts = [f"{value:,.0f}" if tokens in values else "none" for tokens, value in zip(sizes, heights, strict=True)]
        axes.bar_label(bars, texts, fontsize=8)
    axes.set_xticks(range(len(sizes)), [_short(tokens) for tokens in sizes])
    axes.grid(axis="x", visible=False)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
