"""Statistics of several completions per prompt: pass@k, and the confidence interval of a mean over prompts."""

from typing import NamedTuple

import numpy as np

_95 = 1.959963984540054  # the 97.5 % quantile of the standard normal distribution


class Interval(NamedTuple):
    """A mean over prompts and its 95 % confidence interval; NaN if there is none."""

    mean: float
    low: float
    high: float


def pass_at_k(passed: np.ndarray, judged: np.ndarray, k: int) -> np.ndarray:
    """Estimate without bias the probability that at least one of k completions passes, from n completions.

        pass@k = 1 - C(n - c, k) / C(n, k)    (Chen et al. 2021, https://arxiv.org/abs/2107.03374)

    Args:
        passed: int [P], c, the completions of each prompt that pass.
        judged: int [P], n, the completions of each prompt that were judged.
        k: At least 1.

    Returns:
        float64 [P]; NaN if fewer than k were judged.
    """
    passed, judged = np.asarray(passed, np.float64), np.asarray(judged, np.float64)
    # Compute C(n - c, k) / C(n, k) as a product of k factors: no factor overflows.
    lower = np.arange(k)
    left, all_of = (np.maximum(count[..., None] - lower, 0) for count in (judged - passed, judged))
    missed = np.prod(np.divide(left, all_of, out=np.zeros_like(left), where=all_of > 0), axis=-1)
    return np.where(judged >= k, 1 - missed, np.nan)


def mean_interval(values: np.ndarray) -> Interval:
    """Return the mean over prompts with its 95 % normal confidence interval, mean ± 1.96 · deviation / √P.

    Prompts are the random sample, so each counts once, whatever its number of completions.

    Args:
        values: float [P], one for each prompt; NaN does not count.
    """
    present = np.asarray(values, np.float64)[np.isfinite(values)]
    if not present.size:
        return Interval(np.nan, np.nan, np.nan)
    mean = float(present.mean())
    half = _95 * float(present.std(ddof=1)) / np.sqrt(present.size) if present.size > 1 else np.nan
    return Interval(mean, mean - half, mean + half)
