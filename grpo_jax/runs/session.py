"""A run's progress, which checkpoints keep, its callbacks, and its ends: stop requests, early stopping, failures."""

from __future__ import annotations

import _thread
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.fields import differences, identity
from grpo_jax.config.run import Config
from grpo_jax.errors import StageError, StageTimeout, Stopped, StopRun, UserError, complain
from grpo_jax.rollout.data import TRAINING_ROWS
from grpo_jax.rollout.rewards import join_names
from grpo_jax.training.update import PATIENCE

Record = dict[str, Any]
"""A JSON object."""
MISSING_ITERATIONS = 3
"""Iterations in a row without a reward, after which a run stops."""
WEIGHTS = "weights"
"""Begins the names of digests of frozen weights in a task's identity."""
SCORE = "score"
"""As evaluation.best_by: the maximised measure."""


class Progress(NamedTuple):
    """JSON metadata of a checkpoint.

    Attributes:
        iteration: Finished iterations.
        iterations: Total iterations.
        seconds: By stage; "total" counts only earlier processes, in a checkpoint also this one.
        identity: "config": the fields that change learning; "task": other values that must not change on resume.
        notes: Memory of the run: "before", held-out measures at the start by kind of text ("greedy",
            "sampled", "unchanged", "oracle") and of the policy before SFT ("untrained"); "samples", `sample_measures`
            at the start; "watched", eval rewards of each test and validation prompt at the start; "remembered", for
            the task's findings; "streaks" of iterations without a reward, "constant" of those with one value,
            "range" of each reward's values, "truncated" of those in which no completion ended.
        unvalidated: Metrics of the last iteration if its validation was stopped or failed.
        early_stopping: An `EarlyStopping`; None before the first validation.
    """

    iteration: int
    iterations: int
    best_score: float | None
    best_iteration: int
    seconds: dict[str, float]
    identity: dict[str, Record]
    notes: Record
    unvalidated: Record | None = None
    early_stopping: Record | None = None

    @classmethod
    def read(cls, meta: Record, where: Path) -> Progress:
        """Read the progress from a checkpoint's meta; UserError if another grpo_jax version wrote it."""
        try:
            return cls(**meta["progress"])
        except (KeyError, TypeError):
            message = f"{where}: its checkpoints are of another version of grpo_jax: continue with that version"
            raise UserError(message) from None


def identity_of(config: Config, task: Mapping[str, object]) -> dict[str, Record]:
    """Return the config and task fields that must not change on resume."""
    return {"config": identity(config.resolved), "task": dict(task)}


def require_same(saved: Mapping[str, Record], config: Config, task: Mapping[str, object], folder: Path) -> None:
    """Raise UserError naming the differences if a checkpoint has another configuration or other data."""
    if changed := differences(saved["config"], config.resolved):
        other = f"the checkpoint in {folder} was made with other values ({'; '.join(changed)})"
        raise UserError(f"--resume: {other}: give those again, or start a new run in another --run_dir")
    require_same_task(saved["task"], task, folder)


def require_same_task(saved: Record, task: Mapping[str, object], folder: Path) -> None:
    """Raise UserError naming the differences if a checkpoint has other data or models; training rows may differ.

    Checkpoints of earlier versions lack digests of weights.
    """
    changed = [
        f"{name}: {saved.get(name)} → {value}"
        for name, value in task.items()
        if name != TRAINING_ROWS and saved.get(name, value if name.startswith(WEIGHTS) else None) != value
    ]
    if changed:
        other = f"the checkpoint in {folder} was made with other data or models ({'; '.join(changed)})"
        raise UserError(f"{other}: give it those again")


def with_total(seconds: Mapping[str, float], clock: float) -> dict[str, float]:
    """Return seconds for checkpoints and summary; "total" includes this process."""
    return {**seconds, "total": seconds.get("total", 0.0) + time.monotonic() - clock}


