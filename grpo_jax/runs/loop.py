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

from grpo_jax.core.advantages import sum_rewards
from grpo_jax.core.selection import without_truncated
from grpo_jax.models.sharding import place, place_batch, shard_optimizer
from grpo_jax.rollout.data import batches_per_epoch
from grpo_jax.rollout.drawing import draw, objectives_of
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.runs.parts import Parts
from grpo_jax.tasks.prompt_enhancement.rewriting import rewrite_statistics
from grpo_jax.training import trainer
from grpo_jax.training.estimators import OVERLONG, estimate_advantages, learning_groups, signal_metrics
from grpo_jax.training.loss_scale import make_loss_scale
from grpo_jax.training.objectives import Batch
from grpo_jax.training.optimizer import make_optimizer, make_schedule
from grpo_jax.training.packing import pack, trimmed
from grpo_jax.training.trainer import TrainState

_UPDATE_STREAM = 2**31 - 3


class Learner(NamedTuple):
    """The compiled parts of training.

    Attributes:
        update: update(state, batch, key) → (state, report).
        schedule: Learning rate by update.
        iterations: Iterations in all.
        updates_per_iteration: Optimizer updates of one iteration.
        start: start(variables) → the state that training begins with. It takes the trained weights over: where they
            are not the reference, they can be read until the first update only.
    """

    update: Callable[..., tuple[TrainState, dict[str, Any]]]
    schedule: Callable[[int], Any]
    iterations: int
    updates_per_iteration: int
    start: Callable[[dict[str, Any]], TrainState]


class Iteration(NamedTuple):
    """What one iteration gives.

    Attributes:
        state: After the update.
        row: Its metrics.
        rollout: The groups it learned from.
        advantages: f32 [P, G]; of PPO the mean over each completion's tokens.
        seconds: Seconds of work by stage.
    """

    state: TrainState
    row: dict[str, float]
    rollout: Rollout
    advantages: np.ndarray
    seconds: dict[str, float]


def make_learner(parts: Parts) -> Learner:
    """Optimizer, schedule and update step that a config names."""
    config = parts.config
    per_epoch = batches_per_epoch(len(parts.prompts.train), config.training.prompts_per_batch)
    iterations = config.training.max_steps or config.training.num_epochs * per_epoch
    per_iteration = config.training.inner_epochs * config.training.minibatches
    schedule = make_schedule(config.optimizer, iterations * per_iteration)
    optimizer = make_optimizer(config.optimizer, schedule, value_rate=config.ppo.value_rate)
    optimizer = shard_optimizer(optimizer, parts.mesh)
    allowed = None if parts.allowed_tokens is None else jnp.asarray(parts.allowed_tokens)
    update = trainer.make_update(
        parts.policy,
        optimizer,
        config.algorithm,
        config.training,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        allowed_tokens=allowed,
        ppo=config.ppo,
    )
    steered = config.algorithm.advantage == "gae" and config.ppo.kl_coef > 0

    # Fresh adapters change nothing: the base is the policy at the start, and stays the reference if none replaces it.
    fresh = config.policy.lora.path is None and config.warm_start.steps == 0 and config.algorithm.update_ref_every == 0

    def start(variables: dict[str, Any]) -> TrainState:
        state = trainer.init_state(
            variables,
            optimizer,
            keep_reference=trainer.needs_reference(config.algorithm, config.ppo),
            base_reference=fresh,
            kl_coef=config.ppo.kl_coef if steered else None,
            loss_scale=make_loss_scale(config.policy.compute_dtype),
            take_over=True,
        )
        return place(state, parts.mesh)

    return Learner(update, schedule, iterations, per_iteration, start)


def run_iteration(parts: Parts, learner: Learner, state: TrainState, iteration: int) -> Iteration:
    """Samples a batch, judges it and learns from it.

    Args:
        parts: The run's parts.
        learner: Its compiled steps.
        state: Donated.
        iteration: From 0.
    """
    config = parts.config
    drawn = draw(parts, state.variables, iteration)
    started = time.perf_counter()
    batch, kept = make_batch(parts, drawn.rollout)
    key = jax.random.fold_in(jax.random.fold_in(parts.key, _UPDATE_STREAM), iteration)
    first = int(state.step)  # of the updates that were made: those left out do not move the schedule
    state, report = learner.update(state, batch, key)
    seconds = {**drawn.seconds, "update": time.perf_counter() - started}
    every = config.algorithm.update_ref_every
    if trainer.needs_reference(config.algorithm, config.ppo) and every and (iteration + 1) % every == 0:
        before, state = state.reference, trainer.refresh_reference(state)
        trainer.release(before)
    row = {
        "step": iteration + 1,
        "epoch": (iteration + 1) / batches_per_epoch(len(parts.prompts.train), config.training.prompts_per_batch),
        **update_metrics(report),
        "learning_rate": float(learner.schedule(first)),
        **rollout_metrics(parts, drawn.first),
    }
    if state.loss_scale is not None:
        row["loss_scale"] = float(state.loss_scale.scale)
    if config.algorithm.dead_groups != "keep":
        row |= {"draws": drawn.draws, "groups_kept": kept}
    estimates = report["measured"].get("estimates")
    advantages = batch.advantages if estimates is None else estimates.advantages
    return Iteration(state, row, drawn.rollout, np.asarray(advantages), seconds)


