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
from grpo_jax.rollout.drawing import Drawn, Judged, draw
from grpo_jax.rollout.inputs.pictures import pictures_column
from grpo_jax.rollout.pipeline import Place
from grpo_jax.rollout.rollout import Rollout, collect
from grpo_jax.runs.loop.learner import Learner, LearningBrief, led_learner
from grpo_jax.runs.parts import Parts, objectives_of
from grpo_jax.runs.turns import turn_columns, turn_metrics
from grpo_jax.training.batch import Batch, make_batch
from grpo_jax.training.estimators import (
    OVERLONG,
    signal_metrics,
    teaching_groups,
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
        rewards: f32 [P, G, N] of these groups.
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
    return led_learner(config, parts.policy, brief, company, parts.sampler_device)


def run_iteration(parts: Parts, learner: Learner, state: TrainState, iteration: int) -> Iteration:
    """Samples a batch, judges it and learns from it.

    Args:
        parts: The run's parts.
        learner: Its compiled steps.
        state: Donated.
        iteration: From 0.
    """
    started = time.monotonic()
    drawn = draw_batch(parts, state.variables, iteration)
    return learn(parts, learner, state, iteration, drawn, started)


def draw_batch(parts: Parts, variables: Any, iteration: int, place: Place | None = None) -> Drawn:
    """The batch of an iteration, sampled and judged.

    Args:
        parts: The run's parts.
        variables: Of the policy that samples.
        iteration: From 0.
        place: Among batches that are on their way at once; only where there are no further draws.
    """
    algorithm = parts.config.algorithm
    further = algorithm.resample_rounds if algorithm.dead_groups == "resample" else 0
    with parts.trainer.at(iteration) as moment:
        drawn = draw(lambda number: sample_batch(parts, variables, iteration, number, place), further=further)
    return drawn._replace(logged=moment.logged)


def learn(parts: Parts, learner: Learner, state: TrainState, iteration: int, drawn: Drawn, started: float) -> Iteration:
    """Learns from a batch.

    Args:
        parts: The run's parts.
        learner: Its compiled steps.
        state: Donated.
        iteration: From 0.
        drawn: Its batch.
        started: `time.monotonic()` when the iteration began.
    """
    config, algorithm = parts.config, parts.config.algorithm
    before_update = time.perf_counter()
    batch = batch_of(parts, drawn.batch)
    key = jax.random.fold_in(jax.random.fold_in(parts.key, _UPDATE_STREAM), iteration)
    first_update = int(state.step)  # of those that were made: what is left out does not move the schedule
    state, report = learner.update(state, batch, key)
    seconds = {**drawn.seconds, "update": time.perf_counter() - before_update}
    every = algorithm.update_ref_every
    if needs_reference(algorithm, config.ppo) and every and (iteration + 1) % every == 0:
        before, state = state.reference, learner.refresh(state)
        release(before)
    row = {
        "step": iteration + 1,
        "epoch": (iteration + 1) / batches_per_epoch(len(parts.prompts.train), config.training.prompts_per_batch),
        **update_metrics(report),
        "learning_rate": float(learner.schedule(first_update)),
        **rollout_metrics(parts, drawn.first),
        **drawn.logged,
    }
    if state.loss_scale is not None:
        row["loss_scale"] = float(state.loss_scale.scale)
    if algorithm.dead_groups != "keep":
        row |= {"draws": drawn.draws, "groups_kept": int(drawn.batch.teaching.sum())}
    row |= _timings(parts, {**seconds, "total": time.monotonic() - started}, row)
    estimates = report["measured"].get("estimates")
    advantages = np.asarray(batch.advantages if estimates is None else estimates.advantages)
    rollout = drawn.batch.rollout
    columns = completion_columns(parts, rollout, advantages)
    return Iteration(state, row, seconds, columns, rollout.judgement.rewards)


def sample_batch(parts: Parts, variables: Any, iteration: int, number: int, place: Place | None = None) -> Judged:
    """The batch of an iteration's draw: rows and random numbers are functions of (seed, iteration, number)."""
    config, rows = parts.config, parts.prompts.train
    places = further_batch_at(config.seed, iteration, number, batch_size=config.training.prompts_per_batch, n=len(rows))
    # A prompt that comes twice in an iteration, when prompts run out, gets other completions.
    key = jax.random.fold_in(jax.random.fold_in(parts.key, _DRAW_STREAM), number) if number else parts.key
    rollout = collect(
        parts.environment,
        parts.samplers.training,
        variables,
        [rows[place] for place in places],
        key=key,
        iteration=iteration,
        see=parts.see,
        chunk_prompts=config.training.chunk_prompts,
        timeout=parts.timeout,
        stopping=parts.stopping,
        keep_prompt=config.sampling.keep_prompt,
        place=place,
    )
    objectives = objectives_of(parts, rollout.judgement.judged, rollout.lengths)
    return Judged(rollout, objectives, teaching_groups(objectives, config.algorithm))


def batch_of(parts: Parts, judged: Judged) -> Batch:
    """A judged batch as the update takes it."""
    rollout = judged.rollout
    prompts = (rollout.prompt_tokens, rollout.prompt_mask)
    return make_batch(
        prompts,
        rollout.samples,
        judged.objectives,
        judged.teaching,
        parts.config.algorithm,
        pictures=rollout.pictures,
        answers=rollout.answers,
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


def rollout_metrics(parts: Parts, judged: Judged) -> dict[str, float]:
    """The batch's part of a metrics row: rewards as judged and their total as maximised, signal, lengths, texts.

    All of what the policy wrote; kept prompts (sampling.keep_prompt) are in the signal, and in a total of their own.
    """
    rollout, objectives = judged.rollout, judged.objectives
    wrote = slice(rollout.usable.shape[1] - parts.config.sampling.keep_prompt)
    samples, judgement = jax.tree.map(lambda array: array[:, wrote], rollout.samples), rollout.judgement
    row: dict[str, float] = {}
    for index, name in enumerate(parts.environment.reward_names):
        values = judgement.rewards[:, wrote, index]
        row |= _spread(f"reward/{name}", values)
        row[f"missing/{name}"] = float(np.isnan(values).mean())
    totals = total_rewards(objectives)
    row |= _spread("reward/total", totals[:, wrote])
    if parts.config.sampling.keep_prompt:
        row |= _spread("kept_prompt/total", totals[:, wrote.stop :])
    if OVERLONG in objectives.names:
        row |= _spread(f"reward/{OVERLONG}", np.asarray(objectives.rewards[:, wrote, -1]))
    row |= signal_metrics(objectives)
    for index, name in enumerate(parts.environment.watch_names):
        row |= _spread(f"watch/{name}", judgement.watched[:, wrote, index])
    lengths = samples.mask.sum(-1)
    row |= {
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": float(samples.truncated.mean()),
    }
    row |= turn_metrics(rollout, parts.environment.reward_names, parts.environment.watch_names)
    prompts = [row.prompt for row in rollout.rows]
    texts = [group[wrote] for group in rollout.texts]
    return row | parts.task_data.report.statistics(prompts, texts, rollout.usable[:, wrote].tolist())


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


def completion_columns(parts: Parts, rollout: Rollout, advantages: np.ndarray) -> dict[str, Any]:
    """The completions of a batch as columns, one entry each, groups one after another; of episodes one for each turn.

    Args:
        parts: Names of rewards and watched measures.
        rollout: The groups that were learned from.
        advantages: f32 [P, G]; of PPO the mean over each completion's tokens; [P, G, T] where turns have their own.
    """
    environment = parts.environment
    group = len(rollout.completions[0])
    if rollout.episodes is not None:
        turns = turn_columns(rollout, environment.reward_names, environment.watch_names, advantages)
        return turns | pictures_column([rollout.rows[episode // group] for episode in turns["episode"]])
    columns: dict[str, Any] = {
        "prompt": [row.prompt for row in rollout.rows for _ in range(group)],
        "completion": [text for texts in rollout.completions for text in texts],
        "text": [text for texts in rollout.texts for text in texts],
    }
    columns |= pictures_column([row for row in rollout.rows for _ in range(group)])
    judgement = rollout.judgement
    judged = (
        ("reward", environment.reward_names, judgement.rewards),
        ("watch", environment.watch_names, judgement.watched),
    )
    for kind, names, values in judged:
        columns |= {f"{kind}/{name}": np.ravel(values[..., n]) for n, name in enumerate(names)}
    written = np.asarray(rollout.samples.mask).any(-1)
    if not written.all():
        columns["kept_prompt"] = np.ravel(~written)
    return columns | {
        "advantage": np.ravel(advantages),
        "length": np.ravel(np.asarray(rollout.samples.mask).sum(-1)),
        "truncated": np.ravel(np.asarray(rollout.samples.truncated)),
        "usable": np.ravel(rollout.usable),
    }
