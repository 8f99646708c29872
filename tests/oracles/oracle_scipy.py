"""The cases of oracle.py whose oracle is SciPy, scikit-learn or NumPy's own statistics."""

import jax
import numpy as np
from oracles.oracle import Case, Compared, policy_batch
from scipy import special, stats
from sklearn.metrics import explained_variance_score
from support.compiled import compiled

from grpo_jax.core.advantages import batch_whitened_advantages, gdpo_advantages, group_advantages, groups_without_signal
from grpo_jax.core.kl import kl_divergence
from grpo_jax.core.masking import masked_mean, masked_std
from grpo_jax.core.ppo import explained_variance
from grpo_jax.core.returns import normalised_returns
from grpo_jax.core.selection import groups_with_signal, high_entropy_mask

group_advantages, batch_whitened_advantages, gdpo_advantages = map(
    compiled, (group_advantages, batch_whitened_advantages, gdpo_advantages)
)
normalised_returns, masked_mean, masked_std, explained_variance = map(
    compiled, (normalised_returns, masked_mean, masked_std, explained_variance)
)
groups_without_signal, groups_with_signal, kl_divergence = map(
    compiled, (groups_without_signal, groups_with_signal, kl_divergence)
)
SHAPE = (4, 6)


def some_missing(seed, dtype, shape=SHAPE):
    """Numbers of which a few are NaN, at least two present in each group."""
    random = np.random.default_rng(seed)
    numbers = random.normal(loc=3, size=shape)
    numbers[random.random(shape) < 0.2] = np.nan
    numbers[:, :2] = random.normal(size=numbers[:, :2].shape)
    return numbers.astype(dtype)


def scores(numbers, axis):
    """z-scores with the sample standard deviation; a missing number's is 0."""
    numbers = np.asarray(numbers, np.float64)
    return np.nan_to_num(stats.zscore(numbers, axis=axis, ddof=1, nan_policy="omit"))


def group(seed, dtype):
    rewards = some_missing(seed, dtype)
    return Compared((group_advantages(rewards, eps=0.0), scores(rewards, 1)))


def batch(seed, dtype):
    rewards = some_missing(seed, dtype)
    return Compared((batch_whitened_advantages(rewards, eps=0.0), scores(rewards, None)))


def gdpo(seed, dtype):
    rewards = some_missing(seed, dtype, (*SHAPE, 3))
    summed = scores(rewards, 1) @ [2.0, -0.5, 0.25]
    summed[np.isnan(rewards).all(-1)] = np.nan
    return Compared((gdpo_advantages(rewards, weights=(2.0, -0.5, 0.25), eps=0.0), scores(summed, None)))


def returns(seed, dtype):
    """Over episodes and steps of each group."""
    numbers = some_missing(seed, dtype, (3, *SHAPE))
    theirs = np.stack([scores(part, None) for part in numbers])
    return Compared((normalised_returns(numbers, mask=~np.isnan(numbers), eps=0.0), theirs))


def masked(seed, dtype):
    numbers = some_missing(seed, dtype)
    mask = ~np.isnan(numbers)
    ours = [masked_mean(numbers, mask, axis=1), masked_std(numbers, mask, axis=1)]
    wide = numbers.astype(np.float64)
    return Compared((np.stack(ours), np.stack([np.nanmean(wide, 1), np.nanstd(wide, 1, ddof=1)])))


def signal(seed, dtype):
    random = np.random.default_rng(seed)
    rewards = random.integers(0, 2, (40, 3, 2)).astype(dtype)
    rewards[random.random(rewards.shape) < 0.2] = np.nan
    rewards[:, 0] = random.integers(0, 2, (40, 2))
    spread = np.nanmax(rewards, 1) - np.nanmin(rewards, 1)
    return Compared((groups_without_signal(rewards), spread == 0))


def kept(seed, dtype):
    rewards = np.random.default_rng(seed).integers(0, 2, (40, 3, 2)).astype(dtype)
    return Compared((groups_with_signal(rewards), np.ptp(rewards, axis=1).any(-1)))


def quantile(seed, dtype):
    parts = policy_batch(seed, dtype)
    shares = (0.07, 0.23, 0.5, 0.79, 1.0)
    masks = jax.jit(lambda *given: [high_entropy_mask(*given, share=share) for share in shares])
    ours = masks(parts["entropy"], parts["mask"])
    wide = parts["entropy"].astype(np.float64)
    theirs = [parts["mask"] & (wide >= np.quantile(wide[parts["mask"]], 1 - share)) for share in shares]
    return Compared((np.stack(ours), np.stack(theirs)))


def explained(seed, dtype):
    random = np.random.default_rng(seed)
    values, target = random.normal(size=(2, *SHAPE)).astype(dtype)
    target += values
    mask = random.random(SHAPE) > 0.3
    theirs = explained_variance_score(target[mask].astype(np.float64), values[mask].astype(np.float64))
    return Compared((explained_variance(values, target, mask), theirs))


def divergence(estimator):
    """k1 and k3, weighed by the policy's probabilities, are the divergence of two categorical distributions."""

    def run(seed, dtype):
        random = np.random.default_rng(seed)
        logs, ref = (special.log_softmax(random.normal(size=9)).astype(dtype) for _ in range(2))
        ours = np.sum(np.exp(logs) * np.asarray(kl_divergence(logs, ref, estimator=estimator)))
        theirs = special.rel_entr(np.exp(logs.astype(np.float64)), np.exp(ref.astype(np.float64))).sum()
        if estimator == "k3":  # what rounding to the dtype took from the sums of the probabilities
            theirs += np.exp(ref.astype(np.float64)).sum() - np.exp(logs.astype(np.float64)).sum()
        return Compared((ours, theirs))

    return Case("kl_divergence", f"{estimator}, expectation", "scipy.special.rel_entr", run)


ZSCORE = "scipy.stats.zscore"
CASES = [
    Case("group_advantages", "eps 0, missing rewards", ZSCORE, group),
    Case("batch_whitened_advantages", "centre batch, eps 0, missing rewards", ZSCORE, batch),
    Case("gdpo_advantages", "eps 0, weights, missing rewards", ZSCORE, gdpo),
    Case("normalised_returns", "eps 0, mask", ZSCORE, returns),
    Case("masked_mean, masked_std", "mask", "numpy.nanmean, nanstd", masked),
    Case("groups_without_signal", "two objectives", "numpy.nanmax - nanmin", signal),
    Case("groups_with_signal", "two objectives", "numpy.ptp", kept),
    Case("high_entropy_mask", "shares .07 to 1", "numpy.quantile", quantile),
    Case("explained_variance", "mask", "sklearn.metrics.explained_variance_score", explained),
    divergence("k1"),
    divergence("k3"),
]
