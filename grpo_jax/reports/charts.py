"""Line charts as SVG, and which of them a run has: its task's first, then what every run measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from grpo_jax.reports.page import Rows, number, render, section, stroke
from grpo_jax.tasks.task import Chart, Curve, Display, of_turns

_WIDTH, _HEIGHT = 320, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 310, 8, 158
_MAX_POINTS = 500
_MAX_MARKS = 100  # points of a line that show their values under the pointer
_MOST_LINES = 24  # that `page.stroke` tells apart


class Series(NamedTuple):
    """One line: its name and (step, value) points in order; a sparse one is drawn with dots."""

    name: str
    points: Sequence[tuple[float, float]]
    sparse: bool = False


def series_of(rows: Rows, key: str, name: str, *, sparse: bool = False) -> Series:
    """Collect a metric over steps, leaving out rows that lack it."""
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    return Series(name, [point for point in points if math.isfinite(point[1])], sparse)


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


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Format ticks with as many digits as it takes to tell them apart."""
    texts = [number(tick) for tick in ticks]
    for digits in range(4, 17):
        if len(set(texts)) == len(texts):
            break
        texts = [f"{tick:.{digits}g}" for tick in ticks]
    return texts


def smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return the exponential moving average without the bias of its start."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def line_chart(title: str, series: Sequence[Series], *, note: str = "") -> str:
    """Draw an HTML figure: legend, axes and lines; noisy series are drawn faint with a smooth line over them.

    Empty series are left out, and those beyond `_MOST_LINES`; with none left the result is empty. The note stands
    under the heading.
    """
    series = [line for line in series if line.points][:_MOST_LINES]
    if not series:
        return ""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    y_ticks = nice_ticks(min(ys), max(ys))
    x_ticks = [tick for tick in nice_ticks(min(xs), max(xs), 5) if min(xs) <= tick <= max(xs) and tick == int(tick)]
    x_span = (max(xs) - min(xs)) or 1.0

    def to_x(step: float) -> float:
        return round(_LEFT + (step - min(xs)) / x_span * (_RIGHT - _LEFT), 1)

    def to_y(value: float) -> float:
        return round(_BOTTOM + (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (_TOP - _BOTTOM), 1)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return "L".join(f"{to_x(x)} {to_y(y)}" for x, y in points[:: -(-len(points) // _MAX_POINTS)])

    lines = []
    for index, line in enumerate(series):
        style = stroke(index)
        dots = line.sparse or len(line.points) < 12
        trend = smoothed([y for _, y in line.points])
        smooth = line.points if dots else list(zip([x for x, _ in line.points], trend, strict=True))
        marked = line.points[:: -(-len(line.points) // _MAX_MARKS)]
        lines.append(
            {
                "name": line.name,
                "last": line.points[-1][1],
                "stroke": style,
                "colour": style.partition(";")[0].replace("stroke:", "color:"),
                "dots": dots,
                "raw": "" if dots else path(line.points),
                "smooth": path(smooth),
                "marks": [(to_x(x), to_y(y), f"iteration {number(x)}: {line.name} {number(y)}") for x, y in marked],
            }
        )
    frame = {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _RIGHT,
        "bottom": _BOTTOM,
        "x_ticks": [(number(tick), to_x(tick)) for tick in x_ticks],
        "y_ticks": [(text, tick == 0, to_y(tick)) for text, tick in zip(tick_texts(y_ticks), y_ticks, strict=True)],
    }
    return render("chart", title, note, frame, lines)


def curves_section(rows: Rows, starts: Sequence[int], display: Display) -> str:
    """Return the section of a run's curves; "" without metrics.

    `starts` are the iterations done when a process began: the one after compiles.
    """
    charts = [*(_drawn(chart, rows) for chart in charts_of(rows, display)), _seconds_chart(rows, starts)]
    if not any(charts):
        return ""
    content = render("charts", charts)
    note = (
        "Faint: each iteration. Bold: smoothed. Figures beside the names are the last ones; under the pointer, those "
        "of an iteration."
    )
    return section("Training", content, note)


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _drawn(chart: Chart, rows: Rows) -> str:
    lines = [series_of(rows, curve.metric, curve.label, sparse=curve.sparse) for curve in chart.curves]
    return line_chart(chart.title, lines, note=chart.note)


def _seconds_chart(rows: Rows, starts: Sequence[int]) -> str:
    """Chart seconds without iterations that compiled, which would set the scale; the note has theirs."""
    first = {start + 1 for start in starts}
    later = [row for row in rows if row["step"] not in first]
    compiling = [
        f"iteration {row['step']} with {number(row.get('seconds/total'))} s" for row in rows if row["step"] in first
    ]
    names = [name for name in _names(rows) if name.startswith("seconds/") and name != "seconds/total"]
    lines = [series_of(later, name, name.removeprefix("seconds/").replace("_", " ")) for name in names]
    note = f"Left out, for then programs are compiled: {', '.join(compiling)}." if compiling else ""
    return line_chart("Seconds per iteration", lines, note=note)


def charts_of(rows: Rows, display: Display) -> list[Chart]:
    """Return the charts of these rows; a chart may have no curve."""
    names = _names(rows)

    def group(prefix, suffix=""):
        chosen = [name for name in names if name.startswith(prefix) and name.endswith(suffix)]
        return [(name, name.removeprefix(prefix).removesuffix(suffix).replace("_", " ")) for name in chosen]

    def chart(title, keys, *, sparse=False, note=""):
        return Chart(title, tuple(Curve(key, name, sparse) for key, name in keys), note)

    def computed(keys):
        """Return the keys, or none where all is 0, as of a KL without a reference."""
        return keys if any(row.get(key) for row in rows for key, _ in keys) else []

    rewards = group("reward/", "/mean")
    rewards.sort(key=lambda pair: pair[1] != "total")
    if len(rewards) == 2 and rewards[0][1] == "total":
        rewards = rewards[1:]  # a single objective is its own total, up to its weight
    charted = {curve.metric for chart in display.charts for curve in chart.curves}
    hidden = (*display.hidden, "completion tokens", "valid")
    watched = [(k, n) for k, n in group("eval_rewards/", "/mean") if k not in charted and n not in hidden]
    measures = {key.removeprefix("validation/") for key in names}
    validated = [
        (key, name)
        for key, name in group("validation/")
        if name not in hidden and not of_turns(key.removeprefix("validation/"), measures)
    ]
    by_turn = [(key, label.replace("@turn", ", turn ")) for key, label in group("reward/") if "@turn" in key]
    return [
        *display.charts,
        chart("Rewards", rewards),
        chart("Rewards turn by turn", by_turn),
        chart("Watched, never trained on", watched),
        chart("Validation", validated, sparse=True),
        chart("KL to the reference", computed([("kl", "kl")])),
        chart("Explained variance of the values", [("value/explained_variance", "explained")]),
        chart("Values", [("value/mean", "value"), ("value/return", "return")]),
        chart("Groups that teach, of dynamic sampling", [("groups_kept", "kept"), ("draws", "draws")]),
        chart("Entropy of the policy", [("entropy", "entropy")]),
        chart("Completion length, tokens", [("completion_tokens", "mean"), ("completion_tokens_max", "longest")]),
        chart("Turns of an episode", [("turns", "mean")]),
        chart("Groups without signal", group("zero_variance_groups/")),
        chart(
            "Shares",
            [
                ("truncated", "truncated"),
                ("invalid", "invalid"),
                ("duplicates", "duplicates in group"),
                *computed([("unchanged", "unchanged prompts")]),
            ],
        ),
        chart("Gradient norm", [("grad_norm", "norm")]),
        chart("Clipped tokens", computed([("clip_low", "below"), ("clip_high", "above")])),
    ]
