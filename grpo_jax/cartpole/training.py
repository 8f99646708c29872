"""Training on CartPole as pure functions, `make_training(settings)`, which jit and vmap over seeds:

    training = make_training(SETTINGS["grpo"])
    train = jax.jit(jax.vmap(lambda key: training.train(training.init(key), 100)))
    state, metrics, measures = train(jax.random.split(jax.random.key(0), 10))

The losses and advantages are those of `grpo_jax.core`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.cartpole import environment
from grpo_jax.cartpole.environment import FEATURES, Episodes, Steps, largest, objective_rewards
from grpo_jax.cartpole.settings import MAX_STEPS, Settings
from grpo_jax.core.advantages import gdpo_advantages, groups_without_signal, sum_rewards
from grpo_jax.core.aggregation import Mean, loss_normaliser
from grpo_jax.core.losses import GRPOMetrics, KLPenalty, grpo_loss
from grpo_jax.core.masking import masked_whiten
from grpo_jax.core.ppo import explained_variance, value_loss
from grpo_jax.core.returns import discounted_returns, gae_advantages, normalised_returns
from grpo_jax.core.surrogates import Clip
from grpo_jax.models.layers import make_mlp
from grpo_jax.models.variables import PyTree

Metrics = dict[str, jax.Array]
Optimizer = optax.GradientTransformation
Learner = tuple[PyTree, PyTree]  # parameters and Optax's state
Learned = tuple[Learner, Metrics]  # after updates, and their metrics

_INIT_STREAM = 2**31 - 1
_EVALUATION_STREAM = 2**31 - 2
_CARTS_STREAM = 2**31 - 3
EPISODES, SOLVED = 100, 475.0
"""Greedy episodes of one measurement, and the mean return from which CartPole counts as solved."""
ENVIRONMENTS, STEPS, MINIBATCHES = 32, 128, 4
"""PPO's carts, steps of each of them per iteration, and updates per pass."""
CLIP, KL_COEF, ENTROPY_COEF, VALUE_COEF, GAE_LAMBDA, MAX_GRAD_NORM = 0.2, 0.01, 0.01, 0.5, 0.95, 0.5
"""The KL penalty (k3), of GRPO and GDPO, is against the policy at the iteration's start."""
HIDDEN = (64,)
"""Widths of the tanh layers of the policy and of ppo's value network."""
# Steps of all episodes per gradient chunk: a divisor of 500, short enough to fit the cache and to stop soon after the
# longest episode.
_CHUNK = 50
_SHOWN = ("policy_loss", "kl", "entropy", "old_kl", "clip_low", "clip_high", "value_loss")


class Batch(NamedTuple):
    """Data of an update, time first: each `[T, B]`, observations `[T, B, 4]`."""

    observations: jax.Array
    actions: jax.Array
    old_logprobs: jax.Array
    advantages: jax.Array
    mask: jax.Array  # steps that were taken; all with PPO
    returns: jax.Array | None = None  # targets of the values (PPO)


class Carry(NamedTuple):
    """The training state; under vmap each leaf has the seeds as first axis."""

    variables: PyTree  # {"policy": …}, and with ppo {"value": …}
    optimizer: PyTree
    carts: PyTree  # state of the carts for ppo; () for the others, whose episodes are whole
    key: jax.Array  # the seed's key; every random number depends only on it and the iteration
    iteration: jax.Array  # i32, finished iterations
    steps: jax.Array  # i32, environment steps trained on, without padding and evaluation


class Training(NamedTuple):
    """Pure functions of `Settings`."""

    init: Callable[[jax.Array], Carry]  # key of a seed → the state at the start
    # (state, iterations) → the state after them, their metrics f32 `[iterations]`, and `evaluate` of it
    train: Callable[[Carry, int], tuple[Carry, Metrics, Metrics]]
    evaluate: Callable[[Carry], Metrics]  # state → measures of the greedy policy, means over `EPISODES` fresh starts


def action_logprobs(log_odds: jax.Array, right: jax.Array) -> jax.Array:
    """Return the log-probability of each action: log σ(±log-odds)."""
    return -jax.nn.softplus(jnp.where(right, -log_odds, log_odds))


def action_entropy(log_odds: jax.Array) -> jax.Array:
    """Return the entropy of the choice between left and right."""
    return jax.nn.softplus(log_odds) - log_odds * jax.nn.sigmoid(log_odds)


