"""Line charts of a run: the task's charts first, then the common ones. page.html draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grpo_jax.config.files import Values
from grpo_jax.tasks.task import Chart, Curve, Display, of_turns

_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 310, 8, 158
"""Position of the axes in page.html's drawing of 320 x 190."""
_MAX_POINTS = 500
_MAX_MARKS = 100  # maximum points of a line with tooltips

Rows = Sequence[Values]
"""Rows of metrics.jsonl."""

COMMON = Display(
    live=(("loss", "loss"), ("zero_variance_groups/total", "zero var"), ("kl", "kl"), ("entropy", "entropy")),
    charts=(
        Chart("KL to the reference", (Curve("kl", "kl"),)),
        Chart("Explained variance of the values", (Curve("value/explained_variance", "explained"),)),
        Chart("Values", (Curve("value/mean", "value"), Curve("value/return", "return"))),
        Chart("Dynamic sampling", (Curve("groups_kept", "kept groups"), Curve("draws", "draws"))),
        Chart("Entropy of the policy", (Curve("entropy", "entropy"),)),
        Chart(
            "Completion length, tokens",
            (Curve("completion_tokens", "mean"), Curve("completion_tokens_max", "longest")),
        ),
        Chart("Turns of an episode", (Curve("turns", "mean"),)),
        Chart("Tool results that are errors", (Curve("tool_errors", "share"),)),
        Chart("Truncated and invalid completions", (Curve("truncated", "truncated"), Curve("invalid", "invalid"))),
        Chart("Repetition", (Curve("duplicates", "duplicates in group"), Curve("unchanged", "unchanged prompts"))),
        Chart("Gradient norm", (Curve("grad_norm", "norm"),)),
        Chart("Loss of the renderer", (Curve("renderer/policy_loss", "loss"),)),
        Chart("Gradient norm of the renderer", (Curve("renderer/grad_norm", "norm"),)),
        Chart("Clipped tokens", (Curve("clip_low", "below"), Curve("clip_high", "above"))),
    ),
    hidden=("completion tokens", "valid"),
)
"""The metrics of every run. Charts omit those that are 0 throughout, as a KL without a reference."""


def number(value: float | None) -> str:
    """Format a number with three significant digits, without an exponent if readable; an int with all its digits."""
    if value is None or not math.isfinite(value):
        return "–"
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e5):
        return str(int(value))
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers that enclose [low, high]; a step is 1, 2 or 5 times a power of ten."""
    if high - low < 1e-12 * max(1.0, abs(low)):
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    exponent = math.floor(math.log10(rough))
    power = 10.0**exponent
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, max(12, 3 - exponent)) for index in range(first, last + 1)]


def smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return the bias-corrected exponential moving average."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def points_of(rows: Rows, metric: str) -> list[tuple[float, float]]:
    """Return a metric's (step, value) pairs, without rows that lack it."""
    return [(row["step"], y) for row in rows if isinstance(y := row.get(metric), int | float) and math.isfinite(y)]


def draw(chart: Chart, rows: Rows) -> Values | None:
    """Return a chart's ticks and lines in the coordinates of page.html; None without a point.

    A noisy line is faint, below a smoothed one; a short or sparse line has dots.
    """
    curves = [(curve, points) for curve in chart.curves if (points := points_of(rows, curve.metric))]
    if not curves:
        return None
    xs = [x for _, points in curves for x, _ in points]
    ys = [y for _, points in curves for _, y in points]
    y_ticks = nice_ticks(min(ys), max(ys))
    x_ticks = [tick for tick in nice_ticks(min(xs), max(xs), 5) if min(xs) <= tick <= max(xs) and tick == int(tick)]
    x_span = (max(xs) - min(xs)) or 1.0

    def to_x(step: float) -> float:
        return round(_LEFT + (step - min(xs)) / x_span * (_RIGHT - _LEFT), 1)

    def to_y(value: float) -> float:
        return round(_BOTTOM + (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (_TOP - _BOTTOM), 1)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return "L".join(f"{to_x(x)} {to_y(y)}" for x, y in points[:: -(-len(points) // _MAX_POINTS)])

    def line(curve: Curve, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
        dots = curve.sparse or len(points) < 12
        steps, values = zip(*points, strict=True)
        return {
            "name": curve.label,
            "last": values[-1],
            "dots": dots,
            "raw": "" if dots else path(points),
            "smooth": path(points if dots else list(zip(steps, smoothed(values), strict=True))),
            "marks": [(to_x(x), to_y(y), x, y) for x, y in points[:: -(-len(points) // _MAX_MARKS)]],
        }

    texts = [number(tick) for tick in y_ticks]
    if len(set(texts)) < len(texts):  # labels repeat in a narrow range
        texts = [f"{tick:.9g}" for tick in y_ticks]
    return {
        "title": chart.title,
        "note": chart.note,
        "x_ticks": [(number(tick), to_x(tick)) for tick in x_ticks],
        "y_ticks": [(text, tick == 0, to_y(tick)) for text, tick in zip(texts, y_ticks, strict=True)],
        "lines": [line(*curve) for curve in curves],
    }


def drawn_charts(rows: Rows, display: Display) -> list[Values]:
    """Return a run's non-empty charts; seconds exclude the first iteration, which compiles."""
    stages = tuple(curve for curve in _group(rows, "seconds/") if curve.label != "total")
    seconds = draw(Chart("Seconds per iteration", stages, "Without the first iteration, which compiles."), rows[1:])
    return [chart for chart in (*(draw(chart, rows) for chart in charts_of(rows, display)), seconds) if chart]


def _group(rows: Rows, prefix: str, suffix: str = "", *, sparse: bool = False) -> list[Curve]:
    """Return a curve for each metric with a prefix and a suffix, labelled by the text between."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith(prefix) and key.endswith(suffix))
    return [Curve(key, key.removeprefix(prefix).removesuffix(suffix).replace("_", " "), sparse) for key in names]


def charts_of(rows: Rows, display: Display) -> list[Chart]:
    """Return the charts of these rows; a chart may have no curve."""
    rewards = sorted(_group(rows, "reward/", "/mean"), key=lambda curve: curve.label != "total")
    if len(rewards) == 2 and rewards[0].label == "total":
        rewards = rewards[1:]  # a single objective equals the total, up to its weight
    hidden = display.hidden + COMMON.hidden
    charted = {curve.metric for chart in display.charts for curve in chart.curves}
    evaluated = [c for c in _group(rows, "eval_rewards/", "/mean") if c.metric not in charted and c.label not in hidden]
    measures = {c.metric.removeprefix("validation/"): c for c in _group(rows, "validation/", sparse=True)}
    validation = [c for name, c in measures.items() if c.label not in hidden and not of_turns(name, measures)]
    of_turn = [c for c in _group(rows, "reward/") if "@turn" in c.label]
    by_turn = [c._replace(label=c.label.replace("@turn", ", turn ")) for c in of_turn]
    moving = {name for row in rows for name, value in row.items() if value}
    return [
        *display.charts,
        Chart("Rewards", tuple(rewards)),
        Chart("Rewards turn by turn", tuple(by_turn)),
        Chart("Evaluation rewards, never trained on", tuple(evaluated)),
        Chart("Validation", tuple(validation)),
        Chart("Groups without signal", tuple(_group(rows, "zero_variance_groups/"))),
        *(Chart(chart.title, tuple(c for c in chart.curves if c.metric in moving)) for chart in COMMON.charts),
    ]
