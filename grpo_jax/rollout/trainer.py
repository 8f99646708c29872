"""What rewards may ask of the run itself: how far it is (`trainer_state`), and where numbers go (`log_metric`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

STATE, LOG = "trainer_state", "log_metric"


class TrainerState(NamedTuple):
    """How far a run is.

    Attributes:
        global_step: Iterations that are done. Held-out prompts are judged alike at any time: there it is `max_steps`.
        max_steps: Iterations in all.
        evaluation: Whether these are held-out prompts.
    """

    global_step: int
    max_steps: int
    evaluation: bool


class JudgedBatch(NamedTuple):
    """What the rewards of one batch may ask of the run.

    Attributes:
        state: How far it is.
        values: What they logged, by column.
    """

    state: TrainerState
    values: dict[str, list[float]]

    def log_metric(self, name: str, value: Any) -> None:
        """Takes a number for a column of metrics.jsonl; not of held-out prompts, and not what is not finite.

        Raises:
            TypeError: It is no number.
            ValueError: Likewise.
        """
        number = float(value)
        if not self.state.evaluation and math.isfinite(number):
            self.values.setdefault(f"log/{name}", []).append(number)  # judges of several turns have a thread each

    @property
    def logged(self) -> dict[str, float]:
        """Means of what was logged, {"log/NAME": value}."""
        return {name: math.fsum(values) / len(values) for name, values in self.values.items()}


_batch: ContextVar[JudgedBatch | None] = ContextVar("batch", default=None)  # of the batch that is judged here


class Trainer:
    """The run as its rewards see it: in evaluation, but for `at`."""

    def __init__(self, max_steps: int = 0):
        """A run of so many iterations."""
        self._ended = JudgedBatch(TrainerState(max_steps, max_steps, True), {})

    @property
    def now(self) -> JudgedBatch:
        """Of the batch that is judged in this thread."""
        return _batch.get() or self._ended

    @contextmanager
    def at(self, iteration: int) -> Iterator[JudgedBatch]:
        """Inside, in this thread and the pipelines that it runs, completions of an iteration (from 0) are judged."""
        batch = JudgedBatch(TrainerState(iteration, self._ended.state.max_steps, False), {})
        before = _batch.set(batch)
        try:
            yield batch
        finally:
            _batch.reset(before)

    def providers(self, asked: Collection[str]) -> dict[str, Callable[[], Any]]:
        """What gives a reward those of its arguments that are the run's, asked when it is called.

        A reward may log from threads of its own.
        """
        every: dict[str, Callable[[], Any]] = {STATE: lambda: self.now.state, LOG: lambda: self.now.log_metric}
        return {name: provide for name, provide in every.items() if name in asked}
