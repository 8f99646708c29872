"""One iteration of training: draw a batch, estimate advantages, update, and say what happened.

Every random number and every position follows from (seed, iteration), so a run is resumed by its number of
iterations and its arrays.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.rollout.data import batches_per_epoch, further_batch_at, iterations_in_all
from grpo_jax.rollout.pictures import pictures_column
from grpo_jax.rollout.pipeline import Slot
from grpo_jax.rollout.rollout import Episodes, Judgement, collect, informative_first
from grpo_jax.runs.loop.learner import Learner, LearningBrief, led_learner
from grpo_jax.runs.parts import Parts, objectives_of
from grpo_jax.runs.turns import turn_metrics
from grpo_jax.training.batch import Batch, make_batch
from grpo_jax.training.estimators import (
    OVERLONG,
    informative_groups,
    signal_metrics,
    total_rewards,
)
from grpo_jax.training.state import (
    TrainState,
    needs_reference,
    release,
)

_UPDATE_STREAM, _DRAW_STREAM = 2**31 - 3, 2**31 - 5


class Iteration(NamedTuple):
    """What one iteration gives.

    Attributes:
        state: After the update.
        row: Its metrics.
        seconds: Seconds of work by stage.
        completions: Columns of completions/, one entry per completion of the groups it learned from.
        rewards: f32 [P, G, N] of these groups, of episodes at their end.
    """

    state: TrainState
    row: dict[str, Any]
    seconds: dict[str, float]
    completions: dict[str, Any]
    rewards: np.ndarray


def make_learner(parts: Parts) -> Learner:
    """Optimizer, schedule and update step that a run's config names."""
    config, company = parts.config, parts.company
    iterations = iterations_in_all(config.training, len(parts.prompts.train))
    brief = LearningBrief(iterations, config.training.accumulation, parts.allowed_tokens, parts.trie)
    company.lead("learning", lambda brief: None)(brief)
    return led_learner(config, parts.policy, brief, company)


def run_iteration(parts: Parts, learner: Learner, state: TrainState, iteration: int) -> Iteration:
    """Samples a batch, judges it and learns from it.

    Args:
        parts: The run's parts.
        learner: Its compiled steps.
        state: Donated.
        iteration: From 0.
    """
    started = time.monotonic()
    sampled = sample_groups(parts, state.variables, iteration)
    return learn(parts, learner, state, iteration, sampled, started)


Sampled = tuple[Episodes, Judgement, dict[str, Any]]
"""The groups that an iteration learns from, what they are worth, and the batch's part of the metrics row."""


def sample_groups(parts: Parts, variables: Any, iteration: int, slot: Slot | None = None) -> Sampled:
    """Sample and judge the batch of an iteration, and with dynamic sampling others until P groups are informative.

    DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476) with a bound. Informative groups take their places in the
    order they were drawn; if there are too few, groups of the first draw whose variance is zero fill up.

    Args:
        parts: The run's parts.
        variables: Of the policy that samples.
        iteration: From 0.
        slot: Among batches that are on their way at once; only where there are no further draws.

    Returns:
        What is learned from. The metrics are of the first draw: what the policy is like, before anything was left out.
    """
    algorithm = parts.config.algorithm
    further = algorithm.resample_rounds if algorithm.dead_groups == "resample" else 0
    with parts.trainer.at(iteration) as moment:
        batches = [sample_batch(parts, variables, iteration, slot=slot)]
        size = len(batches[0][0].rows)
        while sum(judgement.informative.sum() for _, judgement in batches) < size and len(batches) <= further:
            batches.append(sample_batch(parts, variables, iteration, len(batches)))
    row = {**rollout_metrics(parts, *batches[0]), **moment.logged}
    episodes, judgement = batches[0] if len(batches) == 1 else informative_first(batches)
    if algorithm.dead_groups != "keep":
        row |= {"draws": len(batches), "groups_kept": int(judgement.informative.sum())}
    return episodes, judgement, row


