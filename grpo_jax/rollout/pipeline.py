"""Stages over chunks, at the same time: one chunk is rendered while the next is written, the last scored.

    chunk i+1 ─► sample ─►(queue)─► render ─►(queue)─► score ─► results
                            chunk i           chunk i-1

Every stage has a thread of its own and takes the chunks in their order, so the results are those of a plain
loop; the queues are bounded. What a call returns depends on nothing that comes after it. Several batches may be on
their way at once (`Pipeline`): each stage then passes from one batch to the next by itself.
"""

import contextvars
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from grpo_jax.errors import ABANDONED, StageError, StageTimeout, Stopped, UserError, mend_streams, one_line
from grpo_jax.rollout.watchdog import Watchdog, unseen_interrupts_end

_POLL_SECONDS = 0.5  # how often the waiting main thread looks up where a signal does not wake it
_GRACE_SECONDS = 10.0  # how long a pipeline that failed waits for calls that are still running
_STOP_SECONDS = 2.0  # the same where a stop was asked for
_WATCHDOG_SECONDS = 10.0  # beyond its limit, after which a call that nobody could end ends the process


@dataclass(frozen=True)
class Stage:
    """A named step of the pipeline.

    Attributes:
        function: The previous stage's result for a chunk (of the first stage: the chunk) → its own. It is called from
            a thread of its own, one chunk at a time: what torch and JAX keep per thread (`torch.inference_mode`) it
            must set itself, and it should wait for its results (`jax.block_until_ready`).
        timed: Whether the pipeline's timeout holds for it.
        unbounded: Whether any number of its results may wait for the next stage, where several batches run at once.
    """

    name: str
    function: Callable[[Any], Any]
    timed: bool = True
    unbounded: bool = False


class Pipeline:
    """Batches that go through the same stages in their order, several of them on their way at once.

    Each stage begins with a batch when it is done with all of the one before, whatever later stages still do of that.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done: dict[str, int] = {}  # batches that a stage is done with
        self._slots = 0

    def slot(self) -> "Slot":
        """Return the next slot."""
        self._slots += 1
        return Slot(self, self._slots - 1)


@dataclass(frozen=True)
class Slot:
    """A batch's place in a `Pipeline`, from 0. What fails or is stopped in it never lets the next one begin."""

    pipeline: Pipeline
    number: int

    def is_up(self, stage: str) -> bool:
        """Whether the stage is done with the batches before."""
        return self.pipeline.done.get(stage, 0) == self.number


@dataclass
class _Call:
    """A running call of a stage, by `who`; `start` is when its clock began, None while it stands still."""

    stage: str
    chunk: int
    start: float | None
    limit: float | None
    watchdog: Watchdog
    who: str = ""

    def named(self, reason: str) -> str:
        return f"{self.who}: {reason}" if self.who else reason

    def is_overdue(self) -> bool:
        start = self.start  # its own thread may stop the clock meanwhile
        return self.limit is not None and start is not None and time.perf_counter() - start > self.limit

    def timeout(self) -> StageTimeout:
        return StageTimeout(self.stage, self.chunk, self.named(f"no result after {self.limit:g} s"))

    def watch(self) -> None:
        """Arm the watchdog if the clock runs: while the interpreter lock is held nobody else can end the call."""
        if self.limit is not None and self.start is not None:
            seconds = self.start + self.limit + _WATCHDOG_SECONDS - time.perf_counter()
            self.watchdog.arm(seconds, f"error: {self.timeout()}, and it holds Python's interpreter lock")


_here = threading.local()  # .call: the stage's call that runs in this thread


def at_work(who: str) -> None:
    """Name who is at work in the calling stage, for its failures; outside a stage nothing happens."""
    call = getattr(_here, "call", None)
    if call is not None:
        call.who = who
        call.watch()


@contextmanager
def untimed() -> Iterator[None]:
    """Stop the clock of the calling stage: work inside has a time limit of its own."""
    call = getattr(_here, "call", None)
    if call is None:
        yield
        return
    spent = time.perf_counter() - call.start
    call.start = None
    call.watchdog.disarm()
    try:
        yield
    finally:
        call.start = time.perf_counter() - spent
        call.watch()


class _Stopped(Exception):
    """Raised in a worker that waits when the pipeline is stopped."""


