"""Objectives of an update: the forward pass over a batch's completions, and the configured loss.

PPO runs three steps per batch (`update.make_update`). A forward pass gives old log-probabilities and values.
`make_estimates` turns scores into per-token rewards, advantages and returns. The updates minimise policy loss and
value loss together. A completion is an episode that ends with its last token, even if truncated: there is no
bootstrapping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config.sections import AlgorithmSection, PPOSection
from grpo_jax.core import losses
from grpo_jax.core.aggregation import FixedLength, Mean
from grpo_jax.core.kl import kl_divergence
from grpo_jax.core.masking import count, masked_mean, masked_whiten, safe_divide, select
from grpo_jax.core.ppo import explained_variance, value_loss
from grpo_jax.core.returns import gae_advantages, kl_penalised_rewards
from grpo_jax.core.selection import off_policy_mask
from grpo_jax.core.trie import Trie, walk
from grpo_jax.models.policy import Policy
from grpo_jax.models.variables import VALUE, PyTree, Variables, token_values
from grpo_jax.models.vision.pictures import Pictures
from grpo_jax.training.batch import Batch, packed, required, unpacked


class Forward(NamedTuple):
    """A forward pass over a batch's completions: log-probability, entropy, value, Σπ² (or None), each f32 [P, G, T]."""

    logprobs: jax.Array
    entropy: jax.Array
    values: jax.Array | None
    sum_pi_squared: jax.Array | None = None


Metrics = dict[str, PyTree]
ForwardPass = Callable[..., Forward]
Objective = Callable[..., tuple[jax.Array, Metrics]]
"""objective(variables, batch, normaliser of the whole update) → (loss, metrics by part of the loss); the policy's takes
an entropy coefficient too, in place of the configured one."""


def make_forward(
    policy: Policy, *, temperature: float, allowed_tokens: jax.Array | None = None, trie: Trie | None = None
) -> ForwardPass:
    """Make the function (variables, batch, sum_pi_squared=False) → `Forward` of softmax(logits / temperature).

    `allowed_tokens` is bool [V], or None for all. `trie` replaces it if completions come from a catalogue, whose
    texts or forms it holds. If a batch has `kept` tokens, the distribution is over those.
    """

    allowed: dict[str, Any] = {"allowed_tokens": allowed_tokens} if trie is None else {"trie": trie}

    def forward(variables: Variables, batch: Batch, *, sum_pi_squared: bool = False) -> Forward:
        packing = batch.packing
        pictures: dict[str, Any] = {
            name: policy.encode_images(variables, part) if isinstance(part, Pictures) else part
            for name, part in batch.pictures.items()
        }
        rows: Any = (batch.tokens, batch.exists) if packing is None else packed(batch.tokens, packing)
        hidden = policy.forward_group(variables, batch.prompt_tokens, batch.prompt_mask, *rows, **pictures)
        nodes = None if trie is None or packing is None else packed(walk(trie, batch.tokens), packing)[0]
        kept: dict[str, Any] = allowed if batch.kept is None else {"allowed_tokens": (None, batch.kept)}
        score = partial(policy.token_logprobs, variables, hidden, rows[0], nodes=nodes, **kept)
        logprobs, entropy = score(temperature=temperature)
        squares = None
        if sum_pi_squared:  # at half the temperature, log-probabilities are 2 log π - log Σπ²
            squares = jnp.exp(2 * logprobs - score(temperature=temperature / 2)[0])
        values = token_values(variables[VALUE], hidden) if VALUE in variables else None
        whole = Forward(logprobs, entropy, values, squares)
        return whole if packing is None else jax.tree.map(lambda array: unpacked(array, batch.exists, packing), whole)

    return forward


def loss_options(section: AlgorithmSection, *, max_new_tokens: int) -> dict[str, Any]:
    """Return the keyword arguments of `losses.grpo_loss`: the config's preset with its overrides.

    Dr. GRPO divides by `max_new_tokens`, not by the width of the batch, which is trimmed.
    """
    options = dict(losses.PRESETS[section.preset])
    if options["aggregation"] == FixedLength():
        options["aggregation"] = FixedLength(max_new_tokens)
    bounds = {"low": section.clip_low, "high": section.clip_high}
    changed = {name: value for name, value in bounds.items() if value is not None} | section.surrogate.changes
    options["surrogate"] = dataclasses.replace(options["surrogate"], **changed)
    if section.kl_coef > 0:
        options["kl"] = losses.KLPenalty(section.kl_coef, corrected=section.kl_corrected)
    options["entropy_coef"] = section.entropy_coef
    return options