def _weights(settings: Settings) -> jax.Array:
    return jnp.asarray(settings.weights or [1.0] * len(settings.objectives), jnp.float32)


def episode_rewards(settings: Settings, positions: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the rewards of every step, `[P, G, T]` → `[P, G, T, N]`; 0 after the end.

    With `condition`, "centred" counts only in episodes that stay upright for that many steps.
    """
    rewards = jnp.stack([objective_rewards(name, positions) for name in settings.objectives], -1)
    rewards = jnp.where(mask[..., None], rewards, 0)
    if not settings.condition:
        return rewards
    centred = settings.objectives.index("centred")
    stays = jnp.sum(mask, axis=-1, keepdims=True) >= settings.condition
    return rewards.at[..., centred].set(jnp.where(stays, rewards[..., centred], 0))


def group_step_advantages(settings: Settings, rewards: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the advantages of every step f32 `[P, G, T]`, and the groups without signal, bool `[P, N]`.

    Rewards are `[P, G, T, N]`, the mask is `[P, G, T]`.

        R[p, g, t, n] = Σ_{u ≥ t} γ^(u - t) r[p, g, u, n]
        grpo:  A[p, g, t] = (Σ_n w[n] R[p, g, t, n] - mean) / (std + eps)
        gdpo:  A[p, g, t] = whiten(Σ_n w[n] (R[p, g, t, n] - mean_n) / (std_n + eps))

    Mean and std are over all existing steps (g, t) of group p: a step takes the place of a completion in the papers.
    GDPO whitens over all existing steps of the batch. If all episodes of a group have the same sum of rewards, their
    returns differ only by the time of a step. There is no signal, and A is 0 (per objective with gdpo).
    """
    weights = _weights(settings)
    totals = jnp.sum(rewards, axis=2)
    dead = groups_without_signal(totals)
    if settings.algorithm == "grpo":
        joined = discounted_returns(rewards @ weights, gamma=settings.gamma, mask=mask)
        silent = groups_without_signal(sum_rewards(totals, weights=weights))
        return jnp.where(silent[:, None, None], 0, normalised_returns(joined, mask=mask)), dead
    masks = jnp.broadcast_to(mask, (len(weights), *mask.shape))
    each = discounted_returns(jnp.moveaxis(rewards, -1, 0), gamma=settings.gamma, mask=masks)
    each = jnp.where(mask[..., None], jnp.moveaxis(each, 0, -1) * ~dead[:, None, None, :], jnp.nan)
    members = each.reshape(len(each), -1, len(weights))  # NaN, a missing reward, does not count
    advantages = gdpo_advantages(members, weights=weights, whiten="sequence")
    return advantages.reshape(mask.shape), dead


def group_batch(settings: Settings, episodes: Episodes) -> tuple[Batch, Metrics]:
    """Return the batch of P groups of G episodes, and the metrics of the rollout."""

    def grouped(x):  # [T, B] → [P, G, T]
        return x.T.reshape(-1, settings.group_size, MAX_STEPS)

    mask = grouped(episodes.mask)
    rewards = episode_rewards(settings, grouped(episodes.positions), mask)
    advantages, dead = group_step_advantages(settings, rewards, mask)
    logprobs = action_logprobs(episodes.log_odds, episodes.actions)
    flat = advantages.reshape(-1, MAX_STEPS).T
    metrics = {"episode_return": jnp.mean(jnp.sum(episodes.mask, axis=0, dtype=jnp.float32))}
    for index, name in enumerate(settings.objectives):
        metrics[f"reward/{name}/mean"] = jnp.mean(jnp.sum(rewards[..., index], axis=2))
        metrics[f"zero_variance_groups/{name}"] = jnp.mean(dead[:, index], dtype=jnp.float32)
    return Batch(episodes.observations, episodes.actions, logprobs, flat, episodes.mask), metrics


def step_batch(settings: Settings, critic: Callable, params: PyTree, steps: Steps) -> tuple[Batch, Metrics]:
    """Return PPO's batch with GAE: value 0 after a termination, the truncated state's value at a time limit."""
    values = critic(params["value"], steps.observations)
    next_values = critic(params["value"], steps.next_observations)
    each = [objective_rewards(name, steps.next_observations[..., 0]) for name in settings.objectives]
    rewards = jnp.stack(each, axis=-1) @ _weights(settings)
    ended = steps.terminated | steps.truncated
    advantages = gae_advantages(
        rewards.T,
        values.T,
        gamma=jnp.where(steps.terminated, 0.0, settings.gamma).T,
        gae_lambda=GAE_LAMBDA,
        boundary=ended.T,
        next_values=next_values.T,
    ).T
    logprobs = action_logprobs(steps.log_odds, steps.actions)
    finished = Mean(jnp.sum(jnp.where(ended, steps.lengths, 0), dtype=jnp.float32), jnp.sum(ended, dtype=jnp.float32))
    metrics = {"episode_return": jnp.where(jnp.greater(finished.weight, 0), finished.value(), jnp.nan)}
    metrics |= {f"reward/{name}/mean": jnp.mean(x) for name, x in zip(settings.objectives, each, strict=True)}
    mask = jnp.ones_like(steps.actions)
    return Batch(steps.observations, steps.actions, logprobs, advantages, mask, advantages + values), metrics


def group_updates(settings: Settings, apply: Callable, optimizer: Optimizer, start: Learner, batch: Batch) -> Learned:
    """Update once per epoch from all steps; the gradient is summed over chunks of time up to the last step."""
    whole = loss_normaliser(batch.mask, "token")
    chunks = jax.tree.map(lambda x: x.reshape(MAX_STEPS // _CHUNK, _CHUNK, *x.shape[1:]), batch)
    used = largest(jnp.sum(chunks.mask.any(axis=(1, 2)), dtype=jnp.int32))

    def loss(params, chunk):
        kl = {"kl": KLPenalty(KL_COEF), "ref_logprobs": chunk.old_logprobs}
        return _policy_loss(apply, params, chunk, normaliser=whole, **kl)

    gradient = jax.value_and_grad(loss, has_aux=True)
    shapes = jax.eval_shape(gradient, start[0], jax.tree.map(lambda x: x[0], chunks))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def epoch(carry, _):
        def add(loop):
            index, total = loop
            now = gradient(carry[0], jax.tree.map(lambda x: x[index], chunks))
            return index + 1, jax.tree.map(jnp.add, total, now)

        _, ((value, metrics), grads) = jax.lax.while_loop(lambda loop: loop[0] < used, add, (jnp.int32(0), zeros))
        return _apply_gradient(optimizer, carry, value, metrics._asdict(), grads)

    learned, metrics = jax.lax.scan(epoch, start, length=settings.epochs)
    return learned, jax.tree.map(jnp.mean, metrics)


def step_updates(
    settings: Settings, apply: Callable, optimizer: Optimizer, start: Learner, batch: Batch, key: jax.Array
) -> Learned:
    """Make PPO's updates: shuffled times are split into minibatches, each with all carts, the same in all epochs.

    Shuffling single steps, anew for each epoch, would take longer than training on them: gathering costs more than the
    network here.
    """

    def loss(params, part):
        part = part._replace(advantages=masked_whiten(part.advantages, part.mask))
        policy, metrics = _policy_loss(apply, params, part)
        values = apply(params["value"], part.observations)
        value, of_value = value_loss(values, None, part.returns, part.mask, clip=None)
        metrics = metrics._asdict() | {"value_loss": of_value.loss}
        return policy + VALUE_COEF * value, (metrics, explained_variance(values, part.returns, part.mask))

    gradient = jax.value_and_grad(loss, has_aux=True)

    def update(carry, part):
        (value, (metrics, explained)), grads = gradient(carry[0], part)
        carry, metrics = _apply_gradient(optimizer, carry, value, metrics, grads)
        return carry, metrics | {"explained_variance": explained}

    order = jax.random.permutation(key, batch.actions.shape[0])
    parts = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), batch)
    epochs = settings.epochs
    learned, metrics = jax.lax.scan(lambda carry, _: jax.lax.scan(update, carry, parts), start, length=epochs)
    return learned, jax.tree.map(jnp.mean, metrics)


def _policy_loss(apply: Callable, params: PyTree, batch: Batch, **options: Any) -> tuple[jax.Array, GRPOMetrics]:
    """Return the clipped loss with an entropy bonus, mean over steps; `options` are those of `grpo_loss`."""
    log_odds = apply(params["policy"], batch.observations)
    return grpo_loss(
        action_logprobs(log_odds, batch.actions),
        batch.old_logprobs,
        batch.advantages,
        batch.mask,
        surrogate=Clip(CLIP, CLIP),
        aggregation="token",
        entropy=action_entropy(log_odds),
        entropy_coef=ENTROPY_COEF,
        **options,
    )


def _apply_gradient(
    optimizer: Optimizer, carry: Learner, loss: jax.Array, metrics: dict[str, Mean], grads: PyTree
) -> Learned:
    """Return (parameters, Optax's state) after an update, and its metrics under the names of language runs."""
    params, opt_state = carry
    updates, opt_state = optimizer.update(grads, opt_state, params)
    named = {name: metrics[name].value() for name in _SHOWN if name in metrics}
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))
    named |= {"loss": loss, "mean_ratio": metrics["ratio"].value(), "grad_norm": norm}
    return (optax.apply_updates(params, updates), opt_state), named


