"""report.html: one self-contained page that shows what a run did and learned. Nothing is fetched."""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.reports.charts import number
from grpo_jax.reports.completions import Logged
from grpo_jax.reports.curves import curves_section
from grpo_jax.reports.document import document
from grpo_jax.reports.episodes import episodes_section
from grpo_jax.runs.directory import encode_png, write_atomically
from grpo_jax.tasks.display import Display, EpisodeEntry, GalleryEntry, Table, of_turns

_SHOWN_SIZE = 128  # pictures are shown about this wide: small ones enlarged by whole factors
_ROWS_SHOWN = 200


def write_report(
    path: str | Path,
    *,
    title: str,
    summary: Mapping[str, Any],
    display: Display = Display(),
    metrics_rows: Sequence[Mapping[str, Any]] = (),
    gallery: Sequence[GalleryEntry] = (),
    episodes: Sequence[EpisodeEntry] = (),
    tables: Sequence[Table] = (),
    config_text: str = "",
    starts: Sequence[int] = (),
    completions: Logged | None = None,
) -> None:
    """Writes the page of a run.

    Args:
      path: of the HTML file.
      title: the run's name.
      summary: what summary.json holds; `evaluation.<measure>.{before, after, oracle}` makes the headline. Empty for a
        run that has not finished.
      display: how the task's measures are shown.
      metrics_rows: rows of metrics.jsonl, for the curves.
      gallery: pairs of pictures.
      episodes: as they went.
      tables: rewards per prompt, most added words, …
      config_text: the configuration as YAML.
      starts: iterations done when a process began: the one after compiles.
      completions: what was written in training, to be searched.

    Raises:
      UserError: the disk is full or the place is not writable.
    """
    sections = [
        _headline(title, summary, display, metrics_rows),
        _gallery(gallery, display),
        episodes_section(episodes, _picture, lambda name, value: _value(name, value, display)),
        curves_section(metrics_rows, starts, display),
        _completions(completions),
        *(_table(table) for table in tables if table.rows),
        _facts(summary, config_text),
    ]
    write_atomically(path, document(title, sections, None if completions is None else completions.data))


def _headline(title, summary, display, rows):
    evaluation = dict(summary.get("evaluation", {}))
    total = evaluation.get("total")
    if any(values == total for name, values in evaluation.items() if name != "total"):
        del evaluation["total"]  # of a single objective, which it is
    known = (name for name in (*display.headline, "total") if name in evaluation)
    main = next(known, next(iter(evaluation), None))
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


def _claim(name, values, prompts, display):
    before, after, oracle = (values.get(kind) for kind in ("before", "after", "oracle"))
    change = f"{_label(name)} {_value(name, before, display)} → <strong>{_value(name, after, display)}</strong>"
    if prompts:
        change += f" on {prompts} held-out prompts"
    gap = _gap_closed(before, after, oracle)
    if gap is not None:
        change += f", {gap:.0%} of the way to {display.best} ({_value(name, oracle, display)})"
    return change + "."


def _gap_closed(before, after, oracle):
    if None in (before, after, oracle) or abs(oracle - before) < 1e-9:
        return None
    return (after - before) / (oracle - before)


def _card(name, values, display, first):
    before, after, oracle = (values.get(kind) for kind in ("before", "after", "oracle"))
    known = [value for value in (before, after, oracle) if value is not None]
    low, high = min([0.0, *known]), max([1e-9, *known])
    bars = "".join(
        f"<div class='bar {kind}'><span>{kind}</span>{_bar(value, low, high)}"
        f"<b>{_value(name, value, display)}</b></div>"
        for kind, value in (("before", before), ("after", after), ("oracle", oracle))
        if value is not None
    )
    change = _change(name, before, after, display) if before is not None and after is not None else ""
    return f"<article class='card{' first' if first else ''}'><h3>{_label(name)}{change}</h3>{bars}</article>"


def _bar(value, low, high):
    zero, end = (-low) / (high - low), (value - low) / (high - low)
    left, width = min(zero, end), abs(end - zero)
    return f"<div class='track'><div style='left: {left:.1%}; width: {width:.1%}'></div></div>"


def _label(name):
    return html.escape(name.replace("_", " ").replace("/", " · "))


