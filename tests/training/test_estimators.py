"""The settings of the group estimators: each has the effect of its help line, and no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_update
from support.compiled import compiled

from grpo_jax.config.run import make_config
from grpo_jax.config.sections import AlgorithmSection
from grpo_jax.core.advantages import gdpo_advantages, group_advantages, optimal_token_advantages, sum_rewards
from grpo_jax.core.selection import high_entropy_mask
from grpo_jax.core.surrogates import CappedWeight, Clip, DivergenceMask, DivergencePenalty, GammaWeight, SoftGate
from grpo_jax.models.policy import Policy
from grpo_jax.training.estimators import (
    OVERLONG,
    Objectives,
    estimate_advantages,
    estimate_turn_advantages,
    make_objectives,
    signal_metrics,
)
from grpo_jax.training.objectives import Forward, loss_options, make_policy_objective
from grpo_jax.training.update import make_token_weights

gdpo_advantages, group_advantages, sum_rewards = map(compiled, (gdpo_advantages, group_advantages, sum_rewards))
MASK = np.ones((3, 4, 2), bool)
WEIGHTS = (1.0, 0.5)


@pytest.fixture(scope="module")
def rewards():
    return np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)


def advantages(rewards, **choices):
    return np.asarray(estimate_advantages(rewards, MASK, AlgorithmSection(**choices), WEIGHTS))


def test_each_estimator_is_its_formula(rewards):
    summed = rewards @ np.float32(WEIGHTS)
    centred = summed - summed.mean(1, keepdims=True)
    group, batch = summed.std(1, ddof=1, keepdims=True) + 1e-4, summed.std(ddof=1) + 1e-4
    expected = {"grpo": centred / group, "rloo": centred * 4 / 3, "batch": (summed - summed.mean()) / batch}
    expected["raft"] = np.eye(4)[summed.argmax(1)]
    for name, values in expected.items():
        np.testing.assert_allclose(advantages(rewards, advantage=name), values, rtol=1e-4, atol=1e-6, err_msg=name)
    for scale, values in {"group": centred / group, "batch": centred / batch, "none": centred}.items():
        came = advantages(rewards, advantage="grpo", preset="dr_grpo", scale=scale)
        np.testing.assert_allclose(came, values, rtol=1e-4, atol=1e-6, err_msg=scale)
    plain = advantages(rewards, advantage="grpo", preset="dr_grpo")  # without a scale it is the preset's
    np.testing.assert_allclose(plain, centred, rtol=1e-4, atol=1e-6)


def test_the_length_penalty_is_an_objective_of_its_own(rewards):
    lengths = np.array([[6, 8, 9, 10]] * 3)
    judged = rewards.copy()
    judged[0, 3] = np.nan
    names = {"a": 1.0, "b": 0.5}
    found = make_objectives(judged, lengths, AlgorithmSection(overlong_buffer=4), weights=names, max_new_tokens=10)
    assert found.names == ("a", "b", OVERLONG) and found.weights == (1.0, 0.5, 1.0)
    np.testing.assert_array_equal(found.rewards[..., :2], judged)
    np.testing.assert_allclose(found.rewards[1, :, 2], [0, -0.5, -0.75, -1])
    assert np.isnan(found.rewards[0, 3]).all()  # a completion without a reward is not judged by its length
    without = make_objectives(judged, lengths, AlgorithmSection(), weights=names, max_new_tokens=10)
    assert without.names == ("a", "b") and without.rewards.shape == (3, 4, 2)
    # in the sum it is added, and GDPO normalises it by itself
    summed = advantages_of(found, advantage="grpo")[1:]
    by_hand = sum_rewards(judged, weights=WEIGHTS) + found.rewards[..., 2]
    np.testing.assert_allclose(summed, group_advantages(by_hand)[1:], rtol=1e-5, atol=1e-6)
    apart = advantages_of(found, advantage="gdpo")
    np.testing.assert_allclose(apart, gdpo_advantages(found.rewards, weights=(1, 0.5, 1)), atol=1e-6)
    unweighed = {"weights": {"a": 0.0, "b": 0.0}, "max_new_tokens": 10}
    alone = make_objectives(judged, lengths, AlgorithmSection(overlong_buffer=4), **unweighed)
    np.testing.assert_array_equal(alone.rewards[..., 2], [[0, -0.5, -0.75, -1]] * 3)  # no reward is there to miss


def advantages_of(found: Objectives, **choices):
    return np.asarray(estimate_advantages(found.rewards, MASK, AlgorithmSection(**choices), found.weights))


@pytest.fixture(scope="module")
def opposed():
    """Group 0: two objectives that cancel in the sum. Group 1: nothing varies. Group 2: both agree."""
    a = [[0.0, 1.0, 0.0, 1.0], [1.0] * 4, [0.0, 1.0, 1.0, 0.0]]
    return np.stack([a, [[1.0, 0.0, 1.0, 0.0], [2.0] * 4, [0.0, 1.0, 1.0, 1.0]]], -1).astype(np.float32)


def test_groups_without_signal_are_counted(opposed):
    row = signal_metrics(Objectives(opposed, ("a", "b"), (1.0, 1.0), np.ones(len(opposed), bool)))
    assert row["zero_variance_groups/a"] == row["zero_variance_groups/b"] == pytest.approx(1 / 3)
    assert row["zero_variance_groups/total"] == pytest.approx(2 / 3)
    alone = signal_metrics(Objectives(opposed[:, :1], ("a", "b"), (1.0, 1.0), np.ones(len(opposed), bool)))
    assert alone["zero_variance_groups/total"] == 1


@pytest.fixture(scope="module")
def seen():
    """A forward pass made by hand: nothing is compiled for what the loss does with it."""
    batch, rng = jax.device_get(tiny_update.make_batch()), np.random.default_rng(8)
    logprobs, entropy, noise = rng.uniform(size=(3, *batch.mask.shape)).astype(np.float32)
    return Forward(-1 - logprobs, entropy, None), batch._replace(old_logprobs=-1 - logprobs + 0.2 * (noise - 0.5))


def test_importance_weights_are_bounded_and_multiply(seen):
    forward, batch = seen
    gap = np.random.default_rng(9).normal(size=batch.mask.shape).astype(np.float32)
    batch = batch._replace(sampler_logprobs=batch.old_logprobs - gap)
    weights, mean, clipped = make_token_weights(AlgorithmSection(importance_cap=1.5))(batch, forward.entropy)
    mask, expected = batch.mask, np.minimum(np.exp(gap), 1.5)
    np.testing.assert_allclose(np.asarray(weights)[mask], expected[mask], rtol=1e-5)
    assert float(mean) == pytest.approx(expected[mask].mean(), rel=1e-5)
    assert float(clipped) == pytest.approx((np.exp(gap) >= 1.5)[mask].mean())
    both, *_ = make_token_weights(AlgorithmSection(importance_cap=1.5, entropy_share=0.5))(batch, forward.entropy)
    alone, *_ = make_token_weights(AlgorithmSection(entropy_share=0.5))(batch, forward.entropy)
    np.testing.assert_allclose(both, np.asarray(alone) * np.asarray(weights))


def test_the_gap_is_that_of_trainer_and_sampler_alone(seen):
    """Of the policy's own probabilities: what the sampler's restrictions cut off is no gap."""
    forward, batch = seen
    gap = np.abs(np.random.default_rng(0).normal(size=batch.mask.shape)).astype(np.float32)
    zeros = np.zeros(batch.mask.shape, np.float32)
    batch = batch._replace(rollout_logprobs=batch.old_logprobs - gap, sampler_logprobs=zeros)
    options = loss_options(AlgorithmSection(), max_new_tokens=tiny_update.STEPS)
    _, metrics = make_policy_objective(lambda variables, batch: forward, options)({}, batch, None)
    expected = gap[batch.mask].mean()
    assert float(metrics["sampler_gap"].value()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("preset", "fields", "expected"),
    [
        ("gspo", {"clip_low": 0.1, "surrogate": {"dual": 4.0}}, Clip(0.1, 4e-4, dual=4.0)),
        ("cispo", {"surrogate": {"cap": 4.0}}, CappedWeight(4.0)),
        ("sapo", {"surrogate": {"positive": 0.5, "negative": 2.0}}, SoftGate(0.5, 2.0)),
        ("dppo_tv", {"clip_high": 0.2, "surrogate": {"cap": 5.0}}, DivergenceMask(0.15, 0.2, 5.0)),
        ("vespo", {"surrogate": {"k_positive": 1.0}}, GammaWeight(k_positive=1.0)),
        ("drpo", {"surrogate": {"epsilon": 0.3}}, DivergencePenalty(0.3)),
    ],
)
def test_the_surrogate_has_the_configs_parameters(preset, fields, expected):
    config = make_config(task="text", algorithm={"preset": preset, **fields})
    assert loss_options(config.algorithm, max_new_tokens=4)["surrogate"] == expected


def test_the_update_puts_the_weights_in():
    """Through `make_update`: the trainer's own forward gives entropies and old log-probabilities."""
    batch = tiny_update.make_batch()
    certain = np.zeros(batch.mask.shape, np.float32)
    section = AlgorithmSection(advantage="grpo", importance_cap=2.0, entropy_share=0.5)
    update = tiny_update.updates(section)
    _, _, report = update(batch._replace(sampler_logprobs=certain))  # each token as if it had been
    assert 0 < report["measured"]["importance_weight"] < 0.2
    assert float(report["metrics"]["policy"].ratio.value()) == pytest.approx(1, abs=1e-4)
    _, _, capped = update(batch._replace(sampler_logprobs=certain - 99))
    assert capped["measured"]["importance_weight"] == pytest.approx(2)
    assert 0 < 10 * report["grad_norm"] < capped["grad_norm"]