class _State:
    """State that the threads share. One condition guards it all, also a `Pipeline`'s: nobody polls."""

    def __init__(self, count: int, slot: Slot | None, timeout: float | None):
        self.changed = threading.Condition() if slot is None else slot.pipeline.changed
        self.slot = slot
        self.queues: list[deque] = [deque() for _ in range(count + 1)]  # the last one collects the results
        self.timeout = timeout
        self.running: list[_Call | None] = [None] * count
        self.watchdogs = [Watchdog() for _ in range(count)]
        self.seconds = [0.0] * count
        self.begun = 0
        self.stopped = False
        self.error: StageError | None = None

    def wait_in_line(self, stage: str) -> None:
        slot = self.slot
        with self.changed:
            self.changed.wait_for(lambda: slot is None or slot.is_up(stage) or self.stopped)
            if self.stopped:
                raise _Stopped

    def leave(self, stage: str) -> None:
        if self.slot is not None:
            with self.changed:
                self.slot.pipeline.done[stage] = self.slot.number + 1
                self.changed.notify_all()

    def take(self, queue: deque, limit: int) -> object:
        """Take the next in a queue; in the first, once fewer than `limit` chunks are on their way."""
        first, done = queue is self.queues[0], self.queues[-1]
        with self.changed:
            self.changed.wait_for(lambda: (queue and not (first and self.begun - len(done) >= limit)) or self.stopped)
            if self.stopped:
                raise _Stopped
            item = queue.popleft()
            self.begun += first
            self.changed.notify_all()
            return item

    def give(self, queue: deque, item: object, size: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: len(queue) < size or self.stopped)
            if self.stopped:
                raise _Stopped
            queue.append(item)
            self.changed.notify_all()

    def stop(self, error: StageError | None = None) -> None:
        with self.changed:
            self.error = self.error or error  # the first failure is reported
            self.stopped = True
            self.changed.notify_all()


def _work(state: _State, index: int, stage: Stage, chunks: int, limit: int) -> None:
    last = index == len(state.running) - 1
    size = chunks if last or (state.slot is not None and stage.unbounded) else 1
    chunk = 0
    try:
        state.wait_in_line(stage.name)
        for chunk in range(chunks):
            item = state.take(state.queues[index], limit)
            start = time.perf_counter()
            call = _Call(stage.name, chunk, start, state.timeout if stage.timed else None, state.watchdogs[index])
            _here.call = state.running[index] = call
            depth = sys.getrecursionlimit()
            call.watch()
            try:
                item = stage.function(item)
            finally:
                call.watchdog.disarm()
                sys.setrecursionlimit(max(depth, sys.getrecursionlimit()))  # a judge may have lowered everybody's
            mend_streams()
            state.running[index] = None
            state.seconds[index] += time.perf_counter() - start
            state.give(state.queues[index + 1], item, size)
        state.leave(stage.name)
    except _Stopped:
        return
    except BaseException as error:  # whatever ends a stage ends all: its neighbours would wait for ever
        call, state.running[index] = state.running[index], None
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        if isinstance(error, UserError):  # it names its cause
            reason = str(error)
        elif call is not None:
            reason = call.named(reason)
        failure = StageError(stage.name, chunk, reason)
        failure.__cause__ = error
        state.stop(failure)


def _wait(state: _State, chunks: int, stopping: Callable[[], bool]) -> None:
    seconds = _POLL_SECONDS if state.timeout is None else min(_POLL_SECONDS, state.timeout / 4)
    while True:
        with state.changed:
            if state.error is not None or len(state.queues[-1]) == chunks:
                return
            state.changed.wait(seconds)
        if stopping():
            raise Stopped
        for call in list(state.running):
            if call is not None and call.is_overdue():
                state.stop(call.timeout())


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
    """Send every chunk through all stages, the stages working at the same time on different chunks.

    The calling thread only waits, so signals reach it: an exception that a handler raises there (KeyboardInterrupt)
    stops the pipeline. After any failure running calls are waited for, at most ten seconds, since a thread cannot be
    interrupted. A call that holds Python's interpreter lock for ever lets no signal and no time limit through:
    `watchdog` then ends the process. The stages' threads have the caller's context variables.

    Args:
        stages: At least one, with distinct names.
        timeout: Seconds one call of a stage may take (compilation in a first call counts); None for no limit.
        in_flight: Chunks that may be on their way at once, whatever the queues hold; None for no limit.
        stopping: Asked twice a second.
        slot: Place among batches that are on their way at once, each in a call of its own; None for a batch alone.

    Returns:
        The last stage's results in the order of the chunks, and the seconds of each stage by name.

    Raises:
        StageError: A stage raised; carries the stage, the chunk's index and the exception as its cause.
        StageTimeout: A call took longer than `timeout`. Its thread is abandoned: end the process soon.
        Stopped: A call that takes longer than two seconds more is abandoned too.
    """
    state = _State(len(stages), slot, timeout)
    state.queues[0].extend(chunks)
    count = len(state.queues[0])
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(_work, state, i, stage, count, in_flight or count),
            name=stage.name,
            daemon=True,
        )
        for i, stage in enumerate(stages)
    ]
    grace = _GRACE_SECONDS
    try:
        with unseen_interrupts_end():
            for thread in threads:
                thread.start()
            _wait(state, count, stopping)
    except Stopped:
        grace = _STOP_SECONDS
        raise
    finally:
        state.stop()
        for watchdog in state.watchdogs:  # this thread goes on by itself
            watchdog.close()
        _join(state, threads, grace)
    if state.error is not None:
        raise state.error
    return list(state.queues[-1]), dict(zip((stage.name for stage in stages), state.seconds, strict=True))
