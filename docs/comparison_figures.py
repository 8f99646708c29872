"""Draw the pictures of docs/comparison.md from docs/comparison.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; line styles do the same in grey.
STYLES: dict[str, tuple[str, Any]] = {
    "PPO": ("#0072B2", "-"),
    "GRPO": ("#D55E00", "--"),
    "GDPO": ("#009E73", "-."),
    "GRPO on the sum": ("#D55E00", "--"),
    "GDPO, weighted": ("#CC79A7", (0, (1, 1.2))),
    "GDPO, conditioned": ("#000000", (0, (5, 1.5, 1, 1.5, 1, 1.5))),
}
LEARNING = ("PPO", "GRPO", "GDPO")
OBJECTIVES = ("GRPO on the sum", "GDPO", "GDPO, weighted", "GDPO, conditioned")
GREY, THOUSAND = "#6b7280", 1000.0
plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10.5})


class Band(NamedTuple):
    """Several seeds on one grid: median and quartiles."""

    x: np.ndarray
    median: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(steps: list[list[float]], values: list[list[float]], points: int = 300) -> Band:
    """Puts curves measured at different steps on one grid, from where all have begun to where the first ends."""
    grid = np.linspace(max(x[0] for x in steps), min(x[-1] for x in steps), points)
    curves = np.array([np.interp(grid, x, y) for x, y in zip(steps, values, strict=True)])
    low, median, high = np.quantile(curves, [0.25, 0.5, 0.75], axis=0)
    return Band(grid, median, low, high)


def smoothed(curve: list[float], window: int) -> list[float]:
    """Mean over the last `window` values, without those that are undefined."""
    parts = [np.asarray(curve[max(0, end - window) : end], float) for end in range(1, len(curve) + 1)]
    return [float(np.nanmean(part)) if not np.isnan(part).all() else math.nan for part in parts]


def draw(axis: Axes, name: str, drawn: Band, unit: float = 1.0) -> None:
    """One line with its band, in its own colour and style."""
    colour, style = STYLES[name]
    axis.fill_between(drawn.x / unit, drawn.low, drawn.high, color=colour, alpha=0.15, linewidth=0)
    axis.plot(drawn.x / unit, drawn.median, color=colour, linestyle=style, linewidth=1.9, label=name)


def finish(figure: Figure, axes: list[Axes], target: Path) -> None:
    """One legend above all panels, where it covers nothing."""
    handles = {label: h for axis in axes for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="upper center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(handles),
        frameon=False,
        handlelength=3.2,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.91), w_pad=2.0)
    figure.savefig(target, dpi=140)
    plt.close(figure)


def draw_learning(results: dict[str, Any], target: Path) -> None:
    """Return over environment steps, and over seconds of all seeds together."""
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.5), sharey=True)
    for axis, unit in zip(axes, (THOUSAND, 1.0), strict=True):
        learned = 0.0
        for name in LEARNING:
            curves = results[name]["curves"]
            seconds = [results[name]["seconds_at"]] * len(curves["episode_return"])
            x = curves["environment_steps"] if axis is axes[0] else seconds
            drawn = band(x, curves["episode_return"], points=1000)
            draw(axis, name, drawn, unit)
            learned = max(learned, drawn.x[np.argmax(drawn.median >= 475)] / unit)
        axis.axhline(475, color=GREY, linewidth=0.9, linestyle=":")
        axis.set(ylim=(0, 512), xlim=(0, 2 * learned or None))
    axes[1].annotate("475", (1.01, 475), xycoords=("axes fraction", "data"), va="center", color=GREY, fontsize=9)
    axes[0].set(xlabel="environment steps of one seed (thousands)", ylabel="mean return, 100 greedy episodes")
    axes[1].set(xlabel="seconds, all seeds side by side, without compilation")
    finish(figure, list(axes), target)


def draw_objectives(results: dict[str, Any], target: Path) -> None:
    """Both objectives over environment steps, and the distance from the middle."""
    figure, axes = plt.subplots(1, 3, figsize=(11.0, 3.5))
    panels = (
        ("upright: steps survived", "episode_return", (0, 512)),
        ("centred: sum over the episode", "centred", (0, 512)),
        ("mean distance from the middle", "distance", (0, None)),
    )
    learned = 0.0
    for axis, (title, key, limits) in zip(axes, panels, strict=True):
        for name in OBJECTIVES:
            curves = results[name]["curves"]
            window = 1 if key == "episode_return" else 5
            values = [smoothed(seed, window) for seed in curves[key]]
            drawn = band(curves["environment_steps"], values, points=1000)
            draw(axis, name, drawn, THOUSAND)
            if key == "episode_return":
                learned = max(learned, drawn.x[np.argmax(drawn.median >= 475)] / THOUSAND)
        axis.set(title=title, ylim=limits, xlim=(0, None), xlabel="environment steps (thousands)")
    axes[0].set_ylabel("mean of 100 greedy episodes")
    if learned:
        axes[0].set(xlim=(0, 2.5 * learned), xlabel="environment steps (thousands): the start")
    finish(figure, list(axes), target)


def draw_signal(results: dict[str, Any], target: Path) -> None:
    """Draw the advantages of a group's episodes under the sum and GDPO."""
    curves = results["GRPO on the sum"]["curves"]
    steps = np.median([x[1:] for x in curves["environment_steps"]], axis=0) / THOUSAND
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.5))
    for axis, objective in zip(axes, ("upright", "centred"), strict=True):
        for name, how in (("GRPO on the sum", "sum"), ("GDPO", "gdpo")):
            values = [smoothed(seed, 7) for seed in np.array(curves[f"share/{how}/{objective}"], float)]
            draw(axis, name, _over_seeds(steps, np.array(values)))
        axis.set(title=f"agreement of the advantage with {objective}")
    lowest = min(axis.get_ylim()[0] for axis in axes)
    axes[0].set_ylabel("correlation within the group")
    for axis in axes:
        axis.set_ylim(np.floor(lowest * 5) / 5, 1.02)
        axis.set(xlabel="environment steps (thousands)", xlim=(0, None))
    finish(figure, list(axes), target)


def _over_seeds(x: np.ndarray, values: np.ndarray) -> Band:
    """Median and quartiles of the seeds that have a value there."""
    some = ~np.isnan(values).all(axis=0)
    low, median, high = np.nanquantile(values[:, some], [0.25, 0.5, 0.75], axis=0)
    return Band(x[some], median, low, high)
