"""Advantages from judged rewards by the configured estimator, and metrics of their signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.sections import AlgorithmSection
from grpo_jax.core import losses
from grpo_jax.core.advantages import (
    SUM_ESTIMATORS,
    Condition,
    condition_rewards,
    gdpo_advantages,
    groups_without_signal,
    sum_rewards,
)
from grpo_jax.core.returns import last_turn, overlong_penalty, turn_advantages, turn_returns
from grpo_jax.core.reward_moments import RewardMoments, standardise_rewards
from grpo_jax.core.selection import groups_with_signal
from grpo_jax.errors import StopRun

OVERLONG = "overlong"
"""Name of the soft length penalty's objective."""
Invalid = Literal["worst", "missing", "prompt"]
"""Rewards of a completion that could not be read: the worst of its group, none, or those of the user's prompt."""


class Objectives(NamedTuple):
    """Objectives to maximise, with names [N] and weights [N]; NaN is missing.

    `rewards` is f32 [P, G, N]: a completion's reward, the reward of an episode's last turn, or an episode's return.
    `informative` is bool [P]: the groups to learn from, those of `informative_groups` unless all are kept. `returns` is
    f32 [P, G, U, N] from each turn on if each turn has its own advantage, else None.
    """

    rewards: jax.Array
    names: tuple[str, ...]
    weights: tuple[float, ...]
    informative: np.ndarray
    returns: jax.Array | None = None

    def of_informative_groups(self) -> tuple[jax.Array, jax.Array | None]:
        """Return rewards and returns, NaN in groups that are dropped."""
        if self.informative.all():
            return self.rewards, self.returns
        varies = jnp.asarray(self.informative)[:, None, None]
        returns = None if self.returns is None else jnp.where(varies[..., None], self.returns, jnp.nan)
        return jnp.where(varies, self.rewards, jnp.nan), returns


def make_objectives(
    judged: jax.Array,
    lengths: jax.Array,
    section: AlgorithmSection,
    *,
    weights: dict[str, float],
    conditions: Sequence[Condition] = (),
    max_new_tokens: int,
    valid: np.ndarray | jax.Array | None = None,
    fill: bool = False,
) -> Objectives:
    """Apply conditions to judged rewards f32 [P, G, N] (NaN: missing), and add the length penalty as an objective.

    The penalty grows to 1 over `section.overlong_buffer` tokens (0: none) up to `max_new_tokens`. GDPO normalises it
    like any objective, the other estimators add it to the sum, with `overlong_weight`. It is missing if all judged
    rewards of non-zero weight are missing. `lengths` are i32 [P, G] tokens. `valid` is bool [P, G]; an invalid
    completion's rewards follow `without_invalid`.
    """
    rewards = condition_rewards(judged, conditions)
    names, factors, every = tuple(weights), tuple(weights.values()), np.ones(len(judged), bool)
    if valid is not None:
        rewards = without_invalid(rewards, jnp.asarray(valid), fill=fill)
    if section.overlong_buffer == 0:
        return Objectives(rewards, names, factors, every)
    counted = np.array(factors) != 0
    missing = jnp.isnan(judged).all(axis=-1, where=counted)
    if valid is not None:
        missing = jnp.where(valid, missing, jnp.isnan(rewards).all(axis=-1, where=counted))
    penalty = overlong_penalty(lengths, limit=max_new_tokens, buffer=section.overlong_buffer)
    rewards = jnp.concatenate([rewards, jnp.where(missing & counted.any(), jnp.nan, penalty)[..., None]], -1)
    return Objectives(rewards, (*names, OVERLONG), (*factors, section.overlong_weight), every)


def without_invalid(rewards: jax.Array, valid: jax.Array, *, fill: bool) -> jax.Array:
    """Replace rewards f32 [P, G, N] of invalid completions (`valid` [P, G]): by NaN, or with `fill` by the lowest.

    The lowest is that of the group's valid completions, for each objective; NaN if there are none.
    """
    readable = valid[..., None] & ~jnp.isnan(rewards)
    lowest = jnp.where(readable, rewards, jnp.inf).min(axis=1, keepdims=True)
    stand_in = jnp.where(readable.any(axis=1, keepdims=True) & fill, lowest, jnp.nan)
    return jnp.where(valid[..., None], rewards, stand_in)


def make_turn_objectives(
    judged: np.ndarray,
    lengths: np.ndarray,
    section: AlgorithmSection,
    *,
    valid: np.ndarray | None = None,
    device: jax.Device | None = None,
    **options: Any,
) -> Objectives:
    """Apply `make_objectives` (with its `options`) to each turn of episodes separately, on a device.

    `judged` is f32 [P, G, U, N], NaN if the reward or the turn is missing. `lengths` are i32 [P, G, U] tokens and
    `valid` is bool [P, G, U]. If there are several turns, a missing turn has length 0 and is valid.
    """
    prompts, group, turns, _ = judged.shape

    def by_turn(array: np.ndarray) -> jax.Array:  # [P, G, U, ..] → [P · U, G, ..]: one group for each turn
        return jax.device_put(np.moveaxis(array, 2, 1).reshape(prompts * turns, group, *array.shape[3:]), device)

    readable = None if valid is None else by_turn(valid)
    objectives = make_objectives(by_turn(judged), by_turn(lengths), section, valid=readable, **options)
    if turns > 1:
        rewards = jnp.moveaxis(objectives.rewards.reshape(prompts, turns, group, -1), 1, 2)
        exists = jnp.asarray(lengths) > 0
        if section.turn_advantage == "last":
            objectives = objectives._replace(rewards=jax.jit(last_turn)(rewards, exists))
        else:
            returns = jax.jit(turn_returns, static_argnames="gamma")(rewards, exists, gamma=section.turn_gamma)
            objectives = objectives._replace(rewards=returns[:, :, 0], returns=returns)
    keep = section.zero_variance_groups == "keep"
    return objectives._replace(informative=np.ones(prompts, bool) if keep else informative_groups(objectives, section))


