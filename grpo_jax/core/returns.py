"""Per-token rewards, returns over steps and turns, and generalised advantage estimation (GAE).

The last axis is time. A masked step does not exist: the recursions skip it without gamma, and its own result is 0.
Removing it from the arrays would give the same numbers.

Episodes of several turns have rewards `[P, G, U, N]` over U turns. An episode may end early: `exists` marks its turns,
which come first. NaN is a missing reward; a turn that does not exist has no reward.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from grpo_jax.core.advantages import group_mean
from grpo_jax.core.kl import kl_divergence
from grpo_jax.core.masking import as_float, as_mask, check_shape, masked_whiten, select


def _as_fraction(name: str, value: ArrayLike, like: jax.Array) -> jax.Array:
    """Broadcast gamma or gae_lambda to `like`'s shape; a value known at trace time must be in [0, 1]."""
    if not isinstance(value, jax.Array):
        value = np.asarray(value, np.float32 if isinstance(value, (int, np.integer)) else None)
        if ((value < 0) | (value > 1)).any():
            raise ValueError(f"{name} must be in [0, 1], got {value}")
    array = as_float(name, value).astype(like.dtype)
    check_shape(name, array, (), like.shape)
    return jnp.broadcast_to(array, like.shape)


def _as_step_mask(name: str, mask: ArrayLike | None, like: jax.Array, default: bool) -> jax.Array:
    return jnp.full(like.shape, default) if mask is None else as_mask(name, mask, like.shape)


def _backwards(add: jax.Array, carry: jax.Array, start: jax.Array) -> jax.Array:
    """Compute x[t] = add[t] + carry[t] · x[t + 1] with x[T] = start; a carry of 0 stops even a NaN."""

    def step(later, now):
        addend, factor = now
        value = addend + factor * jnp.where(factor == 0, 0, later)
        return value, value

    over_time = (jnp.moveaxis(add, -1, 0), jnp.moveaxis(carry, -1, 0))
    return jnp.moveaxis(jax.lax.scan(step, start, over_time, reverse=True)[1], 0, -1)


def kl_penalised_rewards(
    scores: ArrayLike, logprobs: ArrayLike, ref_logprobs: ArrayLike, mask: ArrayLike, *, kl_coef: ArrayLike
) -> jax.Array:
    """Compute PPO's per-token reward: a KL penalty at each token, plus the score at the last one.

        r[t] = -kl_coef · KL[t] + (score if t is the row's last token else 0)

    From InstructGPT (https://arxiv.org/abs/2203.02155) and Ziegler et al. (https://arxiv.org/abs/1909.08593).
    The estimator is k1: the penalties of a row add up to its log ratio. The expected return is then the score minus
    kl_coef times the true KL divergence. The result is a constant to gradients. A row without tokens is all 0: its
    score has no token.

    Args:
        scores: `[..]`, floating: one score for each row.
        logprobs: `[.., T]`, floating, of the policy that sampled the tokens.
        ref_logprobs: `[.., T]`, of the reference policy.
        mask: bool `[.., T]`.
        kl_coef: the penalty's weight, a scalar; it may be traced.

    Returns:
        `[.., T]`, at least float32; 0 where the mask is False.

    Raises:
        ValueError: shapes that do not match.
    """
    logprobs = as_float("logprobs", logprobs)
    mask = as_mask("mask", mask, logprobs.shape)
    ref_logprobs = as_float("ref_logprobs", ref_logprobs, shape=logprobs.shape).astype(logprobs.dtype)
    scores = as_float("scores", scores, shape=logprobs.shape[:-1]).astype(logprobs.dtype)
    kl_coef = jnp.asarray(kl_coef, logprobs.dtype)
    check_shape("kl_coef", kl_coef, ())
    penalty = kl_divergence(select(mask, logprobs), select(mask, ref_logprobs), estimator="k1")
    places = jnp.arange(mask.shape[-1])
    last = mask & (places == jnp.max(jnp.where(mask, places, -1), axis=-1, keepdims=True))
    return jax.lax.stop_gradient(select(mask, -kl_coef * penalty) + select(last, scores[..., None]))


def overlong_penalty(lengths: ArrayLike, *, limit: int, buffer: int) -> jax.Array:
    """Compute DAPO's soft overlong punishment from completion lengths.

        0 up to limit - buffer tokens, then linear, -1 from the limit on

    From DAPO, equation 13 (https://arxiv.org/abs/2503.14476). Add it to the reward.

    Args:
        lengths: int `[..]`, tokens of each completion, including EOS.
        limit: length with the full punishment.
        buffer: number of tokens over which it grows, at least 1.

    Returns:
        `[..]`, float32, from -1 to 0.
    """
    if buffer < 1:
        raise ValueError(f"buffer must be at least 1, got {buffer}")
    return jnp.clip((limit - buffer - jnp.asarray(lengths, jnp.float32)) / buffer, -1.0, 0.0)


