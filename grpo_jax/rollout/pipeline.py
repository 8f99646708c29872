"""Run stages over chunks at the same time: one chunk is rendered while the next is sampled and the last is scored.

    chunk i+1 ─► sample ─►(queue)─► render ─►(queue)─► score ─► results
                            chunk i           chunk i-1

Each stage has one thread and takes the chunks in order, so the results are those of a plain loop. The queues are
bounded. Several batches may be in flight at once (`Pipeline`): each stage passes from one batch to the next by itself.
"""

import contextvars
import faulthandler
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_jax.errors import ABANDONED, StageError, StageTimeout, Stopped, UserError, one_line

_POLL_SECONDS = 0.5  # between two looks at the stop request and the time limit
_GRACE_SECONDS = 10.0  # for running calls after a failure
_STOP_SECONDS = 2.0  # for running calls after a stop request
_HELD_SECONDS = 10.0  # beyond the time limit, after which a call that holds the interpreter lock ends the process
_STDERR = 2


@dataclass(frozen=True)
class Stage:
    """A named step of the pipeline.

    Attributes:
        function: Maps the previous stage's result for a chunk (of the first stage: the chunk) to its own. Its thread
            must set what torch and JAX keep per thread (`torch.inference_mode`), and wait for its results
            (`jax.block_until_ready`).
        timed: Whether the time limit holds for it.
        unbounded: Whether any number of its results may wait for the next stage if several batches run at once.
    """

    name: str
    function: Callable[[Any], Any]
    timed: bool = True
    unbounded: bool = False


class Pipeline:
    """Batches that go through the same stages in order, several of them at once.

    Each stage begins with a batch when it is done with all of the one before, whatever later stages still do of that.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done: dict[str, int] = {}  # number of finished batches by stage
        self._slots = 0

    def slot(self) -> "Slot":
        """Return the next slot."""
        self._slots += 1
        return Slot(self, self._slots - 1)


@dataclass(frozen=True)
class Slot:
    """A batch's place in a `Pipeline`, from 0. The next one never begins after a failure or a stop."""

    pipeline: Pipeline
    number: int

    def is_up(self, stage: str) -> bool:
        """Return whether the stage is done with the batches before."""
        return self.pipeline.done.get(stage, 0) == self.number


@dataclass
class _Call:
    """A running call of a stage; `who` is at work in it."""

    stage: Stage
    chunk: int
    start: float
    who: str = ""

    def named(self, reason: str) -> str:
        return f"{self.who}: {reason}" if self.who else reason

    def is_overdue(self, limit: float) -> bool:
        return self.stage.timed and time.perf_counter() - self.start > limit


_here = threading.local()  # .call: the stage's call that runs in this thread


def at_work(who: str) -> None:
    """Name who is at work in the calling stage, for its failures; outside a stage nothing happens."""
    call = getattr(_here, "call", None)
    if call is not None:
        call.who = who


class _Stopped(Exception):
    """Raised in a worker that waits when the pipeline is stopped."""


class _State:
    """State that the threads share. One condition guards it all, also a `Pipeline`'s."""

    def __init__(self, stages: Sequence[Stage], chunks: Sequence[object], in_flight: int | None, slot: Slot | None):
        self.stages = stages
        self.count = len(chunks)
        self.in_flight = in_flight or self.count
        self.slot = slot
        self.changed = threading.Condition() if slot is None else slot.pipeline.changed
        self.queues: list[deque] = [deque(chunks), *(deque() for _ in stages)]  # the last one collects the results
        self.running: list[_Call | None] = [None] * len(stages)
        self.seconds = {stage.name: 0.0 for stage in stages}
        self.begun = 0
        self.stopped = False
        self.error: StageError | None = None

    def _wait_for(self, condition: Callable[[], object]) -> None:
        self.changed.wait_for(lambda: condition() or self.stopped)
        if self.stopped:
            raise _Stopped

    def wait_for_turn(self, stage: str) -> None:
        slot = self.slot
        if slot is not None:
            with self.changed:
                self._wait_for(lambda: slot.is_up(stage))

    def leave(self, stage: str) -> None:
        if self.slot is not None:
            with self.changed:
                self.slot.pipeline.done[stage] = self.slot.number + 1
                self.changed.notify_all()

    def take(self, index: int) -> object:
        """Take the next chunk of a stage; the first stage waits while `in_flight` chunks are on their way."""
        queue, results = self.queues[index], self.queues[-1]
        with self.changed:
            self._wait_for(lambda: queue and (index or self.begun - len(results) < self.in_flight))
            item = queue.popleft()
            self.begun += index == 0
            self.changed.notify_all()
            return item

    def give(self, index: int, item: object) -> None:
        """Hand a stage's result on; a stage waits while its last result is not taken."""
        queue = self.queues[index + 1]
        unbounded = index == len(self.stages) - 1 or (self.slot is not None and self.stages[index].unbounded)
        with self.changed:
            self._wait_for(lambda: unbounded or not queue)
            queue.append(item)
            self.changed.notify_all()

    def stop(self, error: StageError | None = None) -> None:
        with self.changed:
            self.error = self.error or error  # the first failure is reported
            self.stopped = True
            self.changed.notify_all()