def learn(
    parts: Parts, learner: Learner, state: TrainState, iteration: int, sampled: Sampled, started: float
) -> Iteration:
    """Learn from a batch.

    Args:
        parts: The run's parts.
        learner: Its compiled steps.
        state: Donated.
        iteration: From 0.
        sampled: Of `sample_groups`.
        started: `time.monotonic()` when the iteration began.
    """
    config, every = parts.config, parts.config.algorithm.update_ref_every
    episodes, judgement, measured = sampled
    before_update = time.perf_counter()
    batch = batch_of(parts, episodes, judgement)
    key = jax.random.fold_in(jax.random.fold_in(parts.key, _UPDATE_STREAM), iteration)
    first_update = int(state.step)  # of those that were made: what is left out does not move the schedule
    state, report = learner.update(state, batch, key)
    seconds = {**episodes.seconds, "update": time.perf_counter() - before_update}
    if needs_reference(config.algorithm, config.ppo) and every and (iteration + 1) % every == 0:
        before, state = state.reference, learner.refresh(state)
        release(before)
    row = {
        "step": iteration + 1,
        "epoch": (iteration + 1) / batches_per_epoch(len(parts.prompts.train), config.training.prompts_per_batch),
        **update_metrics(report),
        "learning_rate": float(learner.schedule(first_update)),
        **measured,
    }
    if state.loss_scale is not None:
        row["loss_scale"] = float(state.loss_scale.scale)
    row |= _timings(parts, {**seconds, "total": time.monotonic() - started}, row)
    estimates = report["measured"].get("estimates")
    advantages = np.asarray(batch.advantages if estimates is None else estimates.advantages)
    columns = completion_columns(parts, episodes, judgement, advantages)
    return Iteration(state, row, seconds, columns, judgement.final_rewards)


def sample_batch(
    parts: Parts, variables: Any, iteration: int, number: int = 0, slot: Slot | None = None
) -> tuple[Episodes, Judgement]:
    """Sample and judge one draw: rows and random numbers are functions of (seed, iteration, number)."""
    config, rows = parts.config, parts.prompts.train
    places = further_batch_at(config.seed, iteration, number, batch_size=config.training.prompts_per_batch, n=len(rows))
    # A prompt that comes twice in an iteration, when prompts run out, gets other completions.
    key = jax.random.fold_in(jax.random.fold_in(parts.key, _DRAW_STREAM), number) if number else parts.key
    episodes, judgement = collect(
        parts.environment,
        parts.samplers.training,
        variables,
        [rows[place] for place in places],
        key=key,
        iteration=iteration,
        keep_prompt=config.sampling.keep_prompt,
        scheduling=parts.scheduling(config.training.chunk_prompts, slot),
    )
    objectives = objectives_of(parts, judgement.rewards, episodes.lengths)
    informative = informative_groups(objectives, config.algorithm)
    return episodes, judgement._replace(objectives=objectives, informative=informative)


def batch_of(parts: Parts, episodes: Episodes, judgement: Judgement) -> Batch:
    """A judged batch as the update takes it."""
    assert judgement.objectives is not None and judgement.informative is not None
    return make_batch(
        (episodes.prompt_tokens, episodes.prompt_mask),
        episodes.samples,
        judgement.objectives,
        judgement.informative,
        parts.config.algorithm,
        pictures=episodes.pictures,
        mesh=parts.policy.mesh if parts.company.processes == 1 else None,  # each process takes its share
        kept=parts.config.sampling.keep_prompt,
    )


def update_metrics(report: Mapping[str, Any]) -> dict[str, Any]:
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
    named = ("kl_coef", "importance_weight", "importance_clipped")
    return row | {name: float(measured[name]) for name in named if name in measured}


