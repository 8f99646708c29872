"""What an update minimises: the forward pass over a batch's completions, and the loss that a config names.

Nothing here knows a concrete model or task: the policy comes as functions (`forward_group`, `token_logprobs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config.algorithm import AlgorithmSection
from grpo_jax.core import losses
from grpo_jax.core.aggregation import FixedLength, Mean
from grpo_jax.core.masking import count, select
from grpo_jax.core.trie import Trie, walk
from grpo_jax.models.variables import VALUE, token_values
from grpo_jax.models.vision.pictures import Pictures
from grpo_jax.training.batch import Batch, required
from grpo_jax.training.packing import packed, unpacked

Tree = Any


class Forward(NamedTuple):
    """A forward pass over a batch's completions: log-probability, entropy, value (or None), each f32 [P, G, T]."""

    logprobs: jax.Array
    entropy: jax.Array
    values: jax.Array | None


ForwardPass = Callable[[dict[str, Tree], Batch], Forward]
Objective = Callable[[dict[str, Tree], Batch, Any], tuple[jax.Array, dict[str, Any]]]


def make_forward(
    policy: Any, *, temperature: float, allowed_tokens: jax.Array | None = None, trie: Trie | None = None
) -> ForwardPass:
    """The function (variables, batch) → `Forward`.

    Args:
        policy: The policy's functions.
        temperature: Of the trained distribution, softmax(logits / temperature).
        allowed_tokens: bool [V], or None for all.
        trie: The texts of which each completion is one, in place of `allowed_tokens`.
    """
    options: dict[str, Any] = {"temperature": temperature, "allowed_tokens": allowed_tokens}
    if trie is not None:
        options = {"temperature": temperature, "trie": trie}

    def forward(variables: dict[str, Tree], batch: Batch) -> Forward:
        packing = batch.packing
        shown = {
            name: policy.encode_images(variables, pictures) if isinstance(pictures, Pictures) else pictures
            for name, pictures in batch.pictures.items()
        }
        rows = (batch.tokens, batch.exists) if packing is None else packed(batch.tokens, packing)
        hidden = policy.forward_group(variables, batch.prompt_tokens, batch.prompt_mask, *rows, **shown)
        nodes = None if trie is None or packing is None else packed(walk(trie, batch.tokens), packing)[0]
        logprobs, entropy = policy.token_logprobs(variables, hidden, rows[0], nodes=nodes, **options)
        values = token_values(variables[VALUE], hidden) if VALUE in variables else None
        whole = Forward(logprobs, entropy, values)
        return whole if packing is None else jax.tree.map(lambda array: unpacked(array, batch.exists, packing), whole)

    return forward


def loss_options(section: AlgorithmSection, *, max_new_tokens: int) -> dict[str, Any]:
    """The keyword arguments of `losses.grpo_loss` that a config names: a preset with its overrides.

    Args:
        section: Preset, clip bounds, KL and entropy.
        max_new_tokens: The token budget that Dr. GRPO divides by. A batch's width would not do: it is cut to its
            longest completion.
    """
    options = dict(losses.PRESETS[section.preset])
    if isinstance(options["aggregation"], FixedLength):
        options["aggregation"] = FixedLength(max_new_tokens)
    surrogate = options["surrogate"]
    bounds = {"low": section.clip_low, "high": section.clip_high}
    changed = {name: value for name, value in bounds.items() if value is not None}
    if changed:
        if not isinstance(surrogate, losses.Clip):
            raise ValueError(
                f"algorithm.clip_low/clip_high: expected null for preset {section.preset!r}, which has no clip bounds, "
                f"got {changed}"
            )
        options["surrogate"] = dataclasses.replace(surrogate, **changed)
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
        required("advantages", batch.advantages),
        batch.mask,
        normaliser=normaliser,
        ref_logprobs=batch.ref_logprobs,
        entropy=seen.entropy,
        token_weights=batch.token_weights,
        kl_weights=batch.kl_weights,
        **options,
    )
    measured: dict[str, Any] = {"policy": metrics}
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
