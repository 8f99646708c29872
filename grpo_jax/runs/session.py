"""A run's progress, which checkpoints keep with its identity, and its callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from grpo_jax.config.fields import differences, identity
from grpo_jax.config.files import Values
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import TRAINING_ROWS
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.tasks.task import Finished

Record = dict[str, Any]
"""A JSON object."""
WEIGHTS = "weights"
"""Begins the names of digests of frozen weights in a task's identity."""
SCORE = "score"
"""As evaluation.best_by: the maximised measure."""


class Notes(NamedTuple):
    """Values that a run keeps from its start, and from iteration to iteration; JSON.

    Attributes:
        before: Held-out measures at the start, by kind of text ("greedy", "sampled", "unchanged", "oracle") and of the
            policy before SFT ("untrained").
        samples: `sample_measures` at the start.
        eval_rewards_at_start: Eval rewards of each prompt at the start, by "test" and "validation".
        task_data: Data for the task's findings.
        streaks: Iterations in a row without a reward.
        constant: Value of a reward with a single one, and the iterations in a row with it.
        range: Lowest and highest value of each reward.
        truncated: Iterations in a row in which no completion ended.
    """

    before: Mapping[str, Mapping[str, float]] = {}
    samples: Record | None = None
    eval_rewards_at_start: Mapping[str, Mapping[str, Sequence[float]]] = {}
    task_data: Record = {}
    streaks: Mapping[str, int] = {}
    constant: Mapping[str, Sequence[float]] = {}
    range: Mapping[str, Sequence[float]] = {}
    truncated: int = 0

    @classmethod
    def read(cls, saved: Record) -> Notes:
        """Read the notes of a checkpoint, also of one with the names of an earlier version."""
        renamed = {"watched": "eval_rewards_at_start", "remembered": "task_data"}
        return cls(**{renamed.get(name, name): value for name, value in saved.items()})


class Progress(NamedTuple):
    """JSON metadata of a checkpoint.

    Attributes:
        iteration: Finished iterations.
        iterations: Total iterations.
        seconds: By stage; "total" counts only earlier processes, in a checkpoint also this one.
        identity: "config": the fields that change learning; "task": other values that must not change on resume.
        unvalidated: Metrics of the last iteration if its validation was stopped or failed.
        early_stopping: An `EarlyStopping`; None before the first validation.
    """

    iteration: int
    iterations: int
    best_score: float | None
    best_iteration: int
    seconds: dict[str, float]
    identity: dict[str, Record]
    notes: Notes = Notes()
    unvalidated: Record | None = None
    early_stopping: Record | None = None

    @classmethod
    def read(cls, meta: Record, where: Path) -> Progress:
        """Read the progress from a checkpoint's meta; UserError if another grpo_jax version wrote it."""
        try:
            progress = meta["progress"]
            return cls(**{**progress, "notes": Notes.read(progress["notes"])})
        except (KeyError, TypeError):
            message = f"{where}: its checkpoints are of another version of grpo_jax: continue with that version"
            raise UserError(message) from None

    def as_json(self) -> Record:
        """Return the metadata that `read` reads."""
        return {**self._asdict(), "notes": self.notes._asdict()}


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


class Output(Protocol):
    """A run's folder, terminal and files of metrics (`reports.output`); nothing in processes other than 0."""

    @property
    def directory(self) -> RunDirectory:
        """Return the run directory."""

    @property
    def info(self) -> Callable[..., None]:
        """Return the function that prints a line."""

    @property
    def warning(self) -> Callable[[str], None]:
        """Return the function that prints a warning."""

    def truncate(self, step: int, *, rows: int | None = None) -> int:
        """Remove the output after a step; return the number of rows of metrics."""

    def start(self, total: int, done: int = 0) -> None:
        """Start the progress bar."""

    def completions(self, step: int, columns: Mapping[str, Sequence[object]]) -> None:
        """Write the completions of an iteration."""

    def iteration(self, row: Values) -> None:
        """Write an iteration's metrics."""

    def finish(self, finished: Finished, *, config: Config) -> None:
        """Write summary and report."""


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
