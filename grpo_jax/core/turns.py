"""Episodes of several turns: what each turn is worth, and from there an advantage for each token.

Rewards are `[P, G, U, N]` over U turns. An episode may end before its last turn: `exists` says which turns there are,
the first ones of each completion. NaN is a missing reward, as everywhere; a turn that does not exist has none.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.core.advantages import group_mean
from grpo_jax.core.masking import as_float, as_mask, check_shape, select
from grpo_jax.core.returns import discounted_returns


def _as_turns(rewards: ArrayLike, exists: ArrayLike) -> tuple[jax.Array, jax.Array]:
    rewards = as_float("rewards", rewards, ndim=4)
    return rewards, as_mask("exists", exists, rewards.shape[:3])


def last_turn(rewards: ArrayLike, exists: ArrayLike) -> jax.Array:
    """Rewards of the last turn of each episode.

    Args:
        rewards: `[P, G, U, N]`, floating; NaN is missing.
        exists: bool `[P, G, U]`.

    Returns:
        `[P, G, N]`; NaN where an episode has no turn.

    Raises:
        ValueError: shapes that do not fit.
    """
    rewards, exists = _as_turns(rewards, exists)
    last = jnp.max(jnp.where(exists, jnp.arange(exists.shape[-1]), 0), axis=-1)
    rewards_of_last = jnp.take_along_axis(rewards, last[..., None, None], axis=2)[:, :, 0]
    return jnp.where(exists.any(axis=-1)[..., None], rewards_of_last, jnp.nan)


def turn_returns(rewards: ArrayLike, exists: ArrayLike, *, gamma: float) -> jax.Array:
    """Discounted sums over each turn and those after it, of each objective by itself.

        R[u] = r[u] + γ · R[u + 1]

    A reward that is missing at a turn which exists counts as its group's mean for that objective at that turn, and as
    nothing where the whole group lacks it (`sum_rewards` has the same rule): a judge that failed pulls neither way,
    and one that speaks at the end alone has nothing to say before.

    Args:
        rewards: `[P, G, U, N]`, floating; NaN is missing.
        exists: bool `[P, G, U]`.
        gamma: γ in [0, 1].

    Returns:
        `[P, G, U, N]`, at least float32; NaN where a turn does not exist, and where neither it nor any later turn has
        a reward.

    Raises:
        ValueError: shapes that do not fit, or a gamma outside [0, 1].
    """
    rewards, exists = _as_turns(rewards, exists)
    there = jnp.broadcast_to(exists[..., None], rewards.shape)
    present = there & ~jnp.isnan(rewards)
    means = group_mean(rewards, present)
    filled = select(there, jnp.where(present, rewards, means))
    over_turns = [jnp.moveaxis(array, 2, -1) for array in (filled, there)]
    returns = jnp.moveaxis(discounted_returns(over_turns[0], gamma=gamma, mask=over_turns[1]), -1, 2)
    some = jnp.flip(jnp.cumsum(jnp.flip(present, 2), axis=2), 2) > 0
    return jnp.where(there & some, returns, jnp.nan)


def turn_advantages(
    returns: ArrayLike,
    turn: ArrayLike,
    mask: ArrayLike,
    estimate: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """An advantage for each token: that of its turn, which is compared with the same turn of the group.

    Args:
        returns: `[P, G, U, N]`, floating, of `turn_returns`; NaN is missing.
        turn: int `[P, G, T]`, the turn of each token, from 0.
        mask: bool `[P, G, T]`, the tokens that are learned from.
        estimate: (rewards `[P, G, N]`, mask `[P, G, T]` of their tokens) → advantages `[P, G]`, as an estimator of
            single answers gives them; a turn without signal, or that no other completion has, is its to make 0.

    Returns:
        `[P, G, T]`, at least float32; 0 where the mask is False.

    Raises:
        ValueError: shapes that do not fit.
    """
    returns, turn = as_float("returns", returns, ndim=4), jnp.asarray(turn)
    check_shape("turn", turn, (*returns.shape[:2], turn.shape[-1]))
    mask = as_mask("mask", mask, turn.shape)
    each = [estimate(returns[:, :, u], mask & (turn == u)) for u in range(returns.shape[2])]
    places = jnp.clip(turn, 0, returns.shape[2] - 1)
    return select(mask, jnp.take_along_axis(jnp.stack(each, axis=-1), places, axis=-1))
