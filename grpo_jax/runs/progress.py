"""Progress of a run: checkpoint metadata, the check of config and task on resume, early stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.build import differences, identity
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError
from grpo_jax.rollout.data import TRAINING_ROWS

Record = dict[str, Any]
"""A JSON object."""
SCORE = "score"
"""As evaluation.best_by: the maximised measure."""


class Progress(NamedTuple):
    """Metadata of a checkpoint beside its arrays; all of it JSON.

    Attributes:
        iteration: Iterations done.
        iterations: Iterations in all.
        seconds: By stage; "total" is that of earlier processes while one runs, and of all until then in a checkpoint.
        starts: Iterations done when a process began: 0, and wherever the run was resumed.
        identity: "config": its fields that change what is learned; "task": what else must be the same on resume.
        notes: The program's memory, such as the measures of the start.
        unvalidated: Metrics of the last iteration where its validation was stopped or failed.
        waited: A `Waited`; None before the first validation.
    """

    iteration: int
    iterations: int
    best_score: float | None
    best_iteration: int
    seconds: dict[str, float]
    starts: list[int]
    identity: dict[str, Record]
    notes: Record
    unvalidated: Record | None = None
    waited: Record | None = None

    @classmethod
    def read(cls, meta: Record, where: Path) -> Progress:
        """Read the progress in a checkpoint's meta; UserError if its fields are another grpo_jax version's."""
        saved = meta.get("progress")
        saved = saved if isinstance(saved, dict) else {}
        kinds = {"iteration": int, "iterations": int, "seconds": dict, "starts": list, "identity": dict, "notes": dict}
        complete = {*cls._fields} - {*cls._field_defaults} <= saved.keys() <= {*cls._fields}
        if not complete or any(not isinstance(saved[name], kind) for name, kind in kinds.items()):
            raise UserError(f"{where}: its checkpoints are of another version of grpo_jax: go on with that version")
        return cls(**saved)


def identity_of(config: object, task: Mapping[str, object]) -> dict[str, Record]:
    """Config and task fields that must be the same when a run goes on from a checkpoint."""
    return {"config": identity(config), "task": dict(task)}


def require_same(saved: Mapping[str, Record], config: object, task: Mapping[str, object], folder: Path) -> None:
    """Raise UserError naming what differs, where a checkpoint is of another configuration or of other data."""
    changed = differences(saved["config"], config)
    if changed:
        raise UserError(
            f"--resume: the checkpoint in {folder} was made with other values ({'; '.join(changed)}): give those "
            "again, or start a new run in another --run_dir"
        )
    require_same_task(saved["task"], task, folder)


def require_same_task(saved: Record, task: Mapping[str, object], folder: Path) -> None:
    """Raise UserError that names the differences if a checkpoint is of other data; training rows may differ."""
    changed = [
        f"{name}: {saved.get(name)} → {value}"
        for name, value in task.items()
        if name != TRAINING_ROWS and saved.get(name) != value
    ]
    if changed:
        raise UserError(
            f"the checkpoint in {folder} was made with other data or models ({'; '.join(changed)}): give it those again"
        )


def with_total(seconds: Mapping[str, float], clock: float) -> dict[str, float]:
    """Seconds for checkpoints and summary: "total" is the whole run's until now, not that of earlier processes."""
    stages = {name: value for name, value in seconds.items() if name != "total"}
    return {**stages, "total": seconds.get("total", 0.0) + time.monotonic() - clock}


def added(total: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Seconds by name, summed."""
    return {name: total.get(name, 0.0) + more.get(name, 0.0) for name in {**total, **more}}


class Waited(NamedTuple):
    """Early stopping's best value (None before the first), its iteration, and the validations since then."""

    best: float | None = None
    iteration: int = 0
    validations: int = 0


def after_validation(waited: Waited, measures: Mapping[str, float], iteration: int, config: Config) -> Waited:
    """Count a validation: better is what exceeds the best by more than training.early_stopping_threshold."""
    value = measures.get(config.evaluation.best_by, math.nan)
    better = waited.best is None or value > waited.best + config.training.early_stopping_threshold
    if math.isfinite(value) and better:
        return Waited(float(value), iteration)
    return waited._replace(validations=waited.validations + 1)


def reason_to_end(waited: Waited, config: Any) -> str:
    """Reason to stop early; "" if there is none."""
    patience = getattr(config.training, "early_stopping_patience", 0)  # a program that validates nothing has none
    if not patience or waited.validations < patience:
        return ""
    metric = config.evaluation.best_by
    if waited.best is None:
        return f"validation/{metric} was missing in {waited.validations} validations in a row"
    return (
        f"validation/{metric} has not exceeded {waited.best:.4g}, of iteration {waited.iteration}, in "
        f"{waited.validations} validations"
    )
