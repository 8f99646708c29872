"""The loss of reinforcement learning for flow-matching models, as a function of velocities.

A sample x0 is drawn by the old model and judged. With noise ε and a time t, x_t = (1 - t) x0 + t ε has the velocity
ε - x0. The loss compares it with the model's velocities at (x_t, t); no likelihood and no trajectory is needed.
Axes: B samples; the axes after it belong to a sample.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.core.aggregation import Mean
from grpo_jax.core.masking import as_float, as_mask, count, safe_divide, select

_SMALLEST = 1e-5  # least mean absolute error that divides a squared error, as in DiffusionNFT's published code


class FlowMetrics(NamedTuple):
    """Metrics of one loss call; each is a `Mean` over samples, so the parts of a batch add up."""

    policy_loss: Mean  # without penalties
    old_distance: Mean  # mean square of v - v_old
    reference_distance: Mean  # mean square of v - v_ref; weight 0 without a reference


def unit_rewards(advantages: ArrayLike, *, clip: float = 5.0) -> jax.Array:
    """Map advantages to DiffusionNFT's rewards: r = clip(A / (2 · clip) + 1/2, 0, 1), of any shape.

    An advantage of 0 gives 1/2, which has no gradient at v = v_old.
    """
    return jnp.clip(as_float("advantages", advantages) / (2 * clip) + 0.5, 0.0, 1.0)


def add_noise(latents: ArrayLike, noise: ArrayLike, times: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return x_t = (1 - t) x0 + t ε and its velocity ε - x0, both `[B, ..]`; `times` are `[B]` in [0, 1]."""
    x0 = as_float("latents", latents)
    noise = as_float("noise", noise, shape=x0.shape)
    t = _beside(as_float("times", times, shape=x0.shape[:1]), x0)
    return (1 - t) * x0 + t * noise, noise - x0


def diffusion_nft_loss(
    velocity: ArrayLike,
    old_velocity: ArrayLike,
    target: ArrayLike,
    rewards: ArrayLike,
    times: ArrayLike,
    *,
    beta: float = 1.0,
    scale: float = 5.0,
    reference: ArrayLike | None = None,
    reference_coef: float = 1e-4,
    mask: ArrayLike | None = None,
    rows: ArrayLike | None = None,
) -> tuple[jax.Array, FlowMetrics]:
    """Compute DiffusionNFT's loss (https://arxiv.org/abs/2509.16117).

        v⁺ = v_old + β (v - v_old),   v⁻ = v_old - β (v - v_old)
        loss = 1 / B · Σ_b (scale / β · (r · E(v⁺) + (1 - r) · E(v⁻)) + c · mean((v - v_ref)²))
        E(v) = mean(e²) / max(mean|e|, 1e-5),   e = t (v - target), the error of the predicted x0

    The divisor of E is a constant to gradients. At v = v_old the gradient is scale · (2 r - 1) times that of E, which
    is flow matching, for any β.

    Args:
        velocity: `[B, ..]`, floating, of the trained model at (x_t, t).
        old_velocity: `[B, ..]`, of the old model; a constant to gradients, as are all further arguments.
        target: `[B, ..]`, ε - x0.
        rewards: `[B]` in [0, 1], for example `unit_rewards`.
        times: `[B]` in [0, 1].
        beta: strength of the implicit guidance; published 1, and .1 for OCR.
        scale: factor of the policy loss; published: the clip of the advantages, 5, so that scale · (2 r - 1) = A.
        reference: `[B, ..]`, velocity of a reference model; None for no penalty.
        reference_coef: c; published 1e-4.
        mask: bool `[B]`, the samples that count; all by default.
        rows: number of samples of the whole update, if this is a part of it; by default that of the mask.

    Returns:
        (loss, metrics); the loss a scalar of at least float32.

    Raises:
        TypeError, ValueError: an array of another type or shape.
    """
    v = as_float("velocity", velocity)
    kept = jnp.ones(v.shape[:1], bool) if mask is None else as_mask("mask", mask, v.shape[:1])

    def constant(name: str, value: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
        array = as_float(name, value, shape=shape).astype(v.dtype)
        return jax.lax.stop_gradient(select(_beside(kept, array), array))

    v = select(_beside(kept, v), v)
    old, target = constant("old_velocity", old_velocity, v.shape), constant("target", target, v.shape)
    r, t = constant("rewards", rewards, v.shape[:1]), constant("times", times, v.shape[:1])
    fixed = constant("reference", v if reference is None else reference, v.shape)

    def error(v: jax.Array) -> jax.Array:
        e = _beside(t, v) * (v - target)
        divisor = jnp.maximum(_mean(jnp.abs(e)), _SMALLEST)
        return _mean(jnp.square(e)) / jax.lax.stop_gradient(divisor)

    step, number = beta * (v - old), count(kept, dtype=v.dtype)
    losses = scale / beta * (r * error(old + step) + (1 - r) * error(old - step))
    policy = jnp.sum(select(kept, losses))
    moved, away = (jnp.sum(_mean(jnp.square(v - other))) for other in (old, fixed))
    loss = safe_divide(policy + reference_coef * away, number if rows is None else jnp.asarray(rows, v.dtype))
    compared = jnp.zeros_like(number) if reference is None else number
    metrics = FlowMetrics(Mean(policy, number), Mean(moved, number), Mean(away, compared))
    return loss, jax.lax.stop_gradient(metrics)


def _mean(x: jax.Array) -> jax.Array:
    """Return the mean of each sample, `[B]`."""
    return jnp.mean(x, axis=tuple(range(1, x.ndim)))


def _beside(values: jax.Array, array: jax.Array) -> jax.Array:
    """Return `values` `[B]` with the number of axes of `array` `[B, ..]`."""
    return values.reshape(-1, *([1] * (array.ndim - 1)))
