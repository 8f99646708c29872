"""CartPole-v1 as pure functions of arrays: its equations, whole episodes, and steps with automatic reset.

The equations are from "Neuronlike adaptive elements that can solve difficult learning control problems" (Barto, Sutton
and Anderson 1983), with gymnasium's constants and Euler steps. A policy is a function: observations `[B, 4]` →
log-odds `[B]` of pushing to the right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.cartpole.settings import MAX_STEPS

FEATURES = 4

GRAVITY = 9.8
POLE_MASS = 0.1
TOTAL_MASS = 1.0 + POLE_MASS
HALF_LENGTH = 0.5  # of the pole
FORCE = 10.0
TIME_STEP = 0.02
MAX_ANGLE = 12 * 2 * math.pi / 360
MAX_POSITION = 2.4
WIDTH = 0.5
"""Distance from the middle at which "centred" becomes 0."""

Policy = Callable[[jax.Array], jax.Array]


class State(NamedTuple):
    """B carts: position, speed, angle and angular speed of the pole, each f32 `[B]`; steps taken, i32 `[B]`."""

    x: jax.Array
    x_dot: jax.Array
    theta: jax.Array
    theta_dot: jax.Array
    time: jax.Array


class Episodes(NamedTuple):
    """Whole episodes, time first: T = 500."""

    observations: jax.Array  # f32 [T, B, 4]; 0 after the end
    actions: jax.Array  # bool [T, B], True for right
    log_odds: jax.Array  # f32 [T, B] of right, under the policy that acted
    mask: jax.Array  # bool [T, B], the steps that were taken
    positions: jax.Array  # f32 [T, B], position of the cart after the step


class Steps(NamedTuple):
    """A fixed number of steps with automatic reset, time first."""

    observations: jax.Array  # f32 [T, B, 4], before the step
    actions: jax.Array  # bool [T, B], True for right
    log_odds: jax.Array  # f32 [T, B] of right, under the policy that acted
    next_observations: jax.Array  # f32 [T, B, 4], after the step and before a reset
    terminated: jax.Array  # bool [T, B], fell or left the track: no bootstrapping
    truncated: jax.Array  # bool [T, B], ended only by the time limit: bootstraps
    lengths: jax.Array  # i32 [T, B], steps of the episode up to this one


def reset(key: jax.Array, count: int) -> State:
    """Return `count` carts at the start of an episode: each of the four numbers uniform in ±0.05."""
    draw = jax.vmap(lambda one: jax.random.uniform(one, (FEATURES,), minval=-0.05, maxval=0.05))
    return State(*draw(jax.random.split(key, count)).T, time=jnp.zeros(count, jnp.int32))


def step(states: State, right: jax.Array) -> tuple[State, jax.Array]:
    """Push every cart; return the new states, and whether each has fallen or left the track (no time limit)."""
    cos = jnp.cos(states.theta)
    sin = jnp.sin(states.theta)
    force = jnp.where(right, FORCE, -FORCE)
    push = (force + POLE_MASS * HALF_LENGTH * states.theta_dot**2 * sin) / TOTAL_MASS
    inertia = HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cos**2 / TOTAL_MASS)
    angular = (GRAVITY * sin - cos * push) / inertia
    linear = push - POLE_MASS * HALF_LENGTH * angular * cos / TOTAL_MASS
    after = State(
        x=states.x + TIME_STEP * states.x_dot,
        x_dot=states.x_dot + TIME_STEP * linear,
        theta=states.theta + TIME_STEP * states.theta_dot,
        theta_dot=states.theta_dot + TIME_STEP * angular,
        time=states.time + 1,
    )
    return after, (jnp.abs(after.x) > MAX_POSITION) | (jnp.abs(after.theta) > MAX_ANGLE)


def observe(states: State) -> jax.Array:
    """Return the observations f32 `[B, 4]`: position, speed, angle, angular speed."""
    return jnp.stack(states[:FEATURES], axis=-1)


def objective_rewards(objective: str, positions: jax.Array) -> jax.Array:
    """Return the reward of every step from the positions after it.

    "upright" is 1, as in CartPole-v1; "centred" is max(0, 1 - |x| / WIDTH). The track ends at 2.4.
    """
    if objective == "upright":
        return jnp.ones_like(positions)
    return jnp.maximum(0.0, 1.0 - jnp.abs(positions) / WIDTH)


@jax.custom_batching.custom_vmap
def largest(values: jax.Array) -> jax.Array:
    """Return the largest value; under vmap, that of all members of the batch.

    A loop whose condition differs between vmapped members copies its whole carry at every iteration, to keep finished
    members unchanged. Here iterations after the end are masked, so all members may run as long as the longest.
    """
    return jnp.max(values)


@largest.def_vmap
def _largest_of_all(axis_size: int, in_batched: list[bool], values: jax.Array) -> tuple[jax.Array, bool]:
    return largest(values), False


def _where(mask: jax.Array, new: State, old: State) -> State:
    return jax.tree.map(lambda a, b: jnp.where(mask, a, b), new, old)


def _draw(log_odds: jax.Array, key: jax.Array) -> jax.Array:
    """Draw from Bernoulli distributions with probability sigmoid(log_odds)."""
    return jax.random.uniform(key, log_odds.shape) < jax.nn.sigmoid(log_odds)


def play_episodes(policy: Policy, states: State, key: jax.Array | None) -> Episodes:
    """Play one episode from each state; step t samples with (key, t), or takes the likelier action if key is None."""
    count = states.x.shape[0]
    zeros = jnp.zeros((MAX_STEPS, count))
    none = jnp.zeros((MAX_STEPS, count), jnp.bool_)
    record = Episodes(jnp.zeros((MAX_STEPS, count, FEATURES)), none, zeros, none, zeros)

    def going_on(carry):
        t, _, alive, _ = carry
        return (t < MAX_STEPS) & largest(alive)

    def turn(carry):
        t, states, alive, record = carry
        observations = observe(states)
        log_odds = policy(observations)
        right = log_odds > 0 if key is None else _draw(log_odds, jax.random.fold_in(key, t))
        after, terminated = step(states, right)
        after = _where(alive, after, states)  # a fallen cart stays in place, so that its numbers stay bounded
        row = Episodes(jnp.where(alive[:, None], observations, 0), right, log_odds, alive, after.x)
        record = jax.tree.map(lambda rows, new: rows.at[t].set(new), record, row)
        return t + 1, after, alive & ~terminated, record

    return jax.lax.while_loop(going_on, turn, (jnp.int32(0), states, jnp.ones(count, jnp.bool_), record))[-1]


def play_steps(policy: Policy, states: State, key: jax.Array, *, steps: int) -> tuple[State, Steps]:
    """Play T = `steps` steps with sampled actions and automatic reset; return also the last states."""

    def turn(states, key):
        act, start = jax.random.split(key)
        observations = observe(states)
        log_odds = policy(observations)
        right = _draw(log_odds, act)
        after, terminated = step(states, right)
        truncated = ~terminated & (after.time >= MAX_STEPS)
        row = Steps(observations, right, log_odds, observe(after), terminated, truncated, after.time)
        return _where(terminated | truncated, reset(start, len(right)), after), row

    return jax.lax.scan(turn, states, jax.random.split(key, steps))


def play_greedily(policy: Policy, states: State) -> dict[str, jax.Array]:
    """Play one episode from each state with the likelier action.

    Returns:
        `[B]` each: "episode_return", its steps; "centred", the sum of that objective; "distance", the mean |x|.
    """
    episodes = play_episodes(policy, states, None)
    length = jnp.sum(episodes.mask, axis=0, dtype=jnp.float32)
    centred = jnp.where(episodes.mask, objective_rewards("centred", episodes.positions), 0)
    distance = jnp.where(episodes.mask, jnp.abs(episodes.positions), 0)
    return {
        "episode_return": length,
        "centred": jnp.sum(centred, axis=0),
        "distance": jnp.sum(distance, axis=0) / length,
    }
