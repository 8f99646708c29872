"""Rewards from the target's rank: built-in ones by name, the user's own by import path.

A reward is ``reward(prompts, completions, **columns) -> list[float | None]``. The columns of this task are

    rank            rank of the target among all items, from 1
    probability     of the target in the softmax over all items' similarities to the completion
    user, target, target_title, last_title, target_row, history     of the example

An empty or meaningless completion is not a failure: all items tie, ties count against the target, and the completion
earns the value of the last rank.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.rollout.rewards import Reward
from grpo_jax.tasks.recommendation import FUSED, RANK
from grpo_jax.tasks.recommendation.baselines import Gain, Measure, Prior, floor_scores, gain, item_scores, target_ranks
from grpo_jax.tasks.recommendation.catalogue import Items

_MEASURES: dict[str, Gain] = {"hr": "hit", "ndcg": "ndcg", "mrr": "mrr"}
LISTED_RANK, FUSED_RANK = "listed_rank", "fused_rank"
"""Columns with the target's place in a row's ranking: by the policy alone, and with the prior."""


def task_rewards(items: int, *, fused: bool) -> dict[str, Reward]:
    """Return the rewards by name; `fused` if rankings have a prior."""
    rewards: dict[str, Reward] = {name: functools.partial(RankReward, name, items) for name in ("ndcg", "hit", "mrr")}
    rewards |= {"soft": soft, RANK: _of_rank(lambda rank: rank)}
    if fused:
        rewards[FUSED] = _fused
    return rewards


def _fused(completions: Sequence[str], fused_rank: Sequence[float] = (), **_: object) -> list[float | None]:
    """Return the rank with the prior, only for held-out prompts; missing in training."""
    return list(fused_rank) or [None] * len(completions)


class RankReward:
    """A built-in reward of the target's rank."""

    def __init__(self, name: Gain, items: int, /, *, k: float = 0):
        """Choose the measure; a ValueError if `k` is out of range.

        Args:
            name: "ndcg", "hit" or "mrr".
            items: Number of items in the catalogue.
            k: The cut-off, at most `items`; 0 for none, so that every rank counts. With a small k and few completions,
                most groups have zero variance.
        """
        if not (k >= 0 and k % 1 == 0):  # also NaN and infinity
            raise ValueError(f"k must be a whole number from 1, or 0 for no cut-off, got {k!r}")
        if k > items:
            raise ValueError(f"k must be at most {items}, the number of items, got {k!r}")
        self._measure = functools.partial(gain, name, k=int(k) or None, items=items)

    def __call__(self, rank: Sequence[float], **_: object) -> list[float]:
        """Return the value of each rank."""
        return self._measure(np.asarray(rank, np.float64)).tolist()


def measure(name: str) -> Reward | None:
    """Return a measure by its name: hr@K, ndcg@K, mrr@K or mrr, K of at most nine digits; None for other names."""
    kind, at, k = name.partition("@")
    if kind not in _MEASURES or not (re.fullmatch("[1-9][0-9]{0,8}", k) if at else name == "mrr"):
        return None
    return _of_rank(functools.partial(gain, _MEASURES[kind], k=int(k) if at else None))


def _of_rank(measure: Measure) -> Reward:
    def reward(rank: Sequence[float], **_: object) -> list[float]:
        return measure(np.asarray(rank, np.float64)).tolist()

    return reward


def soft(probability: Sequence[float], **_: object) -> list[float]:
    """Return the target's probability under the retriever: a dense objective beside sparse ranks."""
    return list(probability)


def ranking_columns(
    items: Items, prior: Prior | None, rows: Sequence[Row], numbers: np.ndarray, scores: np.ndarray
) -> dict[str, Sequence[object]]:
    """Return the rank of each row's target, from 1, without the history; equal scores rank before it.

    `numbers`, int [P, K], are the indices of all texts, best first, with `scores` f32 [P, K]. A target with the title
    of an earlier item is not ranked and gets the last rank.
    """
    alone = item_scores(items.rows[numbers], scores, items.count)
    targets = np.array([row.columns["target_row"] for row in rows])
    histories = [row.columns["history"] for row in rows]
    columns: dict[str, Sequence[object]] = {LISTED_RANK: target_ranks(alone, targets, histories).tolist()}
    if prior is not None:
        columns[FUSED_RANK] = target_ranks(floor_scores(alone) + prior(histories), targets, histories).tolist()
    return columns


def completion_ranks(items: Items, completions: Sequence[str], columns: Mapping[str, Sequence[object]]) -> np.ndarray:
    """Return the ranks for rewards: a ranking's own; for a single item 1 if it is the target, else the last."""
    if LISTED_RANK in columns:
        return np.asarray(columns[LISTED_RANK], np.float64)
    is_target = [items.row_of(text) == target for text, target in zip(completions, columns["target_row"], strict=True)]
    return np.where(is_target, 1.0, float(items.count))
