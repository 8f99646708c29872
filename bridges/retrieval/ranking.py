"""The exact rank of one item among all: a count of the items that score at least as high.

No top-k and no sorting: a query needs its target's score and how many others are not below it. Such counts, and the
log-sum-exp of the softmax probability, add up over any division of the catalogue.

Scores are cosine similarities. Two that differ by no more than TOLERANCE are a tie: the same title twice, or the same
sum in another order, must not be ranked by a rounding. Ties count against the target.
"""

from typing import NamedTuple

import numpy as np
from scipy import sparse

from grpo_jax.errors import UserError

Vectors = np.ndarray | sparse.csr_matrix

TEMPERATURE = 0.05
"""Of the softmax over the similarities."""
TOLERANCE = 1e-6


class RetrievalError(RuntimeError):
    """A call gave no ranks: no answer in its time, an actor that stays dead, a cluster that is gone."""


class ServiceNotFound(RetrievalError, UserError):
    """No retrieval service of that name runs; the message says how to start one."""


class NonFiniteScores(RetrievalError):
    """A vector or a score is NaN or infinite."""


class Counts(NamedTuple):
    """Counts of a part of the catalogue for each query's target; excluded items and the target do not count.

    Attributes:
        before: i64 [B], items that score higher than the target, or tie with it.
        log_sum: f64 [B], log Σ exp(score / TEMPERATURE) of the other items; -inf if there are none.
        score: f64 [B], the target's own.
    """

    before: np.ndarray
    log_sum: np.ndarray
    score: np.ndarray


class Ranks(NamedTuple):
    """Ranks of the targets; NaN where the service gave no answer.

    Attributes:
        rank: f64 [B], 1 is best.
        probability: f32 [B], of the target in the softmax over all items that are not excluded.
    """

    rank: np.ndarray
    probability: np.ndarray


def merge_counts(parts: list[Counts]) -> Counts:
    """Add up the counts of the catalogue's parts; the target's score is the same in all."""
    before, log_sums, scores = zip(*parts, strict=True)
    return Counts(np.sum(before, axis=0), np.logaddexp.reduce(log_sums, axis=0), scores[0])


def ranks_of(counts: Counts) -> Ranks:
    r"""Return rank = 1 + before, and probability = exp(s/τ) / (exp(s/τ) + Σ_others exp(s_j/τ))."""
    scores = counts.score / TEMPERATURE
    probability = np.exp(scores - np.logaddexp(scores, counts.log_sum))
    return Ranks(1.0 + counts.before, probability.astype(np.float32))


def count_scores(scores: np.ndarray, target: np.ndarray, out: np.ndarray) -> Counts:
    """Count scores f32 [B, M], which are overwritten, against those of targets f64 [B], without the columns `out`."""
    leave_out(scores, out)
    before = np.count_nonzero(scores >= target[:, None].astype(scores.dtype) - np.float32(TOLERANCE), axis=1)
    top = np.maximum(scores.max(1, keepdims=True), np.float32(-1))
    scores -= top
    scores *= np.float32(1 / TEMPERATURE)
    np.exp(scores, out=scores)
    with np.errstate(divide="ignore"):  # a block whose items are all left out has no sum
        log_sum = np.log(scores.sum(1, dtype=np.float64)) + top[:, 0] / TEMPERATURE
    return Counts(before, log_sum, target)


def leave_out(scores: np.ndarray, out: np.ndarray) -> None:
    """Set -inf in the columns `out` [B, X] of scores [B, M], where they lie inside."""
    inside = (out >= 0) & (out < scores.shape[1])
    scores[np.nonzero(inside)[0], out[inside]] = -np.inf
