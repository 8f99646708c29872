"""CartPole-v1 on gymnax's equations: groups of episodes from one start, rollouts with automatic reset, objectives.

Everything is a pure function of arrays. A policy is a function: observations `[B, 4]` → log-odds `[B]` of pushing
to the right. Loops run until every episode has ended, in all seeds when they are vmapped: what comes after an
episode's end is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.errors import UserError, extras_named

MAX_STEPS = 500
FEATURES = 4
OBJECTIVES = ("upright", "centred")

State = Any
Policy = Callable[[jax.Array], jax.Array]


class CartPole(NamedTuple):
    """The environment over a batch of B carts.

    Attributes:
        start: start(key, count) → states of `count` carts, each number uniform in ±0.05.
        step: step(states, actions i32 `[B]`) → (states, terminated bool `[B]`); the time limit is not in it.
        observe: observe(states) → f32 `[B, 4]`: position, speed, angle, angular speed.
    """

    start: Callable[[jax.Array, int], State]
    step: Callable[[State, jax.Array], tuple[State, jax.Array]]
    observe: Callable[[State], jax.Array]


class Episodes(NamedTuple):
    """Whole episodes, time first: `[T, B]` with T = 500.

    Attributes:
        observations: f32 `[T, B, 4]`; 0 after the end.
        actions: bool `[T, B]`, True for right.
        log_odds: f32 `[T, B]` of right, under the policy that acted.
        mask: bool `[T, B]`, the steps that were taken.
        positions: f32 `[T, B]`, where the cart is after the step.
    """

    observations: jax.Array
    actions: jax.Array
    log_odds: jax.Array
    mask: jax.Array
    positions: jax.Array


class Steps(NamedTuple):
    """A fixed number of steps with automatic reset, time first: `[T, B]`.

    Attributes:
        observations: f32 `[T, B, 4]`, before the step.
        actions: bool `[T, B]`, True for right.
        log_odds: f32 `[T, B]` of right, under the policy that acted.
        next_observations: f32 `[T, B, 4]`, after the step and before a reset.
        terminated: bool `[T, B]`, fell or left the track: no value after it.
        truncated: bool `[T, B]`, ended by the time limit alone: its value goes on.
        lengths: i32 `[T, B]`, steps of the episode up to this one.
    """

    observations: jax.Array
    actions: jax.Array
    log_odds: jax.Array
    next_observations: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    lengths: jax.Array


class Outcome(NamedTuple):
    """How episodes went, `[B]` each.

    Attributes:
        length: steps until the end, at most 500: the return of CartPole-v1.
        centred: sum of the `centred` objective.
        distance: mean distance from the centre over the steps.
    """

    length: jax.Array
    centred: jax.Array
    distance: jax.Array


def make_cartpole() -> CartPole:
    """Wraps gymnax's CartPole-v1.

    Its `step_env` is used directly: `step` would draw a reset at every step.

    Raises:
        UserError: gymnax, or a package that it needs, is not installed.
    """
    try:
        with extras_named():
            from gymnax.environments.classic_control.cartpole import CartPole as Gymnax
    except ImportError as error:  # of something else that it needs
        raise UserError(f"gymnax cannot be imported: {error}") from error
    environment = Gymnax()
    params, unused = environment.default_params, jax.random.key(0)

    def start(key: jax.Array, count: int) -> State:
        return jax.vmap(lambda one: environment.reset_env(one, params)[1])(jax.random.split(key, count))

    def step_one(state: State, action: jax.Array) -> tuple[State, jax.Array]:
        _, state, _, terminated, _ = environment.step_env(unused, state, action, params)
        return state, terminated

    def observe(states: State) -> jax.Array:
        return jnp.stack([states.x, states.x_dot, states.theta, states.theta_dot], axis=-1)

    return CartPole(start, jax.vmap(step_one), observe)


def objective_rewards(objective: str, positions: jax.Array, width: float) -> jax.Array:
    """The reward of every step, whatever its shape.

    "upright" is 1 for each step, as in CartPole-v1. "centred" is max(0, 1 - |x| / width) of the cart after the step:
    full in the middle, nothing beyond `width`, while the track ends at 2.4.

    Raises:
        ValueError: an unknown objective.
    """
    if objective == "upright":
        return jnp.ones_like(positions)
    if objective == "centred":
        return jnp.maximum(0.0, 1.0 - jnp.abs(positions) / width)
    raise ValueError(f"objective must be one of {OBJECTIVES}, got {objective!r}")


@jax.custom_batching.custom_vmap
def largest(values: jax.Array) -> jax.Array:
    """The largest value; under vmap, of all members of the batch alike.

    A loop whose condition differs between vmapped members copies its whole carry at every turn to keep the finished
    ones as they were. Here turns after the end are masked, so all members may turn as often as the longest.
    """
    return jnp.max(values)


@largest.def_vmap
def _largest_of_all(axis_size: int, in_batched: list[bool], values: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return largest(values), False


def _where(mask: jax.Array, new: State, old: State) -> State:
    return jax.tree.map(lambda a, b: jnp.where(mask, a, b), new, old)


def play_episodes(cartpole: CartPole, policy: Policy, states: State, key: jax.Array) -> Episodes:
    """Plays one episode from each state, with sampled actions; the draws of step t follow from (key, t).

    Args:
        cartpole: The environment.
        policy: Log-odds of pushing right.
        states: Starts of B carts.
        key: Of the actions.
    """
    count = states.x.shape[0]
    record = Episodes(
        jnp.zeros((MAX_STEPS, count, FEATURES)),
        jnp.zeros((MAX_STEPS, count), jnp.bool_),
        jnp.zeros((MAX_STEPS, count)),
        jnp.zeros((MAX_STEPS, count), jnp.bool_),
        jnp.zeros((MAX_STEPS, count)),
    )

    def going_on(carry):
        t, _, alive, _ = carry
        return (t < MAX_STEPS) & largest(alive)

    def turn(carry):
        t, states, alive, record = carry
        observations = cartpole.observe(states)
        log_odds = policy(observations)
        right = _draw(log_odds, jax.random.fold_in(key, t))
        after, terminated = cartpole.step(states, right.astype(jnp.int32))
        after = _where(alive, after, states)  # a fallen cart stays where it is: no numbers without bound
        step = Episodes(jnp.where(alive[:, None], observations, 0), right, log_odds, alive, after.x)
        record = jax.tree.map(lambda rows, row: rows.at[t].set(row), record, step)
        return t + 1, after, alive & ~terminated, record

    alive = jnp.ones(count, jnp.bool_)
    return jax.lax.while_loop(going_on, turn, (jnp.int32(0), states, alive, record))[-1]


def _draw(log_odds: jax.Array, key: jax.Array) -> jax.Array:
    """Bernoulli draws with probability sigmoid(log_odds)."""
    return jax.random.uniform(key, log_odds.shape) < jax.nn.sigmoid(log_odds)


def play_steps(cartpole: CartPole, policy: Policy, states: State, key: jax.Array, *, steps: int) -> tuple[State, Steps]:
    """Plays a number of steps, starting anew wherever an episode ends.

    Args:
        cartpole: The environment.
        policy: Log-odds of pushing right.
        states: Where B carts are now.
        key: Of actions and new starts.
        steps: T.

    Returns:
        Where the carts are then, and the steps.
    """
    count = states.x.shape[0]

    def turn(states, key):
        act, reset = jax.random.split(key)
        observations = cartpole.observe(states)
        log_odds = policy(observations)
        right = _draw(log_odds, act)
        after, terminated = cartpole.step(states, right.astype(jnp.int32))
        truncated = ~terminated & (after.time >= MAX_STEPS)
        step = Steps(observations, right, log_odds, cartpole.observe(after), terminated, truncated, after.time)
        return _where(terminated | truncated, cartpole.start(reset, count), after), step

    return jax.lax.scan(turn, states, jax.random.split(key, steps))


def play_greedily(cartpole: CartPole, policy: Policy, states: State, *, width: float) -> Outcome:
    """Plays one episode from each state with the likelier action, and keeps only how it went.

    Args:
        cartpole: The environment.
        policy: Log-odds of pushing right.
        states: Starts of B carts.
        width: Of the `centred` objective.
    """
    zeros = jnp.zeros_like(states.x)

    def going_on(carry):
        t, _, alive, *_ = carry
        return (t < MAX_STEPS) & largest(alive)

    def turn(carry):
        t, states, alive, length, centred, distance = carry
        right = policy(cartpole.observe(states)) > 0
        after, terminated = cartpole.step(states, right.astype(jnp.int32))
        after = _where(alive, after, states)
        length += alive
        centred += jnp.where(alive, objective_rewards("centred", after.x, width), 0)
        distance += jnp.where(alive, jnp.abs(after.x), 0)
        return t + 1, after, alive & ~terminated, length, centred, distance

    carry = (jnp.int32(0), states, jnp.ones(zeros.shape, jnp.bool_), zeros, zeros, zeros)
    *_, length, centred, distance = jax.lax.while_loop(going_on, turn, carry)
    return Outcome(length, centred, distance / length)
