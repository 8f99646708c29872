"""One iteration of training: draw a batch, estimate advantages, update, and report metrics.

Every random number and every position follows from (seed, iteration), so a run is resumed by its number of iterations
and its arrays.

With training.async_level 1 the next batch is on its way while one is judged and learned from (`SampledAhead`):

    weights     θ0        θ1        θ2
    learn       batch 0 ─►batch 1 ─►batch 2
    sample      batch 1   batch 2   batch 3      with the weights above it, those before the update

The weights that sample a batch follow from the iteration alone: θ0 for batches 0 and 1, then θn for batch n+1.
Nothing that is learned depends on how long anything takes, and a resumed run begins again what was on its way.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.errors import ABANDONED
from grpo_jax.models.broadcast import process_count
from grpo_jax.models.policy import make_loss_scale
from grpo_jax.models.sharding import shard, shard_batch, shard_optimizer
from grpo_jax.models.variables import Variables
from grpo_jax.rollout.data import batches_per_epoch, further_batch_at, iterations_in_all
from grpo_jax.rollout.pictures import pictures_column
from grpo_jax.rollout.rollout import Rollout, collect, join_rollouts
from grpo_jax.runs.measures import present_mean, turn_metrics
from grpo_jax.runs.parts import RunContext, objectives_of
from grpo_jax.runs.progress import Record
from grpo_jax.training.batch import Batch, make_batch
from grpo_jax.training.estimators import OVERLONG, Objectives, informative_groups, signal_metrics, total_rewards
from grpo_jax.training.optimizer import make_optimizer, make_schedule
from grpo_jax.training.state import (
    TrainState,
    commit_to_device,
    free_buffers,
    init_state,
    needs_reference,
    refresh_reference,
    rollout_copy,
    rollout_variables,
)
from grpo_jax.training.update import make_update


class Learner(NamedTuple):
    """The compiled parts of training.

    Attributes:
        update: update(state, batch, key) → (state, report).
        schedule: Learning rate by update.
        start: start(variables) → initial state. It takes the trained weights over: where they are not the reference,
            they can be read until the first update only.
        refresh: refresh(state) → the state with the current policy as its reference.
    """

    update: Callable[..., tuple[TrainState, Record]]
    schedule: optax.Schedule
    iterations: int
    updates_per_iteration: int
    start: Callable[[Variables], TrainState]
    refresh: Callable[[TrainState], TrainState]


def make_learner(parts: RunContext) -> Learner:
    """Make optimizer, schedule and update step from a run's config."""
    config, policy, training = parts.config, parts.policy, parts.config.training
    iterations = iterations_in_all(training, len(parts.prompts.train))
    per_iteration = config.training.inner_epochs * config.training.minibatches
    section = config.optimizer.replace(learning_rate=config.learning_rate)
    schedule = make_schedule(section, iterations * per_iteration)
    optimizer = shard_optimizer(make_optimizer(section, schedule), policy.mesh)
    update = make_update(
        policy,
        optimizer,
        config.algorithm,
        training,
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.written_tokens,
        allowed_tokens=None if parts.allowed_tokens is None else jnp.asarray(parts.allowed_tokens),
        trie=parts.trie,
        ppo=config.ppo,
    )

    # New adapters change nothing: the base is the policy at the start, and stays the reference if none replaces it.
    untouched = config.policy.lora.path is None and config.sft.steps == 0
    base_reference = untouched and config.algorithm.update_ref_every == 0

    def start(variables: Variables) -> TrainState:
        state = init_state(
            variables,
            optimizer,
            keep_reference=needs_reference(config.algorithm, config.ppo),
            base_reference=base_reference,
            loss_scale=make_loss_scale(config.policy.compute_dtype),
            take_over=True,
        )
        state = commit_to_device(shard(state, policy.mesh))
        return state._replace(rollout_weights=rollout_copy(state)) if config.training.async_level else state

    def learn_from(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Record]:
        return jax.block_until_ready(update(state, shard_batch(batch, policy.mesh), key))

    return Learner(learn_from, schedule, iterations, per_iteration, start, refresh_reference)


