"""report.html: one self-contained page of a run's results and curves. Nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config.fields import typed
from grpo_jax.config.files import Values, load_json, read_text
from grpo_jax.errors import UserError
from grpo_jax.reports.charts import Rows, curves_section, number
from grpo_jax.reports.completions import MEGABYTES, LoggedCompletions, read_completions
from grpo_jax.runs.directory import RunDirectory, encode_png, finite, read_metrics, write_atomically
from grpo_jax.tasks.display import Display, EpisodeEntry, GalleryEntry, ShownTurn, Table, of_turns

_SHOWN_SIZE = 128  # pictures are shown about this wide: small ones enlarged by whole factors
_ROWS_SHOWN = 200
_HERE = Path(__file__).parent
Measures = Mapping[str, float | None]
_SUMMARY: Values = {
    "iterations": int,
    "prompts": int,
    "evaluation": dict[str, dict[str, float | None]],
    "best": dict[str, float | None] | None,
    "seconds": dict[str, float | None],
    "versions": dict[str, str],
    "samples": dict[str, Any],
}
"""Numbers of a summary that pages and cards compute with."""
_SAMPLES = dict[str, dict[str, dict[str, list[float | None] | None]]]


class RunEnd(NamedTuple):
    """The parts of report.html that stand in no other file of a run; report.json.

    Attributes:
        sections: HTML of the gallery, the episodes and the tables by these names, in which all text is escaped.
        starts: Iterations done when a process began: the one after compiles.
        config: The configuration of the last process, as YAML.
    """

    sections: Mapping[str, str] = {}
    starts: Sequence[int] = (0,)
    config: str = ""


def write_report(
    path: str | Path,
    run: RunDirectory,
    display: Display = Display(),
    *,
    megabytes: float = MEGABYTES,
    summary: Values | None = None,
) -> None:
    """Write the page of a run with metrics, finished or not, from its directory.

    `megabytes` limits the completions in the page; `summary` is given by a run that is about to write it.
    """
    rows = read_metrics(run.metrics)
    summary = read_summary(run, rows) if summary is None else finite(summary)
    end = read_end(run) if summary else RunEnd(config=read_config(run))
    completions = read_completions(run.completions, megabytes)
    page = render_report(run.path.name, summary or {}, display, rows, end, completions)
    write_atomically(path, page)


def render_report(
    title: str,
    summary: Values,
    display: Display = Display(),
    rows: Rows = (),
    end: RunEnd = RunEnd(),
    completions: LoggedCompletions | None = None,
) -> str:
    """Render the page of a run.

    `evaluation.<measure>.{before, after, oracle}` of the summary makes the headline; it is empty for a run that has
    not finished. `completions` are those of training, to be searched.
    """
    sections = [
        _headline(title, summary, display, rows),
        end.sections.get("gallery", ""),
        end.sections.get("episodes", ""),
        curves_section(rows, end.starts, display),
        _completions(completions),
        end.sections.get("tables", ""),
        _facts(summary, end.config),
    ]
    return document(title, sections, None if completions is None else completions.data)


def end_sections(
    gallery: Sequence[GalleryEntry], episodes: Sequence[EpisodeEntry], tables: Sequence[Table], display: Display
) -> dict[str, str]:
    """Render the end of a run by name, as in `RunEnd.sections`."""
    return {
        "gallery": _gallery(gallery, display),
        "episodes": _episodes(episodes, display),
        "tables": "".join(_table(table) for table in tables if table.rows),
    }


def document(title: str, sections: Iterable[str], data: Values | None = None) -> str:
    """Make an HTML file that stands alone: a policy lets nothing but its one script run, and nothing be fetched.

    All text in the HTML of `sections` is escaped; page.js reads `data` as JSON.
    """
    style, *scripts = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "tables.js", "page.js"))
    script = "".join(scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    embedded = ""
    if data is not None:  # no < is left in it that would end its element
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        embedded = f"<script type='application/json' id='data'>{text}</script>"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(sections)}</main>{embedded}<script>{script}</script></body></html>\n"
    )


def section(title: str, content: str, note: str = "") -> str:
    """Make a section of HTML texts; the note stands under its heading."""
    shown = f"<p class='note'>{note}</p>" if note else ""
    return f"<section><h2>{title}</h2>{shown}{content}</section>"


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Make a table of HTML texts; a cell may be a whole `<td>`."""
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(cell if cell.startswith('<td') else f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f"<div class='scroll'><table class='data{kind and f' {kind}'}'><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _headline(title: str, summary: Values, display: Display, rows: Rows) -> str:
    evaluation = dict(summary.get("evaluation", {}))
    total = evaluation.get("total")
    if any(values == total for name, values in evaluation.items() if name != "total"):
        del evaluation["total"]  # of a single objective, which it is
    candidates = (name for name in (*display.headline, "total", *evaluation) if name in evaluation)
    main = next(candidates, None)
    parts = [f"<header><p class='over'>grpo_jax run</p><h1>{html.escape(title)}</h1>"]
    if main is not None:
        parts.append(f"<p class='claim'>{_claim(main, evaluation[main], summary.get('prompts'), display)}</p>")
    if not summary and rows:
        parts.append(f"<p class='claim'>Not finished: after iteration {rows[-1]['step']}.</p>")
    parts.append("</header>")
    if main is not None:
        names = [main, *(name for name in evaluation if name != main and not of_turns(name, evaluation))]
        cards = "".join(_card(name, evaluation[name], display, first=name == main) for name in names)
        parts.append(f"<section class='cards'>{cards}</section>")
    return "".join(parts)


def _claim(name: str, values: Measures, prompts: int | None, display: Display) -> str:
    before, after, oracle = (values.get(kind) for kind in ("before", "after", "oracle"))
    change = f"{_label(name)} {_value(name, before, display)} → <strong>{_value(name, after, display)}</strong>"
    if prompts:
        change += f" on {prompts} held-out prompts"
    if before is not None and after is not None and oracle is not None and abs(oracle - before) >= 1e-9:
        gap = (after - before) / (oracle - before)
        change += f", {gap:.0%} of the way to {display.best} ({_value(name, oracle, display)})"
    return change + "."


def _card(name: str, values: Measures, display: Display, first: bool) -> str:
    measured = {kind: value for kind in ("before", "after", "oracle") if (value := values.get(kind)) is not None}
    low = min([0.0, *measured.values()])
    high = max([1e-9, *measured.values()])
    bars = "".join(
        f"<div class='bar {kind}'><span>{kind}</span>{_bar(value, low, high)}"
        f"<b>{_value(name, value, display)}</b></div>"
        for kind, value in measured.items()
    )
    change = ""
    if "before" in measured and "after" in measured:
        difference = measured["after"] - measured["before"]
        size = f"{abs(difference) * 100:.1f} points" if _is_share(name) else _value(name, abs(difference), display)
        change = f"<em>{'+' if difference >= 0 else '−'}{size}</em>"
    return f"<article class='card{' first' if first else ''}'><h3>{_label(name)}{change}</h3>{bars}</article>"


def _bar(value: float, low: float, high: float) -> str:
    zero = -low / (high - low)
    end = (value - low) / (high - low)
    return f"<div class='track'><div style='left: {min(zero, end):.1%}; width: {abs(end - zero):.1%}'></div></div>"


def _label(name: str) -> str:
    return html.escape(name.replace("_", " ").replace("/", " · "))


def _is_share(name: str) -> bool:
    return any(word in name for word in ("accuracy", "usable", "share"))


def _value(name: str, value: float | None, display: Display) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if _is_share(name):
        return f"{value:.1%}"
    if display.digits_of(name) > 3:
        return f"{value:.{display.digits_of(name)}f}"
    value = round(value, 2) + 0.0  # no "-0.00"
    return (f"{value:.2f}" if abs(value) < 100 else number(value)).replace("-", "−")


def _gallery(gallery: Sequence[GalleryEntry], display: Display) -> str:
    if not gallery:
        return ""
    items = "".join(_pair(entry, display) for entry in gallery)
    note = "Left: the prompt as it was typed. Right: as the trained policy rewrote it. Both from the same noise."
    if all(entry.before is None and entry.after is None for entry in gallery):
        note = "Grey: the prompt. Black: what the trained policy made of it."
    if any(entry.shown for entry in gallery):
        alone = any(entry.before is None and entry.after is not None for entry in gallery)
        note = (
            "Left: what the prompt shows. Right: what was drawn." if alone else f"{note} Above: what the prompt shows."
        )
    return section("Before and after", f"<div class='gallery'>{items}</div>", note)


def _pair(entry: GalleryEntry, display: Display) -> str:
    shown = "".join(_picture(picture, "shown by the prompt") for picture in entry.shown)
    drawn = entry.before is not None or entry.after is not None
    rows = []
    if shown and (entry.before is not None or not drawn):
        rows.append(shown)
    if drawn:
        before = shown if shown and entry.before is None else _picture(entry.before, "before")
        rows.append(f"{before}<span class='arrow'>→</span>{_picture(entry.after, 'after')}")
    pictures = "".join(f"<div class='pair'>{row}</div>" for row in rows)
    scores = "".join(
        f"<tr><td>{_label(name)}</td><td>{_value(name, before, display)}</td><td>→</td>"
        f"<td class='{_trend(before, after)}'>{_value(name, after, display)}</td></tr>"
        for name, (before, after) in entry.scores.items()
    )
    return (
        f"<article class='entry'>{pictures}<p class='prompt'>{html.escape(entry.prompt)}</p>"
        f"<p class='rewrite'>{html.escape(entry.rewrite)}</p><table class='scores'>{scores}</table></article>"
    )


def _trend(before: float | None, after: float | None) -> str:
    if before is None or after is None or before == after or math.isnan(before) or math.isnan(after):
        return "same"
    return "better" if after > before else "worse"


def _picture(image: np.ndarray | None, kind: str) -> str:
    if image is None:
        return "<div class='missing'>no picture</div>"
    height, width = image.shape[:2]
    factor = max(1, _SHOWN_SIZE // width) if width < _SHOWN_SIZE else _SHOWN_SIZE / width
    data = base64.b64encode(encode_png(image)).decode()
    crisp = " class='crisp'" if width < _SHOWN_SIZE else ""
    size = f"width='{round(width * factor)}' height='{round(height * factor)}'"
    return f"<img{crisp} {size} alt='{kind}' src='data:image/png;base64,{data}'>"


def _episodes(entries: Sequence[EpisodeEntry], display: Display) -> str:
    if not entries:
        return ""
    articles = []
    for entry in entries:
        turns = "".join(_turn(place, turn, display) for place, turn in enumerate(entry.turns, 1))
        articles.append(f"<article class='entry episode'>{_read(entry.prompt, entry.pictures)}{turns}</article>")
    note = "Held-out prompts after training, greedy, chosen by place. Grey: what the policy read. Black: what it wrote."
    return section("Episodes", f"<div class='episodes'>{''.join(articles)}</div>", note)


def _read(text: str, pictures: Sequence[np.ndarray]) -> str:
    shown = "".join(_picture(picture, "read by the policy") for picture in pictures)
    return f"{shown}<p class='prompt'>{html.escape(text)}</p>"


def _turn(place: int, turn: ShownTurn, display: Display) -> str:
    drawn = "" if turn.image is None else _picture(turn.image, f"turn {place}")
    written = f"<p class='rewrite'>{html.escape(turn.text)}</p>"
    scores = ", ".join(
        f"{html.escape(name.replace('_', ' '))} <b>{_value(name, value, display)}</b>"
        for name, value in turn.scores.items()
    )
    answer = "" if turn.answer is None else _read(turn.answer, turn.pictures)
    return f"<div class='turn'><h3>turn {place}</h3>{written}{drawn}<p class='note'>{scores}</p></div>{answer}"


def _completions(logged: LoggedCompletions | None) -> str:
    if logged is None:
        return ""
    note = "A click on a line unfolds it, on a heading sorts; a prompt has its history."
    missing = "<p class='note'>A browser that runs scripts shows them here.</p>"
    return section("Completions", f"<div id='completions'>{missing}</div>", f"{html.escape(logged.note)} {note}")


def _table(table: Table) -> str:
    def cell(value: Any) -> str:
        value = value.item() if isinstance(value, np.generic) else value
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or not numeric:
            return "–" if value is None else f"<td>{html.escape(str(value))}</td>"
        return f"<td class='number'>{number(value)}</td>"

    rows = [[cell(value) for value in row] for row in table.rows[:_ROWS_SHOWN]]
    left = len(table.rows) - _ROWS_SHOWN
    more = f"<p class='note'>and {left} more</p>" if left > 0 else ""
    content = html_table([_label(str(column)) for column in table.columns], rows)
    return section(html.escape(table.title), content + more, html.escape(table.note))


def _facts(summary: Values, config: str) -> str:
    plain = {k: v for k, v in summary.items() if k != "evaluation" and not isinstance(v, Mapping | list | tuple)}
    groups = {"run": plain}
    for name in ("seconds", "versions", "devices"):
        if isinstance(summary.get(name), Mapping):
            groups[name] = summary[name]
    lists = "".join(
        f"<div><h3>{_label(name)}</h3><dl>"
        + "".join(f"<dt>{_label(key)}</dt><dd>{_fact(value)}</dd>" for key, value in facts.items())
        + "</dl></div>"
        for name, facts in groups.items()
    )
    shown = f"<details><summary>Configuration</summary><pre>{html.escape(config)}</pre></details>" if config else ""
    return section("How it was run", f"<div class='facts'>{lists}</div>{shown}")


def _fact(value: float | str | None) -> str:
    return number(value) if value is None or isinstance(value, float) else html.escape(str(value))


def write_end(run: RunDirectory, end: RunEnd) -> None:
    """Write report.json."""
    write_atomically(run.end, json.dumps(finite(end._asdict()), indent=1) + "\n")


def read_end(run: RunDirectory) -> RunEnd:
    """Read report.json of a finished run; UserError if it is damaged, or of an earlier version."""
    if not run.end.exists():
        return RunEnd(config=read_config(run))
    stored = load_json(run.end)
    if "sections" not in stored:
        raise UserError(f"{run.end} is of another version of grpo_jax: report.html stays as that one wrote it")
    try:
        return RunEnd(
            typed(dict[str, str], stored["sections"], "sections"),
            typed(list[int], stored.get("starts"), "starts"),
            typed(str, stored.get("config"), "config"),
        )
    except UserError as error:
        raise UserError(f"{run.end}: {error}") from error


def read_config(run: RunDirectory) -> str:
    """Return the text of config.yaml."""
    return read_text(run.config) if run.config.is_file() else ""


def read_summary(run: RunDirectory, rows: Rows = ()) -> dict[str, Any]:
    """Read summary.json; empty for a run that has not finished, or goes on after it had."""
    summary = load_json(run.summary) if run.summary.exists() else {}
    try:
        for name in _SUMMARY.keys() & summary.keys():
            typed(_SUMMARY[name], summary[name], name)
        typed(_SAMPLES, summary.get("samples", {}).get("measures", {}), "samples.measures")
    except UserError as error:
        raise UserError(f"{run.summary}: {error}") from error
    return {} if rows and summary.get("iterations", rows[-1]["step"]) < rows[-1]["step"] else summary
