"""From judged rewards to what the estimator that a config names learns from, and what its signal is worth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.algorithm import AlgorithmSection
from grpo_jax.core import losses
from grpo_jax.core.advantages import (
    Condition,
    batch_whitened_advantages,
    condition_rewards,
    distinct_advantages,
    gdpo_advantages,
    group_advantages,
    groups_without_signal,
    leave_one_out_advantages,
    sum_rewards,
)
from grpo_jax.core.selection import groups_with_signal
from grpo_jax.core.shaping import overlong_penalty
from grpo_jax.core.turns import last_turn, turn_advantages, turn_returns

OVERLONG = "overlong"
"""Name of the objective that the soft penalty on length is."""


class Objectives(NamedTuple):
    """Objectives to maximise, with name and weight; NaN is missing.

    Attributes:
        rewards: f32 [P, G, N] of each completion; of an episode its last turn's, or what it returns from its first.
        names: N.
        weights: N.
        returns: f32 [P, G, U, N] from each turn of an episode on, where turns are compared by themselves; or None.
    """

    rewards: jax.Array
    names: tuple[str, ...]
    weights: tuple[float, ...]
    returns: jax.Array | None = None


def make_objectives(
    judged: jax.Array,
    lengths: jax.Array,
    *,
    weights: dict[str, float],
    conditions: Sequence[Condition] = (),
    overlong_buffer: int = 0,
    max_new_tokens: int,
) -> Objectives:
    """Judged rewards with their conditions applied, and the penalty on length as an objective more.

    The penalty is an objective and not part of another one's reward: GDPO normalises it by itself, every other
    estimator adds it to the sum. It is missing where every judged reward is.

    Args:
        judged: f32 [P, G, N], NaN where missing.
        lengths: i32 [P, G], tokens of each completion.
        weights: Weight of each reward by name, in order.
        conditions: Between rewards, by index.
        overlong_buffer: Tokens over which the penalty grows to 1 at `max_new_tokens`; 0 for none.
        max_new_tokens: T.
    """
    rewards = condition_rewards(judged, conditions)
    names, factors = tuple(weights), tuple(weights.values())
    if overlong_buffer == 0:
        return Objectives(rewards, names, factors)
    penalty = overlong_penalty(lengths, limit=max_new_tokens, buffer=overlong_buffer)
    penalty = jnp.where(jnp.isnan(judged).all(axis=-1), jnp.nan, penalty)
    return Objectives(jnp.concatenate([rewards, penalty[..., None]], -1), (*names, OVERLONG), (*factors, 1.0))


def make_turn_objectives(
    judged: jax.Array, lengths: jax.Array, section: AlgorithmSection, **options: Any
) -> Objectives:
    """`make_objectives` of episodes: conditions and the penalty on length hold in each turn by itself.

    Args:
        judged: f32 [P, G, U, N], NaN where missing and where a turn does not exist.
        lengths: i32 [P, G, U], tokens of each turn; where there are several, 0 says that one does not exist.
        section: What weighs the tokens of turns.
        **options: Of `make_objectives`.
    """
    prompts, group, turns, _ = judged.shape
    flat = make_objectives(
        judged.reshape(prompts, group * turns, -1), lengths.reshape(prompts, group * turns), **options
    )
    if turns == 1:
        return flat
    rewards, exists = flat.rewards.reshape(prompts, group, turns, -1), jnp.asarray(lengths) > 0
    if section.turn_advantage == "last":
        return flat._replace(rewards=last_turn(rewards, exists))
    returns = turn_returns(rewards, exists, discount=section.turn_discount)
    return flat._replace(rewards=returns[:, :, 0], returns=returns)


def total_rewards(objectives: Objectives) -> np.ndarray:
    """Weighted sum of each completion's objectives, f32 [P, G].

    NaN where all of them are missing; where some are, as `sum_rewards` fills their places.
    """
    total = np.asarray(objectives.rewards) @ np.array(objectives.weights, np.float32)
    return np.where(np.isnan(total), sum_rewards(objectives.rewards, weights=objectives.weights), total)


@partial(jax.jit, static_argnames=("weights", "section"))
def groups_that_vary(rewards: jax.Array, weights: tuple[float, ...], section: AlgorithmSection) -> jax.Array:
    """bool [P], the groups of some variance: under GDPO of any objective, else of their sum."""
    if section.advantage == "gdpo":
        return groups_with_signal(rewards, weights=weights)
    return groups_with_signal(sum_rewards(rewards, weights=weights))


def informative_groups(objectives: Objectives, section: AlgorithmSection) -> np.ndarray:
    """bool [P], the groups whose variance is not zero; of episodes whose turns are compared by themselves, in any turn.

    DAPO's dynamic sampling keeps these (https://arxiv.org/abs/2503.14476).
    """
    rewards, returns = objectives.rewards, objectives.returns
    by_turn = [rewards] if returns is None else [returns[:, :, turn] for turn in range(returns.shape[2])]
    return np.any([groups_that_vary(one, objectives.weights, section) for one in by_turn], axis=0)


@partial(jax.jit, static_argnames=("weights", "section"))
def estimate_advantages(
    rewards: jax.Array, mask: jax.Array, section: AlgorithmSection, weights: tuple[float, ...]
) -> jax.Array:
    """Advantages f32 [P, G] of rewards f32 [P, G, N] (NaN: missing) by the group estimator that a config names.

    "gdpo" keeps the objectives apart until each is normalised in its group; the others work on their weighted sum.
    The scaling of "grpo" is its preset's (Dr.GRPO: none) unless the config gives one.
    """
    if section.advantage == "gdpo":
        whiten = None if section.whiten == "none" else section.whiten
        return gdpo_advantages(rewards, weights=weights, whiten=whiten, mask=mask)
    summed = sum_rewards(rewards, weights=weights)
    if section.advantage == "rloo":
        return leave_one_out_advantages(summed)
    if section.advantage == "batch":
        return batch_whitened_advantages(summed)
    if section.advantage == "grpo":
        return group_advantages(summed, scale=section.scale or losses.PRESET_SCALES[section.preset])
    raise ValueError(f"section.advantage: expected gdpo, grpo, rloo or batch, got {section.advantage!r}")


def estimate_turn_advantages(
    returns: jax.Array, turn: jax.Array, mask: jax.Array, section: AlgorithmSection, weights: tuple[float, ...]
) -> jax.Array:
    """Advantages f32 [P, G, T] of returns f32 [P, G, U, N]: `estimate_advantages` of each turn by itself."""
    return turn_advantages(
        returns, turn, mask, lambda rewards, tokens: estimate_advantages(rewards, tokens, section, weights)
    )


def signal_metrics(objectives: Objectives) -> dict[str, float]:
    """Signal in the rewards, whichever estimator is used.

    Returns:
        "dead_groups/<name>": Share of groups in which an objective does not vary; "dead_groups/total": their sum.
        "distinct_advantages/grpo", "distinct_advantages/gdpo": Different advantages in a group, mean over groups,
        when the sum is normalised and when each objective is. Left out where groups are of one.
    """
    dead, total, distinct = jax.device_get(_signal(objectives.rewards, objectives.weights))
    row = {f"dead_groups/{name}": float(share) for name, share in zip(objectives.names, dead, strict=True)}
    row["dead_groups/total"] = float(total)
    return row | {f"distinct_advantages/{name}": float(number) for name, number in distinct.items()}


@partial(jax.jit, static_argnames=("weights",))
def _signal(rewards: jax.Array, weights: tuple[float, ...]):
    summed = sum_rewards(rewards, weights=weights)
    dead = jnp.mean(groups_without_signal(rewards).astype(jnp.float32), axis=0)
    total = jnp.mean(groups_without_signal(summed).astype(jnp.float32))
    if rewards.shape[1] < 2:
        return dead, total, {}
    present = ~jnp.isnan(summed)
    # Whitening is the same line for the whole batch: it joins no values and parts none.
    advantages = {"grpo": group_advantages(summed), "gdpo": gdpo_advantages(rewards, weights=weights, whiten=None)}
    counts = {name: distinct_advantages(values, mask=present, axis=1) for name, values in advantages.items()}
    return dead, total, {name: jnp.mean(count.astype(jnp.float32)) for name, count in counts.items()}
