"""PPO's losses against loops in the form of its implementations."""

import functools

import jax
import numpy as np
import pytest
from core.test_core_properties import batch as everything
from support.compiled import compiled

from grpo_jax.core.losses import Clip, grpo_loss
from grpo_jax.core.ppo import explained_variance, ppo_loss, value_loss

grpo_loss, ppo_loss, explained_variance = map(compiled, (grpo_loss, ppo_loss, explained_variance))
pytestmark = pytest.mark.usefixtures("strict")

NAMES = ("logprobs", "old", "steps", "entropy", "values", "old_values", "returns", "mask")


def batch(seed):
    """Steps of rows, the first of which has none."""
    parts = {name: part[:, 0] for name, part in everything(seed).items() if name in NAMES}
    parts["mask"][0] = False
    return parts | {"advantages": parts.pop("steps"), "values": parts["values"][:, :-1]}


@functools.partial(jax.jit, static_argnames="clip")
def value_slope(parts, normaliser=None, clip=0.2):
    """((loss, metrics), gradient with respect to the values)."""
    call = functools.partial(value_loss, clip=clip, normaliser=normaliser)
    return jax.value_and_grad(call, has_aux=True)(parts["values"], parts["old_values"], parts["returns"], parts["mask"])


@jax.jit
def policy_slope(parts, normaliser=None):
    def call(logprobs, entropy):
        return ppo_loss(
            logprobs, parts["old"], parts["advantages"], parts["mask"], clip_low=0.2, clip_high=0.3,
            normaliser=normaliser, entropy=entropy, entropy_coef=0.1,
        )  # fmt: skip

    return jax.value_and_grad(call, (0, 1), has_aux=True)(parts["logprobs"], parts["entropy"])


def test_policy_loss_passes_its_choices_on():
    parts = batch(1)
    args = [parts[name] for name in ("logprobs", "old", "advantages", "mask")]
    weights = np.random.default_rng(0).random(args[0].shape).astype(np.float32)
    got, _ = ppo_loss(*args, clip_low=0.1, clip_high=0.3, dual_clip=2.0, aggregation="sequence", token_weights=weights)
    expected, _ = grpo_loss(*args, surrogate=Clip(0.1, 0.3, 2.0), aggregation="sequence", token_weights=weights)
    assert got == expected
    assert got != ppo_loss(*args)[0]


def test_a_prediction_that_moved_enough_gets_no_gradient():
    """Beyond its bound and still short of the target: stopped. Away from the target: pulled back."""
    old, target = np.zeros((1, 4), np.float32), np.float32([[1.0, 1.0, 1.0, -1.0]])
    values = np.float32([[0.1, 0.5, 1.6, 0.5]])
    mask = np.ones((1, 4), bool)
    slopes = jax.jit(jax.grad(value_loss, has_aux=True), static_argnames="clip")
    slope, metrics = slopes(values, old, target, mask, clip=0.2)
    # third: past the target, but the bound's error, (0.2 - 1)², is the larger one
    np.testing.assert_allclose(slope, [[(0.1 - 1) / 4, 0, 0, 1.5 / 4]], rtol=1e-6)
    assert metrics.clip_fraction.value() == 0.5
    free, metrics = slopes(values, None, target, mask, clip=None)
    np.testing.assert_allclose(free, (values - target) / 4, rtol=1e-6)
    assert metrics.clip_fraction.value() == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masked_steps_have_no_influence_whatever_they_hold(bad):
    parts = batch(7)
    dirty = {name: np.where(parts["mask"], part, np.float32(bad)) for name, part in parts.items() if name != "mask"}
    for slope in (value_slope, policy_slope):
        expected, got = slope(parts), slope(dirty | {"mask": parts["mask"]})
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        (loss, metrics), gradient = slope(dirty | {"mask": np.zeros_like(parts["mask"])})
        assert loss == 0
        assert all(member.value() == 0 for member in metrics)
        jax.tree.map(lambda part: np.testing.assert_array_equal(part, 0), gradient)


def test_explained_variance_of_constant_of_perfect_and_of_undefined():
    mask = np.ones((2, 3), bool)
    targets = np.arange(6, dtype=np.float32).reshape(2, 3)

    def explained(values, returns):
        return explained_variance(values, returns, mask)

    np.testing.assert_allclose(explained(targets, targets), 1, rtol=1e-6)
    np.testing.assert_allclose(explained(np.full_like(targets, 2.5), targets), 0, atol=1e-6)
    assert explained(targets, np.full_like(targets, 1000.1)) == 0
    close = np.float32(1000) + targets / 2**13  # exact in float32
    np.testing.assert_allclose(explained(close + np.float32(2**-13) * (targets % 2), close), 1 - 0.3 / 3.5, rtol=1e-6)
    assert np.isnan(explained(targets, np.full_like(targets, np.nan)))
