"""Advantages against slow NumPy loops."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.compiled import compiled

from grpo_jax.core.advantages import (
    Condition,
    batch_whitened_advantages,
    condition_rewards,
    gdpo_advantages,
    group_advantages,
    leave_one_out_advantages,
    raft_advantages,
    sum_rewards,
)
from grpo_jax.core.losses import grpo_loss, sft_loss
from grpo_jax.core.returns import normalised_returns

gdpo_advantages, group_advantages, batch_whitened_advantages, leave_one_out_advantages = map(
    compiled, (gdpo_advantages, group_advantages, batch_whitened_advantages, leave_one_out_advantages)
)
normalised_returns, raft_advantages, sum_rewards, condition_rewards = map(
    compiled, (normalised_returns, raft_advantages, sum_rewards, condition_rewards)
)
pytestmark = pytest.mark.usefixtures("strict")

GDPO = jax.jit(gdpo_advantages, static_argnames=("weights", "eps", "whiten"))

# Multiples of 1/4, so that equal rewards are common and sums are exact; a few are missing.
steps = st.integers(-8, 8).map(lambda n: np.float32(n / 4))
maybe = st.one_of(steps, steps, steps, st.just(np.float32(np.nan)))
pairs = hnp.arrays(np.float32, (3, 4), elements=maybe)
triples = hnp.arrays(np.float32, (3, 4, 2), elements=maybe)
token_masks = hnp.arrays(np.bool_, (3, 4, 3))


def loop_std(numbers):
    mean = sum(numbers) / len(numbers)
    return (sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)) ** 0.5


def loop_group(rewards, scale, eps):
    """[P, G] → [P, G], one number at a time, in float64."""
    out = np.zeros(rewards.shape)
    everything = [float(r) for r in rewards.ravel() if not np.isnan(r)]
    for p, group in enumerate(rewards.astype(np.float64)):
        present = [r for r in group if not np.isnan(r)]
        if len(present) < 2 or max(present) == min(present):
            continue
        for g, reward in enumerate(group):
            if np.isnan(reward):
                continue
            difference = reward - sum(present) / len(present)
            divisor = {"none": 1.0, "group": loop_std(present) + eps, "batch": loop_std(everything) + eps}
            out[p, g] = difference / divisor[scale]
    return out


def loop_gdpo(rewards, weights, eps, whiten, mask):
    prompts, group, objectives = rewards.shape
    summed = np.zeros((prompts, group))
    for n in range(objectives):
        summed += weights[n] * loop_group(rewards[..., n], "group", eps)
    counted = [n for n in range(objectives) if weights[n] != 0]
    dead = groups_dead(rewards[..., counted])
    votes = np.zeros((prompts, group), int)
    for p in range(prompts):
        for g in range(group):
            has_reward = any(not np.isnan(rewards[p, g, n]) for n in counted)
            tokens = int(mask[p, g].sum())
            if has_reward and tokens:
                votes[p, g] = tokens if whiten == "token" else 1
    summed[(votes == 0) | dead[:, None]] = 0
    if whiten is None:
        return summed
    ballots = [summed[i] for i in np.ndindex(summed.shape) for _ in range(votes[i])]
    spread = loop_std(ballots) if len(ballots) > 1 else 0.0
    if spread < 1e-9:
        return np.zeros_like(summed)
    white = (summed - np.mean(ballots)) / (spread + eps)
    white[(votes == 0) | dead[:, None]] = 0
    return white


def groups_dead(rewards):
    """[P, G, N] → [P]: no objective of the group has two different rewards."""
    dead = np.ones(len(rewards), bool)
    for p in range(len(rewards)):
        for n in range(rewards.shape[2]):
            present = {float(r) for r in rewards[p, :, n] if not np.isnan(r)}
            dead[p] &= len(present) < 2
    return dead


@pytest.mark.parametrize("whiten", ["sequence", "token", None])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, -0.5), (0.0, 1.0)])
@given(rewards=triples, mask=token_masks)
def test_gdpo_is_the_loop(whiten, weights, rewards, mask):
    expected = loop_gdpo(rewards, weights, 1e-2, whiten, mask)
    got = GDPO(rewards, weights=weights, eps=1e-2, whiten=whiten, mask=mask)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e37])
def test_an_objective_counts_by_its_weight_whatever_it_is_measured_in(scale):
    """With eps = 0. A fixed eps takes the voice of a small spread, and squares of 1e19 overflow."""
    rewards = np.float32([[[1.0, 0.5], [0.0, 0.25], [2.0, -1.0]], [[1.0, 3.0], [np.nan, 1.0], [0.0, 1.5]]])
    measured = rewards * np.float32([1.0, scale])
    expected = loop_gdpo(rewards, (1.0, 1.0), 0.0, "sequence", np.ones((2, 3, 1), bool))
    np.testing.assert_allclose(GDPO(measured, eps=0.0), expected, rtol=1e-4, atol=1e-5)
    for how in ("group", "batch"):
        got = group_advantages(measured[..., 1], scale=how, eps=0.0)
        np.testing.assert_allclose(got, loop_group(rewards[..., 1], how, 0.0), rtol=1e-4, atol=1e-5)
    for centre in ("batch", "group"):
        got = batch_whitened_advantages(measured[..., 1], centre=centre, eps=0.0)
        whole = batch_whitened_advantages(rewards[..., 1], centre=centre, eps=0.0)
        np.testing.assert_allclose(got, whole, rtol=1e-4, atol=1e-5)


def loop_raft(rewards):
    """[P, G] → [P, G]: the best of each group, by sorting; ties share."""
    out = np.zeros(rewards.shape)
    for p, group in enumerate(rewards):
        order = sorted((float(r), g) for g, r in enumerate(group) if not np.isnan(r))
        best = [g for r, g in order if r == order[-1][0]]
        if len(best) < len(order):
            out[p, best] = 1 / len(best)
    return out


@given(rewards=pairs)
def test_raft_is_the_loop(rewards):
    np.testing.assert_allclose(raft_advantages(rewards), loop_raft(rewards), rtol=1e-6)


def test_batch_whitened_compares_single_completions():
    """What REINFORCE++ has over groups: one answer for each prompt will do."""
    got = batch_whitened_advantages(np.float32([[1.0], [2.0], [3.0]]), eps=0.0)
    np.testing.assert_allclose(got, [[-1.0], [0.0], [1.0]], rtol=1e-6)


def test_equal_rewards_give_exactly_zero():
    """Rounding of a mean, divided by a small eps, once trained on nothing."""

    @jax.jit  # eps as an array: one program
    def every(rewards, eps):
        made = [group_advantages(rewards, scale=scale, eps=eps) for scale in ("group", "batch", "none")]
        made += [batch_whitened_advantages(rewards, centre=centre, eps=eps) for centre in ("batch", "group")]
        made += [gdpo_advantages(rewards[..., None], eps=eps), leave_one_out_advantages(rewards)]
        return [*made, raft_advantages(rewards)]

    for eps in (1e-4, 0.0):
        for advantages in every(np.full((2, 8), 1000.1, np.float32), np.float32(eps)):
            np.testing.assert_array_equal(advantages, 0)


def test_close_large_rewards_lose_no_digits():
    """Steps of 2^-13 above 1000, which float32 holds exactly: a mean of the plain values would be off by a step."""
    steps = np.random.default_rng(0).integers(0, 9, (8, 6))
    rewards = np.float32(1000 + steps / 2**13)
    white = (steps - steps.mean()) / steps.std(ddof=1)
    returns = normalised_returns(rewards, mask=np.ones(steps.shape, bool), eps=0.0)
    for got in (batch_whitened_advantages(rewards, eps=0.0), returns):
        np.testing.assert_allclose(got, white, atol=1e-6)
    for how in ("group", "batch", "none"):
        expected = loop_group(np.float64(steps) / 2**13, how, 0.0)
        np.testing.assert_allclose(group_advantages(rewards, scale=how, eps=0.0), expected, atol=1e-6)
    expected = loop_gdpo(steps[..., None], (1.0,), 0.0, "sequence", np.ones((8, 6, 1), bool))
    np.testing.assert_allclose(gdpo_advantages(rewards[..., None], eps=0.0), expected, atol=1e-5)


def test_objectives_that_cancel_give_zero_not_noise():
    first = np.random.default_rng(0).normal(size=(4, 6, 1)).astype(np.float32)
    rewards = np.concatenate([first, np.float32(1) - first], axis=-1)
    np.testing.assert_array_equal(gdpo_advantages(rewards, eps=0.0), 0)


def test_sum_of_rewards():
    nan = np.nan
    rewards = np.array([[[1.0, 2.0], [nan, 3.0], [nan, nan]], [[1.0, nan]] * 3], np.float32)
    expected = [[12.0, 13.0, nan], [10.0] * 3]
    np.testing.assert_allclose(sum_rewards(rewards, weights=(10.0, 1.0)), expected)
    unweighted = [[2.0, 3.0, nan], [nan] * 3]  # an objective of weight 0 is as good as absent
    np.testing.assert_allclose(sum_rewards(rewards, weights=(0.0, 1.0)), unweighted)


def test_raft_has_the_gradient_of_supervision_on_the_best():
    rewards, logprobs = np.float32([[0, 3, 1, 2], [5, 0, 0, 0]]), np.full((2, 4, 3), -1.0, np.float32)
    mask = np.ones(logprobs.shape, bool)
    rl = jax.grad(lambda x: grpo_loss(x, logprobs, raft_advantages(rewards), mask)[0])(logprobs)
    sft = jax.grad(lambda x: sft_loss(x, mask & (rewards == rewards.max(1, keepdims=True))[..., None])[0])(logprobs)
    np.testing.assert_allclose(rl, sft / 4, rtol=1e-6)


@pytest.mark.parametrize("combine", [sum_rewards, gdpo_advantages])
def test_an_objective_of_weight_0_may_be_infinite(combine):
    rewards = np.array([[[1.0, np.inf], [2.0, -np.inf], [4.0, 3.0]]], np.float32)
    np.testing.assert_array_equal(combine(rewards, weights=(1.0, 0.0)), combine(rewards[..., :1]))


@given(hnp.arrays(np.float32, (2, 3, 3), elements=maybe))
def test_conditions_are_the_loop(rewards):
    """0 waits for 1, which waits for 2."""
    got = np.asarray(condition_rewards(rewards, conditions=(Condition(0, 1, 0.5), Condition(1, 2, 0.0))))
    for p, g in np.ndindex(2, 3):
        a, b, c = rewards[p, g]
        a_unmet, b_unmet = (min([0.0, *(r for r in rewards[p, :, n] if not np.isnan(r))]) for n in (0, 1))
        b_expected = np.nan if np.isnan(b) or np.isnan(c) else (b if c >= 0 else b_unmet)
        a_missing = np.isnan(a) or np.isnan(b) or np.isnan(c)
        a_expected = np.nan if a_missing else (a if b >= 0.5 and c >= 0 else a_unmet)
        np.testing.assert_array_equal(got[p, g], np.array([a_expected, b_expected, c], np.float32))


def test_an_unmet_condition_never_pays():
    """Two right answers of 5 and 6 tokens, six wrong ones of 3 to 8; brevity counts where the answer is right."""
    right = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    brief = [-5.0, -6.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]
    rewards = np.float32([[brief, right]]).swapaxes(1, 2)
    got = np.asarray(condition_rewards(rewards, conditions=(Condition(0, 1, 1.0),)))
    np.testing.assert_array_equal(got[0, :, 0], [-5.0, -6.0, *[-8.0] * 6])
    advantages = np.asarray(gdpo_advantages(got))[0]
    assert advantages[0] > advantages[1] > 0 > advantages[2:].max()


def test_several_conditions_on_one_objective_must_all_hold():
    rewards = np.float32([[[5.0, 1.0, 0.0], [5.0, 1.0, 1.0]]])
    got = condition_rewards(rewards, conditions=(Condition(0, 1, 1.0), Condition(0, 2, 1.0)))
    np.testing.assert_array_equal(np.asarray(got)[..., 0], [[0.0, 5.0]])
