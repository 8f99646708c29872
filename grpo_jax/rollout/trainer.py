"""What rewards may ask of the run itself: how far it is (`trainer_state`), and where numbers go (`log_metric`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from grpo_jax.rollout.rewards import Reward, accepted_arguments

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


class Trainer:
    """The run as its rewards see it: in evaluation, but for `at`."""

    def __init__(self, max_steps: int = 0):
        """A run of so many iterations."""
        self._ended = TrainerState(max_steps, max_steps, True)
        self.state = self._ended
        self._values: dict[str, list[float]] = {}

    @contextmanager
    def at(self, iteration: int) -> Iterator[None]:
        """Inside, completions of an iteration (from 0) are judged; what is logged is kept until the next one."""
        self._values = {}
        self.state = TrainerState(iteration, self._ended.max_steps, False)
        try:
            yield
        finally:
            self.state = self._ended

    def log_metric(self, name: str, value: Any) -> None:
        """Takes a number for a column of metrics.jsonl; not of held-out prompts, and not what is not finite.

        Raises:
            TypeError: It is no number.
            ValueError: Likewise.
        """
        number = float(value)
        if not self.state.evaluation and math.isfinite(number):
            self._values.setdefault(f"log/{name}", []).append(number)  # judges of several turns have a thread each

    @property
    def logged(self) -> dict[str, float]:
        """Means of what was logged in the last iteration, {"log/NAME": value}."""
        return {name: math.fsum(values) / len(values) for name, values in self._values.items()}

    def told(self, reward: Reward, asked: list[str]) -> Reward:
        """A reward with those of its arguments that are the run's."""
        given: dict[str, Callable[[], Any]] = {STATE: lambda: self.state, LOG: lambda: self.log_metric}
        wanted = {name: give for name, give in given.items() if name in asked}
        if not wanted:
            return reward

        @functools.wraps(reward)
        def told(**arguments: Any) -> Any:
            own = {name: give() for name, give in wanted.items()}
            return reward(**{**accepted_arguments(reward, arguments), **own})

        return told