def _work(state: _State, index: int) -> None:
    stage = state.stages[index]
    call = _Call(stage, 0, 0.0)
    try:
        state.wait_for_turn(stage.name)
        for chunk in range(state.count):
            item = state.take(index)
            _here.call = state.running[index] = call = _Call(stage, chunk, time.perf_counter())
            item = stage.function(item)
            state.running[index] = None
            state.seconds[stage.name] += time.perf_counter() - call.start
            state.give(index, item)
        state.leave(stage.name)
    except _Stopped:
        return
    except BaseException as error:  # its neighbours would wait for ever
        state.running[index] = None
        # A user's mistake names its cause itself.
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error, 200)}"
        failure = StageError(stage.name, call.chunk, reason if isinstance(error, UserError) else call.named(reason))
        failure.__cause__ = error
        state.stop(failure)


def _wait(state: _State, timeout: float | None, stopping: Callable[[], bool]) -> None:
    """Wait for the results, a failure, a stop request or the time limit.

    This thread cannot look at the clock while a call holds the interpreter lock. faulthandler's thread then ends the
    process, and writes to standard error where each thread stands.
    """
    seconds = _POLL_SECONDS if timeout is None else min(_POLL_SECONDS, timeout / 4)
    while True:
        if timeout is not None:
            faulthandler.dump_traceback_later(timeout + _HELD_SECONDS, exit=True, file=_STDERR)
        with state.changed:
            if state.error is not None or len(state.queues[-1]) == state.count:
                return
            state.changed.wait(seconds)
        if stopping():
            raise Stopped
        for call in list(state.running):
            if call is not None and timeout is not None and call.is_overdue(timeout):
                reason = call.named(f"no result after {timeout:g} s")
                state.stop(StageTimeout(call.stage.name, call.chunk, reason))


def _join(state: _State, threads: Sequence[threading.Thread], seconds: float) -> None:
    """Wait for the threads to end; one that is stuck in its call is left behind (it is a daemon), and renamed so."""
    stuck = state.error.stage if isinstance(state.error, StageTimeout) else None
    deadline = time.perf_counter() + seconds
    for thread in threads:
        if thread.is_alive() and thread.name != stuck:
            thread.join(max(0.0, deadline - time.perf_counter()))
        if thread.is_alive():
            thread.name = ABANDONED + thread.name


def run_pipeline(
    chunks: Sequence[object],
    stages: Sequence[Stage],
    *,
    timeout: float | None = None,
    in_flight: int | None = None,
    stopping: Callable[[], bool] = lambda: False,
    slot: Slot | None = None,
) -> tuple[list[Any], dict[str, float]]:
    """Send every chunk through all stages, which work at the same time on different chunks.

    The calling thread only waits, so signals reach it: an exception of a signal handler (KeyboardInterrupt) stops the
    pipeline. After a failure running calls are waited for, at most ten seconds: a thread cannot be interrupted. The
    stages' threads have the caller's context variables.

    Args:
        stages: At least one, with distinct names.
        timeout: Seconds that one call of a stage may take, compilation included; None for no limit.
        in_flight: Most chunks between the first stage and the last; None for no limit beside the queues.
        stopping: Asked twice a second.
        slot: Place among several batches in flight, each in a call of its own; None for a batch alone.

    Returns:
        The last stage's results in the order of the chunks, and the seconds of each stage by name.

    Raises:
        StageError: A stage raised; carries the stage, the chunk's index and the exception as its cause.
        StageTimeout: A call took longer than `timeout`. Its thread is abandoned: end the process soon.
        Stopped: A call that takes longer than two seconds more is abandoned too.
    """
    state = _State(stages, list(chunks), in_flight, slot)
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(_work, state, i), name=stage.name, daemon=True)
        for i, stage in enumerate(stages)
    ]
    grace = _GRACE_SECONDS
    try:
        for thread in threads:
            thread.start()
        _wait(state, timeout, stopping)
    except Stopped:
        grace = _STOP_SECONDS
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
        state.stop()
        _join(state, threads, grace)
    if state.error is not None:
        raise state.error
    return list(state.queues[-1]), state.seconds
