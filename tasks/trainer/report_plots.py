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
    """Write training.png (loss, tau, acc and alpha by step), depth.png (by draft depth) and tau.png (and baselines)."""
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
        "figure.dpi": 110,
    }
    with plt.rc_context(style):
        _training(facts, folder / PLOTS["training"])
        _depth(facts, folder / PLOTS["depth"])
        _tau(facts, folder / PLOTS["tau"])


def _training(facts: dict[str, Any], path: Path) -> None:
    """Four panels by optimizer step: loss, simulated tau, acc and alpha by TTT step; held-out figures as dots."""
    figure, panels = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    held_out = facts["heldout_curve"]
    seen = [measured["step"] for measured in held_out]
    for panel, key, title in ((panels[0, 0], "loss", "Training loss"), (panels[0, 1], "tau", "Simulated tau")):
        values = facts["losses"] if key == "loss" else facts["curves"]["tau"]
        points = [(step, value) for step, value in enumerate(values, start=1) if value is not None]
        places, kept = [step for step, _ in points], [value for _, value in points]
        panel.plot(places, kept, color=PALE, linewidth=0.8)
        panel.plot(places, _smooth(kept), color=ACCENT, linewidth=1.8)
        looks = [(step, look[key]) for step, look in zip(seen, held_out, strict=True) if look[key] is not None]
        if looks:
            panel.plot(*zip(*looks, strict=True), "o-", color=INK, markersize=4, label="held out")
        if held_out:
            best = facts["evaluation"]["step"]
            panel.axvline(best, color=INK, linewidth=0.8, linestyle=":", label=f"exported: step {best}")
            panel.legend(frameon=False, fontsize=8)
        panel.set(title=title)
    panels[0, 0].set_ylim(bottom=0)
    dots = "; dots: held out" if held_out else ""
    for panel, key, title in (
        (panels[1, 0], "acc", f"Accuracy by TTT step (smoothed{dots})"),
        (panels[1, 1], "alpha", "Alpha, acceptance rate by TTT step"),
    ):
        values = np.array(facts["curves"][key], dtype=float)
        steps = np.arange(1, len(values) + 1)
        for depth, shade in enumerate(plt.get_cmap("YlOrBr")(np.linspace(0.9, 0.45, values.shape[1]))):
            panel.plot(steps, _smooth(values[:, depth]), color=shade, linewidth=1.6, label=f"{key}_{depth}")
            if held_out:
                panel.plot(seen, [look[key][depth] for look in held_out], "o", color=shade, markersize=4)
        panel.set(title=title, xlabel="optimizer step")
        panel.set_ylim(bottom=0)
        panel.legend(frameon=False, fontsize=8, ncols=2)
    for panel in panels.flat:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
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
