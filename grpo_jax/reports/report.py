"""report.html of a run, and one page for several: their curves, their results, the differences of their configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.build import flat
from grpo_jax.config.command_line import read_config
from grpo_jax.config.files import Values
from grpo_jax.config.help import spelled
from grpo_jax.config.sections import RewardSection
from grpo_jax.errors import UserError
from grpo_jax.reports.charts import MOST_LINES, RunCurves, curves_section
from grpo_jax.reports.page import (
    MISSING,
    Rows,
    RunEnd,
    document,
    facts_section,
    headline,
    number,
    read_end,
    read_summary,
    render,
    section,
    table_section,
)
from grpo_jax.runs.directory import RunDirectory, finite, read_metrics, write_atomically
from grpo_jax.tasks.display import Display, Table

_PASSING = ("run_dir", "resume")  # fields that say nothing of what was computed
_ITERATIONS_SHOWN = 5
_COMPLETIONS_SHOWN = 40  # of each of these iterations
_LONGEST = 2000  # characters of one text


def write_report(
    path: str | Path, run: RunDirectory, display: Display = Display(), *, summary: Values | None = None
) -> None:
    """Write the page of a run with metrics, finished or not, from its directory.

    `summary` is given by a run that is about to write it.
    """
    rows = read_metrics(run.metrics)
    summary = read_summary(run, rows) if summary is None else finite(summary)
    end = read_end(run)
    if not summary:
        end = RunEnd(config=end.config)
    page = render_report(run.path.name, summary or {}, display, rows, end, completions_table(run.completions))
    write_atomically(path, page)


def render_report(
    title: str,
    summary: Values,
    display: Display = Display(),
    rows: Rows = (),
    end: RunEnd = RunEnd(),
    completions: Table | None = None,
) -> str:
    """Render the page of a run.

    `evaluation.<measure>.{before, after, oracle}` of the summary makes the headline; it is empty for a run that has
    not finished. `completions` are some of training.
    """
    sections = [
        headline(title, summary, display, rows),
        end.sections.get("gallery", ""),
        end.sections.get("episodes", ""),
        curves_section([RunCurves("", rows, end.starts)], display),
        "" if completions is None else table_section(completions),
        end.sections.get("tables", ""),
        facts_section(summary, end.config),
    ]
    return document(title, sections)


def completions_table(folder: str | Path) -> Table | None:
    """Read the first completions of the first iteration, the last, and some between; None where there are none."""
    import pyarrow
    import pyarrow.parquet

    files = sorted(Path(folder).glob("step_*.parquet"))
    places = {round(part * (len(files) - 1) / (_ITERATIONS_SHOWN - 1)) for part in range(_ITERATIONS_SHOWN)}
    rows: list[Values] = []
    damaged: list[str] = []
    for file in [files[place] for place in sorted(places) if files]:
        try:
            with pyarrow.parquet.ParquetFile(file) as parquet:
                rows += parquet.read().slice(0, _COMPLETIONS_SHOWN).to_pylist()
        except (OSError, pyarrow.ArrowException):
            damaged.append(file.name)
    if not rows and not damaged:
        return None
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, str | int | float))
    note = (
        f"Of {min(len(files), _ITERATIONS_SHOWN)} of {len(files)} iterations the first ones; all are in completions/."
    )
    if damaged:
        note += f" Could not be read: {', '.join(damaged)}."
    cells = [[_shortened(row.get(name)) for name in names] for row in rows]
    return Table("Completions", tuple(names), cells, note)


def _shortened(value: object) -> object:
    return f"{value[:_LONGEST]}…" if isinstance(value, str) and len(value) > _LONGEST else value


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
    charts = tuple(dict.fromkeys(chart for display in displays for chart in display.charts))
    hidden = tuple(dict.fromkeys(name for display in displays for name in display.hidden))
    curves = [RunCurves(run.name, run.rows) for run in compared]
    sections = [
        render("headline", "grpo_jax", title, [], [], Display()),
        _runs(compared),
        _configs(compared),
        _measures(compared),
        curves_section(curves, Display(charts=charts, hidden=hidden)),
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
    rows = []
    for run, heading in zip(compared, _headings(compared), strict=True):
        last = run.rows[-1]["step"]
        seconds = run.summary.get("seconds", {}).get("total")
        best = run.summary.get("best") or {}
        chosen = None
        if best.get("iteration") is not None:
            chosen = f"{best['iteration']} ({number(best.get('validation_score'))})"
        done = str(run.summary.get("iterations", last)) if run.summary else f"{last}, not finished"
        time = None if seconds is None else f"{number(seconds / 60)} min"
        rows.append([heading, run.fields.get("task.kind"), run.fields.get("seed"), done, chosen, time])
    columns = ["run", "task", "seed", "iterations", "best iteration (score)", "time"]
    tasks = {run.fields.get("task.kind") for run in compared}
    note = "These are of different tasks: what has the same name may not be the same." if len(tasks) > 1 else ""
    return section("Runs", render("table", columns, rows, kind="runs"), note)


def _measures(compared: Sequence[Compared]) -> str:
    """Return held-out measures at the end, with their intervals where several completions were drawn."""
    finals = [_final(run.summary) for run in compared]
    names = dict.fromkeys(name for measures in finals for name in measures)
    if not names:
        return ""
    rows = [[name, *(measures.get(name) for measures in finals)] for name in names]
    note = "On the held-out prompts after training; in grey before it. In brackets 95 % intervals, over prompts."
    return section("Measures", render("table", ["measure", *_headings(compared)], rows, kind="across"), note)


def _final(summary: Values) -> dict[str, str]:
    cells = {}
    for name, values in summary.get("evaluation", {}).items():
        cells[name.replace("_", " ")] = render("before_after", values.get("before"), values.get("after"))
    for name, statistics in summary.get("samples", {}).get("measures", {}).items():
        for statistic, values in statistics.items():
            cells[f"{name.replace('_', ' ')}, {statistic}"] = _interval(values.get("after"))
    return cells


def _interval(values: Sequence[float | None] | None) -> str:
    if not values or values[0] is None:
        return MISSING
    mean, low, high = (*values, None, None)[:3]
    return number(mean) if low is None else f"{number(mean)} [{number(low)}, {number(high)}]"


def _configs(compared: Sequence[Compared]) -> str:
    names = sorted({name for run in compared for name in run.fields} - {*_PASSING})
    values = {name: [_spelled(run.fields, name) for run in compared] for name in names}
    rows = [[name, *texts] for name, texts in values.items() if len(set(texts)) > 1]
    if not rows:
        return section("Configuration", " ", "All fields are the same.")
    note = f"Fields that differ; {MISSING} where a run has none of that name."
    return section("Configuration", render("table", ["field", *_headings(compared)], rows, kind="across"), note)


def _fields(values: Values) -> dict[str, Any]:
    """Return a config by dotted names, each reward's fields under its name in metrics."""
    rewards = values.get("rewards") or []
    if rewards and all(isinstance(entry, Mapping) and isinstance(entry.get("name"), str) for entry in rewards):
        called = {RewardSection(entry["name"], label=entry.get("label") or "").called: entry for entry in rewards}
        values = {**values, "rewards": called}
    return flat(values)


def _spelled(fields: Values, name: str) -> str:
    return spelled(fields[name]) if name in fields else MISSING


def _headings(compared: Sequence[Compared]) -> list[str]:
    return [render("named", place, run.name) for place, run in enumerate(compared)]
