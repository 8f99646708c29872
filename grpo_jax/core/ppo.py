"""PPO's losses: the clipped policy loss with per-step advantages, the clipped value loss, and its quality."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.core.aggregation import Aggregation, Mean, Normaliser, as_normaliser, loss_normaliser
from grpo_jax.core.losses import GRPOMetrics, grpo_loss
from grpo_jax.core.masking import as_float, as_mask, masked_std, safe_divide, select
from grpo_jax.core.surrogates import Clip


class ValueMetrics(NamedTuple):
    """Metrics of one `value_loss` call; each is a `Mean` over steps, so the parts of a batch add up."""

    loss: Mean
    clip_fraction: Mean  # share of steps whose clipped error is the larger one, which stops the gradient
    value: Mean  # the predictions
    target: Mean  # the returns


def ppo_loss(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token",
    normaliser: Normaliser | ArrayLike | None = None,
    entropy: ArrayLike | None = None,
    entropy_coef: float = 0.0,
    token_weights: ArrayLike | None = None,
) -> tuple[jax.Array, GRPOMetrics]:
    """Compute PPO's clipped policy loss (https://arxiv.org/abs/1707.06347).

        loss = -mean over steps of min(ρ A, clip(ρ, 1 - low, 1 + high) A) - entropy_coef · mean entropy

    It is `grpo_loss` with a clip, token ratios and a token mean; only the source of the advantages differs
    (`gae_advantages`). This loss does not normalise them: call `masking.masked_whiten` first, over a batch or a
    minibatch. PPO's KL penalty is part of its rewards (`kl_penalised_rewards`). For arguments that are not listed
    here see `grpo_loss`.

    Args:
        logprobs: `[.., T]`, floating.
        old_logprobs: `[.., T]`, of the policy that acted.
        advantages: `[.., T]`, or `[..]`.
        mask: bool `[.., T]`.
        clip_low: clipping range of the ratio below 1.
        clip_high: clipping range above 1.
        dual_clip: upper bound of the ratio for negative advantages, as in `Clip`.

    Returns:
        (loss, metrics); the loss is a scalar of at least float32. `metrics.old_kl` is also known as approx_kl.

    Raises:
        ValueError: shapes that do not match, a bonus without `entropy`.
    """
    return grpo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        surrogate=Clip(clip_low, clip_high, dual_clip),
        aggregation=aggregation,
        normaliser=normaliser,
        entropy=entropy,
        entropy_coef=entropy_coef,
        token_weights=token_weights,
    )


def value_loss(
    values: ArrayLike,
    old_values: ArrayLike | None,
    returns: ArrayLike,
    mask: ArrayLike,
    *,
    clip: float | None = 0.2,
    normaliser: Normaliser | ArrayLike | None = None,
) -> tuple[jax.Array, ValueMetrics]:
    """Compute PPO's clipped value loss, as in OpenAI's baselines.

        V' = clip(V, V_old - clip, V_old + clip)
        loss = 1/2 · mean over steps of max((V - R)², (V' - R)²)

    Gradients reach only `values`. A step whose clipped error is the larger one gets no gradient. The factor 1/2 is
    included; the caller multiplies by the value coefficient.

    Args:
        values: `[..]`, floating: the predictions.
        old_values: the same shape, the predictions at rollout time; may be None without a clip.
        returns: the same shape, `gae_advantages(…) + values[..., :-1]`.
        mask: bool of the same shape.
        clip: largest change of a prediction, in the units of the returns; None does not clip.
        normaliser: the whole update's number of steps, or its `loss_normaliser`; that of the mask by default.

    Returns:
        (loss, metrics); the loss is a scalar of at least float32.

    Raises:
        ValueError: shapes that differ, a clip without `old_values`.
    """
    predicted = as_float("values", values)
    mask = as_mask("mask", mask, predicted.shape)
    if clip is not None and old_values is None:
        raise ValueError("old_values must be given with a clip, got None")

    def constant(name, value) -> jax.Array:
        value = as_float(name, value, shape=predicted.shape)
        return jax.lax.stop_gradient(select(mask, value.astype(predicted.dtype)))

    local = loss_normaliser(mask, "token", dtype=predicted.dtype)
    whole = as_normaliser(normaliser, local, "token", bonus=False)
    predicted, target = select(mask, predicted), constant("returns", returns)
    squared = jnp.square(predicted - target)
    clipped = jnp.zeros_like(mask)
    if clip is not None:
        old = constant("old_values", old_values)
        bounded = jnp.square(jnp.clip(predicted, old - clip, old + clip) - target)
        # If both are equal, the prediction is within its bounds and keeps its gradient.
        clipped = bounded > squared
        squared = jnp.where(clipped, bounded, squared)
    per_step = {"loss": 0.5 * squared, "clip_fraction": clipped, "value": predicted, "target": target}
    means = {name: Mean(jnp.sum(x.astype(predicted.dtype)), local.tokens) for name, x in per_step.items()}
    return safe_divide(means["loss"].total, whole.tokens), jax.lax.stop_gradient(ValueMetrics(**means))


def explained_variance(values: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Compute the share of the returns' variance that the value function predicts.

        1 - Var(R - V) / Var(R)

    It is 1 for perfect values and 0 for a constant; equal returns give 0.

    Args:
        values: `[..]`, floating: the predictions.
        returns: the same shape.
        mask: bool of the same shape.

    Raises:
        ValueError: shapes that differ.
    """
    values = as_float("values", values)
    mask = as_mask("mask", mask, values.shape)
    returns = as_float("returns", returns, shape=values.shape).astype(values.dtype)
    deviation = masked_std(returns, mask)
    ratio = safe_divide(masked_std(select(mask, returns) - select(mask, values), mask), deviation)
    return jnp.where(deviation == 0, 0, 1 - jnp.square(ratio))