def make_policy_objective(
    forward: ForwardPass,
    options: dict[str, Any],
    ppo: PPOSection | None = None,
    *,
    off_policy_threshold: float | None = None,
) -> Objective:
    """Make the policy-gradient objective; `options` are keyword arguments of `losses.grpo_loss`.

    Without old log-probabilities, the current policy is the old one. The metrics are "policy" and up to two more.
    "sampler_gap" needs the sampler's log-probabilities: it is the mean over tokens of |log π_old - log π_sampler|,
    the same policy in trainer and sampler. "off_policy_masked" needs an `off_policy_threshold`: it is the share of
    tokens that `off_policy_mask` masks. With `ppo`, advantages are per token, and

        loss = policy loss + value_coef · value loss (mean over tokens)

    Both losses share one forward pass, and both gradients reach the policy's weights. With preset "bnpo" the policy
    loss is `ppo.ppo_loss`.
    """

    def objective(
        variables: Variables, batch: Batch, normaliser: PyTree, **adapted: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        passed = forward(variables, batch)
        old = jax.lax.stop_gradient(passed.logprobs) if batch.old_logprobs is None else batch.old_logprobs
        advantages, weights = required("advantages", batch.advantages), batch.token_weights
        metrics: Metrics = {}
        if off_policy_threshold is not None:
            drawn = required("rollout_logprobs", batch.rollout_logprobs)
            kept = off_policy_mask(passed.logprobs, drawn, advantages, batch.mask, threshold=off_policy_threshold)
            weights = kept if weights is None else weights * kept
            metrics["off_policy_masked"] = Mean(jnp.sum(select(batch.mask, ~kept)), count(batch.mask))
        loss, metrics["policy"] = losses.grpo_loss(
            passed.logprobs,
            old,
            advantages,
            batch.mask,
            normaliser=normaliser,
            ref_logprobs=batch.ref_logprobs,
            entropy=passed.entropy,
            token_weights=weights,
            **{**options, **adapted},
        )
        if batch.rollout_logprobs is not None:
            gap = select(batch.mask, jnp.abs(old - batch.rollout_logprobs))
            metrics["sampler_gap"] = Mean(jnp.sum(gap), count(batch.mask))
        if ppo is None:
            return loss, metrics
        value, metrics["value"] = value_loss(
            required("values", passed.values),
            batch.old_values,
            required("returns", batch.returns),
            batch.mask,
            normaliser=normaliser,
        )
        return loss + ppo.value_coef * value, metrics

    return objective


def make_supervised_objective(forward: ForwardPass) -> Objective:
    """Make `losses.sft_loss` of a batch with one completion per prompt: (loss, {"supervised": SFTMetrics})."""

    def objective(variables: Variables, batch: Batch, normaliser: PyTree) -> tuple[jax.Array, Metrics]:
        loss, metrics = losses.sft_loss(forward(variables, batch).logprobs, batch.mask, normaliser=normaliser)
        return loss, {"supervised": metrics}

    return objective


class Estimates(NamedTuple):
    """Measurements of a PPO batch before its first update; all but the first are scalars."""

    advantages: jax.Array  # [P, G], mean over each completion's tokens, after whitening
    completion_kl: jax.Array  # KL from the reference: k1 estimates summed over each completion; mean over rows
    value: jax.Array  # mean over tokens
    returns: jax.Array  # mean of the values' targets
    explained_variance: jax.Array  # 1 is perfect, 0 a constant, less is worse


def make_estimates(section: PPOSection) -> Callable[[Batch, jax.Array], tuple[Batch, Estimates]]:
    """Compile the function (batch with scores and old_logprobs, values) → (batch for training, estimates).

    Per-token rewards, with a KL penalty against `batch.ref_logprobs` (None: no KL), become advantages by GAE. The
    values' targets are advantage + value. Advantages are whitened over the batch's tokens.
    """

    def estimate(batch: Batch, values: jax.Array) -> tuple[Batch, Estimates]:
        mask = batch.mask
        old = required("old_logprobs", batch.old_logprobs)
        reference = old if batch.ref_logprobs is None else batch.ref_logprobs
        scores = required("scores", batch.scores)
        values = select(mask, values)
        rewards = kl_penalised_rewards(scores, old, reference, mask, kl_coef=section.kl_coef)
        # The state after the last token has value 0; GAE skips padding.
        following = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
        advantages = gae_advantages(rewards, following, gamma=section.gamma, gae_lambda=section.gae_lambda, mask=mask)
        returns = advantages + values
        divergence = select(mask, kl_divergence(old, reference, estimator="k1"))
        advantages = masked_whiten(advantages, mask)
        estimates = Estimates(
            advantages=masked_mean(advantages, mask, axis=-1),
            completion_kl=safe_divide(jnp.sum(divergence), count(mask.any(axis=-1))),
            value=masked_mean(values, mask),
            returns=masked_mean(returns, mask),
            explained_variance=explained_variance(values, returns, mask),
        )
        return batch._replace(advantages=advantages, scores=None, old_values=values, returns=returns), estimates

    return jax.jit(estimate)
