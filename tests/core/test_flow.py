"""The loss of flow-matching models against loops in float64, and properties of batches and masks."""

import functools

import jax
import numpy as np
import pytest

from grpo_jax.core import flow

OPTIONS = {"beta": 0.5, "scale": 3.0}
pytestmark = pytest.mark.usefixtures("strict")


def arrays(seed=0, rows=5, dtype: type = np.float64):
    """(velocity, old velocity, latents, noise, weights in [0, 1], times), and the reference's velocity."""
    rng = np.random.default_rng(seed)
    v, old, x0, noise, reference = rng.normal(size=(5, rows, 3, 4, 2))
    weights, times = rng.uniform(size=rows), rng.uniform(0.1, 1.0, size=rows)
    return [a.astype(dtype) for a in (v, old, x0, noise, weights, times)], reference.astype(dtype)


@functools.partial(jax.jit, static_argnames=("beta", "scale", "reference_coef"))
def evaluate(parts, **options):
    v, old, x0, noise, weights, times = parts
    _, target = flow.add_noise(x0, noise, times)
    loss = functools.partial(flow.diffusion_nft_loss, **options)
    return jax.value_and_grad(lambda v: loss(v, old, target, weights, times), has_aux=True)(v)


def nft_loop(parts, b, beta, scale, divisors=None):
    """One sample in the published code's form: errors of predicted x0, not of velocities."""
    v, old, x0, noise, r, t = (part[b] for part in parts)
    x_t, total = (1 - t) * x0 + t * noise, 0.0
    predictions = beta * v + (1 - beta) * old, (1 + beta) * old - beta * v
    for i, (share, prediction) in enumerate(zip((r, 1 - r), predictions, strict=True)):
        wrong = x_t - t * prediction - x0
        divisor = max(np.mean(np.abs(wrong)), 1e-5) if divisors is None else divisors[b][i]
        total += share * np.mean(wrong**2 / divisor) / beta
    return total * scale


def test_the_loss_is_the_published_one(x64):
    for seed in range(3):
        parts, reference = arrays(seed)
        expected = np.mean([nft_loop(parts, b, **OPTIONS) for b in range(5)])
        (loss, metrics), _ = evaluate(parts, **OPTIONS)
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        assert loss.dtype == np.float64 and metrics.reference_distance.weight == 0
        (loss, metrics), _ = evaluate(parts, **OPTIONS, reference=reference, reference_coef=0.3)
        away, moved = np.mean((parts[0] - reference) ** 2), np.mean((parts[0] - parts[1]) ** 2)
        np.testing.assert_allclose(loss, expected + 0.3 * away, rtol=1e-12)
        np.testing.assert_allclose(metrics.reference_distance.value(), away, rtol=1e-12)
        np.testing.assert_allclose(metrics.old_distance.value(), moved, rtol=1e-12)


def test_the_gradient_is_that_of_finite_differences(x64):
    parts, _ = arrays(1)
    v, old, x0, noise, _, t = parts
    options, step = OPTIONS, np.random.default_rng(2).normal(size=v.shape)
    moved = options["beta"] * (v - old)
    errors = [t[:, None, None, None] * (old + sign * moved - noise + x0) for sign in (1, -1)]
    divisors = np.stack([np.abs(error).mean(axis=(1, 2, 3)) for error in errors], axis=1)  # constants

    def value(size):
        shifted = [v + size * step, *parts[1:]]
        return np.mean([nft_loop(shifted, b, **options, divisors=divisors) for b in range(len(v))])

    _, gradient = evaluate(parts, **options)
    np.testing.assert_allclose(np.sum(gradient * step), (value(1e-5) - value(-1e-5)) / 2e-5, rtol=1e-7)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_at_the_old_model_the_gradient_is_the_advantage_times_that_of_flow_matching(beta, x64):
    (v, _, x0, noise, _, t), _ = arrays(3)
    error = t[:, None, None, None] * (v - noise + x0)
    matching = 2 * t[:, None, None, None] * error / np.abs(error).mean(axis=(1, 2, 3), keepdims=True) / v.size
    advantages = np.array([-7.0, -1.0, 0.0, 2.0, 5.0])
    rewards = flow.unit_rewards(advantages, clip=5.0)
    np.testing.assert_allclose(rewards, [0.0, 0.4, 0.5, 0.7, 1.0])
    _, gradient = evaluate((v, v, x0, noise, rewards, t), beta=beta)
    clipped = np.clip(advantages, -5, 5)[:, None, None, None]
    np.testing.assert_allclose(gradient, clipped * matching, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_parts_add_up_and_masked_rows_have_no_influence(bad):
    parts, reference = arrays(5, dtype=np.float32)
    options = OPTIONS | {"reference": reference}
    (whole, metrics), gradient = evaluate(parts, **options)
    losses, gradients, pieces = [], 0.0, []
    for mask in (np.arange(5) < 3, np.arange(5) >= 3):
        dirty = [np.where(mask.reshape(-1, *[1] * (part.ndim - 1)), part, np.float32(bad)) for part in parts]
        options["reference"] = np.where(mask[:, None, None, None], reference, np.float32(bad))
        (loss, piece), slope = evaluate(dirty, **options, mask=mask, rows=np.int32(5))
        assert not np.asarray(slope)[~mask].any()
        losses.append(loss)
        pieces.append(piece)
        gradients += slope
    np.testing.assert_allclose(sum(losses), whole, rtol=1e-6)
    np.testing.assert_allclose(gradients, gradient, rtol=1e-5, atol=1e-8)
    for total, *others in zip(metrics, *pieces, strict=True):
        np.testing.assert_allclose(sum(float(one.total) for one in others), total.total, rtol=1e-6)
        assert sum(float(one.weight) for one in others) == total.weight == 5
    empty, slope = evaluate(parts, **OPTIONS, mask=np.zeros(5, bool))
    assert empty[0] == 0 and not np.asarray(slope).any()


def test_vmap_is_a_loop():
    batches = [arrays(seed, dtype=np.float32)[0] for seed in (6, 7)]
    (v, old, x0, noise, weights, times) = (np.stack(column) for column in zip(*batches, strict=True))
    losses, _ = jax.jit(jax.vmap(flow.diffusion_nft_loss))(v, old, noise - x0, weights, times)
    np.testing.assert_allclose(losses, [evaluate(parts)[0][0] for parts in batches], rtol=1e-5)


def test_noise_is_added_along_a_line_and_arrays_are_checked():
    (v, old, x0, noise, weights, times), _ = arrays(8, dtype=np.float32)
    noisy, target = flow.add_noise(x0, noise, times)
    np.testing.assert_allclose(noisy - times[:, None, None, None] * target, x0, atol=1e-6)
    with pytest.raises(ValueError, match="times must have shape"):
        flow.diffusion_nft_loss(v, old, target, weights, times[:2])
    with pytest.raises(ValueError, match="old_velocity must have shape"):
        flow.diffusion_nft_loss(v, old[:1], target, weights, times)
    with pytest.raises(TypeError, match="rewards must be of a floating type"):
        flow.diffusion_nft_loss(v, old, target, np.ones(5, int), times)
