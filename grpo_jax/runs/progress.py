"""Where a run stands: what a checkpoint remembers beside the arrays, and whether a config may go on from it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.build import differences, identity
from grpo_jax.errors import UserError


class Progress(NamedTuple):
    """What a checkpoint remembers beside the arrays; all of it JSON.

    Attributes:
        iteration: Iterations done.
        iterations: That there were to be.
        best_score: Best validation score so far, or None.
        best_iteration: Where it was reached.
        seconds: Seconds by stage so far; "total" of the processes before this one, in a checkpoint of all until then.
        starts: Iterations done when a process began: 0, and wherever the run was resumed.
        identity: "config": its fields that change what is learned; "task": what else must be the same on resume.
        notes: What the program must remember, such as the measures of the start.
        unvalidated: Metrics of the last iteration where its validation is still to be made: it was stopped, or failed.
        waited: What early stopping remembers of the validations (`loop.early_stopping.Waited`); None before the first.
    """

    iteration: int
    iterations: int
    best_score: float | None
    best_iteration: int
    seconds: dict[str, float]
    starts: list[int]
    identity: dict[str, dict[str, Any]]
    notes: dict[str, Any]
    unvalidated: dict[str, Any] | None = None
    waited: dict[str, Any] | None = None

    @classmethod
    def read(cls, meta: Mapping[str, Any], where: Path) -> Progress:
        """What a checkpoint remembers.

        Raises:
            UserError: It was written by a version of grpo_jax that remembers other things.
        """
        found = meta.get("progress")
        saved: dict[str, Any] = found if isinstance(found, dict) else {}
        kinds = {"iteration": int, "iterations": int, "seconds": dict, "starts": list, "identity": dict, "notes": dict}
        right = {*cls._fields} - {*cls._field_defaults} <= saved.keys() <= {*cls._fields}
        if not right or any(not isinstance(saved[name], kind) for name, kind in kinds.items()):
            raise UserError(f"{where}: its checkpoints are of another version of grpo_jax: go on with that version")
        return cls(**saved)


def identity_of(config: Any, task: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What must be the same when a run goes on from a checkpoint."""
    return {"config": identity(config), "task": dict(task)}


def require_same(saved: Mapping[str, Mapping[str, Any]], config: Any, task: Mapping[str, Any], folder: Path) -> None:
    """Refuses a checkpoint of another configuration, or of other data.

    Raises:
        UserError: Naming the fields that differ.
    """
    changed = differences(saved["config"], config)
    if changed:
        raise UserError(
            f"--resume: the checkpoint in {folder} was made with other values ({'; '.join(changed)}): give those "
            "again, or start a new run in another --run_dir"
        )
    require_same_task(saved["task"], task, folder)


def require_same_task(saved: Mapping[str, Any], task: Mapping[str, Any], folder: Path) -> None:
    """Refuses a checkpoint of other data than the task has loaded.

    Raises:
        UserError: Naming what differs.
    """
    changed = [f"{name}: {saved.get(name)} → {value}" for name, value in task.items() if saved.get(name) != value]
    if changed:
        raise UserError(
            f"the checkpoint in {folder} was made with other data or models ({'; '.join(changed)}): give it those again"
        )


def with_total(seconds: Mapping[str, float], clock: float) -> dict[str, float]:
    """Seconds as checkpoints and summary hold them: "total" is the whole run's until now.

    While a process runs, "total" is what earlier ones took: the checkpoint that it started from says so.

    Args:
        seconds: By name; no "total" where there was no process before.
        clock: `time.monotonic()` at the start of this process.
    """
    parts = {name: value for name, value in seconds.items() if name != "total"}
    return {**parts, "total": seconds.get("total", 0.0) + time.monotonic() - clock}


def added(total: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Seconds by name, summed."""
    return {name: total.get(name, 0.0) + more.get(name, 0.0) for name in {**total, **more}}


SCORE = "score"
"""As training.early_stopping_metric: what is maximised, by which the best checkpoint is chosen."""


class Waited(NamedTuple):
    """What validations have come to; JSON in every checkpoint.

    Attributes:
        best: Best value of the metric so far; None before the first.
        iteration: Where it was reached.
        validations: How many since brought nothing better.
    """

    best: float | None = None
    iteration: int = 0
    validations: int = 0


def after_validation(waited: Waited, measures: Mapping[str, float], iteration: int, training: Any) -> Waited:
    """Takes a validation: better is what exceeds the best by more than training.early_stopping_threshold.

    Args:
        waited: Before it.
        measures: The validation's, `SCORE` among them.
        iteration: Behind which it was made.
        training: The config's section.
    """
    value = measures.get(training.early_stopping_metric, math.nan)
    better = waited.best is None or value > waited.best + training.early_stopping_threshold
    if math.isfinite(value) and better:
        return Waited(float(value), iteration)
    return waited._replace(validations=waited.validations + 1)


def reason_to_end(waited: Waited, training: Any) -> str:
    """Why training is over before its iterations are; "" if it is not."""
    patience = getattr(training, "early_stopping_patience", 0)  # a program that validates nothing has none
    if not patience or waited.validations < patience:
        return ""
    metric = training.early_stopping_metric
    if waited.best is None:
        return f"validation/{metric} was missing in {waited.validations} validations in a row"
    return (
        f"validation/{metric} has not exceeded {waited.best:.4g}, of iteration {waited.iteration}, in "
        f"{waited.validations} validations"
    )
