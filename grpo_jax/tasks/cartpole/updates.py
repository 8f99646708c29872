"""What an iteration on CartPole does with the steps it has played: advantages, and the updates made from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.core.advantages import (
    Condition,
    condition_rewards,
    distinct_advantages,
    gdpo_advantages,
    groups_without_signal,
    sum_rewards,
)
from grpo_jax.core.aggregation import Mean, loss_normaliser
from grpo_jax.core.losses import KLPenalty, grpo_loss
from grpo_jax.core.masking import masked_whiten
from grpo_jax.core.ppo import ppo_loss, value_loss
from grpo_jax.core.returns import discounted_returns, gae_advantages, normalised_returns
from grpo_jax.core.surrogates import Clip
from grpo_jax.tasks.cartpole.config import CartPoleAlgorithm, CartPoleConfig
from grpo_jax.tasks.cartpole.environment import MAX_STEPS, Episodes, Steps, largest, objective_rewards

PyTree = Any
Apply = Callable[[PyTree, jax.Array], jax.Array]

# Steps of all episodes whose gradient is taken at once. Short enough to stay in the cache and to stop soon after the
# longest episode; a divisor of 500.
_CHUNK = 50


class GroupBatch(NamedTuple):
    """What GRPO and GDPO learn from, time first.

    Attributes:
        observations: f32 `[T, B, 4]`.
        actions: bool `[T, B]`.
        old_logprobs: f32 `[T, B]`.
        advantages: f32 `[T, B]`.
        mask: bool `[T, B]`.
    """

    observations: jax.Array
    actions: jax.Array
    old_logprobs: jax.Array
    advantages: jax.Array
    mask: jax.Array


class StepBatch(NamedTuple):
    """What PPO learns from, time first.

    Attributes:
        observations: f32 `[T, B, 4]`.
        actions: bool `[T, B]`.
        old_logprobs: f32 `[T, B]`.
        advantages: f32 `[T, B]`.
        values: f32 `[T, B]`, before the updates.
        returns: f32 `[T, B]`, their targets.
    """

    observations: jax.Array
    actions: jax.Array
    old_logprobs: jax.Array
    advantages: jax.Array
    values: jax.Array
    returns: jax.Array


def action_logprobs(log_odds: jax.Array, right: jax.Array) -> jax.Array:
    """Log-probability of each action: log σ(±log-odds)."""
    return -jax.nn.softplus(jnp.where(right, -log_odds, log_odds))


def action_entropy(log_odds: jax.Array) -> jax.Array:
    """Entropy of the choice between left and right."""
    return jax.nn.softplus(log_odds) - log_odds * jax.nn.sigmoid(log_odds)


def _weights(algorithm: CartPoleAlgorithm) -> jax.Array:
    return jnp.asarray(algorithm.weights or [1.0] * len(algorithm.objectives), jnp.float32)


def episode_rewards(algorithm: CartPoleAlgorithm, positions: jax.Array, mask: jax.Array) -> jax.Array:
    """Rewards of every step, `[P, G, T]` → `[P, G, T, N]`; 0 after the end, "centred" conditioned if asked for.

    The condition is on the episode: its steps' "centred" counts where the episode stayed upright for the threshold.
    """
    rewards = jnp.stack([objective_rewards(name, positions, algorithm.width) for name in algorithm.objectives], -1)
    rewards = jnp.where(mask[..., None], rewards, 0)
    if not algorithm.condition:
        return rewards
    centred = algorithm.objectives.index("centred")
    lengths = jnp.broadcast_to(jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32), mask.shape)
    groups = mask.shape[0]
    pairs = jnp.stack([rewards[..., centred], lengths], axis=-1).reshape(groups, -1, 2)
    counted = condition_rewards(pairs, [Condition(0, 1, algorithm.condition)])[..., 0]
    return rewards.at[..., centred].set(counted.reshape(mask.shape))


def group_step_advantages(
    algorithm: CartPoleAlgorithm, rewards: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Advantages of every step from the rewards of groups of episodes.

    With the discounted returns R[p, g, t, n] = Σ_{u ≥ t} γ^(u - t) r[p, g, u, n] of objective n,

        grpo:  A[p, g, t] = (Σ_n w[n] R[p, g, t, n] - mean) / (std + eps)
        gdpo:  A[p, g, t] = whiten(Σ_n w[n] (R[p, g, t, n] - mean_n) / (std_n + eps))

    with mean and std over all existing steps (g, t) of group p: a step is a member of its group, as an answer is in
    the papers. GDPO whitens over all existing steps of the batch. A group whose episodes all have the same sum of
    rewards teaches nothing: what its returns differ by is how late a step is. There A is 0 (per objective under gdpo).

    Args:
        algorithm: Which of the two, discount, weights.
        rewards: f32 `[P, G, T, N]`.
        mask: bool `[P, G, T]`.

    Returns:
        Advantages f32 `[P, G, T]`, and which groups are without signal, bool `[P, N]`.
    """
    weights = _weights(algorithm)
    totals = jnp.sum(rewards, axis=2)
    dead = groups_without_signal(totals)
    if algorithm.name == "grpo":
        joined = discounted_returns(rewards @ weights, discount=algorithm.discount, mask=mask)
        silent = groups_without_signal(sum_rewards(totals, weights=weights))
        return jnp.where(silent[:, None, None], 0, normalised_returns(joined, mask=mask)), dead
    each = discounted_returns(jnp.moveaxis(rewards, -1, 0), discount=algorithm.discount, mask=_repeat(mask, weights))
    each = jnp.where(mask[..., None], jnp.moveaxis(each, 0, -1) * ~dead[:, None, None, :], jnp.nan)
    groups, size, steps, objectives = each.shape
    members = each.reshape(groups, size * steps, objectives)  # NaN, a missing reward, takes no part
    advantages = gdpo_advantages(members, weights=weights, whiten="sequence")
    return advantages.reshape(mask.shape), dead


