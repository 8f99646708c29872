"""One page for several runs: their curves in the same charts, their results, and the differences of their configs."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.build import flat
from grpo_jax.config.command_line import read_config
from grpo_jax.config.files import Values
from grpo_jax.config.help import spelled
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.reports.charts import (
    MOST_LINES,
    Rows,
    Series,
    all_others,
    charts_of,
    line_chart,
    number,
    series_of,
    swatch,
)
from grpo_jax.reports.page import document, html_table, read_summary, section
from grpo_jax.runs.directory import RunDirectory, read_metrics, write_atomically
from grpo_jax.tasks.display import Chart, Display

_PASSING = ("run_dir", "resume")  # fields that say nothing of what was computed
_MISSING = "–"


class Compared(NamedTuple):
    """A run in a comparison, with a name as short as it can be told from the others'.

    Its rows are of metrics.jsonl, its summary is empty where it has not finished, its fields have dotted names.
    """

    name: str
    rows: Rows
    summary: Values
    fields: Values


def write_comparison(path: str | Path, runs: Sequence[RunDirectory], displays: Sequence[Display]) -> None:
    """Write the HTML page of runs; UserError if they are too many for one chart, or a file is damaged."""
    if len(runs) > MOST_LINES:
        raise UserError(f"at most {MOST_LINES} runs can be told apart in one page, got {len(runs)}")
    compared = []
    for name, run in zip(names_of([run.path for run in runs]), runs, strict=True):
        rows = read_metrics(run.metrics)
        compared.append(Compared(name, rows, read_summary(run, rows), _fields(read_config(run.config))))
    title = f"Comparison of {len(runs)} runs"
    sections = [
        f"<header><p class='over'>grpo_jax</p><h1>{title}</h1></header>",
        _runs(compared),
        _configs(compared),
        _measures(compared),
        _curves(compared, displays),
    ]
    write_atomically(path, document(title, sections))


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the end of each path, with as many folders as it takes to tell it from the others."""

    def name(path: Path) -> str:
        ends = (Path(*path.parts[-length:]) for length in range(1, len(path.parts)))
        alone = (end for end in ends if sum(other.parts[-len(end.parts) :] == end.parts for other in paths) == 1)
        return str(next(alone, path))

    return [name(path) for path in paths]


def _runs(compared: Sequence[Compared]) -> str:
    def row(place: int, run: Compared) -> list[str]:
        last = run.rows[-1]["step"]
        done = str(run.summary.get("iterations", last)) if run.summary else f"{last}, not finished"
        seconds = run.summary.get("seconds", {}).get("total")
        best = run.summary.get("best") or {}
        chosen = _MISSING
        if best.get("iteration") is not None:
            chosen = f"{best['iteration']} ({number(best.get('validation_score'))})"
        return [
            swatch(place) + html.escape(run.name),
            html.escape(str(run.fields.get("task.kind", _MISSING))),
            html.escape(str(run.fields.get("seed", _MISSING))),
            done,
            chosen,
            _MISSING if seconds is None else f"{number(seconds / 60)} min",
        ]

    columns = ["run", "task", "seed", "iterations", "best iteration (score)", "time"]
    tasks = {run.fields.get("task.kind") for run in compared}
    note = "These are of different tasks: what has the same name may not be the same." if len(tasks) > 1 else ""
    return section("Runs", html_table(columns, map(row, range(len(compared)), compared), "runs"), note)


def _measures(compared: Sequence[Compared]) -> str:
    """Return held-out measures at the end, with their intervals where several completions were drawn."""
    finals = [_final(run.summary) for run in compared]
    names = dict.fromkeys(name for measures in finals for name in measures)
    rows = [[html.escape(name), *(measures.get(name, _MISSING) for measures in finals)] for name in names]
    note = "On the held-out prompts after training; in grey before it. In brackets 95 % intervals, over prompts."
    return section("Measures", html_table(["measure", *_headings(compared)], rows, "across"), note) if rows else ""


def _final(summary: Values) -> dict[str, str]:
    cells = {}
    for name, values in summary.get("evaluation", {}).items():
        before = f" <span class='before'>{number(values['before'])}</span>" if values.get("before") is not None else ""
        cells[name.replace("_", " ")] = number(values.get("after")) + before
    for name, statistics in summary.get("samples", {}).get("measures", {}).items():
        for statistic, values in statistics.items():
            cells[f"{name.replace('_', ' ')}, {statistic}"] = _interval(values.get("after"))
    return cells


def _interval(values: Sequence[float | None] | None) -> str:
    if not values or values[0] is None:
        return _MISSING
    mean, low, high = (*values, None, None)[:3]
    return number(mean) if low is None else f"{number(mean)} [{number(low)}, {number(high)}]"


def _curves(compared: Sequence[Compared], displays: Sequence[Display]) -> str:
    rows = [row for run in compared for row in run.rows]
    charts = dict.fromkeys(chart for display in displays for chart in display.charts)
    hidden = dict.fromkeys(name for display in displays for name in display.hidden)
    planned = charts_of(rows, Display(charts=tuple(charts), hidden=tuple(hidden)))
    drawn = "".join(_laid_over(chart, compared) for chart in planned)
    further = all_others(rows, planned, lambda chart: _laid_over(chart, compared))
    seconds = [_series(run, place, "seconds/total", rows=run.rows[1:]) for place, run in enumerate(compared)]
    took = line_chart("Seconds per iteration", seconds, note="Without the first, in which programs are compiled.")
    note = "Faint: each iteration. Bold: smoothed. Under the pointer, or by the arrow keys, the values of an iteration."
    return section("Training", f"<div class='charts'>{drawn}{took}</div>{further}", note)


def _laid_over(chart: Chart, compared: Sequence[Compared]) -> str:
    figures = []
    for curve in chart.curves:
        lines = [_series(run, place, curve.metric, sparse=curve.sparse) for place, run in enumerate(compared)]
        title = chart.title if len(chart.curves) == 1 else f"{chart.title}: {curve.label}"
        figures.append(line_chart(title, lines))
    return "".join(figures)


def _series(run: Compared, place: int, metric: str, *, rows: Rows | None = None, sparse: bool = False) -> Series:
    return series_of(run.rows if rows is None else rows, metric, run.name, sparse=sparse, place=place)


def _configs(compared: Sequence[Compared]) -> str:
    names = sorted({name for run in compared for name in run.fields} - {*_PASSING})
    values = {name: [_spelled(run.fields, name) for run in compared] for name in names}
    rows = [[html.escape(name), *map(html.escape, texts)] for name, texts in values.items() if len(set(texts)) > 1]
    note = "Fields that differ; – where a run has none of that name."
    if not rows:
        return section("Configuration", "", "All fields are the same.")
    return section("Configuration", html_table(["field", *_headings(compared)], rows, "across"), note)


def _fields(values: Values) -> dict[str, Any]:
    """Return a config by dotted names, each reward's fields under its name in metrics."""
    rewards = values.get("rewards") or []
    if rewards and all(isinstance(entry, Mapping) and isinstance(entry.get("name"), str) for entry in rewards):
        called = {RewardSection(entry["name"], label=entry.get("label") or "").called: entry for entry in rewards}
        values = {**values, "rewards": called}
    return flat(values)


def _spelled(fields: Values, name: str) -> str:
    return spelled(fields[name]) if name in fields else _MISSING


def _headings(compared: Sequence[Compared]) -> list[str]:
    return [swatch(place) + html.escape(run.name) for place, run in enumerate(compared)]
