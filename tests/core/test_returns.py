"""Returns and GAE against explicit sums, and the ends of episodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.core.returns import (
    discounted_returns,
    gae_advantages,
    kl_penalised_rewards,
    normalised_returns,
    overlong_penalty,
)

pytestmark = pytest.mark.usefixtures("strict")

ROWS, STEPS = 3, 6
RETURNS, GAE = jax.jit(discounted_returns), jax.jit(gae_advantages)
seeds = st.integers(0, 10_000)


def episodes(seed, dtype=np.float32):
    """Random steps with holes in the mask, terminations and time limits among them."""
    random = np.random.default_rng(seed)
    shape = (ROWS, STEPS)
    parts = dict(
        rewards=random.normal(size=shape),
        values=random.normal(size=(ROWS, STEPS + 1)),
        gamma=random.uniform(0.5, 1, size=shape) * (random.random(shape) > 0.2),
        gae_lambda=random.uniform(0.5, 1, size=shape),
        next_values=random.normal(size=shape),
    )
    parts = {name: part.astype(dtype) for name, part in parts.items()}
    return parts | dict(mask=random.random(shape) > 0.3, boundary=random.random(shape) > 0.8)


def gae_of(parts, *, gamma=None, gae_lambda=None, **options):
    """The jitted function, with what `parts` holds wherever nothing else is asked for."""
    gamma = parts["gamma"] if gamma is None else gamma
    gae_lambda = parts["gae_lambda"] if gae_lambda is None else gae_lambda
    return np.asarray(GAE(parts["rewards"], parts["values"], gamma=gamma, gae_lambda=gae_lambda, **options))


def loop_gae(parts, mask, boundary, next_values):
    """Each advantage as its own sum of residuals; `next_values` None takes the next existing step's value."""
    rewards, values, gamma, gae_lambda = (parts[name] for name in ("rewards", "values", "gamma", "gae_lambda"))
    out = np.zeros(rewards.shape)
    for row in range(len(rewards)):
        places = list(np.flatnonzero(mask[row]))
        for i, t in enumerate(places):
            weight = 1.0
            for j, k in enumerate(places[i:], start=i):
                after = places[j + 1] if j + 1 < len(places) else STEPS
                following = values[row, after] if next_values is None else next_values[row, k]
                out[row, t] += weight * (rewards[row, k] + gamma[row, k] * following - values[row, k])
                weight *= 0.0 if boundary[row, k] else gamma[row, k] * gae_lambda[row, k]
    return out


@given(seeds)
def test_gae_is_the_loop(seed):
    parts = episodes(seed)
    everything, nowhere = np.ones((ROWS, STEPS), bool), np.zeros((ROWS, STEPS), bool)
    close = dict(rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gae_of(parts), loop_gae(parts, everything, nowhere, None), **close)
    got = gae_of(parts, mask=parts["mask"])
    np.testing.assert_allclose(got, loop_gae(parts, parts["mask"], nowhere, None), **close)
    options = {name: parts[name] for name in ("mask", "boundary", "next_values")}
    np.testing.assert_allclose(gae_of(parts, **options), loop_gae(parts, **options), **close)


def test_masked_steps_get_no_gradient_and_give_none():
    parts = episodes(4)
    mask = parts["mask"].copy()
    mask[0] = False

    def total(rewards, values):
        advantages = gae_advantages(rewards, values, gamma=0.9, gae_lambda=0.8, mask=mask)
        return jnp.sum(advantages * advantages + discounted_returns(rewards, gamma=0.9, mask=mask))

    exists = np.pad(mask, ((0, 0), (0, 1)), constant_values=True)
    slope = jax.jit(jax.value_and_grad(total, (0, 1)))
    expected = slope(parts["rewards"], parts["values"])
    dirty = [np.where(mask, parts["rewards"], np.nan), np.where(exists, parts["values"], np.inf)]
    got = slope(*(part.astype(np.float32) for part in dirty))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    np.testing.assert_array_equal(np.asarray(got[1][0])[~mask], 0)
    np.testing.assert_array_equal(got[1][1][0], 0)  # the row without steps does not see its last value either


def test_equal_returns_and_empty_groups_give_exactly_zero():
    mask = np.ones((2, 3, 4), bool)
    normalised = jax.jit(normalised_returns)
    np.testing.assert_array_equal(normalised(np.full((2, 3, 4), 1000.1, np.float32), mask=mask), 0)
    np.testing.assert_array_equal(normalised(np.full((2, 3, 4), np.nan, np.float32), mask=~mask), 0)


PENALISED = jax.jit(kl_penalised_rewards)


def penalised_batch(seed, rows=4, length=5):
    random = np.random.default_rng(seed)
    logprobs, ref = -random.exponential(size=(2, rows, length)).astype(np.float32)
    mask = random.random((rows, length)) > 0.3
    mask[0] = False
    return random.normal(size=rows).astype(np.float32), logprobs, ref, mask


def loop_rewards(scores, logprobs, ref, mask, coef):
    out = np.zeros(logprobs.shape)
    for row in range(len(mask)):
        places = np.flatnonzero(mask[row])
        for t in places:
            d = float(ref[row, t]) - float(logprobs[row, t])
            out[row, t] = coef * d
        if len(places):
            out[row, places[-1]] += scores[row]
    return out


@given(seed=seeds)
def test_penalised_rewards_are_the_loop(seed):
    scores, logprobs, ref, mask = penalised_batch(seed)
    expected = loop_rewards(scores, logprobs, ref, mask, 0.3)
    dirty = [np.where(mask, part, np.float32(bad)) for part, bad in ((logprobs, np.nan), (ref, -np.inf))]
    scores[0] = np.nan  # of the row without tokens
    got = PENALISED(scores, *dirty, mask, kl_coef=np.float32(0.3))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(got)[~mask], 0)


def test_penalised_rewards_are_constants_to_gradients():
    scores, logprobs, ref, mask = penalised_batch(2)
    slope = jax.jit(jax.grad(lambda x: kl_penalised_rewards(scores, x, ref, mask, kl_coef=0.3).sum()))(logprobs)
    np.testing.assert_array_equal(slope, 0)


def test_a_length_penalty_grows_over_a_token_at_least():
    with pytest.raises(ValueError, match="buffer must be at least 1, got 0"):
        overlong_penalty(jnp.array([9, 10]), limit=10, buffer=0)  # 0 / 0 at 10 was NaN, a missing reward
