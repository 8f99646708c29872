"""The worked examples of the GRPO/GDPO tutorial, by hand and to four digits; and what its claims come to exactly.

Expectations over tokens are sums over a small vocabulary, weighed by probability: no sampling noise, except where
the claim is about samples.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import compiled

from grpo_jax.core.advantages import (
    Condition,
    batch_whitened_advantages,
    condition_rewards,
    gdpo_advantages,
    group_advantages,
    leave_one_out_advantages,
    sum_rewards,
)
from grpo_jax.core.kl import KLPenalty, kl_divergence
from grpo_jax.core.losses import PRESETS, grpo_loss
from grpo_jax.core.returns import discounted_returns, gae_advantages
from grpo_jax.core.selection import groups_with_signal
from grpo_jax.core.surrogates import Clip

gdpo_advantages, group_advantages, grpo_loss = map(compiled, (gdpo_advantages, group_advantages, grpo_loss))
pytestmark = pytest.mark.usefixtures("strict")

FOUR_DIGITS = {"rtol": 0, "atol": 5e-5}
ONE_GOOD = jnp.array([[[0.0, 0.0], [1.0, 0.0]]])
BOTH_GOOD = jnp.array([[[0.0, 0.0], [1.0, 1.0]]])


@pytest.mark.parametrize(("rewards", "gdpo"), [(ONE_GOOD, 0.7071), (BOTH_GOOD, 1.4142)])
def test_two_completions_two_rewards(rewards, gdpo):
    """Rewards (0,0),(1,0) and (0,0),(1,1): summed first they look alike, normalised first they do not."""
    np.testing.assert_allclose(group_advantages(sum_rewards(rewards), eps=0.0), [[-0.7071, 0.7071]], **FOUR_DIGITS)
    np.testing.assert_allclose(gdpo_advantages(rewards, whiten=None, eps=0.0), [[-gdpo, gdpo]], **FOUR_DIGITS)


def test_whitening_keeps_the_difference_within_a_batch():
    """Both prompts in one batch: twice the reason is twice the advantage. std = sqrt(5 / 3)."""
    rewards = jnp.concatenate([ONE_GOOD, BOTH_GOOD])
    expected = [[-0.5477, 0.5477], [-1.0954, 1.0954]]
    np.testing.assert_allclose(gdpo_advantages(rewards, eps=0.0), expected, **FOUR_DIGITS)
    summed = group_advantages(sum_rewards(rewards), eps=0.0)
    np.testing.assert_allclose(summed, [[-0.7071, 0.7071]] * 2, **FOUR_DIGITS)


def test_collapse_within_a_group():
    """(1,0) and (0,1) have the same sum; with a rarer second reward GDPO tells them apart."""
    rewards = jnp.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]])
    summed = group_advantages(sum_rewards(rewards), eps=0.0)
    np.testing.assert_allclose(summed, [[0.5, 0.5, -1.5, 0.5]], **FOUR_DIGITS)
    # first: (r - 1/2) / 0.5774; second: (r - 1/4) / 0.5
    apart = gdpo_advantages(rewards, whiten=None, eps=0.0)
    np.testing.assert_allclose(apart, [[0.3660, 0.3660, -1.3660, 0.6340]], **FOUR_DIGITS)


def test_sums_that_cancel_teach_gdpo():
    """(1,0),(0,1): equal sums, so GRPO drops the group; with weights GDPO prefers one."""
    rewards = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
    np.testing.assert_array_equal(group_advantages(sum_rewards(rewards)), 0)
    np.testing.assert_array_equal(groups_with_signal(sum_rewards(rewards)), [False])
    np.testing.assert_array_equal(groups_with_signal(rewards), [True])
    weighted = gdpo_advantages(rewards, weights=(2.0, 1.0), whiten=None, eps=0.0)
    np.testing.assert_allclose(weighted, [[0.7071, -0.7071]], **FOUR_DIGITS)


def test_a_conditioned_reward_counts_where_the_hard_one_is_reached():
    """Brevity (first) counts only where the answer is right (second)."""
    rewards = jnp.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]])
    conditioned = condition_rewards(rewards, [Condition(easy=0, hard=1, threshold=1.0)])
    np.testing.assert_array_equal(conditioned[..., 0], [[0.0, 0.0, 1.0, 0.0]])
    advantages = gdpo_advantages(conditioned, whiten=None, eps=0.0)
    np.testing.assert_allclose(advantages, [[-1.3660, 0.3660, 2.3660, -1.3660]], **FOUR_DIGITS)


def test_one_group_under_every_baseline():
    rewards = jnp.array([[1.0, 2.0, 6.0]])  # mean 3, std sqrt(7)
    np.testing.assert_allclose(group_advantages(rewards, eps=0.0), [[-0.7559, -0.3780, 1.1339]], **FOUR_DIGITS)
    np.testing.assert_allclose(group_advantages(rewards, scale="none"), [[-2.0, -1.0, 3.0]], **FOUR_DIGITS)
    np.testing.assert_allclose(leave_one_out_advantages(rewards), [[-3.0, -1.5, 4.5]], **FOUR_DIGITS)
    two = jnp.array([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]])  # batch mean 3, std sqrt(14 / 5)
    expected = [[-1.1952, -0.5976, 1.7928], [0.0, 0.0, 0.0]]
    for centre in ("batch", "group"):
        got = batch_whitened_advantages(two, centre=centre, eps=0.0)
        np.testing.assert_allclose(got, expected, **FOUR_DIGITS)


def test_three_steps_of_generalised_advantages():
    """δ = (1 + .9 · .5 - .2, 0 + .9 · .4 - .5, 2 - .4) = (1.25, -.14, 1.6), each looked at with .9 · .8 more."""
    rewards, values = jnp.array([1.0, 0.0, 2.0]), jnp.array([0.2, 0.5, 0.4, 0.0])
    returns = discounted_returns(rewards, gamma=0.9)
    np.testing.assert_allclose(returns, [2.62, 1.8, 2.0], **FOUR_DIGITS)
    for gae_lambda, expected in (
        (0.0, [1.25, -0.14, 1.6]),  # the residual of one step
        (0.8, [1.9786, 1.012, 1.6]),
        (1.0, returns - values[:3]),  # the return less the value
    ):
        got = gae_advantages(rewards, values, gamma=0.9, gae_lambda=gae_lambda)
        np.testing.assert_allclose(got, expected, **FOUR_DIGITS)


def test_one_token_through_the_clip():
    """ρ = 1.5: a good token is paid for 1.2, a bad one in full, and with a dual clip of 1.3 for 1.3."""
    logprobs, old, mask = jnp.log(jnp.array([[0.6]])), jnp.log(jnp.array([[0.4]])), jnp.ones((1, 1), bool)
    for advantage, surrogate, expected in (
        (1.0, Clip(), -1.2), (-1.0, Clip(), 1.5), (-1.0, Clip(dual=1.3), 1.3), (1.0, Clip(high=0.6), -1.5),
    ):  # fmt: skip
        loss, _ = grpo_loss(logprobs, old, jnp.array([advantage]), mask, surrogate=surrogate)
        np.testing.assert_allclose(loss, expected, **FOUR_DIGITS)


def test_two_lengths_under_three_aggregations():
    """Rows of 1 and 3 tokens, on-policy, A = (1, 0): a token of the first row weighs 1/2, 1/4 or 1/6."""
    logprobs, mask = jnp.full((2, 3), -1.0), jnp.array([[True, False, False], [True] * 3])
    for name, expected in (("grpo", -0.5), ("dapo", -0.25), ("dr_grpo", -0.1667)):
        loss, _ = grpo_loss(logprobs, logprobs, jnp.array([1.0, 0.0]), mask, **PRESETS[name])
        np.testing.assert_allclose(loss, expected, **FOUR_DIGITS)


def test_gspo_takes_the_geometric_mean():
    """Ratios 2 and 1/2 of one row: 1 as a row, clipped to 1.2 and left at 1/2 as tokens."""
    logprobs, mask = jnp.log(jnp.array([[0.4, 0.2]])), jnp.ones((1, 2), bool)
    old = jnp.log(jnp.array([[0.2, 0.4]]))
    row, _ = grpo_loss(logprobs, old, jnp.array([1.0]), mask, ratio="sequence")
    token, _ = grpo_loss(logprobs, old, jnp.array([1.0]), mask)
    np.testing.assert_allclose([row, token], [-1.0, -0.85], **FOUR_DIGITS)


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

    return jax.grad(divergence)(logits)


def expected_slope(penalty, logits, drawer, reference):
    """Expected gradient of grpo_loss's penalty over one token from the drawer: its rows are the vocabulary."""

    def loss(x):
        logs = jax.nn.log_softmax(x)
        one = lambda new, old, ref: grpo_loss(  # noqa: E731
            new[None], old[None], jnp.zeros((), x.dtype), jnp.ones(1, bool), kl=penalty, ref_logprobs=ref[None]
        )[0]
        return jnp.sum(jnp.exp(drawer) * jax.vmap(one)(logs, drawer, reference))

    return jax.grad(loss)(logits)


