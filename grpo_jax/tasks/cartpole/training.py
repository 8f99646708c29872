"""Training on CartPole as one function: `make_train(config).train(key)`, which jits and vmaps over seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.models.mlp import count_parameters, make_mlp
from grpo_jax.tasks.cartpole import environment as task
from grpo_jax.tasks.cartpole import updates
from grpo_jax.tasks.cartpole.config import CartPoleConfig

PyTree = Any
_INIT_STREAM, _EVALUATION_STREAM, _CARTS_STREAM = 2**31 - 1, 2**31 - 2, 2**31 - 3


class Carry(NamedTuple):
    """Everything that changes; under vmap each leaf has the seeds as first axis.

    Attributes:
        params: {"policy": …}, and with ppo {"value": …}.
        optimizer: Optax's state.
        carts: Where ppo's carts are; () for the others, whose episodes are whole.
        key: The seed's key. Every random number follows from it and the iteration.
        iteration: i32, iterations done.
        steps: i32, environment steps taken to learn from, without padding and without evaluation.
    """

    params: PyTree
    optimizer: PyTree
    carts: PyTree
    key: jax.Array
    iteration: jax.Array
    steps: jax.Array


class History(NamedTuple):
    """What a run saw.

    Attributes:
        iterations: Each metric, f32 `[I]`; "environment_steps" counts them up to and with the iteration.
        evaluations: Each measure, f32 `[1 + I / every]`: before training and after every `evaluation.every`
            iterations; "iteration" and "environment_steps" say where.
    """

    iterations: dict[str, jax.Array]
    evaluations: dict[str, jax.Array]


class Training(NamedTuple):
    """Pure functions of a config.

    Attributes:
        init: init(key) → the start.
        iterate: iterate(state) → (state, metrics): one iteration.
        evaluate: evaluate(state) → measures of the greedy policy on fresh starts.
        block: block(state) → (state, metrics `[every]`, measures): `evaluation.every` iterations, then a measurement.
        train: train(key) → (state, History): the whole run.
        parameters: Number of parameters by network.
    """

    init: Callable[[jax.Array], Carry]
    iterate: Callable[[Carry], tuple[Carry, dict[str, jax.Array]]]
    evaluate: Callable[[Carry], dict[str, jax.Array]]
    block: Callable[[Carry], tuple[Carry, dict[str, jax.Array], dict[str, jax.Array]]]
    train: Callable[[jax.Array], tuple[Carry, History]]
    parameters: dict[str, int]


def updates_per_iteration(config: CartPoleConfig) -> int:
    """Optimizer updates of one iteration."""
    return config.algorithm.epochs * config.algorithm.minibatches


def make_optimizer(config: CartPoleConfig) -> tuple[optax.GradientTransformation, Callable[[Any], Any]]:
    """Adam behind a clip of the gradient's norm, and its learning rate by update."""
    section = config.optimizer
    rate = optax.constant_schedule(section.learning_rate)
    if section.schedule == "linear":
        total = config.training.iterations * updates_per_iteration(config)
        rate = optax.linear_schedule(section.learning_rate, 0.0, total)
    clip = optax.clip_by_global_norm(section.max_grad_norm) if section.max_grad_norm else optax.identity()
    return optax.chain(clip, optax.adam(rate, b1=section.beta1, b2=section.beta2, eps=1e-5)), rate


