"""report.html of a run, from the files of its directory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from grpo_jax.config.files import Values
from grpo_jax.reports.charts import curves_section
from grpo_jax.reports.page import (
    Rows,
    RunEnd,
    document,
    episodes_section,
    facts_section,
    gallery_section,
    headline,
    read_end,
    read_summary,
    table_section,
)
from grpo_jax.runs.directory import RunDirectory, finite, read_metrics, write_atomically
from grpo_jax.tasks.display import Display, Table

_ITERATIONS_SHOWN = 5
_COMPLETIONS_SHOWN = 40  # of each of these iterations
_LONGEST = 2000  # characters of one text


def write_report(path: str | Path, run: RunDirectory, display: Display = Display()) -> None:
    """Write the page of a run with metrics, finished or not, from its directory."""
    rows = read_metrics(run.metrics)
    summary, end = read_summary(run, rows), read_end(run)
    if not summary:
        end = RunEnd(config=end.config)
    write_atomically(
        path, render_report(run.path.name, summary, display, rows, end, completions_table(run.completions))
    )


def write_final_report(run: RunDirectory, display: Display, summary: Values, end: RunEnd) -> None:
    """Write the page of a run that is about to write its summary."""
    rows, completions = read_metrics(run.metrics), completions_table(run.completions)
    write_atomically(run.report, render_report(run.path.name, finite(summary), display, rows, end, completions))


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
        gallery_section(end.gallery, display),
        episodes_section(end.episodes, display),
        curves_section(rows, end.starts, display),
        "" if completions is None else table_section(completions),
        *(table_section(table) for table in end.tables),
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
    for file in [files[place] for place in sorted(places) if files]:
        with suppress(OSError, pyarrow.ArrowException), pyarrow.parquet.ParquetFile(file) as parquet:  # of a killed run
            rows += parquet.read().slice(0, _COMPLETIONS_SHOWN).to_pylist()
    if not rows:
        return None
    names = _columns(rows)
    note = f"The first of {min(len(files), _ITERATIONS_SHOWN)} of {len(files)} iterations; all are in completions/."
    return Table("Completions", names, [[_shortened(row.get(name)) for name in names] for row in rows], note)


def _columns(rows: Sequence[Values]) -> list[str]:
    """Return the columns that the page shows, numbers before texts; raw completions only where they differ."""
    shown = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, str | int | float))
    if all(row.get("raw_completion") == row.get("completion") for row in rows):
        shown.pop("raw_completion", None)
    texts = {name for name in shown if any(isinstance(row.get(name), str) for row in rows)}
    return [*(name for name in shown if name not in texts), *(name for name in shown if name in texts)]


def _shortened(value: object) -> object:
    return f"{value[:_LONGEST]}…" if isinstance(value, str) and len(value) > _LONGEST else value