_UPDATE_STREAM, _DRAW_STREAM = 2**31 - 3, 2**31 - 5
_RESAMPLE_ROUNDS = 3  # further draws of one iteration


class Iteration(NamedTuple):
    """Result of one iteration: state, metrics row, seconds of work by stage, and what it learned from.

    `completions` are columns of completions/; `rewards` are f32 [P, G, N], of episodes at their end.
    """

    state: TrainState
    row: Record
    seconds: dict[str, float]
    completions: Record
    rewards: np.ndarray


class Sampled(NamedTuple):
    """The groups that an iteration learns from, what is maximised, and the batch's part of the metrics row.

    `informative` is bool [P], the groups that the estimator learns something from.
    """

    rollout: Rollout
    objectives: Objectives
    informative: np.ndarray
    row: Record


Locks = defaultdict[str, threading.Lock]
"""Of the stages of batches that are on their way at once."""


def sample_groups(parts: RunContext, variables: Variables, iteration: int, locks: Locks | None = None) -> Sampled:
    """Sample and judge the batch of an iteration, and with dynamic sampling others until P groups are informative.

    DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476) with a bound. Informative groups come in the order they
    were drawn, then zero-variance groups of the first draw. The metrics are of the whole first draw.
    """
    algorithm = parts.config.algorithm
    further = _RESAMPLE_ROUNDS if algorithm.zero_variance_groups == "resample" else 0
    with parts.trainer.at(iteration) as moment:
        rollout = sample_batch(parts, variables, iteration, locks=locks)
        objectives, informative, size, draws = *judged(parts, rollout), len(rollout.rows), 1
        row = rollout_metrics(parts, rollout, objectives)
        while informative.sum() < size and draws <= further:
            rollout = join_rollouts([rollout, sample_batch(parts, variables, iteration, draws, locks)])
            draws += 1
            _, informative = judged(parts, rollout)
    if draws > 1:
        rollout = rollout.pick(np.argsort(~informative, kind="stable")[:size])
        objectives, informative = judged(parts, rollout)
    if algorithm.zero_variance_groups != "keep":
        row |= {"draws": draws, "groups_kept": int(informative.sum())}
    return Sampled(rollout, objectives, informative, row | moment.logged)


def judged(parts: RunContext, rollout: Rollout) -> tuple[Objectives, np.ndarray]:
    """Return what training maximises, and bool [P], the groups that the estimator learns something from."""
    objectives = objectives_of(parts, rollout.rewards, rollout.lengths, rollout.valid_turns)
    return objectives, informative_groups(objectives, parts.config.algorithm)


def run_iteration(
    parts: RunContext, learner: Learner, state: TrainState, iteration: int, ahead: SampledAhead | None = None
) -> Iteration:
    """Sample a batch, judge it and learn from it; with `ahead` the next batch is begun first."""
    started = time.monotonic()
    if ahead is None:
        sampled = sample_groups(parts, state.variables, iteration)
    else:
        sampled, state = ahead.advance(state, iteration, learner.iterations)
    rollout = sampled.rollout
    config, every = parts.config, parts.config.algorithm.update_ref_every
    before_update = time.perf_counter()
    batch = batch_of(parts, sampled)
    key = jax.random.fold_in(jax.random.fold_in(parts.key, _UPDATE_STREAM), iteration)
    first_update = int(state.step)  # of those that were made: what is left out does not move the schedule
    state, report = learner.update(state, batch, key)
    seconds = {**rollout.seconds, "update": time.perf_counter() - before_update}
    if needs_reference(config.algorithm, config.ppo) and every and (iteration + 1) % every == 0:
        before, state = state.reference, learner.refresh(state)
        free_buffers(before)
    row = {
        "step": iteration + 1,
        "epoch": (iteration + 1) / batches_per_epoch(len(parts.prompts.train), config.training.prompts_per_batch),
        **update_metrics(report),
        "learning_rate": float(np.asarray(learner.schedule(first_update))),
        **sampled.row,
    }
    if state.loss_scale is not None:
        row["loss_scale"] = float(state.loss_scale.scale)
    written = config.training.prompts_per_batch * row.get("draws", 1) * config.sampling.group_size
    row |= {f"seconds/{name}": value for name, value in seconds.items()}
    row["seconds/total"] = time.monotonic() - started
    row["tokens_per_second"] = row["completion_tokens"] * written / max(seconds["sample"], 1e-9)
    estimates = report["measured"].get("estimates")
    advantages = np.asarray(batch.advantages if estimates is None else estimates.advantages)
    columns = completion_columns(parts, rollout, advantages)
    return Iteration(state, row, seconds, columns, rollout.final_rewards)


