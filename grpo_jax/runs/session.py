"""A run's progress, which checkpoints keep with its identity, early stopping, and callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.fields import differences
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import HELD_OUT_PICTURES, TRAINING_ROWS

Record = dict[str, Any]
"""A JSON object."""
WEIGHTS = "weights"
"""Begins the names of digests of frozen weights in a task's identity."""
READ, CODE = "config and tokenizer of policy.path", "files of user code"
NOTED = (TRAINING_ROWS, CODE)  # facts that may change on resume
_LATER = (WEIGHTS, HELD_OUT_PICTURES, READ)  # facts that checkpoints of earlier versions lack
SCORE = "score"
"""As evaluation.best_by: the maximised measure."""


class Notes(NamedTuple):
    """Values that a run keeps from its start, and from iteration to iteration; JSON."""

    # held-out measures at the start, by kind of text ("greedy", "sampled", "unchanged", "oracle") and of the policy
    # before SFT ("untrained")
    before: Mapping[str, Mapping[str, float]] = {}
    samples: Record | None = None  # `sample_measures` at the start
    # eval rewards of each prompt at the start, by "test" and "validation"
    eval_rewards_at_start: Mapping[str, Mapping[str, Sequence[float]]] = {}
    task_data: Record = {}  # for the task's findings
    streaks: Mapping[str, int] = {}  # iterations in a row without a reward
    constant: Mapping[str, Sequence[float]] = {}  # value of a reward with a single one, and the iterations with it
    range: Mapping[str, Sequence[float]] = {}  # lowest and highest value of each reward
    truncated: int = 0  # iterations in a row in which no completion ended
    failing_tools: Mapping[str, int] = {}  # an error, and the iterations in a row in which every tool result was one
    moments: Mapping[str, Sequence[float]] = {}  # `RewardMoments` of each reward, for algorithm.standardise_rewards

    @classmethod
    def read(cls, saved: Record) -> Notes:
        """Read the notes of a checkpoint, also of one with the names of an earlier version."""
        renamed = {"watched": "eval_rewards_at_start", "remembered": "task_data"}
        return cls(**{renamed.get(name, name): value for name, value in saved.items()})


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


class Progress(NamedTuple):
    """JSON metadata of a checkpoint."""

    iteration: int  # finished iterations
    iterations: int  # total
    best_score: float | None
    best_iteration: int
    seconds: dict[str, float]  # by stage; "total" counts only earlier processes, in a checkpoint also this one
    identity: dict[str, Record]  # "config": fields that change learning; "task": others that must not change on resume
    notes: Notes = Notes()
    unvalidated: Record | None = None  # metrics of the last iteration if its validation was stopped or failed
    early_stopping: EarlyStopping = EarlyStopping()

    @classmethod
    def read(cls, meta: Record, where: Path) -> Progress:
        """Read the progress from a checkpoint's meta; UserError if another grpo_jax version wrote it."""
        try:
            progress = meta["progress"]
            early_stopping = EarlyStopping(**(progress.get("early_stopping") or {}))
            return cls(**{**progress, "notes": Notes.read(progress["notes"]), "early_stopping": early_stopping})
        except (KeyError, TypeError):
            message = f"{where}: its checkpoints are of another version of grpo_jax: continue with that version"
            raise UserError(message) from None

    def as_json(self) -> Record:
        """Return the metadata that `read` reads."""
        return {**self._asdict(), "notes": self.notes._asdict(), "early_stopping": self.early_stopping._asdict()}

    def add_seconds(self, seconds: Mapping[str, float]) -> Progress:
        """Return the progress with further seconds by stage."""
        names = {**self.seconds, **seconds}
        return self._replace(seconds={name: self.seconds.get(name, 0.0) + seconds.get(name, 0.0) for name in names})


def require_same(saved: Mapping[str, Record], config: Config, task: Mapping[str, object], folder: Path) -> None:
    """Raise UserError naming the differences if a checkpoint has another configuration or other data."""
    if changed := differences(saved["config"], config.resolved):
        other = f"the checkpoint in {folder} was made with other values ({'; '.join(changed)})"
        raise UserError(f"--resume: {other}: give those again, or start a new run in another --run_dir")
    require_same_task(saved["task"], task, folder)


def require_same_task(saved: Record, task: Mapping[str, object], folder: Path) -> None:
    """Raise UserError naming the differences if a checkpoint has other data or models; except `NOTED` ones."""
    changed = [
        f"{name}: {saved.get(name)} → {value}"
        for name, value in task.items()
        if name not in NOTED and saved.get(name, value if name.startswith(_LATER) else None) != value
    ]
    if changed:
        other = f"the checkpoint in {folder} was made with other data or models ({'; '.join(changed)})"
        raise UserError(f"{other}: give it those again")


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
    """The user's callbacks (`train.run`); None for none."""

    on_iteration: Callback | None = None
    on_validation: Callback | None = None
    on_checkpoint: Callback | None = None