def update_moments(objectives: Objectives, saved: Mapping[str, Sequence[float]]) -> dict[str, RewardMoments]:
    """Return each objective's moments by name, with this batch; `saved` are those before it."""
    values, names = np.asarray(objectives.rewards), enumerate(objectives.names)
    return {name: RewardMoments(*saved.get(name, ())).with_batch(values[..., n]) for n, name in names}


def standardise_objectives(objectives: Objectives, moments: Mapping[str, RewardMoments]) -> Objectives:
    """Standardise rewards and returns by each objective's moments (`update_moments`)."""
    rewards, returns = (
        None if array is None else jnp.asarray(standardise_rewards(np.asarray(array), [*moments.values()]))
        for array in (objectives.rewards, objectives.returns)
    )
    return objectives._replace(rewards=rewards, returns=returns)


def total_rewards(objectives: Objectives) -> np.ndarray:
    """Return weighted sums f32 [P, G]; `sum_rewards` fills in missing objectives, NaN if all are missing."""
    total = np.asarray(objectives.rewards) @ np.array(objectives.weights, np.float32)
    if not (missing := np.isnan(total)).any():
        return total
    return np.where(missing, sum_rewards(objectives.rewards, weights=objectives.weights), total)


def require_binary(objectives: Objectives) -> None:
    """Raise StopRun unless each weighted sum of rewards is 0, 1 or missing, as MaxRL needs."""
    total = total_rewards(objectives)
    other = total[~np.isnan(total) & (total != 0) & (total != 1)]
    if other.size:
        raise StopRun(
            f"algorithm.advantage 'maxrl' needs a sum of rewards of 0 or 1, got {other[0]:g}: return 0 or 1, or take "
            "another advantage"
        )


@partial(jax.jit, static_argnames=("weights", "section"))
def groups_that_vary(rewards: jax.Array, weights: tuple[float, ...], section: AlgorithmSection) -> jax.Array:
    """Return the groups whose rewards vary, bool [P]: with GDPO in any objective, else in their sum."""
    if section.advantage == "gdpo":
        return groups_with_signal(rewards, weights=weights)
    return groups_with_signal(sum_rewards(rewards, weights=weights))


def informative_groups(objectives: Objectives, section: AlgorithmSection) -> np.ndarray:
    """Return the groups with non-zero variance in some turn, bool [P]; DAPO keeps them (arXiv:2503.14476)."""
    rewards, returns = objectives.rewards, objectives.returns
    by_turn = [rewards] if returns is None else [returns[:, :, turn] for turn in range(returns.shape[2])]
    return np.any([groups_that_vary(values, objectives.weights, section) for values in by_turn], axis=0)


@partial(jax.jit, static_argnames=("weights", "section"))
def estimate_advantages(
    rewards: jax.Array, mask: jax.Array, section: AlgorithmSection, weights: tuple[float, ...]
) -> jax.Array:
    """Compute advantages f32 [P, G] from rewards f32 [P, G, N] (NaN: missing) by the configured group estimator.

    "gdpo" normalises each objective in its group before summing; the others use the weighted sum. The scale of "grpo"
    is its preset's (Dr. GRPO: none), unless the config sets one. "optimal_token_baseline" is the sum until
    `update.make_preparation` subtracts the baseline, which needs probabilities.
    """
    if section.advantage == "gdpo":
        return gdpo_advantages(rewards, weights=weights, eps=section.advantage_eps, mask=mask)
    summed = sum_rewards(rewards, weights=weights)
    if section.advantage == "optimal_token_baseline":
        return summed
    options: dict[str, Any] = {"eps": section.advantage_eps} if section.advantage in ("grpo", "batch") else {}
    if section.advantage == "grpo":
        options["scale"] = section.scale or losses.PRESET_SCALES[section.preset]
    if section.advantage == "max_at_k":
        options["k"] = section.best_of
    return SUM_ESTIMATORS[section.advantage](summed, **options)


@partial(jax.jit, static_argnames=("weights", "section"))
def estimate_turn_advantages(
    returns: jax.Array, turn: jax.Array, mask: jax.Array, section: AlgorithmSection, weights: tuple[float, ...]
) -> jax.Array:
    """Compute advantages f32 [P, G, T] from returns f32 [P, G, U, N] by `estimate_advantages` for each turn."""
    return turn_advantages(
        returns, turn, mask, lambda rewards, tokens: estimate_advantages(rewards, tokens, section, weights)
    )


def signal_metrics(objectives: Objectives) -> dict[str, float]:
    """Return the shares of groups without signal, "zero_variance_groups/NAME" by objective and for the "total"."""
    dead, total = jax.device_get(_signal(objectives.rewards, objectives.weights))
    row = {f"zero_variance_groups/{name}": float(share) for name, share in zip(objectives.names, dead, strict=True)}
    return row | {"zero_variance_groups/total": float(total)}


@partial(jax.jit, static_argnames=("weights",))
def _signal(rewards: jax.Array, weights: tuple[float, ...]) -> tuple[jax.Array, jax.Array]:
    summed = sum_rewards(rewards, weights=weights)
    dead = jnp.mean(groups_without_signal(rewards).astype(jnp.float32), axis=0)
    return dead, jnp.mean(groups_without_signal(summed).astype(jnp.float32))
