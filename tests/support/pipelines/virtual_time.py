"""The real pipeline on a clock that jumps: a stage that sleeps costs no time, and what it took is exact.

Threads that wait for each other wait in conditions, those that sleep in the clock. When nobody else can go on, it jumps
to the sleeper who wakes first.
"""

import heapq
import itertools
import threading
from types import SimpleNamespace

from grpo_jax.rollout import pipeline
from grpo_jax.rollout.pipeline import Pipeline, Stage, run_pipeline

PATIENCE = 60  # seconds; only a mistake takes that long


class Clock:
    """Virtual seconds for the thread that makes it, and for those that `thread` makes."""

    def __init__(self):
        self.now = 0
        self._lock, self._awake = threading.Lock(), 1
        self._sleepers, self._numbers = [], itertools.count()

    def busy(self, change):
        """So many threads more can go on; where none can, the clock jumps."""
        with self._lock:
            self._awake += change
            if self._awake == 0 and self._sleepers:
                self.now, _, woken = heapq.heappop(self._sleepers)
                self._awake = 1
                woken.set()

    def sleep(self, seconds):
        woken = threading.Event()
        with self._lock:
            heapq.heappush(self._sleepers, (self.now + seconds, next(self._numbers), woken))
        self.busy(-1)
        assert woken.wait(PATIENCE), "nobody moves the clock"

    def condition(self):
        """A condition whose waiters are counted again when they are told of a change."""
        clock = self

        class Condition(threading.Condition):
            waiting = 0

            def wait(self, timeout=None):
                self.waiting += 1
                clock.busy(-1)
                assert super().wait(PATIENCE), "nobody tells of a change"
                return True

            def notify_all(self):
                clock.busy(self.waiting)
                self.waiting = 0
                super().notify_all()

        return Condition()

    def thread(self, **given):
        """A thread that is counted from its start to its end."""
        clock, target, arguments = self, given.pop("target"), given.pop("args", ())

        def work():
            try:
                target(*arguments)
            finally:
                clock.busy(-1)

        class Thread(threading.Thread):
            def start(self):
                clock.busy(1)
                super().start()

        return Thread(target=work, **given)


def ends_of_iterations(seconds, update, sizes, *, lag, follows, iterations, monkeypatch):
    """When each update ends of a loop as `runs.iteration` makes it, its batches through `run_pipeline`."""
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "threading", SimpleNamespace(Thread=clock.thread, Condition=clock.condition))
        line, done, changed, ends = Pipeline() if lag and follows else None, [0], clock.condition(), []

        def stage(number, unit):
            def work(chunk):
                clock.sleep(unit * chunk)
                return chunk

            return Stage(f"stage {number}", work, unbounded=number == 0)

        def batch(number, slot):
            if slot is None:
                with changed:
                    changed.wait_for(lambda: done[0] == number)
            run_pipeline(sizes, [stage(*of) for of in enumerate(seconds)], slot=slot)
            with changed:
                done[0] += 1
                changed.notify_all()

        begun = 0
        for iteration in range(iterations):
            while begun <= min(iteration + lag, iterations - 1):
                clock.thread(target=batch, args=(begun, line.slot() if line else None), daemon=True).start()
                begun += 1
            with changed:
                changed.wait_for(lambda iteration=iteration: done[0] > iteration)
            clock.sleep(update)
            ends.append(clock.now)
    return ends
