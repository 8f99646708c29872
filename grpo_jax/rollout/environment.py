"""What stands between a policy's tokens and its rewards, as functions of whole chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.rollout.data import Row, repeat_rows
from grpo_jax.rollout.rewards import Reward, collect_rewards


class Environment(NamedTuple):
    """What stands between a policy's tokens and its rewards.

    Attributes:
        encode: User prompts → (i32 [P, L], bool [P, L]), left-padded to a length that depends on no batch.
        decode: (token ids of one completion, the user's prompt) → (completion as written, text to judge, usable).
        render: (rows, texts [P][G], iteration, evaluation) → pictures for `score`, or None where nothing is drawn.
        score: (rows, texts [P][G], pictures) → f32 [P, G, N] rewards and f32 [P, G, W] watched; NaN is missing.
        reward_names: N names.
        watch_names: W names.
    """

    encode: Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]
    decode: Callable[[np.ndarray, str], tuple[str, str, bool]]
    render: Callable[[Sequence[Row], list[list[str]], int, bool], Any] | None
    score: Callable[[Sequence[Row], list[list[str]], Any], tuple[np.ndarray, np.ndarray]]
    reward_names: tuple[str, ...]
    watch_names: tuple[str, ...]


def make_score(
    rewards: Mapping[str, Reward],
    watched: Mapping[str, Reward],
    *,
    missing: bool,
    columns_of: Callable[[Sequence[str], Mapping[str, Any]], dict[str, Any]] | None = None,
) -> Callable[[Sequence[Row], list[list[str]], Any], tuple[np.ndarray, np.ndarray]]:
    """score(rows, texts [P][G], pictures) → rewards f32 [P, G, N], watched f32 [P, G, W].

    Args:
        rewards: N functions by name.
        watched: W functions by name.
        missing: A reward that fails is missing; otherwise it raises.
        columns_of: (completions, columns) → further columns, asked once for all rewards.
    """
    on_error = "missing" if missing else "raise"

    def score(rows: Sequence[Row], texts: list[list[str]], pictures: Any) -> tuple[np.ndarray, np.ndarray]:
        group = len(texts[0])
        prompts, columns = repeat_rows(rows, group)
        completions = [text for texts_of in texts for text in texts_of]
        if pictures is not None and pictures.images is not None:
            columns["images"] = pictures.images
            if pictures.baseline_images is not None:
                columns["baseline_images"] = pictures.baseline_images
        if columns_of is not None:
            columns |= columns_of(completions, columns)
        values = [
            collect_rewards([*some.values()], [*some], prompts, completions, columns, group, on_error=on_error)
            for some in (rewards, watched)
        ]
        return values[0], values[1]

    return score
