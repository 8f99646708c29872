"""Losses of flow-matching models against loops in float64, and the properties that batches and masks must not break."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import compiled

from grpo_jax.core import flow

LOSSES = {"nft": compiled(flow.diffusion_nft_loss), "awm": compiled(flow.awm_loss)}
OPTIONS = {"nft": {"beta": 0.5, "scale": 3.0}, "awm": {"clip": 0.01, "old_coef": 0.7}}
pytestmark = pytest.mark.usefixtures("strict")


def arrays(seed=0, rows=5, dtype: type = np.float64):
    """(velocity, old velocity, latents, noise, weights in [0, 1], times), and the reference's velocity."""
    rng = np.random.default_rng(seed)
    v, old, x0, noise, reference = rng.normal(size=(5, rows, 3, 4, 2))
    weights, times = rng.uniform(size=rows), rng.uniform(0.1, 1.0, size=rows)
    return [a.astype(dtype) for a in (v, old, x0, noise, weights, times)], reference.astype(dtype)


def evaluate(name, parts, **options):
    v, old, x0, noise, weights, times = parts
    loss = LOSSES[name]
    _, target = flow.add_noise(x0, noise, times)
    slope = jax.value_and_grad(lambda v: loss(v, old, target, weights, times, **options), has_aux=True)
    return slope(jnp.asarray(v))


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


def awm_loop(parts, b, clip, old_coef):
    v, old, x0, noise, advantage, t = (part[b] for part in parts)

    def likelihood(prediction):
        error = np.mean((prediction - (noise - x0)) ** 2)
        return -((error + 1e-10) ** 0.25 - 1e-10**0.25) * t / 0.25

    ratio = np.exp(likelihood(v) - likelihood(old))
    bounded = min(max(ratio, 1 - clip), 1 + clip)
    return max(-advantage * ratio, -advantage * bounded) + old_coef * np.mean((v - old) ** 2)