def make_batch(parts: Parts, rollout: Rollout) -> tuple[Batch, int]:
    """A rollout as the trainer takes it, on the policy's device, and how many of its groups teach something.

    Prompts and completions are cut to the longest of the batch; short completions share rows (`packing`).
    Under dead_groups "drop" and "resample" the others are masked, and out of every statistic.
    """
    algorithm, samples = parts.config.algorithm, rollout.samples
    objectives = objectives_of(parts, rollout)
    device = next(iter(objectives.rewards.devices()))
    written, prompts = samples.mask, rollout.prompt_mask
    prompt_tokens, prompt_mask = (trimmed(x, prompts, left=True) for x in (rollout.prompt_tokens, prompts))
    tokens, mask, logprobs, drawn_logprobs = (
        trimmed(x, written) for x in (samples.tokens, written, samples.logprobs, samples.sampler_logprobs)
    )
    prompt_tokens, prompt_mask, tokens, mask, logprobs, truncated = jax.device_put(
        (prompt_tokens, prompt_mask, tokens, mask, logprobs, samples.truncated), device
    )
    if algorithm.mask_truncated:
        mask = without_truncated(mask, truncated)
    teaching = learning_groups(objectives.rewards, objectives.weights, algorithm)
    rewards = objectives.rewards
    if algorithm.dead_groups != "keep":
        mask &= teaching[:, None, None]
        rewards = jnp.where(teaching[:, None, None], rewards, jnp.nan)
    batch = Batch(prompt_tokens, prompt_mask, tokens, mask, rollout_logprobs=logprobs)
    if algorithm.importance_cap > 0:
        batch = batch._replace(sampler_logprobs=jax.device_put(drawn_logprobs, device))
    if algorithm.advantage == "gae":
        # A completion without a reward says nothing about its tokens: it takes no part.
        scores = sum_rewards(rewards, weights=objectives.weights)
        batch = batch._replace(scores=scores, mask=mask & ~jnp.isnan(scores)[..., None])
    else:
        advantages = estimate_advantages(rewards, mask, algorithm, objectives.weights)
        batch = batch._replace(advantages=advantages)
    batch = batch._replace(packing=jax.device_put(pack(np.asarray(batch.mask)), device))
    return place_batch(batch, parts.mesh), int(teaching.sum())


def update_metrics(report: dict[str, Any]) -> dict[str, float]:
    """The update's part of a metrics row; a value head adds its own."""
    parts, measured = report["metrics"], report["measured"]
    policy = {name: float(mean.value()) for name, mean in parts["policy"]._asdict().items()}
    row = {
        "loss": report["loss"],
        "policy_loss": policy["policy_loss"],
        "kl": policy["kl"],
        "entropy": policy["entropy"],
        "mean_advantage": policy["advantage"],
        "grad_norm": report["grad_norm"],
        "clip_low": policy["clip_low"],
        "clip_high": policy["clip_high"],
        "mean_ratio": policy["ratio"],
        "old_kl": policy["old_kl"],
        "sampler_gap": float(parts["sampler_gap"].value()),
        "skipped_updates": report["skipped"],
    }
    if "value" in parts:
        estimates = measured["estimates"]
        row |= {
            "value/loss": float(parts["value"].loss.value()),
            "value/clipped": float(parts["value"].clip_fraction.value()),
            "value/mean": float(estimates.value),
            "value/return": float(estimates.returns),
            "value/explained_variance": float(estimates.explained_variance),
            "completion_kl": float(estimates.completion_kl),
        }
    return row | {name: float(measured[name]) for name in ("kl_coef", "importance_weight") if name in measured}


def rollout_metrics(parts: Parts, rollout: Rollout) -> dict[str, float]:
    """The batch's part of a metrics row: rewards, signal, lengths, looks."""
    samples, judgement = rollout.samples, rollout.judgement
    objectives = objectives_of(parts, rollout)
    row: dict[str, float] = {}
    for index, name in enumerate(parts.environment.reward_names):
        values = judgement.rewards[..., index]
        row |= _spread(f"reward/{name}", values)
        row[f"missing/{name}"] = float(np.isnan(values).mean())
    weights = np.array(list(parts.weights.values()), np.float32)
    row |= _spread("reward/total", judgement.rewards @ weights)
    if OVERLONG in objectives.names:
        row |= _spread(f"reward/{OVERLONG}", np.asarray(objectives.rewards[..., -1]))
    row |= signal_metrics(objectives)
    for index, name in enumerate(parts.environment.watch_names):
        row |= _spread(f"watch/{name}", judgement.watched[..., index])
    lengths = samples.mask.sum(-1)
    row |= {
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": float(samples.truncated.mean()),
    }
    looks = rewrite_statistics([prompt.prompt for prompt in rollout.rows], rollout.texts, rollout.usable.tolist())
    return row | {
        name: float(getattr(looks, name)) for name in ("words", "growth", "duplicates", "unchanged", "unusable")
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    present = values[np.isfinite(values)].astype(np.float64)
    if not present.size:
        return {f"{name}/mean": float("nan"), f"{name}/std": float("nan")}
    return {f"{name}/mean": float(present.mean()), f"{name}/std": float(present.std())}
