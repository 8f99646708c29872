"""Which curves a run has: what its task shows first, then what every run measures, and everything else below."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.reports.charts import line_chart, number, series_of
from grpo_jax.tasks.display import Chart, Curve, Display, of_turns

Rows = Sequence[Mapping[str, Any]]


def curves_section(rows: Rows, starts: Sequence[int], display: Display) -> str:
    """The section of one run; nothing where it has no metrics.

    Args:
        rows: Of metrics.jsonl.
        starts: Iterations done when a process began: the one after compiles.
        display: How the task's measures are shown.
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
    """Whatever else metrics.jsonl has, folded, a chart for each under its name there; "" where there is nothing else.

    Args:
        rows: Of metrics.jsonl.
        charted: What is shown already.
        draw: A chart as HTML.
    """
    shown = {"step", *(curve.metric for chart in charted for curve in chart.curves)}
    names = dict.fromkeys(key for row in rows for key in row if not key.startswith("seconds/"))
    others = [name for name in names if name not in shown]
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
    """What is charted of these rows; a chart may have no curve."""
    names = list(dict.fromkeys(key for row in rows for key in row))

    def group(prefix, suffix=""):
        chosen = [name for name in names if name.startswith(prefix) and name.endswith(suffix)]
        return [(name, name.removeprefix(prefix).removesuffix(suffix).replace("_", " ")) for name in chosen]

    def chart(title, keys, *, sparse=False, note=""):
        return Chart(title, tuple(Curve(key, name, sparse) for key, name in keys), note)

    def computed(keys):
        """The keys, or none where all is 0: what rows hold where no reference runs, or each batch has one update."""
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
    """Without the iterations in which a process compiled: they would set the scale. The note tells their seconds."""
    first = {start + 1 for start in starts}
    named = [key for row in rows for key in row if key.startswith("seconds/") and key != "seconds/total"]
    shown = [row for row in rows if row["step"] not in first]
    compiling = [(row["step"], row.get("seconds/total")) for row in rows if row["step"] in first]
    left = ", ".join(f"iteration {step} with {number(seconds)} s" for step, seconds in compiling)
    note = f"Left out, for then programs are compiled: {left}." if left else ""
    lines = [series_of(shown, key, key.removeprefix("seconds/").replace("_", " ")) for key in dict.fromkeys(named)]
    return line_chart("Seconds per iteration", lines, note=note)
