"""Masked values have no influence on statistics; groups with and without signal. tests/oracles has the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core.masking import masked_mean, masked_std, masked_whiten
from grpo_jax.core.selection import groups_with_signal, high_entropy_mask

pytestmark = pytest.mark.usefixtures("strict")


@jax.jit
def slopes(x, mask):
    """Value and gradient of each function."""
    functions = masked_mean, masked_std, lambda x, m: jnp.sum(jnp.sin(masked_whiten(x, m)))
    return [jax.value_and_grad(function)(x, mask) for function in functions]


def test_empty_mask_gives_zero_and_zero_gradient():
    for value, gradient in slopes(np.float32([1.0, np.nan, np.inf, 2.0]), np.zeros(4, bool)):
        assert value == 0
        np.testing.assert_array_equal(gradient, np.zeros(4))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masked_values_reach_neither_value_nor_gradient(bad):
    clean, dirty = (slopes(np.float32([1.0, 2.0, third, 4.0]), np.array([1, 1, 0, 1], bool)) for third in (0.0, bad))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert all(np.asarray(gradient)[2] == 0 for _, gradient in dirty)


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
