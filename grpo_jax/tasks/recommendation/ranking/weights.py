"""Which weights of the prior are best beside a policy's own scores: every point of a grid on the same users.

The users are those of validation: a weight that was chosen on the users it is reported on would flatter itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation import metrics
from grpo_jax.tasks.recommendation.ranking.prior import Parts, PriorSection

HISTORY, TOGETHER, DECAYS = (0.0, 2.0, 5.0, 10.0, 20.0), (0.0, 5.0, 10.0, 20.0, 40.0), (0.5, 0.7, 0.9)


class Weighed(NamedTuple):
    """A point of the grid, and the mean NDCG@10 and HR@10 that it earns."""

    prior: PriorSection
    ndcg: float
    hit: float


def grid() -> list[PriorSection]:
    """The points that are tried; the policy alone is the first."""
    every = itertools.product(HISTORY, TOGETHER, DECAYS)
    points = [PriorSection(history=history, together=together, decay=decay) for history, together, decay in every]
    return [PriorSection(), *(point for point in points if point.used)]


def weigh(
    score: Callable[[int, int], np.ndarray],
    parts: Parts,
    rows: Sequence[Row],
    points: Sequence[PriorSection],
    *,
    items: int,
) -> list[Weighed]:
    """What each point earns on the same rows, best first; of equal ones the earlier.

    Histories are left out and ties count against the target, as in `items.ranking_columns`. What a decay costs is
    computed once for all its points.

    Args:
        score: score(start, stop) → f32 [B, I], the policy's own scores of all items for the rows start … stop-1.
        parts: Of `prior.make_parts`.
        rows: U examples with the columns "target_row" and "history".
        points: Weights to try.
        items: I.

    Raises:
        ValueError: If there are no rows.
    """
    if not rows:
        raise ValueError("rows must be at least one")
    ranks, block = np.empty((len(points), len(rows))), metrics.users_at_once(items)
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        histories = [row.columns["history"] for row in part]
        targets = np.array([row.columns["target_row"] for row in part])
        own = score(start, start + len(part))
        for decay in dict.fromkeys(point.decay for point in points):
            resembling, together = (made() for made in parts(histories, decay))
            for place, point in enumerate(points):
                if point.decay == decay:
                    known = np.float32(point.history) * resembling + np.float32(point.together) * together
                    found = metrics.count_better(own + known, targets, histories)
                    ranks[place, start : start + len(part)] = metrics.rank_of(found)
    earned = [Weighed(point, *_means(rank)) for point, rank in zip(points, ranks, strict=True)]
    return sorted(earned, key=lambda one: -one.ndcg)


def _means(rank: np.ndarray) -> tuple[float, float]:
    return float(metrics.ndcg(rank, k=10).mean()), float(metrics.hit(rank, k=10).mean())
