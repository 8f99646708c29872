"""What the environment says between two prompts: the picture that was drawn, and what is to be done about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from grpo_jax.rollout.data import Row
from grpo_jax.rollout.episodes import Answer, Episode, Respond

Shown = Literal["drawn", "none", "other"]

INSTRUCTION = (
    "This picture was drawn from your prompt. What the user asked for: {prompt}\n"
    "Write a better prompt that mends what is wrong. Answer with the prompt alone."
)


def make_respond(instruction: str, shown: Shown) -> Respond:
    """respond(rows, episodes) → the picture just drawn and the instruction.

    Args:
        instruction: What is said; "{prompt}" stands for the user's prompt.
        shown: The picture "drawn" last, "none", or that of an "other" prompt, the next in the list that there is.
    """

    def respond(rows: Sequence[Row], episodes: Sequence[Episode]) -> list[Answer]:
        drawn = [episode.last.image for episode in episodes]
        pictures = {"drawn": lambda: drawn, "none": lambda: [None] * len(drawn), "other": lambda: others(rows, drawn)}
        return [
            Answer(instruction.replace("{prompt}", row.prompt), () if picture is None else (picture,))
            for row, picture in zip(rows, pictures[shown](), strict=True)
        ]

    return respond


def others(rows: Sequence[Row], pictures: Sequence[Any]) -> list[Any]:
    """For each row the picture of the next other one, from the first again at the end; None where there is none."""
    count = len(rows)
    following = []
    for place, row in enumerate(rows):
        after = ((place + step) % count for step in range(1, count))
        found = next((at for at in after if rows[at].id != row.id and pictures[at] is not None), None)
        following.append(None if found is None else pictures[found])
    return following
