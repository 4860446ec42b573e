"""An inspection as text for a terminal, and as one HTML page with plots that needs nothing else.

Both show text of the conversations, by design: it is what they are for. Neither goes to a log.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.trainer.data.inspect import Inspection, Piece, Shown

_MOST_CHARACTERS = 6000
"""Of one shown conversation; what is left out is told."""
_BARS = " ▏▎▍▌▋▊▉█"


def print_inspection(found: Inspection, console: Console) -> None:
    """The figures, and the kept conversations: supervised green, cut red and struck out, the rest dim."""
    for title, rows in tables(found):
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_column(style="dim")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    if found.num_samples:
        console.print("Tokens a sample")
        for label, count, bar in _histogram(found.lengths):
            console.print(f"{label:>16} {count:>9,} {bar}", highlight=False)
        console.print()
    for shown in found.shown:
        console.print(Text(heading(shown), style="bold"))
        text = Text()
        for piece in shorten(shown.pieces):
            text.append(piece.text, style="red strike" if piece.is_cut else "green" if piece.is_supervised else "dim")
        console.print(text)
        console.print()


def heading(shown: Shown) -> str:
    return f"{shown.where}: {shown.num_tokens:,} tokens, {shown.num_supervised:,} supervised"


def tables(found: Inspection) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Title, and rows of name, figure, note. Without text of conversations."""
    share = found.num_supervised / max(1, found.num_tokens)
    data = [
        ("conversations", f"{found.num_conversations:,}", ""),
        ("samples", f"{found.num_samples:,}", ""),
        ("tokens", f"{found.num_tokens:,}", ""),
        ("supervised", f"{found.num_supervised:,}", f"{share:.1%}"),
        ("answers", f"{len(found.answer_lengths):,}", _middle(found.answer_lengths)),
        (
            f"over {found.max_tokens:,} tokens",
            f"{found.num_cut:,}",
            f"{found.supervised_cut:,} supervised tokens there",
        ),
        ("prompts met before", f"{found.num_same_prompt:,}", ""),
        ("duplicate samples", f"{found.refusals.counts.get('duplicate', 0):,}", "left out"),
    ]
    roles = [(name, f"{count:,}", "") for name, count in found.role_tokens.items()]
    # A conversation of several rows has its early turns in several of them.
    refused = [
        (name, f"{count:,}", f"first: {found.refusals.first[name]}") for name, count in found.refusals.counts.items()
    ]
    coverage = [
        (f"{size:,} tokens", f"{share:.2%}", "draft.vocab_size" if size == found.vocab_size else "")
        for size, share in found.coverage.items()
    ]
    parts = [("Data", data), ("Tokens by role", roles), ("Draft vocabulary covers", coverage), ("Refused", refused)]
    return [(title, rows) for title, rows in parts if rows]


def _middle(lengths: npt.NDArray[np.int64]) -> str:
    return f"median {int(np.median(lengths)):,} tokens, longest {int(lengths.max()):,}" if len(lengths) else ""


