"""Progress of a run: checkpoint metadata, and the check of config and task on resume."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.fields import Section, differences, identity
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
        notes: Memory of the run. Of a policy: "before", held-out measures of the start by kind of text ("greedy",
            "sampled", "unchanged", "oracle") and of the policy before SFT ("untrained"); "samples", `sample_measures`
            of the start; "watched", eval rewards of each test and validation prompt then; "remembered", for the task's
            findings; "streaks" of rewards that are missing or have one value.
        unvalidated: Metrics of the last iteration where its validation was stopped or failed.
        early_stopping: An `EarlyStopping`; None before the first validation.
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
    early_stopping: Record | None = None

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


def identity_of(config: Section, task: Mapping[str, object]) -> dict[str, Record]:
    """Config and task fields that must be the same when a run goes on from a checkpoint."""
    return {"config": identity(config), "task": dict(task)}


def require_same(saved: Mapping[str, Record], config: Section, task: Mapping[str, object], folder: Path) -> None:
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
