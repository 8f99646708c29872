"""A run in time: its progress, which checkpoints keep, and the session that saves it, resumes it and calls back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_jax.config.fields import Section, differences, identity, to_yaml
from grpo_jax.errors import StopRun, UserError
from grpo_jax.models.broadcast import broadcast, is_main_process
from grpo_jax.rollout.data import TRAINING_ROWS
from grpo_jax.runs.stopping import Callbacks, EarlyStopping, IterationEvent, StopRequests

if TYPE_CHECKING:
    from grpo_jax.runs.checkpoint import Checkpoints

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
            findings; "absent" and "constant", streaks of rewards that are missing or have one value.
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


@dataclass(frozen=True)
class Session:
    """One process's part of a run, as every training loop uses it.

    Attributes:
        config: The run's config, of any task.
        output: Run directory, terminal and metric writers (`reports.output`).
        clock: time.monotonic() when the process began.
    """

    config: Any
    output: Any
    checkpoints: Checkpoints
    stop: StopRequests
    callbacks: Callbacks
    clock: float

    def resumed(self, task: Mapping[str, object], iterations: int) -> Progress | None:
        """Return the progress of the last sound checkpoint on --resume; None if the run begins.

        UserError if the checkpoint is of another configuration or data, or has more iterations.
        """
        checkpoints = self.checkpoints
        if not self.config.resume or checkpoints.latest_step() is None:
            return None
        progress = Progress.read(checkpoints.read_meta("latest"), checkpoints.folder)
        require_same(progress.identity, self.config, task, checkpoints.folder)
        if progress.iteration > iterations:
            raise UserError(f"--resume: {progress.iteration} iterations are done, and the run is to have {iterations}")
        return progress

    def keep_config(self) -> None:
        """On --resume, write what was overridden, such as --on_judge_error, into config.yaml for the next resume.

        Comes after what may refuse the resume: config.yaml must not keep what was refused.
        """
        if self.config.resume and is_main_process():
            self.output.directory.write_config(to_yaml(self.config.replace(resume=False)))

    def save(self, progress: Progress, arrays: Record, *, name: str = "", wait: bool = False) -> None:
        """Write a checkpoint in the background, at once if `wait`; with a `name` under that name too."""
        progress = progress._replace(seconds=with_total(progress.seconds, self.clock))
        saved = progress.iteration, arrays, {"progress": progress._asdict()}
        if name:
            self.checkpoints.save_as(name, *saved)
        else:
            self.checkpoints.save(*saved, wait=wait)

    def early_end(self, progress: Progress) -> str:
        """Return the reason to stop early; "" if there is none."""
        return EarlyStopping(**progress.early_stopping).reason(self.config) if progress.early_stopping else ""

    def is_over(self, progress: Progress) -> bool:
        """Return whether nothing is left to train."""
        return progress.iteration >= progress.iterations or bool(self.early_end(progress))

    def call_back(self, name: str, progress: Progress, metrics: Record) -> None:
        """Call the callback of that name; if it asks to, and anything is left to train, request a stop."""
        if getattr(self.callbacks, name) is None:
            return
        step, folder = int(metrics.get("step", progress.iteration)), self.output.directory.path.absolute()
        checkpoint = self.checkpoints.folder / f"step_{step}" if name == "on_checkpoint" else None
        event = IterationEvent(step, progress.iterations, dict(metrics), folder, checkpoint)
        asked, failure = False, None
        try:
            asked = is_main_process() and self.callbacks.ask(name, event)
        except UserError as error:
            failure = error
        asked, message = broadcast([asked, str(failure or "")])
        if message:
            raise StopRun(message) from failure
        if asked and not self.is_over(progress):
            self.output.info(f"{name} asks to stop")
            self.stop.set()

    def watch_clock(self, progress: Progress) -> None:
        """Request a stop after training.max_hours."""
        hours, worked = self.config.training.max_hours, time.monotonic() - self.clock
        if hours and is_main_process() and worked >= 3600 * hours and not self.is_over(progress):
            self.output.info(f"training.max_hours = {hours:g} are over")
            self.stop.set()

    def stopped(self, done: int) -> Record:
        """Say how a run that was stopped after `done` iterations goes on; return its result."""
        saved = "stopped and saved" if self.output.directory.holds_checkpoint() else "stopped"
        when = f"after iteration {done}" if done else "before the first iteration"
        self.output.info(f"{saved} {when}: --resume --run_dir {self.config.run_dir} goes on")
        return {"stopped": True, "iteration": done}
