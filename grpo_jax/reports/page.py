"""report.html: one self-contained page of a run's results and curves. Nothing is fetched, no script runs.

page.html has the markup, as macros of Jinja; here is what they are given.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup
from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_jax.config.files import Values, load_json, read_text
from grpo_jax.errors import UserError, one_line
from grpo_jax.reports.console import suspicions
from grpo_jax.rollout.pictures import png
from grpo_jax.runs.directory import RunDirectory, finite, write_atomically
from grpo_jax.tasks.task import Display, EpisodeEntry, GalleryEntry, Table, of_turns

_SHOWN_SIZE = 128  # pictures are shown about this wide: small ones enlarged by whole factors
_ROWS_SHOWN = 200
MISSING = "–"
Rows = Sequence[Values]
"""Rows of metrics.jsonl."""
Measures = Mapping[str, float | None]


class RunEnd(NamedTuple):
    """The parts of report.html that stand in no other file of a run; report.json.

    Attributes:
        gallery: Pairs of texts or pictures.
        episodes: As they went.
        tables: The task's own first.
        starts: Iterations done when a process began: the one after compiles.
        config: The configuration of the last process, as YAML.
    """

    gallery: Sequence[GalleryEntry] = ()
    episodes: Sequence[EpisodeEntry] = ()
    tables: Sequence[Table] = ()
    starts: Sequence[int] = (0,)
    config: str = ""


def number(value: float | None) -> str:
    """Format a number for people: three significant digits, no exponent where that is readable."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def stroke(place: int) -> str:
    """Return the style of a chart's line: six colours of page.css, then the same ones dashed."""
    dashes = ("", "6 3", "2 3", "9 3 2 3")[place // 6 % 4]
    return f"stroke: var(--series-{place % 6 + 1}); stroke-dasharray: {dashes}".removesuffix("; stroke-dasharray: ")


def render(macro: str, *arguments: object, **options: object) -> Markup:
    """Call a macro of page.html."""
    return getattr(_macros(), macro)(*arguments, **options)


@functools.cache
def _macros() -> Any:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    filters = (number, stroke, _label, _value, _picture, _cell, _fact)
    environment.filters.update({function.__name__.removeprefix("_"): function for function in filters})
    return environment.get_template("page.html").module


def document(title: str, sections: Iterable[str]) -> str:
    """Return an HTML file that stands alone and whose policy lets no script run and nothing be fetched."""
    return str(render("document", title, style(), map(Markup, sections)))


def style() -> Markup:
    """Return the style of all pages."""
    return Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8"))


def section(title: str, content: str, note: str = "") -> str:
    """Return a section; empty where its content is."""
    return render("section", title, Markup(content), note) if content else ""


def gallery_section(gallery: Sequence[GalleryEntry], display: Display) -> str:
    """Return the section of pairs before and after training."""
    shown = render("gallery", gallery, display) if gallery else ""
    return section("Before and after", shown, _gallery_note(gallery))


def episodes_section(episodes: Sequence[EpisodeEntry], display: Display) -> str:
    """Return the section of episodes."""
    note = "Held-out prompts after training, greedy, chosen by place. Grey: what the policy read. Black: what it wrote."
    return section("Episodes", render("episodes", episodes, display) if episodes else "", note)


def headline(title: str, summary: Values, display: Display, rows: Rows) -> str:
    """Return the head of a run's page: its first measure in a sentence, a card for each."""
    evaluation = dict(summary.get("evaluation", {}))
    total = evaluation.get("total")
    if any(values == total for name, values in evaluation.items() if name != "total"):
        del evaluation["total"]  # of a single objective, which it is
    main = next((name for name in (*display.headline, "total", *evaluation) if name in evaluation), None)
    claims: list[str] = []
    measures: list[Values] = []
    if main is not None:
        claims.append(_claim(main, evaluation[main], summary.get("prompts"), display))
        names = [main, *(name for name in evaluation if name != main and not of_turns(name, evaluation))]
        measures = [_card(name, evaluation[name], display) for name in names]
    claims += [Markup('<strong class="suspect">{}</strong>.').format(line) for line in suspicions(summary)]
    if not summary and rows:
        claims.append(f"Not finished: after iteration {rows[-1]['step']}.")
    return render("headline", "grpo_jax run", title, claims, measures, display)


def _claim(name: str, values: Measures, prompts: int | None, display: Display) -> Markup:
    before, after, oracle = (values.get(kind) for kind in ("before", "after", "oracle"))
    arrow = Markup("{} {} → <strong>{}</strong>")
    claim = arrow.format(_label(name), _value(name, before, display), _value(name, after, display))
    if prompts:
        claim += f" on {prompts} held-out prompts"
    if before is not None and after is not None and oracle is not None and abs(oracle - before) >= 1e-9:
        gap = (after - before) / (oracle - before)
        claim += f", {gap:.0%} of the way to {display.best} ({_value(name, oracle, display)})"
    return claim + "."


def _card(name: str, values: Measures, display: Display) -> Values:
    kinds = ("before", "after", "oracle")
    shown = {kind: _value(name, values.get(kind), display) for kind in kinds if values.get(kind) is not None}
    before, after = values.get("before"), values.get("after")
    change = ""
    if before is not None and after is not None:
        size = abs(after - before)
        text = f"{size * 100:.1f} points" if _is_share(name) else _value(name, size, display)
        change = f"{'+' if after >= before else '−'}{text}"
    return {"name": name, "values": shown, "change": change}


def _label(name: str) -> str:
    return name.replace("_", " ").replace("/", " · ")


def _is_share(name: str) -> bool:
    return any(word in name for word in ("accuracy", "valid", "share"))


def _value(name: str, value: float | None, display: Display) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    if _is_share(name):
        return f"{value:.1%}"
    if display.digits_of(name) > 3:
        return f"{value:.{display.digits_of(name)}f}"
    value = round(value, 2) + 0.0  # no "-0.00"
    return (f"{value:.2f}" if abs(value) < 100 else number(value)).replace("-", "−")


def _gallery_note(gallery: Sequence[GalleryEntry]) -> str:
    if all(entry.after is None for entry in gallery):
        return "Grey: the prompt. Black: the trained policy's completion."
    if all(entry.before is None for entry in gallery):
        return "Left: the prompt's picture. Right: the trained policy's."
    return "Left: the prompt as it was typed. Right: the trained policy's rewrite of it. Both from the same noise."


def _picture(image: np.ndarray | None, kind: str) -> Markup:
    if image is None:
        return Markup('<div class="missing">no picture</div>')
    height, width = image.shape[:2]
    factor = max(1, _SHOWN_SIZE // width) if width < _SHOWN_SIZE else _SHOWN_SIZE / width
    tag = Markup('<img class="{}" width="{}" height="{}" alt="{}" src="data:image/png;base64,{}">')
    crisp = "crisp" if width < _SHOWN_SIZE else ""
    data = base64.b64encode(png(image)).decode()
    return tag.format(crisp, round(width * factor), round(height * factor), kind, data)


def table_section(table: Table) -> str:
    """Return the section of a table, cut after 200 rows; empty without any."""
    if not table.rows:
        return ""
    columns = [_label(str(column)) for column in table.columns]
    content = render("table", columns, table.rows[:_ROWS_SHOWN], len(table.rows) - _ROWS_SHOWN)
    return section(table.title, content, table.note)


def _cell(value: Any) -> Markup:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool):
        return Markup("<td>{}</td>").format("yes" if value else "no")
    if value is None or isinstance(value, int | float):
        return Markup('<td class="number">{}</td>').format(number(value))
    return Markup('<td class="text">{}</td>').format(value)


def facts_section(summary: Values, config: str) -> str:
    """Return the section of seconds, versions, devices and configuration."""
    plain = {k: v for k, v in summary.items() if k != "evaluation" and not isinstance(v, Mapping | list | tuple)}
    groups = {"run": plain}
    for name in ("seconds", "versions", "devices"):
        if isinstance(summary.get(name), Mapping):
            groups[name] = summary[name]
    return section("How it was run", render("facts", groups, config))


def _fact(value: float | str | None) -> str:
    return number(value) if value is None or isinstance(value, float) else str(value)


def write_end(run: RunDirectory, end: RunEnd) -> None:
    """Write report.json."""
    write_atomically(run.end, json.dumps(finite(_plain(end)), indent=1) + "\n")


def _plain(value: object) -> Any:
    """Return named tuples as mappings and pictures as PNG in base64."""
    if isinstance(value, np.ndarray):
        return base64.b64encode(png(value)).decode()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def read_end(run: RunDirectory) -> RunEnd:
    """Read report.json of a finished run; UserError if it is damaged."""
    if not run.end.exists():
        return RunEnd(config=read_text(run.config) if run.config.is_file() else "")
    try:
        return TypeAdapter(RunEnd, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(load_json(run.end))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{run.end}: {place}: {one_line(first['msg'])}") from error


def read_summary(run: RunDirectory, rows: Rows = ()) -> dict[str, Any]:
    """Read summary.json; empty for a run that has not finished, or goes on after it had."""
    if not run.summary.exists():
        return {}
    summary = load_json(run.summary)
    return {} if rows and summary.get("iterations", rows[-1]["step"]) < rows[-1]["step"] else summary
