"""Process two chunks of a batch at the same time: judge one while sampling the next.

Each chunk runs its stages in a thread. A stage takes one chunk at a time, in order, so the results are those of a plain
loop. The calling thread only waits: it receives signals and checks the time limit.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpo_jax.errors import ABANDONED, StageError, StageTimeout, Stopped, UserError, one_line
from grpo_jax.models.broadcast import broadcast, is_main_process, process_count

Result = TypeVar("Result")
Tree = TypeVar("Tree")
_POLL_SECONDS = 0.5  # poll interval for the stop request and the time limit
_GRACE_SECONDS = 10.0  # for running calls after a failure
_STOP_SECONDS = 2.0  # for running calls after a stop request
_HELD_SECONDS = 10.0  # beyond the time limit, until the process ends if a call holds the interpreter lock (GIL)
_STDERR = 2


@dataclass
class _Call:
    """A stage running on a chunk; `who` names its judge or reward."""

    stage: str
    chunk: int
    start: float
    thread: threading.Thread
    who: str = ""

    def named(self, reason: str) -> str:
        return f"{self.who}: {reason}" if self.who else reason


_here = threading.local()  # .call: the running stage of this thread


def set_current_judge(who: str) -> None:
    """Name the judge or reward of the calling stage for error messages; do nothing outside a stage."""
    call = getattr(_here, "call", None)
    if call is not None:
        call.who = who


@dataclass(eq=False)
class Work:
    """Pipeline of one batch through sampler and judges.

    With several processes, all sample, one chunk after the other, and process 0 judges. `share` broadcasts its
    results, or the error that ended the batch.
    """

    chunk_prompts: int = 0  # prompts per chunk; 0 for one chunk
    timeout: float | None = None  # seconds to render, score or step a chunk; sampling, which compiles, has no limit
    stopping: Callable[[], bool] = lambda: False  # returns whether to stop; polled twice a second
    locks: defaultdict[str, threading.Lock] | None = None  # one per stage, shared by concurrent batches
    progress: Mapping[str, Any] = field(default_factory=dict)  # arguments of the batch's rewards about the run
    missing: bool | None = None  # whether failing rewards are missing; None as configured

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._locks = defaultdict(threading.Lock) if self.locks is None else self.locks
        self._changed = threading.Condition()
        self._done: list[float] = []  # number of finished stages per chunk
        self._calls: list[_Call] = []
        self._failure: BaseException | None = None
        self._ended = False
        self._sharing = threading.RLock()

    @contextmanager
    def stage(self, name: str, chunk: int) -> Iterator[None]:
        """Run a stage on a chunk, after the previous chunk.

        A stage must wait for its results (`jax.block_until_ready`), and set the per-thread state of torch and JAX.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or chunk == 0 or self._done[chunk - 1] > self._done[chunk])
            if self._is_over():  # a call that never returns may hold the lock
                raise Stopped
        with self._locks[name]:
            if self._is_over():
                raise Stopped
            call = _Call(name, chunk, time.perf_counter(), threading.current_thread())
            _here.call = call
            self._calls.append(call)
            try:
                if name == "sample" and process_count() > 1:
                    with self._sharing:  # a failing process ends the batch only after all have sampled
                        self.share(None)
                        yield
                else:
                    yield
            except StageError:  # process 0 failed, which ends the batch everywhere
                raise
            except Exception as error:
                own = isinstance(error, UserError)  # its message already names the cause
                reason = str(error) if own else call.named(f"{type(error).__name__}: {one_line(error, 200)}")
                raise StageError(name, chunk, reason) from error
            finally:
                self._calls.remove(call)
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - call.start
                with self._changed:
                    self._done[chunk] += 1
                    self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._ended or self._failure is not None

    def share(self, tree: Tree) -> Tree:
        """Broadcast process 0's tree to all processes, or raise its error in the others."""
        if process_count() == 1:
            return tree
        with self._sharing:
            if self._ended:
                raise Stopped
            message: Any = broadcast(tree)
        if isinstance(message, dict) and "error" in message:
            raise Stopped if message["stopped"] else StageError("score", 0, message["error"])
        return message  # pyright: ignore[reportReturnType] a tree, not an error's message

    def run(self, count: int, chunk: Callable[[int], Result]) -> list[Result]:
        """Return chunk(0), …, chunk(count - 1), running two at a time.

        After a failure, running calls get at most ten seconds to finish: a thread cannot be interrupted.

        Raises:
            StageError: A stage raised; it has the stage, the chunk and, as its cause, the exception.
            StageTimeout: A stage took longer than `timeout`. Its thread is abandoned: end the process soon.
            Stopped: A stop was requested. A call that needs more than two further seconds is abandoned too.
        """
        results: list[Any] = [None] * count
        self._done = [0.0] * count
        numbers, unfinished = iter(range(count)), set(range(count))

        def work() -> None:
            for number in numbers:
                try:
                    results[number] = chunk(number)
                except BaseException as error:  # else the other thread would wait for ever
                    self._failure = self._failure or error
                with self._changed:
                    self._done[number] = float("inf")
                    unfinished.discard(number)
                    self._changed.notify_all()
                if self._is_over():
                    return

        threads = [
            threading.Thread(target=work, name="rollout", daemon=True)
            for _ in range(min(count, 2 if process_count() == 1 else 1))
        ]
        grace, stuck = _GRACE_SECONDS, None
        try:
            for thread in threads:
                thread.start()
            stuck = self._wait(unfinished)
        except Stopped:
            grace = _STOP_SECONDS
            self._end_elsewhere(Stopped(), unfinished)
            if unfinished:
                raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            deadline = time.perf_counter() + grace
            for thread in filter(lambda thread: thread.ident is not None, threads):
                if stuck is None or thread is not stuck.thread:
                    thread.join(max(0.0, deadline - time.perf_counter()))
                if thread.is_alive():
                    thread.name = ABANDONED + thread.name
        if self._failure is not None:
            raise self._failure
        return results

    def _wait(self, unfinished: set[int]) -> _Call | None:
        """Wait for results or a failure; return a call that timed out. Raises Stopped on a stop request."""
        limit = self.timeout
        while True:
            if limit is not None:  # faulthandler's thread ends the process if a call holds the interpreter lock
                faulthandler.dump_traceback_later(limit + _HELD_SECONDS, exit=True, file=_STDERR)
            with self._changed:
                if self._failure is not None or not unfinished:
                    break
                self._changed.wait(_POLL_SECONDS if limit is None else min(_POLL_SECONDS, limit / 4))
            if self.stopping():
                raise Stopped
            for call in list(self._calls) if unfinished else ():
                if limit is not None and call.stage != "sample" and time.perf_counter() - call.start > limit:
                    self._failure = StageTimeout(call.stage, call.chunk, call.named(f"no result after {limit:g} s"))
                    self._end_elsewhere(self._failure, unfinished)
                    return call
        if isinstance(self._failure, StageError) and self._failure.stage != "sample":  # all processes sample themselves
            self._end_elsewhere(self._failure, unfinished)
        return None

    def _end_elsewhere(self, error: BaseException, unfinished: set[int]) -> None:
        """End the batch in the other processes too."""
        if process_count() > 1 and is_main_process():
            with self._sharing:  # all processes finish the current sampling first
                if unfinished or self._failure is not None:
                    self._ended = True
                    broadcast({"stopped": isinstance(error, Stopped), "error": str(error)})