def sample_batch(
    parts: RunContext,
    variables: Variables,
    iteration: int,
    number: int = 0,
    locks: Locks | None = None,
) -> Rollout:
    """Sample and judge one draw: its rows and random numbers are functions of (seed, iteration, number)."""
    config, rows = parts.config, parts.prompts.train
    size = config.training.prompts_per_batch
    places = further_batch_at(config.seed, iteration, number, batch_size=size, n=len(rows))
    # A prompt that comes twice in an iteration, when prompts run out, gets other completions.
    key = jax.random.fold_in(jax.random.fold_in(parts.key, _DRAW_STREAM), number) if number else parts.key
    return collect(
        parts.environment,
        parts.samplers.training,
        variables,
        [rows[place] for place in places],
        key=key,
        iteration=iteration,
        work=parts.work(config.training.chunk_prompts, locks),
    )


def batch_of(parts: RunContext, sampled: Sampled) -> Batch:
    """Convert a judged batch to the update's `Batch`."""
    rollout = sampled.rollout
    assert rollout.samples is not None and rollout.prompt_tokens is not None and rollout.prompt_mask is not None
    return make_batch(
        (rollout.prompt_tokens, rollout.prompt_mask),
        rollout.samples,
        sampled.objectives,
        sampled.informative,
        parts.config.algorithm,
        pictures=rollout.pictures,
        mesh=parts.policy.mesh if process_count() == 1 else None,  # each process takes its share
    )


def update_metrics(report: Record) -> Record:
    """Return the update's part of a metrics row, with a value head's measures if there is one."""
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
    named = ("importance_weight", "importance_clipped")
    return row | {name: float(measured[name]) for name in named if name in measured}


def rollout_metrics(parts: RunContext, rollout: Rollout, objectives: Objectives) -> dict[str, float]:
    """The batch's part of a metrics row: rewards as judged, total as maximised, signal, lengths, texts."""
    samples, rewards, watched = rollout.samples, rollout.final_rewards, rollout.final_eval_rewards
    assert samples is not None
    row: dict[str, float] = {}
    for index, name in enumerate(parts.environment.reward_names):
        row |= _spread(f"reward/{name}", rewards[..., index])
        row[f"missing/{name}"] = float(np.isnan(rewards[..., index]).mean())
    row |= _spread("reward/total", total_rewards(objectives))
    if OVERLONG in objectives.names:
        row |= _spread(f"reward/{OVERLONG}", np.asarray(objectives.rewards[..., -1]))
    row |= signal_metrics(objectives)
    for index, name in enumerate(parts.environment.eval_reward_names):
        row |= _spread(f"eval_rewards/{name}", watched[..., index])
    lengths = samples.mask.sum(-1)
    row |= {
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": float(lengths.max()),
        "truncated": float(samples.truncated.mean()),
    }
    row |= turn_metrics(rollout, parts.environment.reward_names, parts.environment.eval_reward_names)
    prompts = [row.prompt for row in rollout.rows]
    return row | parts.task_data.report.statistics(prompts, rollout.texts, rollout.valid.tolist())


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    present = values[np.isfinite(values)].astype(np.float64)
    return {f"{name}/mean": present_mean(values), f"{name}/std": float(present.std()) if present.size else float("nan")}


