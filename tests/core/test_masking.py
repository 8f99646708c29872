"""Masked values have no influence on statistics; groups with and without signal. tests/oracles has the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import compiled

from grpo_jax.core.masking import masked_mean, masked_std, masked_whiten
from grpo_jax.core.selection import groups_with_signal, high_entropy_mask

masked_mean, masked_std, masked_whiten = map(compiled, (masked_mean, masked_std, masked_whiten))
pytestmark = pytest.mark.usefixtures("strict")


def test_empty_mask_gives_zero_and_zero_gradient():
    x = jnp.array([1.0, jnp.nan, jnp.inf])
    mask = jnp.zeros(3, bool)
    for function in (masked_mean, masked_std, lambda x, m: masked_whiten(x, m).sum()):
        value, gradient = jax.value_and_grad(function)(x, mask)
        assert value == 0
        np.testing.assert_array_equal(gradient, np.zeros(3))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masked_values_reach_neither_value_nor_gradient(bad):
    mask = jnp.array([True, True, False, True])
    clean, dirty = jnp.array([1.0, 2.0, 0.0, 4.0]), jnp.array([1.0, 2.0, bad, 4.0])
    for function in (masked_mean, masked_std, lambda x, m: jnp.sum(jnp.sin(masked_whiten(x, m)))):
        expected, got = (jax.value_and_grad(function)(x, mask) for x in (clean, dirty))
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])
        assert got[1][2] == 0


def test_of_nothing_nothing_has_high_entropy():
    assert not high_entropy_mask(np.ones((4, 6), np.float32), np.zeros((4, 6), bool), share=0.2).any()
    assert high_entropy_mask(np.zeros((0, 3), np.float32), np.zeros((0, 3), bool), share=0.2).shape == (0, 3)


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