def _repeat(mask: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.broadcast_to(mask, (weights.shape[0], *mask.shape))


def group_batch(config: CartPoleConfig, episodes: Episodes) -> tuple[GroupBatch, dict[str, jax.Array]]:
    """Advantages for the episodes of P groups of G, and the figures of the rollout."""
    algorithm, shape = config.algorithm, (config.rollout.groups, config.rollout.group_size)

    def grouped(x):  # [T, B] → [P, G, T]
        return x.T.reshape(*shape, MAX_STEPS)

    mask = grouped(episodes.mask)
    rewards = episode_rewards(algorithm, grouped(episodes.positions), mask)
    advantages, dead = group_step_advantages(algorithm, rewards, mask)
    batch = GroupBatch(
        episodes.observations,
        episodes.actions,
        action_logprobs(episodes.log_odds, episodes.actions),
        advantages.reshape(-1, MAX_STEPS).T,
        episodes.mask,
    )
    figures = {"episode_return": jnp.mean(jnp.sum(episodes.mask, axis=0, dtype=jnp.float32))}
    # At their first step, where they are still in one state: how many episodes of a group are told apart.
    figures["distinct_advantages"] = jnp.mean(distinct_advantages(advantages[:, :, 0], axis=1), dtype=jnp.float32)
    for index, name in enumerate(algorithm.objectives):
        figures[f"reward/{name}/mean"] = jnp.mean(jnp.sum(rewards[..., index], axis=2))
        figures[f"dead_groups/{name}"] = jnp.mean(dead[:, index], dtype=jnp.float32)
    return batch, figures


def group_updates(
    config: CartPoleConfig, apply: Apply, optimizer: Any, params: PyTree, opt_state: PyTree, batch: GroupBatch
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """One update per epoch, each from all steps; the gradient is summed over chunks of time up to the last step."""
    algorithm = config.algorithm
    whole = loss_normaliser(batch.mask, "token")
    chunks = jax.tree.map(lambda x: x.reshape(MAX_STEPS // _CHUNK, _CHUNK, *x.shape[1:]), batch)
    used = largest(jnp.sum(chunks.mask.any(axis=(1, 2)), dtype=jnp.int32))

    def loss(params, chunk):
        log_odds = apply(params["policy"], chunk.observations)
        return grpo_loss(
            action_logprobs(log_odds, chunk.actions),
            chunk.old_logprobs,
            chunk.advantages,
            chunk.mask,
            surrogate=Clip(algorithm.clip_low, algorithm.clip_high),
            aggregation="token",
            normaliser=whole,
            kl=KLPenalty(algorithm.kl_coef) if algorithm.kl_coef else None,
            ref_logprobs=chunk.old_logprobs,
            entropy=action_entropy(log_odds),
            entropy_coef=algorithm.entropy_coef,
        )

    gradient = jax.value_and_grad(loss, has_aux=True)
    part = jax.tree.map(lambda x: x[0], chunks)
    shapes = jax.eval_shape(gradient, params, part)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def epoch(carry, _):
        params, opt_state = carry

        def add(loop):
            index, total = loop
            now = gradient(params, jax.tree.map(lambda x: x[index], chunks))
            return index + 1, jax.tree.map(jnp.add, total, now)

        _, ((value, metrics), grads) = jax.lax.while_loop(lambda loop: loop[0] < used, add, (jnp.int32(0), zeros))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        figures = _figures(value, metrics._asdict(), grads)
        return (optax.apply_updates(params, updates), opt_state), figures

    (params, opt_state), figures = jax.lax.scan(epoch, (params, opt_state), length=algorithm.epochs)
    return params, opt_state, jax.tree.map(jnp.mean, figures)


def step_batch(config: CartPoleConfig, apply: Apply, params: PyTree, steps: Steps) -> tuple[StepBatch, dict]:
    """GAE for steps with automatic reset: 0 after a termination, the value of the cut-off state at a time limit."""
    algorithm = config.algorithm
    values = apply(params["value"], steps.observations)
    next_values = apply(params["value"], steps.next_observations)
    positions = steps.next_observations[..., 0]
    each = [objective_rewards(name, positions, algorithm.width) for name in algorithm.objectives]
    rewards = jnp.stack(each, axis=-1) @ _weights(algorithm)
    ended = steps.terminated | steps.truncated
    advantages = gae_advantages(
        rewards.T,
        values.T,
        discount=jnp.where(steps.terminated, 0.0, algorithm.discount).T,
        trace=algorithm.trace,
        boundary=ended.T,
        next_values=next_values.T,
    ).T
    logprobs = action_logprobs(steps.log_odds, steps.actions)
    batch = StepBatch(steps.observations, steps.actions, logprobs, advantages, values, advantages + values)
    finished = Mean(jnp.sum(jnp.where(ended, steps.lengths, 0), dtype=jnp.float32), jnp.sum(ended, dtype=jnp.float32))
    figures = {"episode_return": jnp.where(jnp.greater(finished.weight, 0), finished.value(), jnp.nan)}
    figures |= {f"reward/{name}/mean": jnp.mean(x) for name, x in zip(algorithm.objectives, each, strict=True)}
    return batch, figures


def step_updates(
    config: CartPoleConfig,
    apply: Apply,
    optimizer: Any,
    params: PyTree,
    opt_state: PyTree,
    batch: StepBatch,
    key: jax.Array,
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """PPO's updates: the times are shuffled and cut into minibatches, each with all carts, for all epochs alike.

    To shuffle single steps, and anew for each epoch, would take longer than to learn from them: gathering costs more
    here than the network.
    """
    algorithm, total = config.algorithm, batch.actions.shape[0]

    def loss(params, part):
        mask = jnp.ones_like(part.actions)
        log_odds = apply(params["policy"], part.observations)
        policy, metrics = ppo_loss(
            action_logprobs(log_odds, part.actions),
            part.old_logprobs,
            masked_whiten(part.advantages, mask),
            mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            entropy=action_entropy(log_odds),
            entropy_coef=algorithm.entropy_coef,
        )
        values = apply(params["value"], part.observations)
        value, of_value = value_loss(values, part.values, part.returns, mask, clip=algorithm.value_clip)
        seen = metrics._asdict() | {"value_loss": of_value.loss}
        return policy + algorithm.value_coef * value, (seen, of_value.explained_variance())

    gradient = jax.value_and_grad(loss, has_aux=True)

    def update(carry, part):
        params, opt_state = carry
        (value, (metrics, explained)), grads = gradient(params, part)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        figures = _figures(value, metrics, grads) | {"explained_variance": explained}
        return (optax.apply_updates(params, updates), opt_state), figures

    order = jax.random.permutation(key, total)
    parts = jax.tree.map(lambda x: x[order].reshape(algorithm.minibatches, -1, *x.shape[1:]), batch)

    def epoch(carry, _):
        return jax.lax.scan(update, carry, parts)

    (params, opt_state), figures = jax.lax.scan(epoch, (params, opt_state), length=algorithm.epochs)
    return params, opt_state, jax.tree.map(jnp.mean, figures)


def _figures(loss: jax.Array, metrics: dict[str, Mean], grads: PyTree) -> dict[str, jax.Array]:
    """The update's part of a metrics row, under the names that language runs use."""
    names = {"policy_loss": "policy_loss", "kl": "kl", "entropy": "entropy", "ratio": "mean_ratio", "old_kl": "old_kl",
             "clip_low": "clip_low", "clip_high": "clip_high", "value_loss": "value_loss"}  # fmt: skip
    named = {names[name]: mean.value() for name, mean in metrics.items() if name in names}
    return {
        "loss": loss,
        **named,
        "grad_norm": jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads))),
    }
