"""The KL estimators: their values, and which of their gradients are right, on a small categorical."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.core.losses import KLPenalty, grpo_loss, kl_divergence

pytestmark = pytest.mark.usefixtures("strict")


@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
def test_k3_is_never_negative(a, b):
    assert kl_divergence(np.float32(a), np.float32(b)) >= 0


def test_k3_close_to_zero_keeps_its_digits_and_slope():
    d = np.float32(1e-4)
    value, slope = jax.value_and_grad(lambda x: kl_divergence(x, np.float32(0)))(-d)
    np.testing.assert_allclose(value, d * d / 2, rtol=0.2)  # exp(d) - d - 1 by itself gives 0 or twice this
    np.testing.assert_allclose(slope, 1 - np.exp(np.float64(d)), rtol=1e-3)


@given(st.integers(0, 10_000))
def test_straight_through_has_one_estimators_value_and_anothers_gradient(seed):
    random = np.random.default_rng(seed)
    logprobs, ref = -random.exponential(size=(2, 3, 4)).astype(np.float32)
    mask = random.random((3, 4)) > 0.3
    dirty = np.where(mask, ref, np.float32(np.nan))
    value, gradient = penalty_slope(logprobs, dirty, mask, KLPenalty(0.5, "k3", straight_through=True))
    expected, _ = penalty_slope(logprobs, ref, mask, KLPenalty(0.5, "k3"))
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    _, expected = penalty_slope(logprobs, ref, mask, KLPenalty(0.5, "k2"))
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)


@functools.partial(jax.jit, static_argnums=3)
def penalty_slope(logprobs, ref, mask, kl):
    return jax.value_and_grad(
        lambda x: grpo_loss(x, logprobs, np.zeros(3, np.float32), mask, kl=kl, ref_logprobs=ref)[0]
    )(logprobs)
