"""Estimators with a paper of their own, against TRL's code or a loop written from the equation."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.oracle import policy_batch

from grpo_jax.core.advantages import (
    distillation_advantages,
    max_at_k_advantages,
    maxrl_advantages,
    optimal_token_advantages,
)
from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.core.losses import PRESETS, EntropyControl, adapt_entropy_coef, grpo_loss
from grpo_jax.core.surrogates import DivergenceMask, DivergencePenalty


def test_adaptive_entropy_coefficient_is_trls(x64):
    """Twelve updates: each loss, with the coefficient that the updates before left, and each coefficient."""
    pytest.importorskip("trl", reason="TRL is the oracle: pip install -e '.[diffusion,oracles]'")
    from oracles.oracle_trl import tensor, trainer
    from oracles.oracle_trl_cases import our_loss

    target, delta, start = 1.0, 0.3, 0.5
    theirs = trainer(
        args={
            "entropy_target": target, "entropy_coef_delta": delta, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0,
        },
        entropy_coef=start, _entropy_bonus_enabled=True, use_adaptive_entropy=True,
        _last_world_entropy=float("inf"), _entropy_window_stats=None, max_completion_length=5,
    )  # fmt: skip
    control = EntropyControl(jnp.float64(start), jnp.float64(0))
    adapt = jax.jit(lambda control, entropy: adapt_entropy_coef(control, entropy, target=target, delta=delta))
    moved = []
    for step, level in enumerate([1.5, 0.5, 0.5, 0.5, 1.5, 1.5, 0.5, 1.5, 1.5, 1.5, 1.5, 0.5]):
        parts = policy_batch(step)
        parts["entropy"] = parts["entropy"] / parts["entropy"][parts["mask"]].mean() * level
        loss, _, metrics = our_loss(parts, PRESETS["grpo"], entropy_coef=control.applied)
        mask = tensor(parts["mask"]).long()
        passed = tensor(parts["logprobs"]), tensor(parts["entropy"]), None
        theirs._get_per_token_logps_and_entropies = lambda *_, passed=passed, **__: passed
        expected = theirs._compute_loss(None, {
            "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
            "advantages": tensor(parts["advantages"]), "old_per_token_logps": tensor(parts["old"]),
        })  # fmt: skip
        np.testing.assert_allclose(loss, expected.item(), atol=1e-6)
        control = adapt(control, metrics.entropy.value())
        np.testing.assert_allclose(control.coef, theirs.entropy_coef, atol=1e-12)
        moved.append(float(control.coef))
    assert min(moved) == 0 and max(moved) == 1 and len(set(np.round(moved, 6))) > 4


def test_maxrl_is_the_loop(x64):
    """Right answers of group p: none, one, some with two rewards missing, all."""
    missing = np.nan
    rewards = np.array([[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, missing, missing], [1, 1, 1, 1]])
    expected = np.zeros(rewards.shape)
    for p, group in enumerate(rewards):
        present = [r for r in group if not np.isnan(r)]
        mean = sum(present) / len(present)
        for g, r in enumerate(group):
            expected[p, g] = 0 if np.isnan(r) or mean == 0 else (r - mean) / mean
    np.testing.assert_allclose(jax.jit(maxrl_advantages)(rewards), expected, atol=1e-12)
    assert expected[1, 1] == 3


@pytest.mark.parametrize("k", [2, 3, 5])
def test_max_at_k_is_the_mean_over_all_sets(x64, k):
    """Each set gives its best reward minus the best without this completion; a missing reward is in no set."""
    rewards = np.random.default_rng(k).normal(size=(5, 6))
    rewards[1, [0, 4]], rewards[2], rewards[3, 1:] = np.nan, [0, 1, 1, 0, 0, 0], np.nan
    rewards[4, :3] = rewards[4, 3]
    expected = np.zeros(rewards.shape)
    for p, group in enumerate(rewards):
        present = np.flatnonzero(~np.isnan(group))
        sets = list(itertools.combinations(present, k))
        for g, members in itertools.product(present, sets):
            if g in members:
                others = max(group[member] for member in members if member != g)
                expected[p, g] += len(present) * (max(group[[*members]]) - others) / len(sets)
    advantages = jax.jit(partial(max_at_k_advantages, k=k))(rewards)
    np.testing.assert_allclose(advantages, expected, atol=1e-12)
    assert (np.asarray(advantages)[3] == 0).all()


def test_the_gradient_of_max_at_k_is_that_of_the_expected_best(x64):
    """Over all groups of 3 of a policy with 4 answers, with their probabilities."""
    values, groups = np.array([0.3, -1.0, 2.0, 0.5]), np.array(list(itertools.product(range(4), repeat=3)))

    def expected_best(logits):
        pairs = jnp.asarray(list(itertools.product(range(4), repeat=2)))
        best = jnp.asarray(values)[pairs].max(axis=1)
        return jnp.sum(jnp.exp(jax.nn.log_softmax(logits)[pairs].sum(axis=1)) * best)

    def surrogate(logits):
        logprobs = jax.nn.log_softmax(logits)[groups]
        weights = jax.lax.stop_gradient(jnp.exp(logprobs.sum(axis=1)))
        return jnp.sum(weights * jnp.mean(max_at_k_advantages(values[groups], k=2) * logprobs, axis=1))

    logits = jnp.asarray([0.1, 0.7, -0.4, 0.0])
    slope, expected = jax.jit(lambda x: (jax.grad(surrogate)(x), jax.grad(expected_best)(x)))(logits)
    np.testing.assert_allclose(slope, expected, atol=1e-12)


@pytest.mark.parametrize("by_token", [False, True])
def test_the_optimal_token_baseline_is_the_loop(x64, by_token):
    """Masked rows and gaps, a missing reward, a group of equal rewards, weights, garbage where masked."""
    random = np.random.default_rng(4)
    shape = (4, 3, 6)
    pi, weights = random.uniform(0.05, 0.9, shape), random.uniform(0.2, 2, shape)
    squares = pi**2 + random.uniform(size=shape) * (1 - pi) ** 2
    mask = random.uniform(size=shape) < 0.7
    mask[0, 1], mask[2, :, 0] = False, True
    returns = random.normal(size=shape)
    returns[1, 2], returns[2] = np.nan, 0.3
    returns = returns if by_token else returns[..., 0]
    expected = np.zeros(shape)
    for p, g in np.ndindex(shape[:2]):
        for t in np.flatnonzero(mask[p, g]):
            total = weighted = 0.0
            for h in range(shape[1]):
                own = np.flatnonzero(mask[p, h])[: mask[p, g, : t + 1].sum()]  # as many tokens of the policy
                reward = returns[p, h] if not by_token else returns[p, h, own[-1]] if len(own) else np.nan
                if len(own) < mask[p, g, : t + 1].sum() or np.isnan(reward):
                    continue
                energy = sum(weights[p, h, u] ** 2 * (1 - 2 * pi[p, h, u] + squares[p, h, u]) for u in own)
                total, weighted = total + energy, weighted + energy * reward
            reward = returns[p, g] if not by_token else returns[p, g, t]
            expected[p, g, t] = 0 if np.isnan(reward) else reward - weighted / total
    logprobs = np.where(mask, np.log(pi), np.nan)
    squares = np.where(mask, squares, np.inf)
    found = np.asarray(jax.jit(optimal_token_advantages)(returns, logprobs, squares, mask, weights=weights))
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert (found[2] == 0).all() and np.abs(found[0]).max() > 0.1  # no rounding noise without signal


def test_bounds_in_probability_have_the_gradients_of_verl_and_unirl(x64):
    """With respect to log π: A min(ρ, cap) where DPPO's mask is 1, and A ρ - |A| π_old ρ (ρ - 1) / ε of DRPO."""
    parts = policy_batch(3, spread=1.0)
    logprobs, old, advantages = parts["logprobs"], parts["old"], parts["advantages"][:, None]
    ratio, change = np.exp(logprobs - old), np.exp(logprobs) - np.exp(old)
    kept = np.where(advantages > 0, change <= 0.15, change >= -0.15)
    masked = kept * advantages * np.minimum(ratio, 1.5)
    pull = advantages * ratio - abs(advantages) * np.exp(old) * ratio * (ratio - 1) / 0.3
    for surrogate, expected in ((DivergenceMask(cap=1.5), masked), (DivergencePenalty(0.3), pull)):
        slope = jax.jit(jax.grad(lambda x, s=surrogate: s.objective(x - old, x, advantages).sum()))(logprobs)
        np.testing.assert_allclose(slope, expected, atol=1e-12)
    assert 0.1 < kept.mean() < 0.95 and (ratio > 1.5).mean() > 0.1
    rare = jax.jit(jax.grad(lambda x: PRESETS["dppo_tv"]["surrogate"].objective(x - np.log(1e-6), x, 1.0)))
    np.testing.assert_allclose(rare(np.log(0.1)), 20)  # not .1 / 1e-6


