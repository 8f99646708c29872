"""The section of report.html that shows episodes as they went: what was written, answered and written again."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.tasks.display import EpisodeEntry, ShownTurn

Picture = Callable[[Any, str], str]
Number = Callable[[str, float], str]


def episodes_section(entries: Sequence[EpisodeEntry], picture: Picture, number: Number) -> str:
    """The section; nothing where there are no episodes.

    Args:
        entries: What is shown.
        picture: (uint8 [H, W, 3], what it is) → HTML.
        number: (measure, value) → text.
    """
    if not entries:
        return ""
    shown = "".join(_episode(entry, picture, number) for entry in entries)
    note = "Held-out prompts after training, greedy, chosen by place. Grey: what the policy read. Black: what it wrote."
    return f"<section><h2>Episodes</h2><p class='note'>{note}</p><div class='episodes'>{shown}</div></section>"


def _episode(entry: EpisodeEntry, picture: Picture, number: Number) -> str:
    asked = _said(entry.prompt, entry.pictures, picture)
    turns = "".join(_turn(place, turn, picture, number) for place, turn in enumerate(entry.turns, 1))
    return f"<article class='entry episode'>{asked}{turns}</article>"


def _said(text: str, pictures: Sequence[Any], picture: Picture) -> str:
    seen = "".join(picture(one, "read by the policy") for one in pictures)
    return f"{seen}<p class='prompt'>{html.escape(text)}</p>"


def _turn(place: int, turn: ShownTurn, picture: Picture, number: Number) -> str:
    drawn = "" if turn.image is None else picture(turn.image, f"turn {place}")
    written = f"<p class='rewrite'>{html.escape(turn.text)}</p>"
    answer = "" if turn.answer is None else _said(turn.answer, turn.pictures, picture)
    return f"<div class='turn'><h3>turn {place}</h3>{written}{drawn}{_scores(turn.scores, number)}</div>{answer}"


def _scores(scores: Mapping[str, float], number: Number) -> str:
    shown = (f"{html.escape(name.replace('_', ' '))} <b>{number(name, value)}</b>" for name, value in scores.items())
    return f"<p class='note'>{', '.join(shown)}</p>"
