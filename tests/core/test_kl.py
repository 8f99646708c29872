"""The KL estimators: their values, and which of their gradients are right, on a small categorical."""

import functools

import jax
import jax.numpy as jnp
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


def categorical():
    random = np.random.default_rng(0)
    logits, other = random.normal(size=(2, 5))
    return logits, jax.nn.log_softmax(other)


def expected_slope(logits, reference, old=None, **penalty):
    """Gradient of the penalty's loss, its expectation over tokens of the old policy taken exactly."""

    def loss(x):
        logs = jax.nn.log_softmax(x)
        drawn = jax.lax.stop_gradient(logs) if old is None else old
        each = jax.vmap(
            lambda lp, o, ref: grpo_loss(
                lp[None], o[None], jnp.zeros(()), np.ones(1, bool), kl=KLPenalty(1.0, **penalty), ref_logprobs=ref[None]
            )[0]
        )(logs, drawn, reference)
        return jnp.sum(jnp.exp(drawn) * each)

    return jax.jit(jax.grad(loss))(logits)


def true_slope(logits, reference):
    return jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - reference)))(logits)


def test_which_kl_gradients_are_right(x64):
    """k1 as a loss teaches nothing in expectation; k3's gradient is biased; the mended forms are exact."""
    logits, reference = categorical()
    true = true_slope(logits, reference)
    slope = functools.partial(expected_slope, logits, reference)
    np.testing.assert_allclose(slope(estimator="k1"), 0, atol=1e-12)
    np.testing.assert_allclose(slope(estimator="k2"), true, atol=1e-12)
    assert np.abs(slope(estimator="k3") - true).max() > 0.05
    for estimator in ("k1", "k3"):
        np.testing.assert_allclose(slope(estimator=estimator, corrected=True), true, atol=1e-12)
        np.testing.assert_allclose(slope(estimator=estimator, straight_through=True), true, atol=1e-12)


def test_the_bias_of_k3_is_the_other_direction(x64):
    """Its gradient is that of KL(reference ‖ policy)."""
    logits, reference = categorical()
    other = jax.grad(lambda x: jnp.sum(jnp.exp(reference) * (reference - jax.nn.log_softmax(x))))(logits)
    np.testing.assert_allclose(expected_slope(logits, reference, estimator="k3"), other, atol=1e-12)


def test_off_policy_only_the_corrected_gradient_stays_right(x64):
    logits, reference = categorical()
    old = jax.nn.log_softmax(logits + np.random.default_rng(1).normal(size=5))
    true = true_slope(logits, reference)
    for estimator in ("k1", "k3"):
        got = expected_slope(logits, reference, old, estimator=estimator, corrected=True)
        np.testing.assert_allclose(got, true, atol=1e-12)
        for other in ({}, {"straight_through": True}):
            assert np.abs(expected_slope(logits, reference, old, estimator=estimator, **other) - true).max() > 0.01


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


def test_the_mean_of_samples_approaches_the_divergence():
    """k3 of 100 000 drawn tokens lies within its error of the true value, and varies less than k1."""
    logits, _ = categorical()
    logs = jax.nn.log_softmax(logits.astype(np.float32))
    reference = jax.nn.log_softmax(logits.astype(np.float32) + np.float32([0.3, -0.2, 0.1, 0.0, -0.4]))
    true = jnp.sum(jnp.exp(logs) * (logs - reference))
    tokens = jax.random.categorical(jax.random.key(0), logs, shape=(100_000,))
    k1, k3 = (kl_divergence(logs[tokens], reference[tokens], estimator=name) for name in ("k1", "k3"))
    for estimate in (k1, k3):
        assert abs(estimate.mean() - true) < 4 * estimate.std() / 100_000**0.5
    assert k3.std() < 0.3 * k1.std()
    assert abs(k3.mean() - true) < 0.02 * true


def test_mean_of_k1_and_k3_is_the_divergence(x64):
    logits, reference = categorical()
    logs = jax.nn.log_softmax(logits)
    true = jnp.sum(jnp.exp(logs) * (logs - reference))
    for estimator in ("k1", "k3"):
        mean = jnp.sum(jnp.exp(logs) * kl_divergence(logs, reference, estimator=estimator))
        np.testing.assert_allclose(mean, true, rtol=1e-12)


X = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: KLPenalty(-0.1), ValueError, "coef must be at least 0, got -0.1"),
        (lambda: KLPenalty(0.1, "k4"), ValueError, "estimator must be 'k1', 'k2' or 'k3', got 'k4'"),
        (lambda: kl_divergence(X, X, estimator="k4"), ValueError, "estimator must be 'k1', 'k2' or 'k3'"),
        (lambda: kl_divergence(X, X[:1]), ValueError, "ref_logprobs must have logprobs' shape"),
        (lambda: kl_divergence(X.astype(int), X), TypeError, "logprobs must be of a floating type"),
        (lambda: KLPenalty(0.1, corrected=True, straight_through=True), ValueError, "must not both be True"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