def make_training(settings: Settings) -> Training:
    """Return the functions of a training."""
    policy = make_mlp(FEATURES, hidden=HIDDEN, output_scale=0.01)
    critic = make_mlp(FEATURES, hidden=HIDDEN, output_scale=1.0)
    group_size, ppo = settings.group_size, settings.algorithm == "ppo"
    peak = settings.learning_rate
    updates = settings.epochs * (MINIBATCHES if ppo else 1)  # updates per iteration
    rate = optax.linear_schedule(peak, 0.0, settings.iterations * updates) if ppo else optax.constant_schedule(peak)
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(rate, eps=1e-5))

    def init(key: jax.Array) -> Carry:
        keys = jax.random.split(jax.random.fold_in(key, _INIT_STREAM))
        params = {"policy": policy.init(keys[0])}
        carts = ()
        if ppo:
            params["value"] = critic.init(keys[1])
            carts = environment.reset(jax.random.fold_in(key, _CARTS_STREAM), ENVIRONMENTS)
        return Carry(params, optimizer.init(params), carts, key, jnp.int32(0), jnp.int32(0))

    def act(state: Carry) -> environment.Policy:
        return lambda observations: policy.apply(state.variables["policy"], observations)

    def learn_from_groups(state: Carry, key: jax.Array):
        start, draws = jax.random.split(key)
        starts = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), environment.reset(start, 1))
        episodes = environment.play_episodes(act(state), starts, draws)
        batch, metrics = group_batch(settings, episodes)
        learned = group_updates(settings, policy.apply, optimizer, (state.variables, state.optimizer), batch)
        return learned, state.carts, metrics, jnp.sum(episodes.mask, dtype=jnp.int32)

    def learn_from_steps(state: Carry, key: jax.Array):
        draws, shuffle = jax.random.split(key)
        carts, steps = environment.play_steps(act(state), state.carts, draws, steps=STEPS)
        batch, metrics = step_batch(settings, critic.apply, state.variables, steps)
        learned = step_updates(settings, policy.apply, optimizer, (state.variables, state.optimizer), batch, shuffle)
        return learned, carts, metrics, jnp.int32(STEPS * ENVIRONMENTS)

    def iterate(state: Carry) -> tuple[Carry, Metrics]:
        key = jax.random.fold_in(state.key, state.iteration)
        (moved, of_updates), carts, metrics, steps = (learn_from_steps if ppo else learn_from_groups)(state, key)
        after = Carry(*moved, carts, state.key, state.iteration + 1, state.steps + steps)
        counted = {"environment_steps": after.steps, "learning_rate": rate(state.iteration * updates)}
        return after, {name: jnp.float32(x) for name, x in (metrics | of_updates | counted).items()}

    def evaluate(state: Carry) -> Metrics:
        key = jax.random.fold_in(jax.random.fold_in(state.key, _EVALUATION_STREAM), state.iteration)
        starts = environment.reset(key, EPISODES)
        return {name: jnp.mean(x) for name, x in environment.play_greedily(act(state), starts).items()}

    def train(state: Carry, iterations: int) -> tuple[Carry, Metrics, Metrics]:
        state, metrics = jax.lax.scan(lambda state, _: iterate(state), state, length=iterations)
        return state, metrics, evaluate(state)

    return Training(init, train, evaluate)
