"""Losses against slow NumPy loops, and the properties that batches, masks and devices must not break."""

from functools import partial

import jax
import numpy as np
import pytest
from oracles.loss_loops import CHOICES, EXTRAS, LENGTH, SURROGATES, batch, evaluate, loop_loss
from support.compiled import compiled

from grpo_jax.core.losses import (
    PRESETS,
    FixedLength,
    KLPenalty,
    Normaliser,
    grpo_loss,
    kl_divergence,
    loss_normaliser,
    sft_loss,
)

grpo_loss, sft_loss = map(compiled, (grpo_loss, sft_loss))
PARTS = ("logprobs", "old", "advantages", "mask")
pytestmark = pytest.mark.usefixtures("strict")


NAMED = {choices.id: choices.values[0] for choices in CHOICES}


@jax.jit
def every(parts):
    """`evaluate` of all choices with all extras: one program takes half the time of twelve."""
    return {name: evaluate(parts, choices, **EXTRAS) for name, choices in NAMED.items()}


def test_losses_are_the_loops(x64):
    settings = [(name, choices, extras) for name, choices in NAMED.items() for extras in ({}, EXTRAS)]

    @jax.jit
    def losses(parts):
        given, arrays = [parts[name] for name in PARTS], {"ref_logprobs": parts["ref"], "entropy": parts["entropy"]}
        return [grpo_loss(*given, **arrays, **choices, **extras)[0] for _, choices, extras in settings]

    for seed in range(2):
        parts = batch(seed, dtype=np.float64)
        for (name, choices, extras), loss in zip(settings, losses(parts), strict=True):
            np.testing.assert_allclose(loss, loop_loss(parts, choices, **extras), rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_leading_axes_are_rows(name):
    """[P, G, T] is [P·G, T]."""
    parts = batch(4)
    grouped = {key: value.reshape(2, 3, *value.shape[1:]) for key, value in parts.items()}
    losses = [
        grpo_loss(p["logprobs"], p["old"], p["advantages"], p["mask"], **PRESETS[name])[0] for p in (parts, grouped)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_masked_tokens_have_no_influence_whatever_they_hold(bad):
    parts = batch(5)
    dirty = {key: value.copy() for key, value in parts.items()}
    for key in ("logprobs", "old", "ref", "entropy"):
        dirty[key][~parts["mask"]] = bad
    dirty["advantages"][0] = bad  # the row without tokens
    expected, got = jax.device_get((every(parts), every(dirty)))
    for name, (value, gradients) in got.items():
        jax.tree.map(partial(np.testing.assert_array_equal, err_msg=name), (value, gradients), expected[name])
        assert not any(gradient[~parts["mask"]].any() for gradient in gradients), name


def test_nothing_to_learn_from_is_loss_zero_and_gradient_zero():
    parts = {key: np.full_like(value, False if key == "mask" else np.nan) for key, value in batch().items()}
    for name, ((loss, metrics), gradients) in jax.device_get(every(parts)).items():
        assert loss == 0 and all(member.value() == 0 for member in metrics), name
        assert not any(np.any(gradient) for gradient in gradients), name


def test_metrics_are_means_over_tokens():
    parts = batch(7, dtype=np.float32)
    (_, metrics), _ = evaluate(parts, PRESETS["grpo"], kl=KLPenalty(0.1))
    mask = parts["mask"]
    log_ratio = (parts["logprobs"] - parts["old"])[mask]
    advantage = np.repeat(parts["advantages"][:, None], LENGTH, 1)[mask]
    difference = (parts["ref"] - parts["logprobs"])[mask]
    for member, values in {
        "ratio": np.exp(log_ratio),
        "entropy": parts["entropy"][mask],
        "advantage": advantage,
        "kl": np.exp(difference) - difference - 1,
        "old_kl": np.exp(log_ratio) - log_ratio - 1,
        "clip_low": (np.exp(log_ratio) < 0.8) & (advantage < 0),
        "clip_high": (np.exp(log_ratio) > 1.2) & (advantage > 0),
    }.items():
        mean = getattr(metrics, member)
        assert float(mean.weight) == mask.sum()
        np.testing.assert_allclose(mean.value(), values.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics.policy_loss.value(), loop_loss(parts, PRESETS["grpo"]), rtol=1e-4)
    assert float(metrics.policy_loss.weight) == mask.any(1).sum()


def test_normalisers():
    mask = np.array([[True, True, False], [True, False, False], [False] * 3])
    for aggregation, loss in (("sequence", 2), ("token", 3), (FixedLength(10), 20), (FixedLength(), 6)):
        assert loss_normaliser(mask, aggregation) == Normaliser(loss, 3)


def test_sft_reads_no_masked_token():
    parts = batch(9)
    dirty = np.where(parts["mask"], parts["logprobs"], np.float32(np.nan))
    slopes = jax.value_and_grad(sft_loss, has_aux=True)
    (loss, metrics), gradient = slopes(dirty, parts["mask"])
    np.testing.assert_allclose([loss, metrics.loss.value()], -parts["logprobs"][parts["mask"]].mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient, -(parts["mask"] / parts["mask"].sum()), rtol=1e-6)
    (empty, _), slope = slopes(dirty, np.zeros(dirty.shape, bool))
    assert empty == 0 and not np.any(slope)


@pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
def test_an_overflowing_ratio_behind_a_bound_keeps_gradients_finite(surrogate):
    """exp(200) is inf; min(inf · A, 1.2 A) is fine, its gradient was once 0 · inf."""
    logprobs = np.array([[-1.0, -2.0]], np.float32)
    old = logprobs - np.array([[200.0, 0.0]], np.float32)
    for advantage in (1.0, -1.0):
        if surrogate == SURROGATES["clip"] and advantage < 0:
            continue  # without a dual clip that loss is infinite, and should look so
        loss, gradient = jax.value_and_grad(
            lambda x, a=advantage: grpo_loss(x, old, np.float32([a]), np.ones((1, 2), bool), surrogate=surrogate)[0]
        )(logprobs)
        assert np.isfinite(loss)
        assert np.isfinite(gradient).all()


def test_k3_close_to_zero_keeps_its_digits_and_slope():
    d = np.float32(1e-4)
    value, slope = jax.value_and_grad(lambda x: kl_divergence(x, np.float32(0)))(-d)
    np.testing.assert_allclose(value, d * d / 2, rtol=0.2)  # exp(d) - d - 1 by itself gives 0 or twice this
    np.testing.assert_allclose(slope, 1 - np.exp(np.float64(d)), rtol=1e-3)