def discounted_returns(rewards: ArrayLike, *, gamma: ArrayLike, mask: ArrayLike | None = None) -> jax.Array:
    """Compute discounted returns.

        R[t] = r[t] + γ[t] · R[t + 1],  R[T] = 0

    Args:
        rewards: `[.., T]`, floating.
        gamma: γ, a scalar or `[.., T]`; 0 at the end of an episode, if another episode follows.
        mask: bool `[.., T]`, the steps that exist; all by default.

    Returns:
        `[.., T]`, at least float32; 0 where the mask is False.

    Raises:
        ValueError: a shape that does not match, or a gamma outside [0, 1].
    """
    rewards = as_float("rewards", rewards)
    gamma = _as_fraction("gamma", gamma, rewards)
    exists = _as_step_mask("mask", mask, rewards, True)
    carry = jnp.where(exists, gamma, 1)
    return select(exists, _backwards(select(exists, rewards), carry, jnp.zeros_like(rewards[..., 0])))


def gae_advantages(
    rewards: ArrayLike,
    values: ArrayLike,
    *,
    gamma: ArrayLike,
    gae_lambda: ArrayLike,
    mask: ArrayLike | None = None,
    boundary: ArrayLike | None = None,
    next_values: ArrayLike | None = None,
) -> jax.Array:
    """Compute generalised advantage estimates, GAE(γ, λ).

        δ[t] = r[t] + γ[t] · V(s[t + 1]) - V(s[t])
        A[t] = δ[t] + γ[t] · λ[t] · A[t + 1],  A[T] = 0

    λ = 0 gives the one-step residual, λ = 1 the return minus the value. The value function's targets are
    `advantages + values[..., :-1]`. From https://arxiv.org/abs/1506.02438.

    The arguments depend on the end of an episode:

    - Termination (the pole fell, the completion has ended): `gamma` is 0 at that step. Nothing after it counts.
    - Arrays that end before the episode: the last step bootstraps from `values[..., T]`.
    - Truncation by a time limit inside the arrays: the step keeps its gamma, so δ bootstraps, and `boundary` is True,
      so the sum stops. After an automatic reset, `values[..., t + 1]` belongs to the next episode's first state:
      pass the value of the truncated state in `next_values`.
    - Padding (rows of different lengths): `mask` is False. A row's last step then bootstraps from `values[..., T]`.
      For finished completions that value must be 0, or a `gamma` of 0 must exclude it.

    Args:
        rewards: `[.., T]`, floating.
        values: `[.., T + 1]`, V(s) of each step's state and of the state after the last; `[.., T]` suffices with
            `next_values`.
        gamma: γ, a scalar or `[.., T]`.
        gae_lambda: λ, a scalar or `[.., T]`.
        mask: bool `[.., T]`, the steps that exist; all by default.
        boundary: bool `[.., T]`, steps after which another episode follows; none by default.
        next_values: `[.., T]`, V(s[t + 1]) of each step; by default the value of the next step that exists.

    Returns:
        `[.., T]`, at least float32; 0 where the mask is False.

    Raises:
        ValueError: a shape that does not match, or a gamma or gae_lambda outside [0, 1].
    """
    rewards = as_float("rewards", rewards)
    gamma = _as_fraction("gamma", gamma, rewards)
    gae_lambda = _as_fraction("gae_lambda", gae_lambda, rewards)
    exists = _as_step_mask("mask", mask, rewards, True)
    stops = _as_step_mask("boundary", boundary, rewards, False)
    values, following = _values(values, next_values, rewards, None if mask is None else exists)
    # Values after a termination may be undefined, so they are never read.
    residual = select(exists, rewards) + select(exists, gamma) * select(exists & (gamma != 0), following)
    residual -= select(exists, values)
    carry = jnp.where(exists, select(~stops, gamma * gae_lambda), 1)
    return select(exists, _backwards(residual, carry, jnp.zeros_like(rewards[..., 0])))


def _values(values, next_values, rewards, exists) -> tuple[jax.Array, jax.Array]:
    """Return V(s[t]) and V(s[t + 1]), both `[.., T]`."""
    values = as_float("values", values).astype(rewards.dtype)
    steps = rewards.shape[-1]
    shapes = [(*rewards.shape[:-1], steps + 1)] + ([rewards.shape] if next_values is not None else [])
    check_shape("values", values, *shapes)
    here = values[..., :steps]
    if next_values is not None:
        return here, as_float("next_values", next_values, shape=rewards.shape).astype(rewards.dtype)
    if exists is None:
        return here, values[..., 1:]
    # Each masked place passes on the value after it, so every step reads the next step that exists.
    filled = _backwards(select(exists, here), (~exists).astype(rewards.dtype), values[..., steps])
    return here, jnp.concatenate([filled[..., 1:], values[..., steps:]], axis=-1)


