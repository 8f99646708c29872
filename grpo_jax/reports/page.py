"""report.html: one self-contained page of a run's results and curves, without scripts or external files.

page.html has the markup, as Jinja macros; this module makes their data.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from grpo_jax.config.files import Values
from grpo_jax.reports.charts import Rows, drawn_charts, number
from grpo_jax.reports.console import suspicions
from grpo_jax.rollout.pictures import png
from grpo_jax.runs.directory import RunDirectory, finite, read_metrics, write_atomically
from grpo_jax.tasks.task import Display, EpisodeEntry, GalleryEntry, Table, of_turns

_SHOWN_SIZE = 128  # approximate width of pictures; small ones are enlarged by integer factors
_ITERATIONS_SHOWN = 5
_COMPLETIONS_SHOWN = 40  # completions of each shown iteration


class RunEnd(NamedTuple):
    """The contents of report.html that no other file of a run holds; report.json."""

    gallery: Sequence[GalleryEntry] = ()  # pairs of texts or pictures
    episodes: Sequence[EpisodeEntry] = ()  # held-out episodes
    tables: Sequence[Table] = ()  # the task's own tables first
    config: str = ""  # the configuration of the last process, as YAML


def write_report(run: RunDirectory, display: Display, summary: Values, end: RunEnd) -> None:
    """Write the page of a run with the metrics of its directory; the summary of an unfinished one is empty."""
    rows, completions = read_metrics(run.metrics), completions_table(run.completions)
    page = render_report(run.path.name, finite(summary), display, rows, end, completions)
    write_atomically(run.report, page)


def render_report(
    title: str,
    summary: Values,
    display: Display = Display(),
    rows: Rows = (),
    end: RunEnd = RunEnd(),
    completions: Table | None = None,
) -> str:
    """Render the page of a run, whose summary is empty until it has finished.

    `evaluation.<measure>.{before, after, oracle}` of the summary makes the headline. `completions` are examples from
    training.
    """
    claims, measures = _headline(summary, display)
    if not summary and rows:
        claims.append(f"Not finished: after iteration {rows[-1]['step']}.")
    plain = {k: v for k, v in summary.items() if k != "evaluation" and not isinstance(v, Mapping | list | tuple)}
    named = ("seconds", "versions", "devices")
    groups = {name: summary[name] for name in named if isinstance(summary.get(name), Mapping)}
    return render(
        "report",
        title,
        style(),
        claims,
        measures,
        end.gallery,
        end.episodes,
        drawn_charts(rows, display),
        [*([completions] if completions else ()), *end.tables],
        {"run": plain, **groups},
        end.config,
        display,
    )


def render(macro: str, *arguments: object) -> Markup:
    """Call a macro of page.html."""
    return getattr(_macros(), macro)(*arguments)


@functools.cache
def _macros() -> Any:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    filters = (number, _stroke, _label, _value, _picture)
    environment.filters.update({function.__name__.removeprefix("_"): function for function in filters})
    return environment.get_template("page.html").module


def style() -> Markup:
    """Return the style of all pages."""
    return Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8"))


def _headline(summary: Values, display: Display) -> tuple[list[str], list[Values]]:
    """Return a sentence on the first measure, with warnings, and a card for each measure."""
    evaluation = dict(summary.get("evaluation", {}))
    total = evaluation.get("total")
    if any(values == total for name, values in evaluation.items() if name != "total"):
        del evaluation["total"]  # it equals a single objective
    main = next((name for name in (*display.headline, "total", *evaluation) if name in evaluation), None)
    claims, measures = [], []
    if main is not None:
        claims.append(_claim(main, evaluation[main], summary.get("prompts"), display))
        names = [main, *(name for name in evaluation if name != main and not of_turns(name, evaluation))]
        measures = [_card(name, evaluation[name], display) for name in names]
    claims += [Markup("<strong>{}</strong>.").format(line) for line in suspicions(summary)]
    return claims, measures


def _claim(name: str, values: Mapping[str, float | None], prompts: int | None, display: Display) -> Markup:
    before, after, oracle = (values.get(kind) for kind in ("before", "after", "oracle"))
    arrow = Markup("{} {} → <strong>{}</strong>")
    claim = arrow.format(_label(name), _value(name, before, display), _value(name, after, display))
    if prompts:
        claim += f" on {prompts} held-out prompts"
    if before is not None and after is not None and oracle is not None and oracle - before >= 1e-9:
        gap = (after - before) / (oracle - before)
        claim += f", {gap:.0%} of the way to the best possible ({_value(name, oracle, display)})"
    return claim + "."


def _card(name: str, values: Mapping[str, float | None], display: Display) -> Values:
    kinds = ("unchanged", "before", "start_renderer", "after", "oracle")
    shown = {kind: _value(name, values.get(kind), display) for kind in kinds if values.get(kind) is not None}
    before, after = values.get("before"), values.get("after")
    change = ""
    if before is not None and after is not None:
        size = abs(after - before)
        text = f"{size * 100:.1f} points" if _is_share(name) else _value(name, size, display)
        change = f"{'+' if after >= before else '−'}{text}"
    return {"name": name, "values": shown, "change": change}


def _stroke(place: int) -> str:
    """Return the style of a chart's line: six colours of page.css, then the same colours dashed."""
    dashes = ("", "; stroke-dasharray: 6 3", "; stroke-dasharray: 2 3", "; stroke-dasharray: 9 3 2 3")
    return f"color: var(--series-{place % 6 + 1}){dashes[place // 6 % 4]}"


