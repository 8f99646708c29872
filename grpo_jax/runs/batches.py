"""The judged batch of an iteration: its rollout and its objectives.

With training.async_level 1 the next batch is sampled while one is judged and trained on (`Rollouts`; docs/scaling.md).
The sampling weights depend only on the iteration: θ0 for batches 0 and 1, then θn for batch n+1. Results do not depend
on timing; a resumed run restarts unfinished batches.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import Future, wait
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.errors import ABANDONED
from grpo_jax.models.variables import Variables
from grpo_jax.rollout.data import draw_at
from grpo_jax.rollout.rewards import JudgedBatch
from grpo_jax.rollout.rollout import Rollout, collect, join_rollouts
from grpo_jax.runs.context import RunContext
from grpo_jax.runs.metrics import rollout_metrics
from grpo_jax.runs.session import Record
from grpo_jax.training.estimators import Objectives, make_turn_objectives, require_binary
from grpo_jax.training.state import TrainState, free_buffers, rollout_copy, rollout_variables

Locks = defaultdict[str, threading.Lock]
"""Locks of the stages, shared by concurrent batches."""
_DRAW_STREAM = 2**31 - 5
_RESAMPLE_ROUNDS = 3  # maximum further draws of one iteration
_AHEAD = "rollout ahead"
_GRACE_SECONDS = 5.0  # prefetch shutdown timeout


class CollectedBatch(NamedTuple):
    """A judged batch: its rollout, its objectives, and its part of the metrics row."""

    rollout: Rollout
    objectives: Objectives
    metrics: Record


def collect_batch(ctx: RunContext, variables: Variables, iteration: int, locks: Locks | None = None) -> CollectedBatch:
    """Sample and judge the batch of an iteration.

    With zero_variance_groups "resample", at most three further batches are drawn until P groups are informative. This
    is DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476) with a limit. Informative groups come first, in
    drawing order. The metrics are those of the first batch.
    """
    algorithm = ctx.config.algorithm
    further = _RESAMPLE_ROUNDS if algorithm.zero_variance_groups == "resample" else 0
    judged = JudgedBatch(iteration, ctx.iterations)

    def collect_draw(number: int) -> Rollout:
        """Collect one draw; its rows and random numbers depend only on (seed, iteration, number)."""
        training, rows = ctx.config.training, ctx.task_data.prompts.train
        places = draw_at(ctx.config.seed, iteration, number, batch_size=training.prompts_per_batch, n=len(rows))
        # If prompts run out, one may occur twice in an iteration, with other completions.
        key = jax.random.fold_in(jax.random.fold_in(ctx.key, _DRAW_STREAM), number) if number else ctx.key
        work = ctx.work(training.chunk_prompts, locks, judged)
        batch = [rows[place] for place in places]
        return collect(ctx.fns, ctx.samplers.training, variables, batch, key=key, iteration=iteration, work=work)

    rollout, draws = collect_draw(0), 1
    objectives = weigh(ctx, rollout, training=True)
    row, size = rollout_metrics(ctx, rollout, objectives), len(rollout.rows)
    if algorithm.zero_variance_groups == "keep":
        return CollectedBatch(rollout, objectives, row | judged.logged)
    while objectives.informative.sum() < size and draws <= further:
        rollout = join_rollouts([rollout, collect_draw(draws)])
        objectives = weigh(ctx, rollout, training=True)
        draws += 1
    if draws > 1:
        rollout = rollout.pick(np.argsort(~objectives.informative, kind="stable")[:size])
        objectives = weigh(ctx, rollout, training=True)
    row |= {"draws": draws, "groups_kept": int(objectives.informative.sum())}
    return CollectedBatch(rollout, objectives, row | judged.logged)


def weigh(ctx: RunContext, rollout: Rollout, *, training: bool = False) -> Objectives:
    """Return the objectives on the policy's device, with conditions and length penalty applied.

    In training, invalid completions earn the task's `invalid` value.
    """
    algorithm, invalid = ctx.config.algorithm, ctx.task_data.invalid
    objectives = make_turn_objectives(
        rollout.rewards,
        rollout.lengths,
        algorithm,
        weights=ctx.rewards.weights,
        conditions=ctx.rewards.conditions,
        max_new_tokens=ctx.config.sampling.max_new_tokens,
        valid=rollout.valid_turns if training and invalid != "prompt" else None,
        fill=invalid == "worst",
        device=ctx.policy_device,
    )
    if training and algorithm.advantage == "maxrl":
        require_binary(objectives)
    return objectives


class Rollouts:
    """The rollouts of a run; with training.async_level 1 sampled ahead.

    Two batches are then in progress: the next one to train on and the one after it. Each stage processes one batch at a
    time, so a slow judge does not delay sampling. A batch with several passes (turns, further draws) starts after the
    previous batch.
    """

    def __init__(self, ctx: RunContext):
        self._is_ahead = ctx.config.training.async_level > 0
        self._one_pass = ctx.config.sampling.turns == 1 and ctx.config.algorithm.zero_variance_groups != "resample"
        self._closed = threading.Event()
        self._ctx = ctx._replace(stopping=lambda: self._closed.is_set() or ctx.stopping())
        self._locks: Locks = defaultdict(threading.Lock)
        self._futures: dict[int, Future[CollectedBatch]] = {}

    def collect(self, state: TrainState, iteration: int) -> tuple[CollectedBatch, TrainState]:
        """Return a judged batch, and the state, which holds the next sampling weights if sampled ahead."""
        if not self._is_ahead:
            return collect_batch(self._ctx, state.variables, iteration), state
        copied = state.rollout_weights
        assert copied is not None  # set by `Learner.start` and by checkpoints
        self._begin(iteration, rollout_variables(state, copied))  # only the first of this process; others have begun
        now = rollout_copy(state)
        if iteration + 1 < self._ctx.iterations:
            self._begin(iteration + 1, rollout_variables(state, now))
        batch = self._futures[iteration].result()
        del self._futures[iteration]
        batch = batch._replace(metrics={**batch.metrics, "staleness": int(state.step) - int(copied.step)})
        free_buffers(copied)
        return batch, state._replace(rollout_weights=now)

    def _begin(self, iteration: int, variables: Variables) -> None:
        if iteration in self._futures:
            return
        before = None if self._one_pass else self._futures.get(iteration - 1)
        future = self._futures[iteration] = Future()

        def work() -> None:
            try:
                if before is not None:
                    wait([before])
                future.set_result(collect_batch(self._ctx, variables, iteration, self._locks))
            except BaseException as error:  # raised by `collect` of this batch
                future.set_exception(error)

        threading.Thread(target=work, name=_AHEAD, daemon=True).start()

    def wait(self) -> None:
        """Wait for all batches in progress, so that sampler and judges are free. `collect` raises their failures."""
        wait(self._futures.values())

    def close(self) -> None:
        """Stop unfinished work. A call that does not return is abandoned."""
        self._closed.set()
        wait(self._futures.values(), _GRACE_SECONDS)
        for thread in threading.enumerate():
            if thread.name == _AHEAD:
                thread.name = ABANDONED + thread.name
        self._futures.clear()
