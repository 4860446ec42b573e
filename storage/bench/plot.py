"""The figure of README: what each preset saves on real states, and how fast it is read. docs/bench/store.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage.bench.results import Row, newest
from storage.errors import StoreError
from storage.presets import PRESETS

PEERS = ("safetensors", "torch.save + gzip")
_INK, _PALE = "#1f2a37", "#8b98a8"
_OURS, _THEIRS, _CODES = "#0072B2", "#D55E00", "#56B4E9"
_STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _PALE,
    "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.titlesize": 11,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "figure.dpi": 120, "axes.grid": True,
    "grid.color": "#e5e9ee", "grid.linewidth": 0.8, "axes.axisbelow": True,
}  # fmt: skip


def draw(rows: Sequence[Row], folder: Path, *, text: str = "sharegpt") -> Path:
    """Write store.png from the newest figures of a text. StoreError when there are none."""
    names = [name for name in (*PEERS, *PRESETS) if newest(rows, text, name, "ratio") is not None]
    if not names:
        raise StoreError(f"no run measured text {text}: run `eyas bench store --text {text}` first")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def values(metric: str) -> list[float]:
        found = [newest(rows, text, name, metric) for name in names]
        return [0.0 if row is None else row.value for row in found]

    with plt.rc_context(_STYLE):
        figure, (sizes, speeds) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
        places = range(len(names))
        colours = [_THEIRS if name in PEERS else _OURS for name in names]
        bars = sizes.barh(places, values("ratio"), color=colours)
        sizes.bar_label(bars, fmt="%.2f", padding=3)
        sizes.set_yticks(places, names)
        sizes.set_title("Times smaller than raw bfloat16")
        speeds.barh([place - 0.2 for place in places], values("read MB/s"), 0.4, color=colours, label="to bfloat16")
        speeds.barh(
            [place + 0.2 for place in places], values("codes MB/s"), 0.4, color=_CODES, label="to codes, for a GPU"
        )
        speeds.set_yticks(places, [])
        speeds.set_title("Read from local files, MB/s of bfloat16")
        speeds.legend(frameon=False)
        for axes in (sizes, speeds):
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
        one = next(row for name in names if (row := newest(rows, text, name, "ratio")) is not None)
        figure.suptitle(f"{one.target}, {one.tokens:,} tokens of {text}; {one.machine}", fontsize=9, color=_PALE)
        path = folder / "store.png"
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)
    return path
