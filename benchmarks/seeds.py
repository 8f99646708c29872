"""Statistics of runs over seeds: the mean, the paired difference of two arms, and their 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Interval(NamedTuple):
    """A mean over seeds and its 95 % interval by Student's t, mean ± t(n - 1) · deviation / √n; NaN for one seed."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the mean with its sign, and the interval if there is one."""
        return f"{self.mean:+.3f}" + ("" if np.isnan(self.low) else f" ({self.low:+.3f} to {self.high:+.3f})")


def mean_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Return the mean of one value per seed, with its interval. ValueError without values."""
    values = np.asarray(values, np.float64)
    if not values.size:
        raise ValueError("values must hold at least one seed")
    half = stats.t.ppf(0.975, values.size - 1) * stats.sem(values) if values.size > 1 else np.nan
    return Interval(values.mean(), values.mean() - half, values.mean() + half)


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Interval:
    """Return the mean of first - second over the seeds that both have, with its interval (the paired t-test's).

    ValueError if they share no seed.
    """
    return mean_interval([first[seed] - second[seed] for seed in first if seed in second])
