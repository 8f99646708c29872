"""Ends of a run before its last iteration: signals, callbacks, early stopping, failures."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config.run import Config
from grpo_jax.errors import StageError, StageTimeout, Stopped, StopRun, UserError, one_line
from grpo_jax.rollout.rewards import join_names
from grpo_jax.runs.metrics import MISSING_ITERATIONS
from grpo_jax.training.update import PATIENCE

_KILLABLE = (
    ", give it more time (--judge_timeout), or run it in a pool of one Ray actor, which can be killed "
    "(judges.NAME.pool, docs/judges.md)"
)


class StopRequests:
    """A flag for a requested stop, checked by long waits, which then save and leave."""

    def __init__(self) -> None:
        self._asked = self._at_once = False

    def is_set(self) -> bool:
        """Return whether a stop was asked for."""
        return self._asked

    def set(self) -> None:
        """Ask for a stop."""
        self._asked = True
        if self._at_once:
            raise Stopped

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside there is nothing to save: a request raises `Stopped` wherever the main thread is."""
        self._at_once = True
        try:
            if self._asked:
                raise Stopped
            yield
        finally:
            self._at_once = False


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Take SIGTERM, SLURM's SIGUSR1 and the first Ctrl-C as requests to stop; yield the flag.

    A second Ctrl-C interrupts at once: the last checkpoint stays valid. SIGHUP, sent when a terminal closes, stops
    nothing. Outside the main thread, where Python takes no handlers, no stop is ever asked for.
    """
    requests = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            return
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, handle)  # `unseen_interrupts_end` has it answer once
            if requests.is_set():
                raise KeyboardInterrupt
        requests.set()

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class IterationEvent:
    """Argument of a callback.

    Attributes:
        step: Iterations done.
        iterations: Iterations in all.
        metrics: By name as in metrics.jsonl: on an iteration its row, on a validation that row's "validation/…"; on a
            checkpoint nothing.
        checkpoint: The checkpoint that was written; None otherwise.
    """

    step: int
    iterations: int
    metrics: Mapping[str, float]
    run_dir: Path
    checkpoint: Path | None = None


Callback = Callable[[IterationEvent], bool | None]
"""callback(event) → True to stop the run as a signal does: saved, and `--resume` goes on; False or None goes on."""


class Callbacks(NamedTuple):
    """The user's functions; None for none.

    Attributes:
        on_iteration: After each iteration's row of metrics.jsonl is written.
        on_validation: After on_iteration, where it was validated.
        on_checkpoint: When a checkpoint of the loop is on disk.
    """

    on_iteration: Callback | None = None
    on_validation: Callback | None = None
    on_checkpoint: Callback | None = None

    def ask(self, name: str, event: IterationEvent) -> bool:
        """Call the callback of that name; return whether it asks to stop."""
        callback = getattr(self, name)
        if callback is None:
            return False
        try:
            answer = callback(event)
        except Exception as error:
            raise UserError(f"{name}: {type(error).__name__}: {one_line(error)}") from error
        if answer is not None and not isinstance(answer, bool | np.bool_):
            raise UserError(f"{name}: expected it to return True to stop, else False or None, got {one_line(answer)}")
        return bool(answer)


class EarlyStopping(NamedTuple):
    """Early stopping's best value (None before the first), its iteration, and the validations since then."""

    best: float | None = None
    iteration: int = 0
    validations: int = 0

    def after(self, measures: Mapping[str, float], iteration: int, config: Config) -> EarlyStopping:
        """Count a validation: better is what exceeds the best by more than training.early_stopping_threshold."""
        value = measures.get(config.evaluation.best_by, math.nan)
        better = self.best is None or value > self.best + config.training.early_stopping_threshold
        if math.isfinite(value) and better:
            return EarlyStopping(float(value), iteration)
        return self._replace(validations=self.validations + 1)

    def reason(self, config: Config) -> str:
        """Return the reason to stop early; "" if there is none."""
        patience, metric = config.training.early_stopping_patience, config.evaluation.best_by
        if not patience or self.validations < patience:
            return ""
        if self.best is None:
            return f"validation/{metric} was missing in {self.validations} validations in a row"
        return (
            f"validation/{metric} has not exceeded {self.best:.4g}, of iteration {self.iteration}, in "
            f"{self.validations} validations"
        )


def nothing_judged(streaks: Mapping[str, Sequence[Any]], iteration: int, iterations: int, run_dir: str) -> str:
    """Return why a run ends without rewards (`reward_streaks`): none came lately, or in a short run; "" before.

    A reward may well apply to few prompts: all must be missing.
    """
    shortest = min((count if value is None else 0 for value, count in streaks.values()), default=0)
    if not shortest or shortest < min(MISSING_ITERATIONS, iterations):
        return ""
    return (
        f"no completion got a reward in {shortest} iterations in a row ({join_names(list(streaks))}). Saved after "
        f"iteration {iteration}; fix the rewards, or what they ask, and {_again(run_dir, iteration < iterations)}"
    )


def nothing_learned(skipped: int, updates: int, iteration: int, iterations: int, run_dir: str) -> str:
    """Return why a run ends if every update of a few iterations was skipped, or most of a short run; "" before.

    `updates` is their number in an iteration.
    """
    if skipped < max(1, min(PATIENCE * updates, iterations * updates - 1)):
        return ""
    return (
        f"the loss or its gradient was not finite in {skipped} updates in a row; they were left out. Saved after "
        f"iteration {iteration}, with the weights before them. If a reward or a prompt is at fault, fix it and "
        f"{_again(run_dir, iteration < iterations)}; else give a new run a lower optimizer.learning_rate, and these "
        f"weights: python -m grpo_jax.export --run {run_dir} --checkpoint {iteration} --out FOLDER, --policy.path "
        "FOLDER"
    )


def explained(
    error: StageError | StopRun, iteration: int | None, run_dir: str, *, resumable: bool, hint: str
) -> Exception:
    """Return an error that ended a run as one line that says what to do; `iteration` is the one that was saved.

    An error of the policy's own stage stays as it is.
    """
    saved = "Nothing was trained yet" if iteration is None else f"Saved after iteration {iteration}"
    again = _again(run_dir, resumable)
    cause = error if isinstance(error, StopRun) else error.__cause__
    told = cause if isinstance(cause, StopRun | UserError) else error  # a reward names itself
    line = " ".join(str(told).split())
    if isinstance(cause, StopRun):
        return StopRun(f"{line}. {saved}; {again} when that is fixed")
    assert isinstance(error, StageError)
    if error.stage == "sample":  # no reward is at fault
        return error if told is error else UserError(f"{line}. {saved}; {again} when that is fixed")
    at_fault = {"render": "the renderer", "env": "the environment"}.get(error.stage, "the reward")
    hint = _KILLABLE if isinstance(error, StageTimeout) else hint
    return UserError(f"{line}. {saved}; fix {at_fault} and {again}{hint}")


def _again(run_dir: str, resumable: bool) -> str:
    return f"go on with --resume --run_dir {run_dir}" if resumable else "start again"
