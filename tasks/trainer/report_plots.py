"""The plots of a report, as PNG files: Prefect's UI shows no inline SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

INK, ACCENT, PALE = "#1f2a37", "#b4540a", "#8b98a8"

PLOTS = {"training": "training.png", "depth": "depth.png", "tau": "tau.png"}


def draw(facts: dict[str, Any], folder: Path) -> None:
    """Write training.png (loss and accuracy by step), depth.png (by draft depth) and tau.png (against baselines)."""
    style: dict[Any, Any] = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": PALE,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "figure.dpi": 120,
    }
    with plt.rc_context(style):
        _training(facts, folder / PLOTS["training"])
        _depth(facts, folder / PLOTS["depth"])
        _tau(facts, folder / PLOTS["tau"])


def _training(facts: dict[str, Any], path: Path) -> None:
    steps = np.arange(1, len(facts["losses"]) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    left.plot(steps, facts["losses"], color=PALE, linewidth=0.8)
    left.plot(steps, _smooth(facts["losses"]), color=ACCENT, linewidth=1.8)
    held_out = facts["heldout_curve"]
    if held_out:
        seen = [measured["step"] for measured in held_out]
        left.plot(
            seen,
            [measured["loss"] for measured in held_out],
            "o-",
            color=INK,
            markersize=4,
            label="held out, cross entropy",
        )
        best = facts["evaluation"]["step"]
        left.axvline(best, color=INK, linewidth=0.8, linestyle=":", label=f"exported: step {best}")
        left.legend(frameon=False, fontsize=8)
    left.set(title="Training loss", xlabel="optimizer step")
    left.set_ylim(bottom=0)
    accuracy = np.array(facts["curves"]["acc"], dtype=float)
    shades = plt.get_cmap("YlOrBr")(np.linspace(0.9, 0.45, accuracy.shape[1]))
    for depth, shade in enumerate(shades):
        right.plot(steps, _smooth(accuracy[:, depth]), color=shade, linewidth=1.6, label=f"acc_{depth}")
        if held_out:
            right.plot(seen, [measured["acc"][depth] for measured in held_out], "o", color=shade, markersize=4)
    dots = "; dots: held out" if held_out else ""
    right.set(title=f"Training accuracy by TTT step (smoothed{dots})", xlabel="optimizer step")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path)
    plt.close(figure)


def _depth(facts: dict[str, Any], path: Path) -> None:
    acceptance = facts["acceptance"]
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    series = {
        "draft, accepted": (acceptance["acceptance"], ACCENT, "o-"),
        "draft, teacher-forced acc": (facts["acc"], INK, "s--"),
        "n-gram lookup, accepted": (acceptance["acceptance_ngram"], PALE, "^-"),
        "before training, accepted": (acceptance["acceptance_untrained"], "#c9d1da", "v-"),
    }
    for label, (values, color, marker) in series.items():
        axes.plot(range(len(values)), values, marker, color=color, label=label, markersize=5)
    axes.set(title="Held-out acceptance by draft depth", xlabel="depth (given that all before were accepted)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def _tau(facts: dict[str, Any], path: Path) -> None:
    low, high = facts["tau_interval"]
    names = ["this draft", "n-gram lookup", "before training"]
    values = [facts["tau"], facts["tau_ngram"], facts["tau_untrained"]]
    figure, axes = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    axes.barh(names, values, color=[ACCENT, PALE, "#c9d1da"], height=0.6)
    axes.errorbar(values[0], 0, xerr=[[max(0.0, values[0] - low)], [max(0.0, high - values[0])]], color=INK, capsize=4)
    longest = max([*values, high])
    for row, (value, end) in enumerate(zip(values, [max(values[0], high), *values[1:]], strict=True)):
        axes.text(end + 0.02 * (longest - 1), row, f" {value:.3f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(1.0, 1.0 + 1.15 * max(longest - 1.0, 0.05))
    axes.set(title="Tokens per target forward (tau), 95% interval", xlabel="1.0: no speed-up")
    figure.savefig(path)
    plt.close(figure)


def _smooth(values: Any) -> Any:
    """Exponential mean over about a fiftieth of the run, at least eight steps."""
    weight = 2.0 / (1 + max(8.0, len(values) / 50))
    smoothed, mean = [], None
    for value in values:
        mean = value if mean is None else mean + weight * (value - mean)
        smoothed.append(mean)
    return smoothed
