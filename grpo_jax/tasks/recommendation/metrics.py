"""Measures of a ranking with one relevant item, as functions of its rank, and bootstrap intervals of their means.

The rank counts from 1 over the whole catalogue without the user's history; the target is never left out, even if the
history holds it. Items that score the same as the target stand before it: a query that tells nothing apart earns
nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

Measure = Callable[[np.ndarray], np.ndarray]

Gain = Literal["ndcg", "mrr", "hit"]
MIXED_WEIGHTS: Mapping[Gain, float] = {"ndcg": 0.5, "mrr": 0.3, "hit": 0.2}
"""Weights of `mixed`; whichever are given are divided by their sum."""


class RankCounts(NamedTuple):
    """i64 [B] each: items that score better than the target, and others that score the same."""

    better: np.ndarray
    ties: np.ndarray


def count_better(
    scores: np.ndarray, targets: np.ndarray, exclude: Sequence[Sequence[int]], *, tolerance: float = 0.0
) -> RankCounts:
    """Count, for each row of scores [B, I], the items that score better than the target and the same.

    A score may be -inf, but not NaN. `targets` [B] and `exclude` are rows of the catalogue; those excluded are left
    out, but never the target. Scores that differ by no more than `tolerance` are ties: the same sum in another order
    is not ranked by a rounding.
    """
    scores = np.asarray(scores)
    target_scores = scores[np.arange(len(scores)), targets][:, None]
    better, worse = scores > target_scores + tolerance, scores < target_scores - tolerance
    # What is left out is taken off again, which is less work than masking all that stays.
    left_out = [list(set(rows) - {int(target)}) for rows, target in zip(exclude, targets, strict=True)]
    above = [int(line.sum() - line[rows].sum()) for line, rows in zip(better, left_out, strict=True)]
    below = [int(line.sum() - line[rows].sum()) for line, rows in zip(worse, left_out, strict=True)]
    others = [scores.shape[1] - 1 - len(rows) for rows in left_out]
    return RankCounts(np.array(above), np.array(others) - above - below)


def rank_of(counts: RankCounts) -> np.ndarray:
    """Return the target's rank f64 [B], from 1; ties stand before it."""
    return 1.0 + np.asarray(counts.better, np.float64) + np.asarray(counts.ties, np.float64)


def gain(name: Gain, rank: np.ndarray, *, k: int | None = None, items: int = 0) -> np.ndarray:
    """Return a measure of ranks, which count from 1; NaN (unknown) stays NaN, ranks beyond `k` earn 0.

    "ndcg" is the normalised discounted cumulative gain with one relevant item, 1 / log2(1 + rank) (Järvelin &
    Kekäläinen 2002), "mrr" the reciprocal rank, "hit" the hit rate. Without a cut-off `k` every ranking is a hit; "hit"
    is then the share of cut-offs from 1 to `items` that would find the target, (items - rank + 1) / items.
    """
    rank = np.asarray(rank, np.float64)
    if name == "hit":
        values = (items - rank + 1.0) / items if k is None else np.where(np.isnan(rank), np.nan, 1.0)
    else:
        values = 1.0 / (np.log2(1.0 + rank) if name == "ndcg" else rank)
    return values if k is None else np.where(rank > k, 0.0, values)  # NaN is not beyond k


ndcg = functools.partial(gain, "ndcg")
mrr = functools.partial(gain, "mrr")
hit = functools.partial(gain, "hit")


def mixed(
    rank: np.ndarray,
    *,
    k: int | None = None,
    items: int = 0,
    weights: Mapping[Gain, float] = MIXED_WEIGHTS,
) -> np.ndarray:
    """Weighted mean of `gain`s: Σ wᵢ mᵢ / Σ wᵢ, so 1 is a perfect ranking whatever the weights; absent ones are 0."""
    total = sum(weights.values())
    if not weights.keys() <= MIXED_WEIGHTS.keys() or min(weights.values(), default=0) < 0 or not total > 0:
        raise ValueError(f"weights must be >= 0, not all 0, for {', '.join(MIXED_WEIGHTS)}, got {dict(weights)}")
    each = [weight / total * gain(name, rank, k=k, items=items) for name, weight in weights.items() if weight]
    return sum(each, start=np.zeros(()))


_MOST_SCORES, _MOST_USERS = 2**23, 512


def users_at_once(items: int) -> int:
    """Return how many users' scores are held at once, so that memory does not grow with the catalogue."""
    return max(1, min(_MOST_USERS, _MOST_SCORES // items))


class Interval(NamedTuple):
    """A mean and its interval."""

    mean: float
    low: float
    high: float

    @property
    def clear_of_zero(self) -> bool:
        """True if 0 lies outside."""
        return self.low > 0 or self.high < 0


_DRAWS = 50
"""Draws of a bootstrap that are held at once, f64 [50, users]."""


def bootstrap(values: np.ndarray, *, level: float = 0.95, samples: int = 1000, seed: int = 0) -> list[Interval]:
    """Percentile bootstrap intervals of M means over U users (Efron & Tibshirani 1993, ch. 13).

    Users are drawn with replacement, all columns of the values [U, M] of a user together; an interval runs between
    the (1 ∓ level) / 2 quantiles of the means of `samples` draws. The same seed draws the same users.
    """
    values = np.asarray(values, np.float64)
    users, generator = len(values), np.random.Generator(np.random.PCG64(seed))
    means = np.empty((samples, values.shape[1]))
    for start in range(0, samples, _DRAWS):  # one product of matrices is quicker than many of vectors
        drawn = np.empty((min(_DRAWS, samples - start), users))
        for draw in drawn:
            draw[:] = np.bincount(generator.integers(0, users, users), minlength=users)
        means[start : start + len(drawn)] = drawn @ values / users
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return [Interval(*map(float, column)) for column in zip(values.mean(0), low, high, strict=True)]