def normalised_returns(returns: ArrayLike, *, mask: ArrayLike, eps: float = 1e-4) -> jax.Array:
    """Compute GRPO's advantages for per-step rewards: returns normalised over all steps of a group.

        A[.., g, t] = (R[.., g, t] - mean) / (std + eps)

    Mean and sample standard deviation are over all existing steps of a group's G episodes. This is GRPO's "process
    supervision" (https://arxiv.org/abs/2402.03300, section 4.1.3), also used by its CartPole implementations. Every
    step counts once, so long episodes weigh more. Returns that are all equal give 0.

    Args:
        returns: `[.., G, T]`, floating: `discounted_returns` of episodes from the same start.
        mask: bool `[.., G, T]`, the steps that exist.
        eps: added to the standard deviation.

    Returns:
        `[.., G, T]`, at least float32; 0 where the mask is False.

    Raises:
        ValueError: fewer than two axes, a group of one, a mask of another shape.
    """
    returns = as_float("returns", returns)
    if returns.ndim < 2 or returns.shape[-2] < 2:
        raise ValueError(f"returns must be [.., G, T] with at least 2 episodes in a group, got shape {returns.shape}")
    return masked_whiten(returns, as_mask("mask", mask, returns.shape), axis=(-2, -1), eps=eps)


def _as_turns(rewards: ArrayLike, exists: ArrayLike) -> tuple[jax.Array, jax.Array]:
    rewards = as_float("rewards", rewards, ndim=4)
    return rewards, as_mask("exists", exists, rewards.shape[:3])


def last_turn(rewards: ArrayLike, exists: ArrayLike) -> jax.Array:
    """Return the rewards of each episode's last turn.

    Args:
        rewards: `[P, G, U, N]`, floating; NaN is missing.
        exists: bool `[P, G, U]`.

    Returns:
        `[P, G, N]`; NaN if an episode has no turn.

    Raises:
        ValueError: shapes that do not match.
    """
    rewards, exists = _as_turns(rewards, exists)
    last = jnp.max(jnp.where(exists, jnp.arange(exists.shape[-1]), 0), axis=-1)
    rewards_of_last = jnp.take_along_axis(rewards, last[..., None, None], axis=2)[:, :, 0]
    return jnp.where(exists.any(axis=-1)[..., None], rewards_of_last, jnp.nan)


def turn_returns(rewards: ArrayLike, exists: ArrayLike, *, gamma: float) -> jax.Array:
    """Compute discounted returns over turns, separately for each objective.

        R[u] = r[u] + γ · R[u + 1]

    A missing reward of an existing turn counts as the group's mean of that objective at that turn, as in `sum_rewards`.
    If it is missing in the whole group, it adds nothing: a judge may fail, or score only the last turn.

    Args:
        rewards: `[P, G, U, N]`, floating; NaN is missing.
        exists: bool `[P, G, U]`.
        gamma: γ in [0, 1].

    Returns:
        `[P, G, U, N]`, at least float32; NaN for a turn that does not exist, or with no reward from it onwards.

    Raises:
        ValueError: shapes that do not match, or a gamma outside [0, 1].
    """
    rewards, exists = _as_turns(rewards, exists)
    there = jnp.broadcast_to(exists[..., None], rewards.shape)
    present = there & ~jnp.isnan(rewards)
    filled = select(there, jnp.where(present, rewards, group_mean(rewards, present)))
    over_turns = [jnp.moveaxis(array, 2, -1) for array in (filled, there)]
    returns = jnp.moveaxis(discounted_returns(over_turns[0], gamma=gamma, mask=over_turns[1]), -1, 2)
    some = jnp.flip(jnp.cumsum(jnp.flip(present, 2), axis=2), 2) > 0
    return jnp.where(there & some, returns, jnp.nan)


def turn_advantages(
    returns: ArrayLike, turn: ArrayLike, mask: ArrayLike, estimate: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Return each token's advantage: that of its turn, compared with the same turn of the group.

    Args:
        returns: `[P, G, U, N]`, floating, of `turn_returns`; NaN is missing.
        turn: int `[P, G, T]`, the turn of each token, from 0.
        mask: bool `[P, G, T]`, the tokens to train on.
        estimate: (rewards `[P, G, N]`, mask `[P, G, T]` of their tokens) → advantages `[P, G]`: an estimator of
            single-turn advantages. It must give 0 for a turn without signal or without a counterpart in the group.

    Returns:
        `[P, G, T]`, at least float32; 0 where the mask is False.

    Raises:
        ValueError: shapes that do not match.
    """
    returns, turn = as_float("returns", returns, ndim=4), jnp.asarray(turn)
    check_shape("turn", turn, (*returns.shape[:2], turn.shape[-1]))
    mask = as_mask("mask", mask, turn.shape)
    each = [estimate(returns[:, :, u], mask & (turn == u)) for u in range(returns.shape[2])]
    places = jnp.clip(turn, 0, returns.shape[2] - 1)
    return select(mask, jnp.take_along_axis(jnp.stack(each, axis=-1), places, axis=-1))