@jax.jit
def dense_baseline(variables, batch):
    """Advantages from the probabilities of all tokens."""
    policy = Policy(tiny_update.CONFIG, remat="none")
    hidden = policy.forward_group(variables, batch.prompt_tokens, batch.prompt_mask, batch.tokens, batch.mask)
    logits = policy.logits("pgtd,vd->pgtv", hidden, policy.head(variables)) / tiny_update.TEMPERATURE
    logs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logs, batch.tokens[..., None], axis=-1)[..., 0]
    squares = jnp.sum(jnp.exp(logs) ** 2, axis=-1)
    kept = high_entropy_mask(-jnp.sum(jnp.exp(logs) * logs, axis=-1), batch.mask, share=0.8).astype(jnp.float32)
    return optimal_token_advantages(batch.advantages, chosen, squares, batch.mask, weights=kept)


@pytest.mark.parametrize(
    "training", [pytest.param({}, marks=pytest.mark.wide), {"minibatches": 2, "grad_accumulation_steps": 2}]
)
def test_the_token_baseline_has_the_probabilities_of_all_tokens(training):
    """Old log-probabilities and Σπ² of a dense softmax give the advantages that the loss gets."""
    batch = tiny_update.make_batch()
    section = AlgorithmSection(advantage="optimal_token_baseline", preset="bnpo", entropy_share=0.8)
    variables, _, report = tiny_update.updated(batch, section, **training)
    expected = dense_baseline(variables, batch)
    np.testing.assert_allclose(report["advantages"], expected, atol=1e-5)
    mean = np.asarray(expected)[np.asarray(batch.mask)].mean()
    assert float(report["metrics"]["policy"].advantage.value()) == pytest.approx(mean, abs=1e-5)
    assert abs(mean) > 1e-3 and report["grad_norm"] > 0


