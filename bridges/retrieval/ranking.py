"""The exact rank of one item among all: a count of the items that score higher.

No top-k and no sorting: a query needs its target's score and how many others lie above and level with it. Such
counts, and the log-sum-exp of the softmax probability, add up over any division of the catalogue, so shards give the
results of one machine.

Scores are cosine similarities. Two that differ by no more than a tolerance are a tie: the same title twice, or the
same sum in another order, must not be ranked by a rounding.
"""

from typing import NamedTuple

import numpy as np
from scipy import sparse

from grpo_jax.config.retrieval import Ties

Vectors = np.ndarray | sparse.csr_matrix

_SHARES = {"against": 1.0, "average": 0.5, "favour": 0.0}


class Scale(NamedTuple):
    """Temperature of the softmax over the similarities, and the difference up to which two scores are a tie."""

    temperature: float = 0.05
    tolerance: float = 1e-6


class Counts(NamedTuple):
    """Counts of a part of the catalogue for each query's target; excluded items and the target do not count.

    Attributes:
        better: i64 [B], items that score higher than the target.
        level: i64 [B], items that tie with it.
        log_sum: f64 [B], log Σ exp(score / temperature) of the other items; -inf if there are none.
        score: f64 [B], the target's own.
        silent: bool [B], the query is the zero vector.
    """

    better: np.ndarray
    level: np.ndarray
    log_sum: np.ndarray
    score: np.ndarray
    silent: np.ndarray


class Ranks(NamedTuple):
    """Ranks of the targets; NaN where the service gave no answer.

    Attributes:
        rank: f64 [B], 1 is best; a half where ties are averaged.
        probability: f32 [B], of the target in the softmax over all items that are not excluded.
    """

    rank: np.ndarray
    probability: np.ndarray


class Nearest(NamedTuple):
    """Items most similar to each query, best first; among equals the first row first.

    Attributes:
        rows: i64 [B, k], of the whole catalogue.
        scores: f32 [B, k], similarities; -inf where no item is left.
    """

    rows: np.ndarray
    scores: np.ndarray


def nearest_of(scores: np.ndarray, out: np.ndarray, count: int, *, first: int) -> Nearest:
    """Best `count` of scores f32 [B, M], overwritten, of rows from `first` on, without the columns `out` [B, X]."""
    _leave_out(scores, out)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return Nearest(best + first, np.take_along_axis(scores, best, axis=1))


def merge_nearest(parts: list[Nearest], count: int) -> Nearest:
    """Merge the best items of the catalogue's parts, given in the order of their rows."""
    rows, scores = (np.concatenate(column, axis=1) for column in zip(*parts, strict=True))
    best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return Nearest(np.take_along_axis(rows, best, axis=1), np.take_along_axis(scores, best, axis=1))


def merge_counts(parts: list[Counts]) -> Counts:
    """Add up the counts of the catalogue's parts; the target's score is the same in all."""
    return Counts(
        better=np.sum([part.better for part in parts], axis=0),
        level=np.sum([part.level for part in parts], axis=0),
        log_sum=np.logaddexp.reduce([part.log_sum for part in parts], axis=0),
        score=parts[0].score,
        silent=parts[0].silent,
    )


def ranks_of(counts: Counts, *, ties: Ties, temperature: float) -> Ranks:
    r"""Return rank = 1 + better + share · level, and probability = exp(s/τ) / (exp(s/τ) + Σ_others exp(s_j/τ)).

    `ties` is the share of the level items that stand before the target: "against" all, "average" half, "favour" none.
    A zero query ties with everything: all stand before the target under any rule.
    """
    share = np.where(counts.silent, 1.0, _SHARES[ties])
    target_scores = counts.score / temperature
    probability = np.exp(target_scores - np.logaddexp(target_scores, counts.log_sum))
    return Ranks(1.0 + counts.better + share * counts.level, probability.astype(np.float32))


def count_scores(scores: np.ndarray, target: np.ndarray, out: np.ndarray, scale: Scale) -> tuple:
    """Return better, level and log_sum [B] of scores [B, M] without the columns `out`, where they lie inside.

    `scores` is overwritten.
    """
    _leave_out(scores, out)
    target_scores = target[:, None].astype(scores.dtype)
    better = np.count_nonzero(scores > target_scores + np.float32(scale.tolerance), axis=1)
    level = np.count_nonzero(scores >= target_scores - np.float32(scale.tolerance), axis=1) - better
    top = np.maximum(scores.max(1, keepdims=True), np.float32(-1))
    scores -= top
    scores *= np.float32(1 / scale.temperature)
    np.exp(scores, out=scores)
    with np.errstate(divide="ignore"):  # a block whose items are all left out has no sum
        log_sum = np.log(scores.sum(1, dtype=np.float64)) + top[:, 0] / scale.temperature
    return better, level, log_sum


def _leave_out(scores: np.ndarray, out: np.ndarray) -> None:
    """Set -inf in the columns `out` [B, X] of scores [B, M], where they lie inside."""
    inside = (out >= 0) & (out < scores.shape[1])
    scores[np.nonzero(inside)[0], out[inside]] = -np.inf