def _is_share(name):
    return any(word in name for word in ("accuracy", "usable", "share"))


def _value(name, value, display):
    if value is None or not math.isfinite(value):
        return "–"
    if _is_share(name):
        return f"{value:.1%}"
    if display.digits_of(name) > 3:
        return f"{value:.{display.digits_of(name)}f}"
    value = round(value, 2) + 0.0  # no "-0.00"
    return (f"{value:.2f}" if abs(value) < 100 else number(value)).replace("-", "−")


def _change(name, before, after, display):
    sign = "+" if after >= before else "−"
    size = f"{abs(after - before) * 100:.1f} points" if _is_share(name) else _value(name, abs(after - before), display)
    return f"<em>{sign}{size}</em>"


def _gallery(gallery, display):
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
    return f"<section><h2>Before and after</h2><p class='note'>{note}</p><div class='gallery'>{items}</div></section>"


def _pair(entry, display):
    pictures = "".join(_picture(picture, "shown by the prompt") for picture in entry.shown)
    before = _picture(entry.before, "before")
    if pictures and entry.before is None:
        pictures, before = "", pictures
    pictures = f"<div class='pair'>{pictures}</div>" if pictures else ""
    if entry.before is not None or entry.after is not None:
        after = _picture(entry.after, "after")
        pictures += f"<div class='pair'>{before}<span class='arrow'>→</span>{after}</div>"
    elif entry.shown:
        pictures = f"<div class='pair'>{before}</div>"
    scores = "".join(
        f"<tr><td>{_label(name)}</td><td>{_value(name, before, display)}</td><td>→</td>"
        f"<td class='{_trend(before, after)}'>{_value(name, after, display)}</td></tr>"
        for name, (before, after) in entry.scores.items()
    )
    return (
        f"<article class='entry'>{pictures}<p class='prompt'>{html.escape(entry.prompt)}</p>"
        f"<p class='rewrite'>{html.escape(entry.rewrite)}</p><table class='scores'>{scores}</table></article>"
    )


def _trend(before, after):
    if before is None or after is None or before == after or math.isnan(before):
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


def _completions(logged):
    if logged is None:
        return ""
    note = "A click on a line unfolds it, on a heading sorts; a prompt has its history."
    missing = "<p class='note'>A browser that runs scripts shows them here.</p>"
    return (
        f"<section><h2>Completions</h2><p class='note'>{html.escape(logged.note)} {note}</p>"
        f"<div id='completions'>{missing}</div></section>"
    )


def _table(table):
    def cell(value):
        if value is None:
            return "<td>–</td>"
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        return f"<td class='number'>{number(value)}</td>" if numeric else f"<td>{html.escape(str(value))}</td>"

    head = "".join(f"<th>{_label(str(column))}</th>" for column in table.columns)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table.rows[:_ROWS_SHOWN])
    left = len(table.rows) - _ROWS_SHOWN
    more = f"<p class='note'>and {left} more</p>" if left > 0 else ""
    note = f"<p class='note'>{html.escape(table.note)}</p>" if table.note else ""
    return (
        f"<section><h2>{html.escape(table.title)}</h2>{note}<div class='scroll'><table class='data'><thead>"
        f"<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}</section>"
    )


def _facts(summary, config_text):
    groups = []
    for name in ("seconds", "versions", "devices"):
        values = summary.get(name)
        if isinstance(values, Mapping):
            groups.append((name, [(key, values[key]) for key in values]))
    plain = [(k, v) for k, v in summary.items() if k != "evaluation" and not isinstance(v, Mapping | list | tuple)]
    lists = "".join(
        f"<div><h3>{_label(name)}</h3><dl>"
        + "".join(f"<dt>{_label(key)}</dt><dd>{_fact(value)}</dd>" for key, value in pairs)
        + "</dl></div>"
        for name, pairs in [("run", plain), *groups]
    )
    config = ""
    if config_text:
        config = f"<details><summary>Configuration</summary><pre>{html.escape(config_text)}</pre></details>"
    return f"<section><h2>How it was run</h2><div class='facts'>{lists}</div>{config}</section>"


def _fact(value):
    if value is None or isinstance(value, float):
        return number(value)
    return html.escape(str(value))