def rollout_metrics(parts: Parts, episodes: Episodes, judgement: Judgement) -> dict[str, float]:
    """The batch's part of a metrics row: rewards as judged and their total as maximised, signal, lengths, texts.

    All of what the policy wrote; kept prompts (sampling.keep_prompt) are in the signal, and in a total of their own.
    """
    objectives, usable = judgement.objectives, episodes.usable
    assert objectives is not None
    wrote = slice(usable.shape[1] - parts.config.sampling.keep_prompt)
    samples = jax.tree.map(lambda array: array[:, wrote], episodes.samples)
    rewards, watched = judgement.final_rewards[:, wrote], judgement.final_watched[:, wrote]
    row: dict[str, float] = {}
    for index, name in enumerate(parts.environment.reward_names):
        row |= _spread(f"reward/{name}", rewards[..., index])
        row[f"missing/{name}"] = float(np.isnan(rewards[..., index]).mean())
    totals = total_rewards(objectives)
    row |= _spread("reward/total", totals[:, wrote])
    if parts.config.sampling.keep_prompt:
        row |= _spread("kept_prompt/total", totals[:, wrote.stop :])
    if OVERLONG in objectives.names:
        row |= _spread(f"reward/{OVERLONG}", np.asarray(objectives.rewards[:, wrote, -1]))
    row |= signal_metrics(objectives)
    for index, name in enumerate(parts.environment.watch_names):
        row |= _spread(f"watch/{name}", watched[..., index])
    lengths = samples.mask.sum(-1)
    row |= {
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": float(samples.truncated.mean()),
    }
    row |= turn_metrics(episodes, judgement, parts.environment.reward_names, parts.environment.watch_names)
    prompts = [row.prompt for row in episodes.rows]
    texts = [group[wrote] for group in episodes.texts]
    return row | parts.task_data.report.statistics(prompts, texts, usable[:, wrote].tolist())


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    present = values[np.isfinite(values)].astype(np.float64)
    if not present.size:
        return {f"{name}/mean": float("nan"), f"{name}/std": float("nan")}
    return {f"{name}/mean": float(present.mean()), f"{name}/std": float(present.std())}


def _timings(parts: Parts, seconds: Mapping[str, float], row: Mapping[str, Any]) -> dict[str, float]:
    prompts = parts.config.training.prompts_per_batch * row.get("draws", 1)
    tokens = row["completion_tokens"] * prompts * parts.config.sampling.written_completions
    timings = {f"seconds/{name}": value for name, value in seconds.items()}
    return {**timings, "tokens_per_second": tokens / max(seconds["sample"], 1e-9)}


def completion_columns(
    parts: Parts, episodes: Episodes, judgement: Judgement, advantages: np.ndarray
) -> dict[str, Any]:
    """The completions of a batch as columns, one entry each, groups one after another; of episodes one for each turn.

    Args:
        parts: Names of rewards and watched measures.
        episodes: The groups that were learned from.
        judgement: Theirs.
        advantages: f32 [P, G]; of PPO the mean over each completion's tokens; [P, G, T] where turns have their own.
    """
    samples, (_, group, turns) = episodes.samples, episodes.lengths.shape
    names = [f"reward/{name}" for name in parts.environment.reward_names]
    names += [f"watch/{name}" for name in parts.environment.watch_names]
    values = np.concatenate([judgement.rewards, judgement.watched], axis=-1)
    kept_prompts = episodes.lengths[..., 0] == 0
    entries: list[dict[str, Any]] = []
    rows = []
    for p, g in np.ndindex(advantages.shape[:2]):
        for number, turn in enumerate(episodes.episodes[p][g].turns):
            advantage = advantages[p, g]
            if advantages.ndim == 3:
                own = samples.mask[p, g] & (samples.turn[p, g] == number)
                own = own[: advantages.shape[2]]
                advantage = advantage[own].mean() if own.any() else 0
            entry = {"prompt": episodes.rows[p].prompt, "completion": turn.written, "text": turn.text}
            if turns > 1:
                answer = None if turn.answer is None or turn.answer.done else turn.answer.text
                entry |= {"episode": p * group + g, "turn": number + 1, "answer": answer}
            entry |= dict(zip(names, values[p, g, number], strict=True))
            if kept_prompts.any():
                entry["kept_prompt"] = bool(kept_prompts[p, g])
            entry |= {
                "advantage": np.float32(advantage),
                "length": int(episodes.lengths[p, g, number]),
                "truncated": turn.truncated,
                "usable": turn.usable,
            }
            entries.append(entry)
            rows.append(episodes.rows[p])
    return {name: [entry[name] for entry in entries] for name in entries[0]} | pictures_column(rows)
