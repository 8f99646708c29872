"""Sampling ahead (training.lag 1): while a batch is judged and learned from, the next one is on its way.

    weights     θ0        θ1        θ2
    learn       batch 0 ─►batch 1 ─►batch 2
    sample      batch 1   batch 2   batch 3      with the weights above it, those before the update

Which weights sample a batch follows from the iteration alone: θ0 for batches 0 and 1, then θn for batch n+1. Nothing
that is learned depends on how long anything takes, and a resumed run begins again what was on its way.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from typing import Any

from grpo_jax.errors import ABANDONED, Stopped
from grpo_jax.rollout.pipeline import Pipeline, Slot
from grpo_jax.rollout.watchdog import unseen_interrupts_end
from grpo_jax.runs.iteration import Iteration, Learner, Sampled, learn, sample_groups
from grpo_jax.runs.parts import Parts
from grpo_jax.training.state import Behind, TrainState, left_behind, release, variables_behind

_POLL_SECONDS = 0.5  # how often who waits looks up where a signal does not wake it
_GRACE_SECONDS = 5.0  # how long batches that nobody wants any more are waited for


class Prefetcher:
    """Batches on their way, a thread for each: the one that is learned from next, and the one behind it.

    Their stages are one line: each takes the chunks of one batch after those of the other, so a slow judge holds up no
    sampling. Where a batch is not one pass through the stages (several turns, further draws), it begins when the one
    before has ended.
    """

    def __init__(self, parts: Parts):
        """Nothing is on its way yet."""
        config = parts.config
        self._parts = parts._replace(stopping=lambda: self._closed or parts.stopping())
        self._pipeline = (
            Pipeline() if config.sampling.turns == 1 and config.algorithm.dead_groups != "resample" else None
        )
        self._drawn: dict[int, Future[Sampled]] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._closed = False

    def begin(self, iteration: int, state: TrainState, behind: Behind) -> None:
        """Begins the batch of an iteration, unless it is on its way already."""
        if iteration in self._drawn:
            return
        variables = variables_behind(state, behind)
        drawn: Future[Sampled] = Future()
        slot, before = (None, [*self._drawn.values()]) if self._pipeline is None else (self._pipeline.slot(), [])
        given = (drawn, before, iteration, variables, slot)
        thread = threading.Thread(target=self._draw, args=given, name="sample ahead", daemon=True)
        self._drawn[iteration], self._threads[iteration] = drawn, thread
        thread.start()

    def take(self, iteration: int) -> Sampled:
        """The batch of an iteration, once it is judged; raises what ended it."""
        drawn = self._drawn[iteration]
        self._await([drawn])
        found = drawn.result()
        del self._drawn[iteration], self._threads[iteration]
        return found

    def settle(self) -> None:
        """Waits until nothing is on its way: who comes next has sampler and judges alone. `take` tells of failures."""
        self._await([*self._drawn.values()])

    def close(self) -> None:
        """Stops what is on its way. A call that does not return is left behind."""
        self._closed = True
        deadline = time.monotonic() + _GRACE_SECONDS
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.name = ABANDONED + thread.name
        self._drawn.clear()
        self._threads.clear()

    def _await(self, drawn: list[Future[Sampled]]) -> None:
        with unseen_interrupts_end():
            while wait(drawn, _POLL_SECONDS).not_done:
                pass

    def _draw(
        self, drawn: Future[Sampled], before: list[Future[Sampled]], iteration: int, variables: Any, slot: Slot | None
    ) -> None:
        """The life of a batch's thread."""
        try:
            while wait(before, _POLL_SECONDS).not_done:
                if self._parts.stopping():
                    raise Stopped
            drawn.set_result(sample_groups(self._parts, variables, iteration, slot))
        except BaseException as error:  # told where the batch is taken
            drawn.set_exception(error)


def iterate_ahead(parts: Parts, learner: Learner, ahead: Prefetcher, state: TrainState, iteration: int) -> Iteration:
    """As `run_iteration`, and the next batch is begun before this one is waited for."""
    started, behind = time.monotonic(), state.behind
    assert behind is not None  # `Learner.start` and checkpoints have it
    ahead.begin(iteration, state, behind)  # the first of this process; others are on their way
    now = left_behind(state)
    if iteration + 1 < learner.iterations:
        ahead.begin(iteration + 1, state, now)
    drawn = ahead.take(iteration)
    staleness = int(state.step) - int(behind.step)
    release(behind)
    result = learn(parts, learner, state._replace(behind=now), iteration, drawn, started)
    return result._replace(row={**result.row, "staleness": staleness})
