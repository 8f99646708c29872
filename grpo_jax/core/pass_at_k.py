"""Statistics of several completions of a prompt: pass@k, and the interval of a mean over prompts."""

from typing import NamedTuple

import numpy as np

_95 = 1.959963984540054  # deviations of a normal distribution on both sides of its mean that hold 95 % of it


class Interval(NamedTuple):
    """A mean over prompts and the bounds of its 95 % interval; NaN if there is none."""

    mean: float
    low: float
    high: float


def pass_at_k(passed: np.ndarray, judged: np.ndarray, k: int) -> np.ndarray:
    """The probability that at least one of k completions passes, estimated without bias from n of them.

        pass@k = 1 - C(n - c, k) / C(n, k)    (Chen et al. 2021, https://arxiv.org/abs/2107.03374)

    Args:
        passed: int [P], c, the completions of each prompt that pass.
        judged: int [P], n, those that were judged at all.
        k: At least 1.

    Returns:
        float64 [P]; NaN where fewer than k were judged.
    """
    passed, judged = np.asarray(passed, np.float64), np.asarray(judged, np.float64)
    # C(n - c, k) / C(n, k) as a product of k factors, none of which overflows.
    lower = np.arange(k)
    left, all_of = (np.maximum(count[..., None] - lower, 0) for count in (judged - passed, judged))
    missed = np.prod(np.divide(left, all_of, out=np.zeros_like(left), where=all_of > 0), axis=-1)
    return np.where(judged >= k, 1 - missed, np.nan)


def mean_interval(values: np.ndarray) -> Interval:
    """The mean over prompts with its 95 % interval by the normal approximation: mean ± 1.96 · deviation / √P.

    Prompts are the random sample, so each counts once, whatever its number of completions.

    Args:
        values: float [P], one for each prompt; NaN takes no part.
    """
    present = np.asarray(values, np.float64)[np.isfinite(values)]
    if not present.size:
        return Interval(np.nan, np.nan, np.nan)
    mean = float(present.mean())
    if present.size < 2:
        return Interval(mean, np.nan, np.nan)
    half = _95 * float(present.std(ddof=1)) / np.sqrt(present.size)
    return Interval(mean, mean - half, mean + half)
