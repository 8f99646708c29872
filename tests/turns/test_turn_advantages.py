"""Returns and advantages of turns against slow NumPy loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.test_advantages import loop_gdpo, loop_group

from grpo_jax.core.advantages import gdpo_advantages, group_advantages, sum_rewards
from grpo_jax.core.returns import last_turn, turn_advantages, turn_returns

P, G, U, N, T = 3, 5, 3, 2, 9
RETURNS = jax.jit(turn_returns, static_argnames="gamma")
LAST = jax.jit(last_turn)
ADVANTAGES = jax.jit(turn_advantages, static_argnums=3)
SUMMED = jax.jit(sum_rewards, static_argnames="weights")


def episodes(seed):
    """Rewards in quarters with ties and some missing, which turns exist, and the turn and mask of each token."""
    rng = np.random.default_rng(seed)
    rewards = (rng.integers(-8, 9, (P, G, U, N)) / 4).astype(np.float32)
    rewards[rng.random(rewards.shape) < 0.2] = np.nan
    exists = np.arange(U) < rng.integers(1, U + 1, (P, G, 1))
    turn = np.sort(rng.integers(0, U, (P, G, T)), axis=-1).astype(np.int32)
    mask = (rng.random((P, G, T)) < 0.8) & np.take_along_axis(exists, turn, axis=-1)
    return np.where(exists[..., None], rewards, np.nan), exists, turn, mask


def loop_returns(rewards, exists, gamma):
    """One turn at a time, from its own words: missing is the group's mean, or nothing."""
    out = np.full(rewards.shape, np.nan)
    for p, g, u, n in np.ndindex(rewards.shape):
        if not exists[p, g, u]:
            continue
        total, some = 0.0, False
        for later in range(u, U):
            if not exists[p, g, later]:
                break
            reward = rewards[p, g, later, n]
            if np.isnan(reward):
                others = [r for r in rewards[p, :, later, n].astype(float) if not np.isnan(r)]
                reward = sum(others) / len(others) if others else 0.0
            else:
                some = True
            total += gamma ** (later - u) * float(reward)
        out[p, g, u, n] = total if some else np.nan
    return out


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_returns_are_those_of_a_loop(gamma):
    rewards, exists, *_ = episodes(0)
    came = RETURNS(rewards, exists, gamma=gamma)
    assert came.dtype == jnp.float32 and np.isnan(came).any()
    np.testing.assert_allclose(came, loop_returns(rewards, exists, gamma), atol=1e-5)


def test_an_episode_ends_with_its_last_turn():
    rewards, exists, *_ = episodes(5)
    came = LAST(rewards, exists)
    for p, g in np.ndindex(P, G):
        np.testing.assert_array_equal(came[p, g], rewards[p, g, exists[p, g].sum() - 1])
    nothing = LAST(np.zeros((1, 2, U, N), np.float32), np.zeros((1, 2, U), bool))
    assert np.isnan(nothing).all()


def loop_spread(values, turn, mask):
    out = np.zeros(turn.shape)
    for p, g, t in np.argwhere(mask):
        out[p, g, t] = values[p, g, turn[p, g, t]]
    return out


def test_grpo_compares_each_turn_with_the_same_turn_of_the_group():
    rewards, exists, turn, mask = episodes(0)
    returns = loop_returns(rewards, exists, 0.9).astype(np.float32)

    def estimate(rewards, mask):
        return group_advantages(sum_rewards(rewards, weights=(1.0, 0.5)), eps=1e-2)

    came = ADVANTAGES(returns, turn, mask, estimate)
    summed = np.stack([np.asarray(SUMMED(returns[:, :, u], weights=(1.0, 0.5))) for u in range(U)], -1)
    each = np.stack([loop_group(summed[..., u], "group", 1e-2) for u in range(U)], -1)
    np.testing.assert_allclose(came, loop_spread(each, turn, mask), atol=1e-5)
    assert np.abs(came).max() > 0.1


@pytest.mark.parametrize("whiten", ["token", None])
def test_gdpo_counts_the_tokens_of_the_turn(whiten):
    rewards, exists, turn, mask = episodes(0)
    returns = loop_returns(rewards, exists, 0.9).astype(np.float32)
    came = ADVANTAGES(
        returns, turn, mask, lambda r, m: gdpo_advantages(r, weights=(2.0, -0.5), whiten=whiten, mask=m, eps=1e-2)
    )
    each = [loop_gdpo(returns[:, :, u], (2.0, -0.5), 1e-2, whiten, mask & (turn == u)) for u in range(U)]
    np.testing.assert_allclose(came, loop_spread(np.stack(each, -1), turn, mask), atol=1e-5)


def test_one_turn_is_the_estimator_itself():
    rewards, _, _, mask = episodes(7)
    rewards, turn = rewards[:, :, :1], np.zeros((P, G, T), np.int32)
    returns = RETURNS(rewards, ~np.isnan(rewards).all(-1), gamma=1.0)
    np.testing.assert_array_equal(returns, rewards)
    came = ADVANTAGES(returns, turn, mask, lambda r, m: gdpo_advantages(r, mask=m))
    whole = np.asarray(jax.jit(gdpo_advantages)(rewards[:, :, 0], mask=mask))
    np.testing.assert_allclose(came, np.where(mask, whole[..., None], 0), rtol=1e-6, atol=1e-6)
