"""Masked values have no influence on statistics; tests/oracles has the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import compiled

from grpo_jax.core.masking import masked_mean, masked_std, masked_whiten

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