def shorten(pieces: Sequence[Piece]) -> list[Piece]:
    """The same up to _MOST_CHARACTERS; the middle of a long piece gives way first."""
    room = max(200, _MOST_CHARACTERS // max(1, len(pieces)))
    return [
        piece
        if len(piece.text) <= room
        else Piece(
            f"{piece.text[: room // 2]} [... {len(piece.text) - room:,} characters ...] {piece.text[-(room // 2) :]}",
            piece.is_supervised,
            piece.is_cut,
        )
        for piece in pieces
    ]


def _edges(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Doubling bins: lengths of conversations spread over orders of magnitude."""
    low, high = int(np.log2(max(1, lengths.min()))), int(np.log2(max(1, lengths.max()))) + 1
    return np.logspace(low, high, high - low + 1, base=2.0, dtype=np.float64)


def _histogram(lengths: npt.NDArray[np.int64], width: int = 40) -> list[tuple[str, int, str]]:
    edges = _edges(lengths)
    counts, _ = np.histogram(lengths, edges)
    rows = []
    for low, high, count in zip(edges, edges[1:], counts.tolist(), strict=False):
        eighths = round(8 * width * count / max(1, counts.max()))
        rows.append((f"{int(low):,} to {int(high) - 1:,}", count, "█" * (eighths // 8) + _BARS[eighths % 8].strip()))
    return rows


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff; margin: 2rem auto; max-width: 62rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
.note { color: #5b6b7a; } .grid { display: flex; flex-wrap: wrap; gap: 0 3rem; }
table { border-collapse: collapse; } td { padding: .15rem .9rem .15rem 0; vertical-align: top; }
td:nth-child(2) { text-align: right; font-variant-numeric: tabular-nums; } td:nth-child(3) { color: #5b6b7a; }
img { max-width: 100%; height: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f7f9; border-radius: 6px; padding: .8rem 1rem;
  font: 13px/1.5 ui-monospace, monospace; color: #5b6b7a; margin: .3rem 0 1.2rem; }
.s { background: #cdeccf; color: #10391a; } .c { background: #f8d2cf; color: #6d1a14; text-decoration: line-through; }
"""


def render_html(found: Inspection) -> str:
    """The page. It holds the text of the kept conversations."""
    sections = "".join(
        f"<section><h2>{html.escape(title)}</h2><table>"
        + "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        + "</table></section>"
        for title, rows in tables(found)
    )
    samples = "".join(
        f"<h3 class=note>{html.escape(heading(shown))}</h3><pre>"
        + "".join(f'<span class="{_kind(piece)}">{html.escape(piece.text)}</span>' for piece in shorten(shown.pieces))
        + "</pre>"
        for shown in found.shown
    )
    plot = (
        f'<img alt="lengths, roles and coverage" src="data:image/png;base64,{_plots(found)}">'
        if found.num_samples
        else ""
    )
    names = html.escape(", ".join(found.sources))
    legend = '<span class="s">supervised</span>, <span class="c">cut off</span>, and what the target is shown'
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{names}</title><style>{_STYLE}</style>'
        f"<h1>{names}</h1><p class=note>eyas data inspect. This page holds text of the conversations.</p>"
        f'{plot}<div class="grid">{sections}</div><h2>Conversations: {legend}</h2>{samples}</html>\n'
    )


def _kind(piece: Piece) -> str:
    """c cut, s supervised, p the rest: classes of _STYLE."""
    return "c" if piece.is_cut else "s" if piece.is_supervised else "p"


def _plots(found: Inspection) -> str:
    """PNG as base64: lengths of samples and answers, tokens by role, coverage by vocabulary size."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(12, 3.4), dpi=110, layout="constrained")
    lengths, roles, coverage = figure.subplots(1, 3)
    for values, label, colour in (
        (found.lengths, "samples", "#4c78a8"),
        (found.answer_lengths, "answers", "#54a24b"),
    ):
        if len(values):
            lengths.hist(values, bins=_edges(values), histtype="stepfilled", alpha=0.55, label=label, color=colour)
    lengths.axvline(found.max_tokens, color="#b3261e", linestyle="--", linewidth=1, label="data.max_tokens")
    lengths.set(xscale="log", title="Lengths", xlabel="tokens", ylabel="count")
    lengths.margins(y=0.35)  # room for the legend
    lengths.legend(frameon=False, loc="upper left", ncols=2, fontsize="small")
    names = list(found.role_tokens)[::-1]
    colours = ["#54a24b" if name.startswith("assistant") else "#9aa7b3" for name in names]
    roles.barh(names, [found.role_tokens[name] for name in names], color=colours)
    roles.set(title="Tokens by role", xlabel="tokens")
    roles.xaxis.set_major_formatter(EngFormatter(sep=""))
    if found.coverage:
        coverage.plot(list(found.coverage), [100 * share for share in found.coverage.values()], marker="o")
        coverage.axvline(found.vocab_size, color="#b3261e", linestyle="--", linewidth=1, label="draft.vocab_size")
        coverage.legend(frameon=False, loc="lower right", fontsize="small")
        coverage.set_ylim(top=100.5, bottom=min(99.0, 100 * min(found.coverage.values()) - 1))
    coverage.set(xscale="log", title="Draft vocabulary", xlabel="tokens", ylabel="% of supervised tokens")
    _tidy(figure.axes)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return base64.b64encode(out.getvalue()).decode()


def _tidy(axes: Sequence[Any]) -> None:
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