def completion_columns(parts: RunContext, rollout: Rollout, advantages: np.ndarray) -> Record:
    """Columns of a batch's completions, one entry each, group after group; of episodes one for each turn.

    `advantages` are f32 [P, G] (of PPO the mean over each completion's tokens), or [P, G, T] by turn.
    """
    samples, lengths = rollout.samples, rollout.lengths
    assert samples is not None
    _, group, turns = lengths.shape
    names = [f"reward/{name}" for name in parts.environment.reward_names]
    names += [f"eval_rewards/{name}" for name in parts.environment.eval_reward_names]
    values = np.concatenate([rollout.rewards, rollout.eval_rewards], axis=-1)
    entries: list[Record] = []
    rows = []
    for p, g in np.ndindex(advantages.shape[:2]):
        for number, turn in enumerate(rollout.episodes[p][g].turns):
            advantage = advantages[p, g]
            if advantages.ndim == 3 and samples.turn is not None:
                in_turn = samples.mask[p, g] & (samples.turn[p, g] == number)
                in_turn = in_turn[: advantages.shape[2]]
                advantage = advantage[in_turn].mean() if in_turn.any() else 0
            entry = {"prompt": rollout.rows[p].prompt, "completion": turn.raw_completion, "text": turn.completion}
            if turns > 1:
                answer = None if turn.observation is None or turn.observation.done else turn.observation.text
                entry |= {"episode": p * group + g, "turn": number + 1, "answer": answer}
            entry |= dict(zip(names, values[p, g, number], strict=True))
            entry |= {
                "advantage": np.float32(advantage),
                "length": int(lengths[p, g, number]),
                "truncated": turn.truncated,
                "valid": turn.valid,
            }
            entries.append(entry)
            rows.append(rollout.rows[p].pictures)
    return {name: [entry[name] for entry in entries] for name in entries[0]} | pictures_column(rows)


_AHEAD = "sample ahead"
_GRACE_SECONDS = 5.0  # how long batches that nobody wants any more are waited for


class SampledAhead:
    """Batches sampled ahead: the one that is learned from next, and the one behind it.

    Each stage works for one batch at a time, so a slow judge holds up no sampling. A batch of several passes (turns,
    further draws) begins after the one before.
    """

    def __init__(self, parts: RunContext):
        config = parts.config
        one_pass = config.sampling.turns == 1 and config.algorithm.zero_variance_groups != "resample"
        self._closed = threading.Event()
        self._parts = parts._replace(stopping=lambda: self._closed.is_set() or parts.stopping())
        self._locks: Locks = defaultdict(threading.Lock)
        self._one_pass = one_pass
        self._drawn: dict[int, Future[Sampled]] = {}

    def advance(self, state: TrainState, iteration: int, iterations: int) -> tuple[Sampled, TrainState]:
        """Begin the next batch of `iterations`, and wait for this one; raises what ended it.

        The state returned holds the weights that the next batch is sampled with.
        """
        copied = state.rollout_weights
        assert copied is not None  # `Learner.start` and checkpoints have it
        self._begin(iteration, rollout_variables(state, copied))  # the first of this process; others are on their way
        now = rollout_copy(state)
        if iteration + 1 < iterations:
            self._begin(iteration + 1, rollout_variables(state, now))
        sampled = self._drawn[iteration].result()
        del self._drawn[iteration]
        row = {**sampled.row, "staleness": int(state.step) - int(copied.step)}
        free_buffers(copied)
        return sampled._replace(row=row), state._replace(rollout_weights=now)

    def _begin(self, iteration: int, variables: Variables) -> None:
        if iteration in self._drawn:
            return
        drawn = self._drawn[iteration] = Future()
        before = self._drawn.get(iteration - 1)

        def draw() -> None:
            try:
                if before is not None and not self._one_pass:
                    wait([before])
                drawn.set_result(sample_groups(self._parts, variables, iteration, self._locks))
            except BaseException as error:  # raised where the batch is taken
                drawn.set_exception(error)

        threading.Thread(target=draw, name=_AHEAD, daemon=True).start()

    def settle(self) -> None:
        """Wait until nothing is on its way, so that sampler and judges are free. `advance` raises failures."""
        wait(self._drawn.values())

    def close(self) -> None:
        """Stop what is on its way. A call that does not return is left behind."""
        self._closed.set()
        wait(self._drawn.values(), _GRACE_SECONDS)
        for thread in threading.enumerate():
            if thread.name == _AHEAD:
                thread.name = ABANDONED + thread.name
        self._drawn.clear()
