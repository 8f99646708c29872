"""Running moments of a reward over all batches, whose deviation brings rewards of different units to one scale."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class RewardMoments(NamedTuple):
    """Moments of a reward's present values so far."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean

    def with_batch(self, rewards: np.ndarray) -> "RewardMoments":
        """Return the moments of these and further values, of any shape; NaN is missing.

        The parallel form of Welford's update (Chan, Golub and LeVeque 1979), in float64.
        """
        values = np.asarray(rewards, np.float64)
        values = values[~np.isnan(values)]
        if not values.size:
            return self
        total, difference = self.count + values.size, float(values.mean()) - self.mean
        squares = float(np.square(values - values.mean()).sum())
        squares += self.squares + difference**2 * self.count * values.size / total
        return RewardMoments(total, self.mean + difference * values.size / total, squares)

    @property
    def deviation(self) -> float:
        """Return the sample standard deviation (ddof 1); 0 with fewer than two values."""
        return float(np.sqrt(self.squares / (self.count - 1))) if self.count > 1 else 0.0


def standardise_rewards(rewards: np.ndarray, moments: Sequence[RewardMoments], *, eps: float = 1e-4) -> np.ndarray:
    """Standardise each reward by its moments over all batches, (r - mean) / (std + eps).

    Args:
        rewards: f32 [.., N], NaN is missing.
        moments: N of them, with these rewards.
        eps: Added to the deviations.

    Returns:
        f32 [.., N]; 0 for a reward that never varied, which teaches nothing.
    """
    means, deviations = np.array([(each.mean, each.deviation) for each in moments]).T
    factors = np.where(deviations > 0, 1 / (deviations + eps), 0.0)
    return ((rewards - means) * factors).astype(np.float32)
