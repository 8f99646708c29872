"""Running moments of rewards against NumPy over all values at once, and rewards standardised by them."""

import numpy as np
import pytest

from grpo_jax.core.reward_moments import RewardMoments, standardise_rewards


def batches(seed=0):
    """Four batches [P, G] of one reward around a large mean, with missing values; one batch is all missing."""
    random = np.random.default_rng(seed)
    drawn = [1e4 + 3 * random.normal(size=(4, 8)).astype(np.float32) for _ in range(4)]
    drawn[1][random.random((4, 8)) < 0.5] = np.nan
    drawn[2][:] = np.nan
    return drawn


def test_moments_are_those_of_all_values_at_once():
    moments, seen = RewardMoments(), []
    for batch in batches():
        moments = moments.with_batch(batch)
        seen += batch[~np.isnan(batch)].astype(np.float64).tolist()
        assert moments.count == len(seen)
        assert moments.mean == pytest.approx(np.mean(seen), rel=1e-12)
        assert moments.deviation == pytest.approx(np.std(seen, ddof=1), rel=1e-9)


def test_fewer_than_two_values_have_no_deviation():
    assert RewardMoments().deviation == RewardMoments().with_batch(np.array([[5.0, np.nan]])).deviation == 0


def test_a_rewards_unit_changes_nothing():
    def standardised(scales):
        rewards = drawn * np.array(scales)
        moments = [RewardMoments().with_batch(rewards[..., n]) for n in range(2)]
        return standardise_rewards(rewards, moments, eps=0.0)

    drawn = np.stack([batches(seed)[0] for seed in (1, 2)], axis=-1).astype(np.float64)
    np.testing.assert_allclose(standardised((1.0, 1.0)), standardised((1e3, 1e-3)), rtol=1e-5)
    assert np.std(standardised((1.0, 1.0))[..., 0], ddof=1) == pytest.approx(1, rel=1e-3)


def test_missing_rewards_stay_missing_and_constant_ones_are_left_out():
    rewards = np.array([[[np.nan, 7.0], [2.0, 7.0], [4.0, 7.0]]], np.float32)
    moments = [RewardMoments().with_batch(rewards[..., n]) for n in range(2)]
    expected = [[[np.nan, 0], [-1 / (2**0.5 + 0.1), 0], [1 / (2**0.5 + 0.1), 0]]]
    np.testing.assert_allclose(standardise_rewards(rewards, moments, eps=0.1), expected, rtol=1e-6)
