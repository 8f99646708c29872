"""CartPole's environment and rollouts: physics, groups, ends of episodes and time limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.cartpole import environment as task
from grpo_jax.cartpole import training
from grpo_jax.cartpole.settings import OBJECTIVES, Settings


@functools.cache
def compiled_advantages(name, weights):
    """Compiled whole: one by one, the operations would take longer to compile than to run."""
    chosen = Settings(name, OBJECTIVES[: len(weights)], weights)
    return jax.jit(lambda rewards, mask: training.group_step_advantages(chosen, rewards, mask))


def linear_policy(observations):
    """Balances for a while: leans the way the pole falls."""
    return observations @ jnp.array([0.0, 0.0, 8.0, 0.0])


@functools.partial(jax.jit, static_argnums=0)
def starts(count):
    return task.reset(jax.random.key(0), count)


@pytest.fixture(scope="module")
def episodes():
    states = jax.tree.map(lambda x: np.repeat(x, 4, axis=0), jax.device_get(starts(3)))
    play = jax.jit(lambda states, key: task.play_episodes(linear_policy, states, key))
    return jax.tree.map(np.asarray, play(states, jax.random.key(1)))


def test_episodes_of_a_group_share_the_start_and_sample_their_own_actions(episodes):
    assert 0 < np.abs(episodes.observations[0]).max() <= 0.05
    first = episodes.observations[0].reshape(3, 4, 4)
    assert (first == first[:, :1]).all()
    assert not np.allclose(first[0], first[1])
    actions = episodes.actions.T.reshape(3, 4, -1)
    assert all((actions[p, 0] != actions[p, 1]).any() for p in range(3))


def test_masks_end_at_termination(episodes):
    """Replayed by gymnasium: it falls at the step after which the mask ends, and not before."""
    peer = pytest.importorskip("gymnasium").make("CartPole-v1").unwrapped
    for b in range(12):
        mask = episodes.mask[:, b]
        length = int(mask.sum())
        assert mask[:length].all() and 5 < length < 500
        peer.reset(seed=0)
        peer.state = tuple(float(x) for x in episodes.observations[0, b])
        for t in range(length):
            np.testing.assert_allclose(peer.state, episodes.observations[t, b], rtol=0, atol=1e-3)
            _, _, done, _, _ = peer.step(int(episodes.actions[t, b]))
            assert done == (t == length - 1)
            np.testing.assert_allclose(peer.state[0], episodes.positions[t, b], rtol=0, atol=1e-3)
    assert np.isfinite(episodes.observations).all() and np.isfinite(episodes.log_odds).all()


def balance(observations):
    """Holds the pole for hundreds of steps."""
    return 50 * (observations @ jnp.array([0.3, 0.7, 6.0, 2.0]))


def test_greedy_play_counts_the_steps_of_each_episode():
    states = starts(5)
    outcome = jax.jit(functools.partial(task.play_greedily, linear_policy))(states)
    alive, length, centred, distance = np.ones(5, bool), np.zeros(5), np.zeros(5), np.zeros(5)
    step = jax.jit(lambda states: task.step(states, linear_policy(task.observe(states)) > 0))
    while alive.any() and length.max() < 500:
        states, fallen = step(states)
        x = np.abs(states.x)
        length += alive
        centred += alive * np.maximum(0, 1 - x / 0.5)
        distance += alive * x
        alive &= ~np.asarray(fallen)
    np.testing.assert_array_equal(outcome["episode_return"], length)
    np.testing.assert_allclose(outcome["centred"], centred, rtol=1e-4)
    np.testing.assert_allclose(outcome["distance"], distance / length, rtol=1e-4)


def test_automatic_reset_tells_termination_from_the_time_limit():
    """A policy that balances meets the limit at step 500; one that always pushes right falls."""

    def play(policy, steps):
        played = jax.jit(functools.partial(task.play_steps, policy, steps=steps))
        return jax.device_get(played(starts(4), jax.random.key(3)))

    carts, steps = play(balance, 600)
    truncated, terminated = np.asarray(steps.truncated), np.asarray(steps.terminated)
    assert not terminated.any() and truncated[499].all() and truncated.sum() == 4
    assert (np.asarray(steps.lengths)[499] == 500).all() and (np.asarray(steps.lengths)[500] == 1).all()
    assert (np.asarray(carts.time) == 100).all()
    # What the limit cut off is kept; the next step begins anew.
    assert np.abs(steps.observations[500]).max() <= 0.05
    assert not np.allclose(steps.next_observations[499], steps.observations[500])
    np.testing.assert_allclose(steps.next_observations[:499], steps.observations[1:500], atol=1e-6)

    _, steps = play(lambda x: jnp.full(x.shape[0], 50.0), 40)
    ends = np.asarray(steps.terminated)
    assert ends.any(axis=0).all() and not np.asarray(steps.truncated).any()
    assert (np.asarray(steps.lengths)[ends] < 15).all()


def group_returns(rewards, mask, gamma):
    """Slow: R[t] = Σ_{u ≥ t} γ^(u - t) r[u]."""
    out = np.zeros(rewards.shape)
    for index in np.ndindex(*rewards.shape[:-1]):
        later = 0.0
        for t in reversed(range(rewards.shape[-1])):
            if mask[index][t]:
                later = rewards[index][t] + gamma * later
                out[index][t] = later
    return out


@pytest.fixture(scope="module")
def groups():
    """Rewards [P, G, T, N] and mask of episodes of many lengths; in the last group all are alike."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 8, size=(4, 3))
    lengths[3] = 5
    mask = np.arange(8) < lengths[..., None]
    centred = np.where(mask, rng.random(mask.shape), 0)
    rewards = np.stack([mask.astype(float), centred], axis=-1)
    return rewards.astype(np.float32), mask


