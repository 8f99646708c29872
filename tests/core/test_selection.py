"""What takes part in an update, against loops and NumPy's quantile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from support.compiled import compiled

from grpo_jax.core.losses import PRESETS, grpo_loss
from grpo_jax.core.selection import (
    groups_with_signal,
    high_entropy_mask,
    truncated_importance_weights,
    without_truncated,
)

grpo_loss, groups_with_signal, high_entropy_mask, truncated_importance_weights, without_truncated = map(
    compiled, (grpo_loss, groups_with_signal, high_entropy_mask, truncated_importance_weights, without_truncated)
)
pytestmark = pytest.mark.usefixtures("strict")

seeds = st.integers(0, 10_000)


def tokens(seed, rows=4, length=6):
    """Entropies in eighths, so that some are equal, under a mask with holes."""
    random = np.random.default_rng(seed)
    entropy = (random.integers(0, 24, (rows, length)) / 8).astype(np.float32)
    return entropy, random.random((rows, length)) > 0.3


def test_of_nothing_nothing_has_high_entropy():
    entropy, mask = tokens(1)
    assert not high_entropy_mask(entropy, np.zeros_like(mask), share=0.2).any()
    assert high_entropy_mask(np.zeros((0, 3), np.float32), np.zeros((0, 3), bool), share=0.2).shape == (0, 3)


def test_a_truncated_row_is_a_row_that_was_never_there():
    random = np.random.default_rng(0)
    logprobs, old = -random.exponential(size=(2, 4, 5)).astype(np.float32)
    advantages, mask = random.normal(size=4).astype(np.float32), np.ones((4, 5), bool)
    kept = without_truncated(mask, np.array([False, True, False, False]))
    for preset in ("grpo", "dr_grpo", "dapo", "gspo"):
        loss = grpo_loss(logprobs, old, advantages, kept, **PRESETS[preset])[0]
        rest = (np.delete(part, 1, axis=0) for part in (logprobs, old, advantages, mask))
        np.testing.assert_allclose(loss, grpo_loss(*rest, **PRESETS[preset])[0], rtol=1e-6)


def test_signal_is_judged_per_objective():
    """Summed rewards of 1 and 1 look dead; GDPO still learns from them."""
    nan = np.nan
    rewards = np.array(
        [[[0, 1], [1, 0]], [[1, 5], [1, 6]], [[1, 5], [1, 5]], [[nan, 5], [1, nan]], [[nan, 5], [1, 6]]], np.float32
    )
    np.testing.assert_array_equal(groups_with_signal(rewards), [True, True, False, False, True])
    np.testing.assert_array_equal(groups_with_signal(rewards[:3].sum(-1)), [False, True, False])
    np.testing.assert_array_equal(groups_with_signal(rewards, weights=(1.0, 0.0)), [True] + [False] * 4)
    np.testing.assert_array_equal(jax.jit(groups_with_signal)(rewards), groups_with_signal(rewards))
    np.testing.assert_array_equal(groups_with_signal(np.full((2, 8), 1000.1, np.float32)), False)


def test_importance_weights_are_constants_in_at_least_float32():
    old, sampler = -np.random.default_rng(0).exponential(size=(2, 3, 4)).astype(np.float32)
    mask = np.ones((3, 4), bool)
    slope = jax.grad(lambda x: truncated_importance_weights(x, sampler, mask, cap=2.0).sum())(old)
    np.testing.assert_array_equal(slope, 0)
    low = truncated_importance_weights(
        jnp.asarray(old, jnp.bfloat16), jnp.asarray(sampler, jnp.bfloat16), mask, cap=2.0
    )
    assert low.dtype == jnp.float32
    huge = truncated_importance_weights(old + np.float32(200), sampler, mask, cap=2.0)
    np.testing.assert_array_equal(huge, 2)
    # An unknown probability is not taken for a right one.
    assert np.isnan(truncated_importance_weights(old, np.full_like(old, np.nan), mask, cap=2.0)).all()


def test_weights_correct_the_gradient_of_another_sampler(x64):
    """Tokens drawn from q, weighted by p / q, give p's policy gradient in expectation."""
    logits, other, rewards = np.random.default_rng(0).normal(size=(3, 5))
    q = jax.nn.log_softmax(other)

    def slope(weighted, draw):
        def loss(x):
            logs = jax.nn.log_softmax(x)
            old = jax.lax.stop_gradient(logs)
            weights = truncated_importance_weights(old[:, None], q[:, None], np.ones((5, 1), bool), cap=1e6)
            each = jax.vmap(
                lambda lp, r, w: grpo_loss(lp[None], jax.lax.stop_gradient(lp)[None], r, np.ones(1, bool),
                                           token_weights=w if weighted else None)[0]
            )(logs, rewards, weights)  # fmt: skip
            return jnp.sum(jnp.exp(draw) * each)

        return jax.grad(loss)(logits)

    right = slope(False, jax.nn.log_softmax(logits))
    np.testing.assert_allclose(slope(True, q), right, rtol=1e-10, atol=1e-14)
    assert np.abs(slope(False, q) - right).max() > 0.05