def added(total: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Sum seconds by name."""
    return {name: total.get(name, 0.0) + more.get(name, 0.0) for name in {**total, **more}}


class StopRequests:
    """Flag of a stop request; long waits poll it, then save and leave."""

    def __init__(self) -> None:
        self._requested = self._immediate = False

    def is_set(self) -> bool:
        """Return whether a stop was requested."""
        return self._requested

    def acknowledge(self, signals: int) -> None:
        """Print a line for each signal that is written to a pipe, until it is closed.

        Python's handlers run between its own instructions, so not before a compilation of a minute is over.
        """
        interrupted = False
        with open(signals, "rb", buffering=0) as pipe:
            for number in iter(lambda: pipe.read(1), b""):
                name = signal.Signals(number[0]).name
                when = "stopping" if self._immediate else "stopping after this iteration"
                if name == "SIGINT":
                    complain("stopping now" if interrupted else f"{when}; Ctrl-C again stops now")
                    interrupted = True
                elif name in ("SIGTERM", "SIGUSR1"):
                    complain(f"{name}: {when}")

    def set(self) -> None:
        """Request a stop."""
        self._requested = True
        if self._immediate:
            raise Stopped

    @contextmanager
    def raise_immediately(self) -> Iterator[None]:
        """Raise `Stopped` in the main thread at once on a request, while there is nothing to save."""
        self._immediate = True
        try:
            if self._requested:
                raise Stopped
            yield
        finally:
            self._immediate = False


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Treat SIGTERM, SLURM's SIGUSR1 and the first Ctrl-C as stop requests; yield the flag.

    Each is acknowledged at once. A second Ctrl-C interrupts at once; the last checkpoint stays valid. SIGHUP, sent when
    a terminal closes, is ignored. Outside the main thread, Python allows no handlers, so there are no stop requests.
    """
    requests = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGINT and requests.is_set():
            raise KeyboardInterrupt
        if number != signal.SIGHUP:
            requests.set()

    def unraisable(dropped: sys.UnraisableHookArgs) -> None:
        if isinstance(dropped.exc_value, Stopped):  # by a callback of the garbage collector: raise it again
            threading.Timer(0.1, _thread.interrupt_main, [signal.SIGTERM]).start()
        else:
            hook(dropped)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    lines = threading.Thread(target=requests.acknowledge, args=[read_end], daemon=True)
    lines.start()
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        yield requests
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(write_end)
        lines.join()


@dataclass(frozen=True)
class IterationEvent:
    """Argument of a callback.

    Attributes:
        step: Finished iterations.
        iterations: Total iterations.
        metrics: By name as in metrics.jsonl: an iteration's row, a validation's entries "validation/…", or nothing on
            a checkpoint.
        checkpoint: The written checkpoint; None for other events.
    """

    step: int
    iterations: int
    metrics: Mapping[str, float]
    run_dir: Path
    checkpoint: Path | None = None


Callback = Callable[[IterationEvent], bool | None]
"""callback(event) → True to stop the run as a signal does: saved for `--resume`; False or None continues."""


class Callbacks(NamedTuple):
    """The user's callbacks; None for none.

    Attributes:
        on_iteration: Called after each iteration's row of metrics.jsonl is written.
        on_validation: Called after on_iteration, if the iteration was validated.
        on_checkpoint: Called when a checkpoint of the loop is on disk.
    """

    on_iteration: Callback | None = None
    on_validation: Callback | None = None
    on_checkpoint: Callback | None = None


class EarlyStopping(NamedTuple):
    """Early stopping's best value (None before the first), its iteration, and the validations since then."""

    best: float | None = None
    iteration: int = 0
    validations: int = 0

    def after(self, measures: Mapping[str, float], iteration: int, config: Config) -> EarlyStopping:
        """Count a validation; it is better if it exceeds the best by more than training.early_stopping_threshold."""
        value = measures.get(config.evaluation.best_by, math.nan)
        better = self.best is None or value > self.best + config.training.early_stopping_threshold
        if math.isfinite(value) and better:
            return EarlyStopping(float(value), iteration)
        return self._replace(validations=self.validations + 1)

    def reason(self, config: Config) -> str:
        """Return the reason to stop early; "" if there is none."""
        patience, metric = config.training.early_stopping_patience, f"validation/{config.evaluation.best_by}"
        if not patience or self.validations < patience:
            return ""
        if self.best is None:
            return f"{metric} was missing in {self.validations} validations in a row"
        best = f"{self.best:.4g}, of iteration {self.iteration}"
        return f"{metric} has not exceeded {best}, in {self.validations} validations"


def rewards_missing_reason(progress: Progress, run_dir: str | None) -> str:
    """Return the reason to end a run without rewards (`reward_streaks`), recently or in a short run; else "".

    All rewards must be missing, since a single reward may apply to few prompts.
    """
    streaks, done, iterations = progress.notes.get("streaks", {}), progress.iteration, progress.iterations
    shortest = min(streaks.values(), default=0)
    if not shortest or shortest < min(MISSING_ITERATIONS, iterations):
        return ""
    return (
        f"no completion got a reward in {shortest} iterations in a row ({join_names(list(streaks))}). Saved after "
        f"iteration {done}; fix the rewards or their judges, and {_again(run_dir, done < iterations)}"
    )


def updates_skipped_reason(skipped: int, updates: int, progress: Progress, run_dir: str | None) -> str:
    """Return the reason to end a run if all updates of a few iterations, or most of a short run, were skipped; else "".

    `updates` is their number per iteration.
    """
    done, iterations = progress.iteration, progress.iterations
    if skipped < max(1, min(PATIENCE * updates, iterations * updates - 1)):
        return ""
    return (
        f"the loss or its gradient was not finite in {skipped} updates in a row; they were left out. Saved after "
        f"iteration {done}, with the weights before them. If a reward or a prompt is at fault, fix it and "
        f"{_again(run_dir, done < iterations)}; else give a new run a lower optimizer.learning_rate, and these "
        f"weights: python -m grpo_jax.export --run {run_dir} --checkpoint {done} --out FOLDER, --policy.path FOLDER"
    )


def with_remedy(error: StageError | StopRun, iteration: int | None, config: Config, *, resumable: bool) -> Exception:
    """Return the error that ended a run as one line with its remedy; `iteration` is the saved one.

    An error of the policy's own stage stays unchanged.
    """
    saved = "Nothing was trained yet" if iteration is None else f"Saved after iteration {iteration}"
    again = _again(config.run_dir, resumable)
    cause = error if isinstance(error, StopRun) else error.__cause__
    named = cause if isinstance(cause, StopRun | UserError) else error  # its message already names the reward
    line = " ".join(str(named).split())
    if isinstance(cause, StopRun):
        return StopRun(f"{line}. {saved}; {again} when that is fixed")
    assert isinstance(error, StageError)
    if error.stage == "sample":  # not a reward's failure
        return error if named is error else UserError(f"{line}. {saved}; {again} when that is fixed")
    at_fault = {"render": "the renderer", "env": "the environment"}.get(error.stage, "the reward")
    hint = "" if config.on_judge_error == "missing" else ", or choose --on_judge_error missing"
    hint += "" if resumable else "; --debug shows the traceback"
    if isinstance(error, StageTimeout):
        actor = "run it in a pool of one Ray actor, which can be killed (judges.NAME.pool, docs/judges.md)"
        hint = f", give it more time (--judge_timeout), or {actor}"
    return UserError(f"{line}. {saved}; fix {at_fault} and {again}{hint}")


def _again(run_dir: str | None, resumable: bool) -> str:
    return f"continue with --resume --run_dir {run_dir}" if resumable else "start again"
