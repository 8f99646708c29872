"""PPO in the language trainer: token rewards, advantages from the values, one loss for policy and value head.

The flow of one batch, which `update.make_update` follows: a forward pass gives old log-probabilities and values; the
estimates below turn scores into rewards per token, advantages and returns; the updates then minimise the policy's
loss and the value loss together. A completion is an episode that ends with its last token, be that the end token or
the last one there was room for: nothing comes after it, so nothing is bootstrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config.algorithm import PPOSection
from grpo_jax.core.kl import kl_divergence
from grpo_jax.core.masking import count, masked_mean, masked_std, masked_whiten, safe_divide, select
from grpo_jax.core.ppo import value_loss
from grpo_jax.core.returns import gae_advantages
from grpo_jax.core.shaping import AdaptiveKL, kl_penalised_rewards
from grpo_jax.training.batch import Batch, required
from grpo_jax.training.objectives import ForwardPass, Objective, policy_loss

Tree = Any


class Estimates(NamedTuple):
    """What a batch of PPO measures before its first update; scalars but for the first.

    Attributes:
        advantages: [P, G], the mean over each completion's tokens, as they are trained on.
        completion_kl: KL against the reference of one completion, its tokens' k1 estimates summed; mean over rows.
        value: Mean value of a token's state.
        returns: Mean of what the values are to become.
        explained_variance: 1 - Var(returns - values) / Var(returns): 1 is a perfect value, 0 a constant, less is worse.
    """

    advantages: jax.Array
    completion_kl: jax.Array
    value: jax.Array
    returns: jax.Array
    explained_variance: jax.Array


def make_estimates(section: PPOSection) -> Callable[[Batch, jax.Array, jax.Array], tuple[Batch, Estimates]]:
    """The compiled function (batch with scores and old_logprobs, values, KL coefficient) → batch to learn from.

    Rewards per token, with the KL against `batch.ref_logprobs` (None: no KL), become advantages by GAE; the values
    learn advantage + value. Advantages are whitened over the batch's tokens if the section says so.
    """

    def estimate(batch: Batch, values: jax.Array, kl_coef: jax.Array) -> tuple[Batch, Estimates]:
        mask, old = batch.mask, required("old_logprobs", batch.old_logprobs)
        reference = old if batch.ref_logprobs is None else batch.ref_logprobs
        scores = required("scores", batch.scores)
        values = select(mask, values)
        rewards = kl_penalised_rewards(scores, old, reference, mask, kl_coef=kl_coef, estimator=section.kl_estimator)
        # The state after the last token has value 0; padding stands in the way of no value, it is passed over.
        following = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
        advantages = gae_advantages(rewards, following, discount=section.discount, trace=section.trace, mask=mask)
        returns = advantages + values
        divergence = select(mask, kl_divergence(old, reference, estimator="k1"))
        explained = _explained_variance(advantages, returns, mask)
        if section.whiten:
            advantages = masked_whiten(advantages, mask)
        measured = Estimates(
            advantages=masked_mean(advantages, mask, axis=-1),
            completion_kl=safe_divide(jnp.sum(divergence), count(mask.any(axis=-1))),
            value=masked_mean(values, mask),
            returns=masked_mean(returns, mask),
            explained_variance=explained,
        )
        return batch._replace(advantages=advantages, scores=None, old_values=values, returns=returns), measured

    return jax.jit(estimate)


def _explained_variance(error: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
    of_error, of_target = (jnp.square(masked_std(x, mask)) for x in (error, target))
    return jnp.where(of_target > 0, 1 - safe_divide(of_error, of_target), 0)


def make_ppo_objective(forward: ForwardPass, options: dict[str, Any], section: PPOSection) -> Objective:
    """PPO's objective: the policy loss of a preset with an advantage for each token, and the value loss.

        loss = policy loss + value_coef · value loss (mean over tokens)

    One forward pass serves both, and both gradients reach the policy's weights.

    Args:
        forward: Of `objectives.make_forward`; variables hold a value head.
        options: Keyword arguments of `losses.grpo_loss`; preset "bnpo" makes its policy loss `ppo.ppo_loss`.
        section: Coefficient and clip of the value loss.

    Returns:
        objective(variables, batch, normaliser) → (loss, what `policy_loss` measured and {"value": ValueMetrics}).
    """

    def objective(variables: dict[str, Tree], batch: Batch, normaliser: Any) -> tuple[jax.Array, dict[str, Any]]:
        seen = forward(variables, batch)
        loss, measured = policy_loss(seen, batch, options, normaliser)
        value, metrics = value_loss(
            required("values", seen.values),
            batch.old_values,
            required("returns", batch.returns),
            batch.mask,
            clip=section.value_clip,
            normaliser=normaliser,
        )
        return loss + section.value_coef * value, {**measured, "value": metrics}

    return objective


def make_kl_control(section: PPOSection) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    """The function (coefficient, completion_kl, completions) → next coefficient; the same one without a target.

    A divergence that is not finite says nothing: the coefficient stays.
    """
    if section.kl_target == 0:
        return lambda coef, observed, samples: coef
    control = AdaptiveKL(section.kl_target, section.kl_horizon)

    def steer(coef: jax.Array, observed: jax.Array, samples: int) -> jax.Array:
        return jnp.where(jnp.isfinite(observed), control.update(coef, observed, samples), coef)

    return steer