def _label(name: str) -> str:
    return name.replace("_", " ").replace("/", "\N{NO-BREAK SPACE}· ")


def _is_share(name: str) -> bool:
    return any(word in name for word in ("accuracy", "valid", "share"))


def _value(name: str, value: float | None, display: Display) -> str:
    if value is None or not math.isfinite(value):
        return number(None)
    if _is_share(name):
        return f"{value:.1%}"
    if display.digits_of(name) > 3:
        return f"{value:.{display.digits_of(name)}f}"
    value = round(value, 2) + 0.0  # no "-0.00"
    return (f"{value:.2f}" if abs(value) < 100 else number(value)).replace("-", "−")


def _picture(image: np.ndarray | None, kind: str) -> Markup:
    if image is None:
        return Markup('<div class="missing">no picture</div>')
    height, width = image.shape[:2]
    factor = max(1, _SHOWN_SIZE // width) if width < _SHOWN_SIZE else _SHOWN_SIZE / width
    tag = Markup('<img class="{}" width="{}" height="{}" alt="{}" src="data:image/png;base64,{}">')
    crisp = "crisp" if width < _SHOWN_SIZE else ""
    data = base64.b64encode(png(image)).decode()
    return tag.format(crisp, round(width * factor), round(height * factor), kind, data)


def completions_table(folder: str | Path) -> Table | None:
    """Read the first completions of the first iteration, the last, and some between; None if there are none."""
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
    return Table("Completions", names, [[row.get(name) for name in names] for row in rows], note)


def _columns(rows: Rows) -> list[str]:
    """Return the columns of the page, texts before numbers; raw completions only if words differ."""
    shown = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, str | int | float))
    if all(str(row.get("raw_completion")).strip() == str(row.get("completion")).strip() for row in rows):
        shown.pop("raw_completion", None)
    return sorted(shown, key=lambda name: not any(isinstance(row.get(name), str) for row in rows))


def write_end(run: RunDirectory, end: RunEnd) -> None:
    """Write report.json."""
    write_atomically(run.end, json.dumps(finite(_plain(end)), indent=1) + "\n")


def _plain(value: object) -> Any:
    """Convert named tuples to mappings and pictures to base64 PNG."""
    if isinstance(value, np.ndarray):
        return base64.b64encode(png(value)).decode()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
