"""Line charts as inline SVG, and which of them a run has: its task's first, then what every run measures.

Nothing is fetched, colours come from the page's style sheet, and charts are whole without a script; page.js reads
`data-points` and shows the values under the pointer.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpo_jax.config.files import Values
from grpo_jax.tasks.display import Chart, Curve, Display, of_turns

Rows = Sequence[Values]
"""Rows of metrics.jsonl."""

_WIDTH, _HEIGHT = 320, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 14, 8, 32
_MAX_POINTS = 500
_DASHES = ("", "6 3", "2 3", "9 3 2 3")
_COLOURS = 6  # the style sheet defines --series-1 … --series-6
MOST_LINES = _COLOURS * len(_DASHES)
"""Lines of a chart that can be distinguished."""


class Series(NamedTuple):
    """One line: its name and (step, value) points in order; a sparse one is drawn with dots.

    `place` decides colour and dashes, from 0; by default it is the place among the lines of the chart.
    """

    name: str
    points: Sequence[tuple[float, float]]
    sparse: bool = False
    place: int | None = None


def series_of(rows: Rows, key: str, name: str, *, sparse: bool = False, place: int | None = None) -> Series:
    """Collect a metric over steps, leaving out rows that lack it."""
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    return Series(name, [point for point in points if math.isfinite(point[1])], sparse, place)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers that enclose [low, high]; a step is 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise ValueError(f"low, high: expected finite numbers in order, got {low}, {high}")
    if high - low < 1e-12 * max(1.0, abs(low)):
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return the exponential moving average without the bias of its start."""
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def line_chart(title: str, series: Sequence[Series], *, note: str = "") -> str:
    """Draw an HTML figure: legend, axes and lines; noisy series are drawn faint with a smooth line over them.

    Empty series are left out, and those beyond `MOST_LINES`; with none left the result is empty. The note stands
    under the heading.
    """
    there = [line for line in series if line.points][:MOST_LINES]
    if not there:
        return ""
    series = [line._replace(place=index if line.place is None else line.place) for index, line in enumerate(there)]
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    y_ticks = nice_ticks(min(ys), max(ys))
    x_ticks = [tick for tick in nice_ticks(min(xs), max(xs), 5) if min(xs) <= tick <= max(xs)]
    to_x = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    to_y = _scale(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    stride = -(-max(len(line.points) for line in series) // _MAX_POINTS)
    marks = [_axis(x_ticks, y_ticks, to_x, to_y), *(_line(line, stride, to_x, to_y) for line in series)]
    frame = [min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP]
    note = f"<p class='note'>{html.escape(note)}</p>" if note else ""
    return (
        f"<figure class='chart' data-points='{_values(series, stride, frame)}'>"
        f"<figcaption>{html.escape(title)}</figcaption>{note}{_legend(series)}"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{html.escape(title, quote=True)}'>"
        f"{''.join(marks)}</svg></figure>"
    )


def number(value: float | None) -> str:
    """Format a number for people: three significant digits, no exponent where that is readable."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def swatch(place: int) -> str:
    """Return a line's mark in a legend."""
    dashes = _DASHES[place // _COLOURS % len(_DASHES)]
    return (
        f"<svg class='swatch' viewBox='0 0 22 10'><line x1='0' x2='22' y1='5' y2='5' {_stroke(place, dashes)}/></svg>"
    )


def _scale(low, high, start, end):
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _axis(x_ticks, y_ticks, to_x, to_y):
    parts = []
    for tick in y_ticks:
        y = to_y(tick)
        zero = " zero" if tick == 0 else ""
        parts.append(f"<line class='grid{zero}' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text class='tick' x='{_LEFT - 6}' y='{y + 3.5:.1f}' text-anchor='end'>{number(tick)}</text>")
    for tick in x_ticks:
        y = _HEIGHT - _BOTTOM + 14
        parts.append(f"<text class='tick' x='{to_x(tick):.1f}' y='{y}' text-anchor='middle'>{number(tick)}</text>")
    centre = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f"<text class='tick' x='{centre}' y='{_HEIGHT - 3}' text-anchor='middle'>iteration</text>")
    return "".join(parts)


def _line(line, stride, to_x, to_y):
    points = list(line.points)
    stroke = _stroke(line.place, _DASHES[line.place // _COLOURS % len(_DASHES)])
    label = f"<title>{html.escape(line.name)}</title>"
    if line.sparse or len(points) < 12:
        dots = "".join(
            f"<circle cx='{to_x(x):.1f}' cy='{to_y(y):.1f}' r='3' style='fill: {_colour(line.place)}'/>"
            for x, y in points[::stride]
        )
        return f"<path class='smooth' {stroke} d='{_path(points[::stride], to_x, to_y)}'>{label}</path>{dots}"
    trend = list(zip([x for x, _ in points], smoothed([y for _, y in points]), strict=True))
    return (
        f"<path class='raw' {_stroke(line.place)} d='{_path(points[::stride], to_x, to_y)}'/>"
        f"<path class='smooth' {stroke} d='{_path(trend[::stride], to_x, to_y)}'>{label}</path>"
    )


def _colour(place):
    return f"var(--series-{place % _COLOURS + 1})"


def _stroke(place, dashes=""):
    return f"style='stroke: {_colour(place)}{f'; stroke-dasharray: {dashes}' if dashes else ''}'"


def _path(points, to_x, to_y):
    return "M" + "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in points)


def _values(series, stride, frame):
    """Return the data of page.js: the drawn points of each line, steps that equal the line before's as null."""
    lines, before = [], None
    for line in series:
        points = line.points[::stride]
        xs, ys = [x for x, _ in points], [float(f"{y:.5g}") for _, y in points]
        lines.append({"name": line.name, "place": line.place, "x": None if xs == before else xs, "y": ys})
        before = xs
    text = json.dumps({"frame": frame, "lines": lines}, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;")


def _legend(series):
    items = []
    for line in series:
        _, last = line.points[-1]
        items.append(f"<span>{swatch(line.place)}{html.escape(line.name)} <b>{number(last)}</b></span>")
    return f"<div class='legend'>{''.join(items)}</div>"


def curves_section(rows: Rows, starts: Sequence[int], display: Display) -> str:
    """Return the section of one run's curves; "" where it has no metrics.

    `starts` are the iterations done when a process began: the one after compiles.
    """
    planned = charts_of(rows, display)
    charts = "".join([*(_drawn(chart, rows) for chart in planned), _seconds_chart(rows, starts)])
    if not charts:
        return ""
    note = (
        "Faint: each iteration. Bold: smoothed. Figures beside the names are the last ones; under the pointer, or by "
        "the arrow keys, those of an iteration."
    )
    return (
        f"<section><h2>Training</h2><p class='note'>{note}</p><div class='charts'>{charts}</div>"
        f"{all_others(rows, planned, lambda chart: _drawn(chart, rows))}</section>"
    )


def all_others(rows: Rows, charted: Sequence[Chart], draw: Callable[[Chart], str]) -> str:
    """Return all other metrics of a run, folded, a chart for each under its name; "" where there are none."""
    charted_metrics = {"step", *(curve.metric for chart in charted for curve in chart.curves)}
    names = dict.fromkeys(key for row in rows for key in row if not key.startswith("seconds/"))
    others = [name for name in names if name not in charted_metrics]
    moving = [name for name in others if any(row.get(name) for row in rows)]
    still = ", ".join(name for name in others if name not in moving)
    note = f"<p class='note'>0 or missing throughout: {html.escape(still)}.</p>" if still else ""
    drawn = "".join(draw(Chart(name, (Curve(name, name, sparse=name.startswith("validation/")),))) for name in moving)
    if not drawn and not note:
        return ""
    return f"<details><summary>All other measures</summary>{note}<div class='charts'>{drawn}</div></details>"


def _drawn(chart: Chart, rows: Rows) -> str:
    lines = [series_of(rows, curve.metric, curve.label, sparse=curve.sparse) for curve in chart.curves]
    return line_chart(chart.title, lines, note=chart.note)


def charts_of(rows: Rows, display: Display) -> list[Chart]:
    """Return the charts of these rows; a chart may have no curve."""
    names = list(dict.fromkeys(key for row in rows for key in row))

    def group(prefix, suffix=""):
        chosen = [name for name in names if name.startswith(prefix) and name.endswith(suffix)]
        return [(name, name.removeprefix(prefix).removesuffix(suffix).replace("_", " ")) for name in chosen]

    def chart(title, keys, *, sparse=False, note=""):
        return Chart(title, tuple(Curve(key, name, sparse) for key, name in keys), note)

    def computed(keys):
        """Return the keys, or none where all is 0, as without a reference or with one update of each batch."""
        return keys if any(row.get(key) for row in rows for key, _ in keys) else []

    rewards = group("reward/", "/mean")
    rewards.sort(key=lambda pair: pair[1] != "total")
    if len(rewards) == 2 and rewards[0][1] == "total":
        rewards = rewards[1:]  # a single objective is its own total, up to its weight
    charted = {curve.metric for chart in display.charts for curve in chart.curves}
    hidden = (*display.hidden, "completion tokens", "usable")
    watched = [(k, n) for k, n in group("watch/", "/mean") if k not in charted and n not in hidden]
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
        chart("Groups without signal", group("dead_groups/")),
        chart(
            "Different advantages in a group",
            [("distinct_advantages/grpo", "rewards summed (GRPO)"), ("distinct_advantages/gdpo", "kept apart (GDPO)")],
            note="What each estimator can tell apart in the same rewards, whichever is used.",
        ),
        chart(
            "Shares",
            [
                ("truncated", "truncated"),
                ("unusable", "unusable"),
                ("duplicates", "duplicates in group"),
                ("unchanged", "unchanged prompts"),
            ],
        ),
        chart("Gradient norm", [("grad_norm", "norm")]),
        chart("Clipped tokens", computed([("clip_low", "below"), ("clip_high", "above")])),
    ]


def _seconds_chart(rows: Rows, starts: Sequence[int]) -> str:
    """Chart seconds without iterations that compiled, which would set the scale; the note has theirs."""
    first = {start + 1 for start in starts}
    named = [key for row in rows for key in row if key.startswith("seconds/") and key != "seconds/total"]
    later = [row for row in rows if row["step"] not in first]
    compiling = [(row["step"], row.get("seconds/total")) for row in rows if row["step"] in first]
    left = ", ".join(f"iteration {step} with {number(seconds)} s" for step, seconds in compiling)
    note = f"Left out, for then programs are compiled: {left}." if left else ""
    lines = [series_of(later, key, key.removeprefix("seconds/").replace("_", " ")) for key in dict.fromkeys(named)]
    return line_chart("Seconds per iteration", lines, note=note)