def test_expected_gradients_of_the_penalties_on_policy(x64):
    """k1 pulls nowhere. k3 pulls along KL(ref ‖ π), the wrong way round. The others pull along KL(π ‖ ref)."""
    logits, _, reference = distributions()
    drawer = jax.nn.log_softmax(logits)
    right, reverse = true_slope(logits, reference), true_slope(logits, reference, forward=True)
    for penalty, expected in (
        (KLPenalty(1.0, "k1"), jnp.zeros(ACTIONS)),
        (KLPenalty(1.0, "k2"), right),
        (KLPenalty(1.0, "k3"), reverse),
        (KLPenalty(1.0, "k1", corrected=True), right),
        (KLPenalty(1.0, "k3", corrected=True), right),
        (KLPenalty(1.0, "k1", straight_through=True), right),
        (KLPenalty(1.0, "k3", straight_through=True), right),
    ):
        got = expected_slope(penalty, logits, drawer, reference)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    assert np.abs(reverse - right).max() > 0.05


def test_expected_gradients_of_the_penalties_off_policy(x64):
    """After a few updates the tokens come from an older policy: only the corrected form is still right."""
    logits, drawer, reference = distributions(1)
    right = true_slope(logits, reference)
    for estimator in ("k1", "k3"):
        got = expected_slope(KLPenalty(1.0, estimator, corrected=True), logits, drawer, reference)
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-12)
    for penalty in (KLPenalty(1.0, "k1"), KLPenalty(1.0, "k2"), KLPenalty(1.0, "k3"),
                    KLPenalty(1.0, "k3", straight_through=True)):  # fmt: skip
        assert np.abs(expected_slope(penalty, logits, drawer, reference) - right).max() > 0.01


@pytest.mark.parametrize(("likes", "steadier"), [(0.02, "k3"), (0.5, "k1")])
def test_k3_is_the_steadier_one_only_near_the_reference(likes, steadier):
    """Its exp(d) is rare and large where the reference likes what the policy hardly ever does."""
    policy, reference = jnp.array([0.99, 0.01]), jnp.array([1 - likes, likes])
    spread = {}
    for estimator in ("k1", "k3"):
        values = kl_divergence(jnp.log(policy), jnp.log(reference), estimator=estimator)
        spread[estimator] = jnp.sum(policy * jnp.square(values - jnp.sum(policy * values)))
    assert min(spread, key=spread.get) == steadier