LOOPS = {"nft": nft_loop, "awm": awm_loop}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_the_published_one(name, x64):
    for seed in range(3):
        parts, reference = arrays(seed)
        if name == "awm":
            parts[4] = parts[4] - 0.5
        expected = np.mean([LOOPS[name](parts, b, **OPTIONS[name]) for b in range(5)])
        (loss, metrics), _ = evaluate(name, parts, **OPTIONS[name])
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        assert loss.dtype == np.float64 and metrics.reference_distance.weight == 0
        (loss, metrics), _ = evaluate(name, parts, **OPTIONS[name], reference=reference, reference_coef=0.3)
        away, moved = np.mean((parts[0] - reference) ** 2), np.mean((parts[0] - parts[1]) ** 2)
        np.testing.assert_allclose(loss, expected + 0.3 * away, rtol=1e-12)
        np.testing.assert_allclose(metrics.reference_distance.value(), away, rtol=1e-12)
        np.testing.assert_allclose(metrics.old_distance.value(), moved, rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_finite_differences(name, x64):
    parts, _ = arrays(1)
    v, old, x0, noise, _, t = parts
    options, step = OPTIONS[name], np.random.default_rng(2).normal(size=v.shape)
    constants = {}
    if name == "nft":  # the divisors are constants
        moved = options["beta"] * (v - old)
        errors = [t[:, None, None, None] * (old + sign * moved - noise + x0) for sign in (1, -1)]
        constants["divisors"] = np.stack([np.abs(error).mean(axis=(1, 2, 3)) for error in errors], axis=1)

    def value(size):
        shifted = [v + size * step, *parts[1:]]
        return np.mean([LOOPS[name](shifted, b, **options, **constants) for b in range(len(v))])

    _, gradient = evaluate(name, parts, **options)
    np.testing.assert_allclose(np.sum(gradient * step), (value(1e-5) - value(-1e-5)) / 2e-5, rtol=1e-7)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_at_the_old_model_the_gradient_is_the_advantage_times_that_of_flow_matching(beta, x64):
    (v, _, x0, noise, _, t), _ = arrays(3)
    error = t[:, None, None, None] * (v - noise + x0)
    matching = 2 * t[:, None, None, None] * error / np.abs(error).mean(axis=(1, 2, 3), keepdims=True) / v.size
    advantages = np.array([-7.0, -1.0, 0.0, 2.0, 5.0])
    rewards = flow.unit_rewards(advantages, clip=5.0)
    np.testing.assert_allclose(rewards, [0.0, 0.4, 0.5, 0.7, 1.0])
    _, gradient = evaluate("nft", (v, v, x0, noise, rewards, t), beta=beta)
    clipped = np.clip(advantages, -5, 5)[:, None, None, None]
    np.testing.assert_allclose(gradient, clipped * matching, rtol=1e-10, atol=1e-15)


def test_awm_is_a_policy_gradient_at_the_old_model_and_stops_beyond_its_clip(x64):
    (v, old, x0, noise, _, t), _ = arrays(4)
    advantages, target = np.array([-1.0, -0.2, 0.0, 0.5, 1.0]), noise - x0
    _, gradient = evaluate("awm", (v, v, x0, noise, advantages, t), power=1.0)
    matching = 2 * t[:, None, None, None] * (v - target) / v.size
    np.testing.assert_allclose(gradient, advantages[:, None, None, None] * matching, rtol=1e-10, atol=1e-15)
    better = target + 0.1 * (old - target)
    _, gradient = evaluate("awm", (better, old, x0, noise, np.ones(5), t), clip=0.01, old_coef=0.0)
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_parts_add_up_and_masked_rows_have_no_influence(name, bad):
    parts, reference = arrays(5, dtype=np.float32)
    options = OPTIONS[name] | {"reference": reference}
    (whole, metrics), gradient = evaluate(name, parts, **options)
    losses, gradients, pieces = [], 0.0, []
    for mask in (np.arange(5) < 3, np.arange(5) >= 3):
        dirty = [np.where(mask.reshape(-1, *[1] * (part.ndim - 1)), part, np.float32(bad)) for part in parts]
        options["reference"] = np.where(mask[:, None, None, None], reference, np.float32(bad))
        (loss, piece), slope = evaluate(name, dirty, **options, mask=mask, rows=np.int32(5))
        assert not np.asarray(slope)[~mask].any()
        losses.append(loss)
        pieces.append(piece)
        gradients += slope
    np.testing.assert_allclose(sum(losses), whole, rtol=1e-6)
    np.testing.assert_allclose(gradients, gradient, rtol=1e-5, atol=1e-8)
    for total, *others in zip(metrics, *pieces, strict=True):
        np.testing.assert_allclose(sum(float(one.total) for one in others), total.total, rtol=1e-6)
        assert sum(float(one.weight) for one in others) == total.weight == 5
    empty, slope = evaluate(name, parts, **OPTIONS[name], mask=np.zeros(5, bool))
    assert empty[0] == 0 and not np.asarray(slope).any()


@pytest.mark.parametrize("name", LOSSES)
def test_vmap_is_a_loop(name):
    batches = [arrays(seed, dtype=np.float32)[0] for seed in (6, 7)]
    function = {"nft": flow.diffusion_nft_loss, "awm": flow.awm_loss}[name]
    (v, old, x0, noise, weights, times) = (np.stack(column) for column in zip(*batches, strict=True))
    losses, _ = jax.jit(jax.vmap(function))(v, old, noise - x0, weights, times)
    np.testing.assert_allclose(losses, [evaluate(name, parts)[0][0] for parts in batches], rtol=1e-5)


def test_noise_is_added_along_a_line_and_arrays_are_checked():
    (v, old, x0, noise, weights, times), _ = arrays(8, dtype=np.float32)
    noisy, target = flow.add_noise(x0, noise, times)
    np.testing.assert_allclose(noisy - times[:, None, None, None] * target, x0, atol=1e-6)
    with pytest.raises(ValueError, match="times must have shape"):
        flow.diffusion_nft_loss(v, old, target, weights, times[:2])
    with pytest.raises(ValueError, match="old_velocity must have shape"):
        flow.awm_loss(v, old[:1], target, weights, times)
    with pytest.raises(TypeError, match="rewards or advantages must be of a floating type"):
        flow.diffusion_nft_loss(v, old, target, np.ones(5, int), times)
