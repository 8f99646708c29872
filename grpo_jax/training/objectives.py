"""What an update minimises: a batch, the forward pass over its completions, and the loss that a config names.

Nothing here knows a concrete model or task: the policy comes as functions (`forward_group`, `head`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config import AlgorithmSection
from grpo_jax.core import losses
from grpo_jax.core.aggregation import FixedLength, Mean
from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.core.masking import count, select
from grpo_jax.models.value_head import VALUE, token_values
from grpo_jax.training.packing import Packing, packed, unpacked

Tree = Any


class Batch(NamedTuple):
    """One sampled batch on the policy's device; P may be a minibatch's share.

    Attributes:
        prompt_tokens: i32 [P, L], left-padded.
        prompt_mask: bool [P, L].
        tokens: i32 [P, G, T].
        mask: bool [P, G, T], EOS included.
        advantages: f32 [P, G], or [P, G, T] under PPO; None where they wait for the values.
        scores: f32 [P, G], the rewards' sum that PPO's advantages are made of, or None.
        old_logprobs: f32 [P, G, T] of the policy that sampled, or None with one update per batch.
        ref_logprobs: f32 [P, G, T] of the reference, or None where nothing is measured against one.
        rollout_logprobs: f32 [P, G, T] of the policy as the sampler computed them: what the gap between sampler and
            trainer is measured against. None measures none.
        sampler_logprobs: f32 [P, G, T] of the distribution drawn from, or None without importance correction.
        token_weights: f32 [P, G, T] on each token's policy gradient, or None for 1.
        old_values: f32 [P, G, T] before the first update, or None without a value head.
        returns: f32 [P, G, T], what the values learn, or None.
        packing: Rows that short completions share, or None for a row each.
    """

    prompt_tokens: jax.Array
    prompt_mask: jax.Array
    tokens: jax.Array
    mask: jax.Array
    advantages: jax.Array | None = None
    scores: jax.Array | None = None
    old_logprobs: jax.Array | None = None
    ref_logprobs: jax.Array | None = None
    rollout_logprobs: jax.Array | None = None
    sampler_logprobs: jax.Array | None = None
    token_weights: jax.Array | None = None
    old_values: jax.Array | None = None
    returns: jax.Array | None = None
    packing: Packing | None = None


class Forward(NamedTuple):
    """A forward pass over a batch's completions: log-probability, entropy, value (or None), each f32 [P, G, T]."""

    logprobs: jax.Array
    entropy: jax.Array
    values: jax.Array | None


ForwardPass = Callable[[dict[str, Tree], Batch], Forward]
Objective = Callable[[dict[str, Tree], Batch, Any], tuple[jax.Array, dict[str, Any]]]


def make_forward(policy: Any, *, temperature: float, allowed_tokens: jax.Array | None = None) -> ForwardPass:
    """The function (variables, batch) → `Forward`.

    Args:
        policy: The policy's functions.
        temperature: Of the trained distribution, softmax(logits / temperature).
        allowed_tokens: bool [V], or None for all.
    """

    def forward(variables: dict[str, Tree], batch: Batch) -> Forward:
        rows = (batch.tokens, batch.mask) if batch.packing is None else packed(batch.tokens, batch.packing)
        hidden = policy.forward_group(variables, batch.prompt_tokens, batch.prompt_mask, *rows)
        logprobs, entropy = token_logprobs(
            hidden, policy.head(variables), rows[0], temperature=temperature, allowed_tokens=allowed_tokens
        )
        values = token_values(variables[VALUE], hidden) if VALUE in variables else None
        seen = Forward(logprobs, entropy, values)
        if batch.packing is None:
            return seen
        return jax.tree.map(lambda array: unpacked(array, batch.mask, batch.packing), seen)

    return forward


def loss_options(section: AlgorithmSection, *, max_new_tokens: int) -> dict[str, Any]:
    """The keyword arguments of `losses.grpo_loss` that a config names: a preset with its overrides.

    Args:
        section: Preset, clip bounds, KL and entropy.
        max_new_tokens: The token budget that Dr. GRPO divides by. A batch's width would not do: it follows the longest
            completion.
    """
    options = dict(losses.PRESETS[section.preset])
    if isinstance(options["aggregation"], FixedLength):
        options["aggregation"] = FixedLength(max_new_tokens)
    surrogate = options["surrogate"]
    bounds = {"low": section.clip_low, "high": section.clip_high}
    given = {name: value for name, value in bounds.items() if value is not None}
    if given:
        if not isinstance(surrogate, losses.Clip):
            raise ValueError(
                f"algorithm.clip_low/clip_high: expected null for preset {section.preset!r}, which has no clip bounds, "
                f"got {given}"
            )
        options["surrogate"] = dataclasses.replace(surrogate, **given)
    if section.kl_coef > 0:
        options["kl"] = losses.KLPenalty(
            section.kl_coef,
            estimator=section.kl_estimator,
            corrected=section.kl_corrected,
            straight_through=section.kl_straight_through,
        )
    options["entropy_coef"] = section.entropy_coef
    return options


def policy_loss(
    seen: Forward, batch: Batch, options: dict[str, Any], normaliser: Any
) -> tuple[jax.Array, dict[str, Any]]:
    """`losses.grpo_loss` of a forward pass; without old log-probabilities the policy is its own old one.

    Returns:
        (loss, {"policy": GRPOMetrics, "sampler_gap": Mean}). The gap, where the batch has the sampler's
        log-probabilities, is the mean over tokens of |log π_old - log π_sampler|: the same policy, as trainer and
        sampler compute it.
    """
    old = jax.lax.stop_gradient(seen.logprobs) if batch.old_logprobs is None else batch.old_logprobs
    loss, metrics = losses.grpo_loss(
        seen.logprobs,
        old,
        batch.advantages,
        batch.mask,
        normaliser=normaliser,
        ref_logprobs=batch.ref_logprobs,
        entropy=seen.entropy,
        token_weights=batch.token_weights,
        **options,
    )
    measured = {"policy": metrics}
    if batch.rollout_logprobs is not None:
        gap = select(batch.mask, jnp.abs(old - batch.rollout_logprobs))
        measured["sampler_gap"] = Mean(jnp.sum(gap), count(batch.mask))
    return loss, measured


def make_policy_objective(forward: ForwardPass, options: dict[str, Any]) -> Objective:
    """The policy-gradient objective of a batch.

    Args:
        forward: Of `make_forward`.
        options: Keyword arguments of `losses.grpo_loss`.

    Returns:
        objective(variables, batch, normaliser) → (loss, what `policy_loss` measured).
    """

    def objective(variables: dict[str, Tree], batch: Batch, normaliser: Any) -> tuple[jax.Array, dict[str, Any]]:
        return policy_loss(forward(variables, batch), batch, options, normaliser)

    return objective