def test_the_token_baseline_starts_from_the_return_of_each_turn(rewards):
    returns, turn, mask = np.stack([rewards, 2 * rewards], 2), np.tile([0, 1, 1], (3, 4, 1)), np.ones((3, 4, 3), bool)
    returns[0, 0, 1], mask[1, 1, 2] = np.nan, False
    section = AlgorithmSection(advantage="optimal_token_baseline")
    summed = np.asarray(sum_rewards(rewards, weights=WEIGHTS))[..., None] * [1, 2, 2]
    summed[0, 0, 1:], summed[1, 1, 2] = np.nan, 0
    np.testing.assert_allclose(estimate_turn_advantages(returns, turn, mask, section, WEIGHTS), summed, rtol=1e-5)


def test_distillation_takes_the_teachers_logprobs_for_advantages_and_rows_that_moved_leave():
    batch = tiny_update.make_batch()
    teacher = np.float32(-3) * np.random.default_rng(5).random(batch.mask.shape, np.float32)
    zeros = np.zeros(batch.mask.shape, np.float32)
    batch = batch._replace(ref_logprobs=teacher, advantages=None, rollout_logprobs=zeros)
    update = tiny_update.updates(AlgorithmSection(advantage="opd", teacher="elsewhere", off_policy_mask_threshold=1.0))
    _, _, report = update(batch._replace(rollout_logprobs=zeros - 99))  # no token became less likely
    advantages, mask = np.asarray(report["advantages"]), np.asarray(batch.mask)
    gap = teacher - advantages  # log π of the policy
    assert (advantages[~mask] == 0).all() and (gap[mask] < 0).all() and report["grad_norm"] > 0
    assert float(report["metrics"]["policy"].advantage.value()) == pytest.approx(advantages[mask].mean(), rel=1e-4)
    assert float(report["metrics"]["off_policy_masked"].value()) == 0
    # each token was certain when it was drawn: every token of negative advantage leaves
    _, _, report = update(batch)
    assert float(report["metrics"]["off_policy_masked"].value()) == pytest.approx((advantages < 0)[mask].mean())
