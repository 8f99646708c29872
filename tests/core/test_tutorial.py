"""The expected gradients of KL penalties, computed exactly.

Expectations over tokens are sums over a small vocabulary, weighed by probability: no sampling noise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import compiled

from grpo_jax.core.kl import KLPenalty
from grpo_jax.core.losses import grpo_loss

grpo_loss = compiled(grpo_loss)
pytestmark = pytest.mark.usefixtures("strict")

ACTIONS = 6


def distributions(seed=0):
    """Logits of a policy; log-probabilities of the policy that drew, and of the reference."""
    logits, drawer, reference = np.random.default_rng(seed).normal(size=(3, ACTIONS))
    return jnp.asarray(logits), jax.nn.log_softmax(drawer), jax.nn.log_softmax(reference)


def true_slope(logits, reference, forward=False):
    """Gradient of KL(π ‖ ref), or of KL(ref ‖ π)."""

    def divergence(x):
        logs = jax.nn.log_softmax(x)
        return jnp.sum(jnp.exp(reference) * (reference - logs) if forward else jnp.exp(logs) * (logs - reference))

    return jax.jit(jax.grad(divergence))(logits)


def expected_slopes(penalties, logits, drawer, reference):
    """Expected gradients of grpo_loss's penalties over one token from the drawer: its rows are the vocabulary."""

    def loss(x, penalty):
        logs = jax.nn.log_softmax(x)
        one = lambda new, old, ref: grpo_loss(  # noqa: E731
            new[None], old[None], jnp.zeros((), x.dtype), jnp.ones(1, bool), kl=penalty, ref_logprobs=ref[None]
        )[0]
        return jnp.sum(jnp.exp(drawer) * jax.vmap(one)(logs, drawer, reference))

    return jax.jit(lambda x: [jax.grad(loss)(x, penalty) for penalty in penalties])(logits)


def test_expected_gradients_of_the_penalties_on_policy(x64):
    """k1 pulls nowhere. k3 pulls along KL(ref ‖ π), the wrong way round. The others pull along KL(π ‖ ref)."""
    logits, _, reference = distributions()
    drawer = jax.nn.log_softmax(logits)
    right, reverse = true_slope(logits, reference), true_slope(logits, reference, forward=True)
    cases = [
        (KLPenalty(1.0, "k1"), jnp.zeros(ACTIONS)),
        (KLPenalty(1.0, "k2"), right),
        (KLPenalty(1.0, "k3"), reverse),
        (KLPenalty(1.0, "k1", corrected=True), right),
        (KLPenalty(1.0, "k3", corrected=True), right),
        (KLPenalty(1.0, "k1", straight_through=True), right),
        (KLPenalty(1.0, "k3", straight_through=True), right),
    ]
    slopes = expected_slopes([penalty for penalty, _ in cases], logits, drawer, reference)
    for got, (_, expected) in zip(slopes, cases, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    assert np.abs(reverse - right).max() > 0.05


def test_expected_gradients_of_the_penalties_off_policy(x64):
    """After a few updates the tokens come from an older policy: only the corrected form is still right."""
    logits, drawer, reference = distributions(1)
    right = true_slope(logits, reference)
    corrected = [KLPenalty(1.0, estimator, corrected=True) for estimator in ("k1", "k3")]
    others = [KLPenalty(1.0, estimator) for estimator in ("k1", "k2", "k3")]
    others.append(KLPenalty(1.0, "k3", straight_through=True))
    slopes = expected_slopes([*corrected, *others], logits, drawer, reference)
    for got in slopes[:2]:
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-12)
    for got in slopes[2:]:
        assert np.abs(got - right).max() > 0.01
