"""Masked statistics against NumPy on what the mask leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.compiled import compiled

from grpo_jax.core.masking import masked_mean, masked_std, masked_whiten, safe_divide

masked_mean, masked_std, masked_whiten, safe_divide = map(
    compiled, (masked_mean, masked_std, masked_whiten, safe_divide)
)
pytestmark = pytest.mark.usefixtures("strict")

values = hnp.arrays(np.float32, (4, 5), elements=st.floats(-100, 100, width=32))
masks = hnp.arrays(np.bool_, (4, 5))


def sample_std(x):
    x = x.astype(np.float64)
    return np.sqrt(sum((v - x.mean()) ** 2 for v in x) / (len(x) - 1)) if len(x) > 1 else 0.0


@given(values, masks)
def test_whitening(x, mask):
    white = np.asarray(masked_whiten(jnp.asarray(x), mask, eps=1e-3))
    expected = np.zeros_like(x)
    inside = x[mask].astype(np.float64)
    if len(inside) > 1 and inside.max() > inside.min():
        expected[mask] = (inside - inside.mean()) / (sample_std(inside) + 1e-3)
    np.testing.assert_allclose(white, expected, rtol=1e-3, atol=1e-3)


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