def normalised(returns, mask):
    seen = returns[mask]
    return np.where(mask, (returns - seen.mean()) / (seen.std(ddof=1) + 1e-4), 0)


def test_grpo_normalises_the_returns_of_the_sum(groups):
    rewards, mask = groups
    got, dead = compiled_advantages("grpo", (1.0, 2.0))(rewards, mask)
    returns = group_returns(rewards[..., 0] + 2 * rewards[..., 1], mask, 0.994)
    for p in range(4):
        np.testing.assert_allclose(got[p], normalised(returns[p], mask[p]), rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(dead, [[False, False]] * 3 + [[True, False]])


def test_gdpo_normalises_each_objective_and_whitens(groups):
    rewards, mask = groups
    got, _ = compiled_advantages("gdpo", (1.0, 2.0))(rewards, mask)
    total = np.zeros(mask.shape)
    for n, weight in enumerate((1.0, 2.0)):
        returns = group_returns(rewards[..., n], mask, 0.994)
        for p in range(4):
            if p == 3 and n == 0:  # all episodes of equal length: nothing to learn from staying up
                continue
            total[p] += weight * normalised(returns[p], mask[p])
    expected = np.where(mask, (total - total[mask].mean()) / (total[mask].std(ddof=1) + 1e-4), 0)
    np.testing.assert_allclose(got, expected, rtol=5e-4, atol=5e-4)


def test_centred_counts_only_in_episodes_that_stay_up():
    mask = np.arange(6) < np.array([[6, 3, 4]])[..., None]
    positions = np.full(mask.shape, 0.1, np.float32)

    def judged(settings):
        return np.asarray(jax.jit(functools.partial(training.episode_rewards, settings))(positions, mask))

    rewards = judged(Settings("gdpo", OBJECTIVES, condition=4))
    np.testing.assert_allclose(rewards[..., 0], mask)
    np.testing.assert_allclose(rewards[..., 1], 0.8 * mask * np.array([[1, 0, 1]])[..., None], rtol=1e-6)
    free = judged(Settings("gdpo", OBJECTIVES))
    np.testing.assert_allclose(free[..., 1], 0.8 * mask, rtol=1e-6)