def test_distillation_descends_the_divergence_from_the_teacher(x64):
    """Over all tokens, each as often as the policy draws it: the gradient of KL(policy ‖ teacher), enumerated."""
    logits, teacher = np.random.default_rng(0).normal(size=(2, 7))
    teacher -= np.logaddexp.reduce(teacher)
    chances = np.exp(logits - np.logaddexp.reduce(logits))

    def surrogate(logits):
        logprobs = jax.nn.log_softmax(logits)
        advantages = distillation_advantages(teacher, logprobs, np.ones(7, bool))
        one_each = (x[:, None] for x in (logprobs, jax.lax.stop_gradient(logprobs)))
        weights = 7 * chances[:, None]
        return grpo_loss(*one_each, advantages[:, None], np.ones((7, 1), bool), token_weights=weights)[0]

    def divergence(logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - teacher))

    slope, expected = jax.jit(lambda x: (jax.grad(surrogate)(x), jax.grad(divergence)(x)))(logits)
    np.testing.assert_allclose(slope, expected, atol=1e-12)


def test_log_probabilities_over_kept_tokens_are_enumerated(x64):
    """Each place has tokens of its own, and the last none; gradients too, of states and head."""
    random = np.random.default_rng(1)
    hidden, head = random.normal(size=(2, 3, 4)), random.normal(size=(9, 4))
    kept = np.array([[[0, 3, -1], [8, 2, 5], [1, -1, -1]], [[4, 6, 7], [2, 0, -1], [-1, -1, -1]]])
    tokens, pull = np.maximum(kept[..., 0], 0), np.array([[1.0, -2, 3], [0.5, 1, 0]])

    def ours(hidden, head):
        logprobs, entropy = token_logprobs(hidden, head, tokens, allowed_tokens=(None, kept), chunk_size=2)
        return jnp.sum(jnp.where(pull != 0, (logprobs + 0.3 * entropy) * pull, 0)), (logprobs, entropy)

    def enumerated(hidden, head):
        total = 0
        for place in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
            logs = jax.nn.log_softmax(jnp.stack([head[v] @ hidden[place] for v in kept[place] if v >= 0]))
            total += pull[place] * (logs[0] - 0.3 * jnp.sum(jnp.exp(logs) * logs))
        return total

    (value, (logprobs, entropy)), slopes = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(hidden, head)
    total, expected = jax.jit(jax.value_and_grad(enumerated, (0, 1)))(hidden, head)
    np.testing.assert_allclose(value, total, rtol=1e-12)
    for slope, right in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(slope, right, atol=1e-12)
    assert logprobs[1, 2] == -np.inf and entropy[1, 2] == 0 and logprobs[0, 2] == 0
