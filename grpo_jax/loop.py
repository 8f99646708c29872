"""One iteration of training: collect a batch, estimate advantages, update, and say what happened.

Every random number and every position follows from (seed, iteration), so a run is resumed by its number of
iterations and its arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import trainer
from grpo_jax.advantages import condition_rewards, groups_without_signal
from grpo_jax.parts import Parts
from grpo_jax.rollout import Rollout, collect
from grpo_jax.tasks.prompt_enhancement import rewrite_statistics
from grpo_jax.tasks.prompts import batch_at, batches_per_epoch
from grpo_jax.trainer import Batch, TrainState

_UPDATE_STREAM = 2**31 - 3


class Learner(NamedTuple):
    """The compiled parts of training.

    Attributes:
        state: The start.
        update: update(state, batch, key) → (state, report).
        schedule: Learning rate by update.
        iterations: Iterations in all.
        updates_per_iteration: Optimizer updates of one iteration.
    """

    state: TrainState
    update: Callable[..., tuple[TrainState, dict[str, Any]]]
    schedule: Callable[[int], Any]
    iterations: int
    updates_per_iteration: int


class Iteration(NamedTuple):
    """What one iteration gives: the new state, its metrics row, its rollout, advantages [P, G], the update's time."""

    state: TrainState
    row: dict[str, float]
    rollout: Rollout
    advantages: np.ndarray
    update_seconds: float


def make_learner(parts: Parts) -> Learner:
    """Optimizer, schedule and update step that a config names."""
    config = parts.config
    per_epoch = batches_per_epoch(len(parts.prompts.train), config.training.prompts_per_batch)
    iterations = config.training.max_steps or config.training.num_epochs * per_epoch
    per_iteration = config.training.inner_epochs * config.training.minibatches
    schedule = trainer.make_schedule(config.optimizer, iterations * per_iteration)
    optimizer = trainer.make_optimizer(config.optimizer, schedule)
    allowed = None if parts.allowed_tokens is None else jnp.asarray(parts.allowed_tokens)
    update = trainer.make_update(
        parts.policy,
        optimizer,
        config.algorithm,
        config.training,
        temperature=config.sampling.temperature,
        allowed_tokens=allowed,
    )
    state = trainer.init_state(parts.variables, optimizer, keep_reference=config.algorithm.kl_coef > 0)
    return Learner(state, update, schedule, iterations, per_iteration)


def run_iteration(parts: Parts, learner: Learner, state: TrainState, iteration: int) -> Iteration:
    """Samples a batch, judges it and learns from it.

    Args:
        parts: The run's parts.
        learner: Its compiled steps.
        state: Donated.
        iteration: From 0.
    """
    config = parts.config
    size, rows = config.training.prompts_per_batch, parts.prompts.train
    chosen = [rows[index] for index in batch_at(config.seed, iteration, batch_size=size, n=len(rows))]
    rollout = collect(
        parts.environment,
        parts.sampler,
        state.variables,
        chosen,
        key=parts.key,
        iteration=iteration,
        chunk_prompts=config.training.chunk_prompts,
        timeout=parts.timeout,
    )
    started = time.perf_counter()
    batch, advantages = make_batch(parts, rollout)
    key = jax.random.fold_in(jax.random.fold_in(parts.key, _UPDATE_STREAM), iteration)
    state, report = learner.update(state, batch, key)
    seconds = time.perf_counter() - started
    every = config.algorithm.update_ref_every
    if config.algorithm.kl_coef > 0 and every and (iteration + 1) % every == 0:
        state = trainer.refresh_reference(state)
    row = {
        "step": iteration + 1,
        "epoch": (iteration + 1) / batches_per_epoch(len(rows), size),
        **update_metrics(report),
        "learning_rate": float(learner.schedule(iteration * learner.updates_per_iteration)),
        **rollout_metrics(parts, rollout),
    }
    return Iteration(state, row, rollout, advantages, seconds)


def make_batch(parts: Parts, rollout: Rollout) -> tuple[Batch, np.ndarray]:
    """A rollout as the trainer takes it, on the policy's device, and its advantages [P, G]."""
    algorithm = parts.config.algorithm
    device = next(iter(jax.tree.leaves(parts.variables)[0].devices()))
    mask = rollout.samples.mask
    if algorithm.mask_truncated:
        mask = mask & ~rollout.samples.truncated[..., None]
    rewards = condition_rewards(jax.device_put(rollout.judgement.rewards, device), parts.conditions)
    advantages = trainer.estimate_advantages(
        rewards, jax.device_put(mask, device), algorithm, tuple(parts.weights.values())
    )
    arrays = (rollout.prompt_tokens, rollout.prompt_mask, rollout.samples.tokens, mask)
    return Batch(*jax.device_put(arrays, device), advantages), np.asarray(advantages)


def update_metrics(report: dict[str, Any]) -> dict[str, float]:
    """The update's part of a metrics row."""
    metrics = {name: float(mean.value()) for name, mean in report["metrics"]._asdict().items()}
    return {
        "loss": report["loss"],
        "policy_loss": metrics["policy_loss"],
        "kl": metrics["kl"],
        "entropy": metrics["entropy"],
        "mean_advantage": metrics["advantage"],
        "grad_norm": report["grad_norm"],
        "clip_low": metrics["clip_low"],
        "clip_high": metrics["clip_high"],
        "mean_ratio": metrics["ratio"],
        "old_kl": metrics["old_kl"],
    }


def rollout_metrics(parts: Parts, rollout: Rollout) -> dict[str, float]:
    """The batch's part of a metrics row: rewards, lengths, groups without signal."""
    samples, judgement = rollout.samples, rollout.judgement
    row: dict[str, float] = {}
    dead = np.asarray(groups_without_signal(jnp.asarray(judgement.rewards)))
    for index, name in enumerate(parts.environment.reward_names):
        values = judgement.rewards[..., index]
        row |= _spread(f"reward/{name}", values)
        row[f"dead_groups/{name}"] = float(dead[:, index].mean())
        row[f"missing/{name}"] = float(np.isnan(values).mean())
    weights = np.array(list(parts.weights.values()), np.float32)
    row |= _spread("reward/total", judgement.rewards @ weights)
    for index, name in enumerate(parts.environment.watch_names):
        row |= _spread(f"watch/{name}", judgement.watched[..., index])
    lengths = samples.mask.sum(-1)
    row |= {
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": float(samples.truncated.mean()),
    }
    looks = rewrite_statistics([prompt.prompt for prompt in rollout.rows], rollout.texts, rollout.usable.tolist())
    row |= {name: float(getattr(looks, name)) for name in ("words", "growth", "duplicates", "unchanged", "unusable")}
    gap = np.abs(samples.logprobs - samples.sampler_logprobs)[samples.mask]
    row["sampler_gap"] = float(gap.mean()) if gap.size else 0.0
    return row


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    present = values[np.isfinite(values)].astype(np.float64)
    if not present.size:
        return {f"{name}/mean": float("nan"), f"{name}/std": float("nan")}
    return {f"{name}/mean": float(present.mean()), f"{name}/std": float(present.std())}
