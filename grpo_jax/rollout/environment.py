"""What stands between a policy's tokens and its rewards, as functions of whole chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.rollout.data import Row, repeat_rows
from grpo_jax.rollout.episodes import Episode
from grpo_jax.rollout.inputs.conversations import as_chat_messages
from grpo_jax.rollout.inputs.encoding import Encoded
from grpo_jax.rollout.inputs.pictures import open_picture, picture_error
from grpo_jax.rollout.replies import Answering
from grpo_jax.rollout.rewards import MESSAGES, Reward, asks, collect_rewards


class Environment(NamedTuple):
    """What stands between a policy's tokens and its rewards.

    Attributes:
        encode: Rows → `Encoded`: tokens i32 [P, L] and bool [P, L], left-padded to a length that depends on no batch,
            and the pictures that stand among them.
        decode: (token ids of one completion, the user's prompt) → (completion as written, text to judge, usable).
        render: (rows, texts `[P][G]`, iteration, evaluation) → pictures for `score`, or None where nothing is drawn.
        score: (rows, texts `[P][G]`, pictures) → f32 [P, G, N] rewards and f32 [P, G, W] watched; NaN is missing. In
            tasks of several turns `episodes` has those `[P][G]` that end with the texts; `tokens` `[P][G]` are what the
            policy wrote, where it did.
        reward_names: N names.
        watch_names: W names.
        encode_images: (variables, `Pictures`) → their `PictureStates`, and what the update takes: these or, to be
            encoded again, those. None for a policy that is shown no pictures.
        gallery: How many of the first held-out rows keep the pictures of their episodes.
        prepare: Pictures in memory, torch float [N, 3, H, W] in [0, 1] or a list of what a row may hold → `Pictures`
            [N, 1, ..], as the policy's processor makes them; None for a policy that sees none.
        answering: What answers in tasks of several turns; None where the policy writes once.
    """

    encode: Callable[[Sequence[Row]], Encoded]
    decode: Callable[[np.ndarray, str], tuple[str, str, bool]]
    render: Callable[[Sequence[Row], list[list[str]], int, bool], Any] | None
    score: Callable[..., tuple[np.ndarray, np.ndarray]]
    reward_names: tuple[str, ...]
    watch_names: tuple[str, ...]
    prepare: Callable[[Any], Any] | None = None
    answering: Answering | None = None
    encode_images: Callable[[Any, Any], tuple[Any, Any]] | None = None
    gallery: int = 0


def make_score(
    rewards: Mapping[str, Reward],
    watched: Mapping[str, Reward],
    *,
    missing: bool,
    columns_of: Callable[[Sequence[str], Mapping[str, Any]], dict[str, Any]] | None = None,
    tokenize: Callable[[str], list[int]] | None = None,
) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """score(rows, texts, pictures, episodes=None, tokens=None) → rewards f32 [P, G, N], watched f32 [P, G, W].

    Episodes `[P][G]` reach the rewards as the column "episodes", tokens `[P][G]`, or what makes them, as
    "completion_ids", and prompts and completions as chat messages, where a reward asks for them. Where the policy
    writes once, "place_in_group" counts a group's completions from 0: a reward of theirs sees where a group begins.

    Args:
        rewards: N functions by name.
        watched: W functions by name.
        missing: A reward that fails is missing; otherwise it raises.
        columns_of: (completions, columns) → further columns, asked once for all rewards.
        tokenize: The tokens of a text that the policy has not written.
    """
    on_error = "missing" if missing else "raise"
    functions = [*rewards.values(), *watched.values()]
    ids_asked, prompts_asked, completions_asked = (
        any(asks(function, name) for function in functions) for name in ("completion_ids", *MESSAGES)
    )

    def score(
        rows: Sequence[Row],
        texts: list[list[str]],
        pictures: Any,
        episodes: list[list[Episode]] | None = None,
        tokens: list[list[list[int]]] | Callable[[], list[list[list[int]]]] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        group = len(texts[0])
        prompts, columns = repeat_rows(rows, group)
        completions = [text for texts_of in texts for text in texts_of]
        columns |= _shown(rows, group, drawn=pictures is not None)
        if pictures is not None and pictures.images is not None:
            columns["images"] = pictures.images
            if pictures.baseline_images is not None:
                columns["baseline_images"] = pictures.baseline_images
        if episodes is None:  # of these some are judged without the others of their group
            columns["place_in_group"] = [*range(group)] * len(rows)
        else:
            columns["episodes"] = [episode for group_of in episodes for episode in group_of]
        if ids_asked and (tokens is not None or tokenize is not None):
            made = tokens() if callable(tokens) else tokens or []
            written = [ids for group_of in made for ids in group_of] or [[] for _ in completions]
            columns["completion_ids"] = [  # what the policy did not write has no tokens of its own
                ids or ([] if tokenize is None else tokenize(text))
                for ids, text in zip(written, completions, strict=True)
            ]
        if prompts_asked:
            columns[MESSAGES[0]] = [as_chat_messages(row) for row in rows for _ in range(group)]
        if completions_asked:
            columns[MESSAGES[1]] = [[{"role": "assistant", "content": text}] for text in completions]
        if columns_of is not None:
            columns |= columns_of(completions, columns)
        values = [
            collect_rewards([*some.values()], [*some], prompts, completions, columns, group, on_error=on_error)
            for some in (rewards, watched)
        ]
        return values[0], values[1]

    return score


def _shown(rows: Sequence[Row], group: int, *, drawn: bool) -> dict[str, list[Any]]:
    """What rewards get of pictures and conversations in prompts, repeated for each completion; nothing without any.

    "pictures" are lists, of Pillow; where nothing is drawn these are "images" too, and "image" is the first of each.
    "messages" are conversations as they were given, unless the rows have a column of that name.
    """
    columns: dict[str, list[Any]] = {}
    if any(row.pictures for row in rows):
        seen = [_opened(row) for row in rows]
        columns["pictures"] = seen
        if not drawn:
            columns |= {"images": seen, "image": [one[0] if one else None for one in seen]}
    if any(row.messages for row in rows) and not any("messages" in row.columns for row in rows):
        columns["messages"] = [as_chat_messages(row) for row in rows]
    return {name: [value for value in values for _ in range(group)] for name, values in columns.items()}


def _opened(row: Row) -> list[Any]:
    pictures = []
    for place, source in enumerate(row.pictures):
        try:
            pictures.append(open_picture(source))
        except ValueError as error:
            raise picture_error(row, place, error) from error
    return pictures