def make_train(config: CartPoleConfig) -> Training:
    """Makes the functions of a run.

    Args:
        config: The run; its `seed` and `num_seeds` are the caller's to turn into keys (`seed_keys`).

    Raises:
        UserError: gymnax is not installed.
    """
    cartpole = task.make_cartpole()
    section = config.network
    policy = make_mlp(task.FEATURES, hidden=section.hidden, activation=section.activation, output_scale=0.01)
    critic = make_mlp(task.FEATURES, hidden=section.hidden, activation=section.activation, output_scale=1.0)
    optimizer, rate = make_optimizer(config)
    ppo = config.algorithm.name == "ppo"

    def init(key: jax.Array) -> Carry:
        keys = jax.random.split(jax.random.fold_in(key, _INIT_STREAM))
        params = {"policy": policy.init(keys[0])} | ({"value": critic.init(keys[1])} if ppo else {})
        carts = ()
        if ppo:
            carts = cartpole.start(jax.random.fold_in(key, _CARTS_STREAM), config.rollout.environments)
        # Written as arrays, so that a start has the types of what an iteration gives back.
        carts = jax.tree.map(jnp.asarray, carts)
        return Carry(params, optimizer.init(params), carts, key, jnp.int32(0), jnp.int32(0))

    def iterate_groups(state: Carry, key: jax.Array):
        start, act = jax.random.split(key)
        starts = cartpole.start(start, config.rollout.groups)
        starts = jax.tree.map(lambda x: jnp.repeat(x, config.rollout.group_size, axis=0), starts)
        episodes = task.play_episodes(cartpole, lambda x: policy.apply(state.params["policy"], x), starts, act)
        batch, figures = updates.group_batch(config, episodes)
        learned = updates.group_updates(config, policy.apply, optimizer, state.params, state.optimizer, batch)
        return learned, state.carts, figures, jnp.sum(episodes.mask, dtype=jnp.int32)

    def iterate_steps(state: Carry, key: jax.Array):
        act, shuffle = jax.random.split(key)
        number = config.rollout.steps
        carts, steps = task.play_steps(
            cartpole, lambda x: policy.apply(state.params["policy"], x), state.carts, act, steps=number
        )
        batch, figures = updates.step_batch(config, critic.apply, state.params, steps)
        learned = updates.step_updates(config, policy.apply, optimizer, state.params, state.optimizer, batch, shuffle)
        return learned, carts, figures, jnp.int32(number * config.rollout.environments)

    def iterate(state: Carry) -> tuple[Carry, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.iteration)
        learned, carts, figures, steps = (iterate_steps if ppo else iterate_groups)(state, key)
        params, opt_state, of_updates = learned
        after = Carry(params, opt_state, carts, state.key, state.iteration + 1, state.steps + steps)
        learning_rate = rate(state.iteration * updates_per_iteration(config))
        counted = {"environment_steps": after.steps, "learning_rate": learning_rate}
        return after, {name: jnp.float32(x) for name, x in (figures | of_updates | counted).items()}

    def evaluate(state: Carry) -> dict[str, jax.Array]:
        key = jax.random.fold_in(jax.random.fold_in(state.key, _EVALUATION_STREAM), state.iteration)
        starts = cartpole.start(key, config.evaluation.episodes)
        outcome = task.play_greedily(
            cartpole,
            lambda x: policy.apply(state.params["policy"], x),
            starts,
            width=config.algorithm.width,
        )
        return {
            "episode_return": jnp.mean(outcome.length),
            "centred": jnp.mean(outcome.centred),
            "distance": jnp.mean(outcome.distance),
            "iteration": jnp.float32(state.iteration),
            "environment_steps": jnp.float32(state.steps),
        }

    def block(state: Carry):
        state, metrics = jax.lax.scan(lambda state, _: iterate(state), state, length=config.evaluation.every)
        return state, metrics, evaluate(state)

    def train(key: jax.Array) -> tuple[Carry, History]:
        def turn(state, _):
            state, metrics, measures = block(state)
            return state, (metrics, measures)

        start = init(key)
        number = config.training.iterations // config.evaluation.every
        state, (metrics, measures) = jax.lax.scan(turn, start, length=number)
        first = evaluate(start)
        return state, History(
            jax.tree.map(lambda x: x.reshape(-1), metrics),
            jax.tree.map(lambda before, after: jnp.concatenate([before[None], after]), first, measures),
        )

    shapes = jax.eval_shape(init, jax.random.key(0)).params
    parameters = {name: count_parameters(tree) for name, tree in shapes.items()}
    return Training(init, iterate, evaluate, block, train, parameters)
