"""A run from its start to its summary: begin or resume, advance, validate, save, finish.

Host code only. The program (`tasks.task.Program`) makes the iterations; its state and a `Progress` are in every
checkpoint, so that a run killed at any moment goes on as if nothing had happened.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config.build import to_yaml
from grpo_jax.errors import StageError, StageTimeout, Stopped, StopRun, UserError, one_line
from grpo_jax.models.broadcast import any_process, broadcast, is_main_process, process_count
from grpo_jax.rollout.data import TRAINING_ROWS
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.progress import (
    SCORE,
    Progress,
    Record,
    Waited,
    added,
    after_validation,
    identity_of,
    reason_to_end,
    require_same,
    with_total,
)
from grpo_jax.runs.results import versions
from grpo_jax.runs.stopping import StopRequests
from grpo_jax.tasks.task import Program, State

Row = Mapping[str, Any]
_AT_FAULT = {"render": "the renderer", "env": "the environment"}  # by stage
_KILLABLE = (
    ", give it more time (--judge_timeout), or run it in a pool of one Ray actor, which can be killed "
    "(judges.NAME.pool, docs/judges.md)"
)


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


def epoch_line(rows: Sequence[Row]) -> str:
    """Return the line about an epoch: means over its iterations."""
    shown = {"reward": "reward/total/mean", "loss": "loss", "kl": "kl"}
    values = {label: [row[name] for row in rows if row.get(name) is not None] for label, name in shown.items()}
    means = [f"{label} {sum(found) / len(found):.4g}" for label, found in values.items() if found]
    return f"epoch {rows[-1]['epoch']:.0f} ends, means of {len(rows)} iterations: {', '.join(means)}"


@dataclass
class Run:
    """One process's part of a run: `output` is its `RunOutput`, `clock` `time.monotonic()` when it started."""

    program: Program
    checkpoints: Checkpoints
    output: Any
    clock: float
    stop: StopRequests
    callbacks: Callbacks = field(default_factory=Callbacks)
    state: State = field(default=None, init=False)
    progress: Progress | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.config = self.program.config
        self._epoch: list[Row] = []
        self.again = f"--resume --run_dir {self.config.run_dir}"

    def execute(self) -> Record:
        """Begin or resume, train, and finish unless a stop is asked for on the way."""
        try:
            if not self.begin():
                return self._stopped(None)
            self.train()
            if not self._is_over():
                return self._stopped(self._now.iteration)
            with self._saved_where_it_ends():
                return {**self.finish(), "stopped": False}
        except Stopped as stopped:
            return self._stopped(stopped.iteration)
        finally:
            self.program.close()

    @property
    def _now(self) -> Progress:
        assert self.progress is not None  # behind `begin`
        return self.progress

    def _early_end(self) -> str:
        return reason_to_end(Waited(**(self._now.waited or {})), self.config)

    def _is_over(self) -> bool:
        return self._now.iteration >= self.program.iterations or bool(self._early_end())

    def _stopped(self, iteration: int | None) -> Record:
        saved = "stopped and saved" if self.output.directory.holds_checkpoint() else "stopped"
        when = f"after iteration {iteration}" if iteration else "before the first iteration"
        self.output.say(f"{saved} {when}: {self.again} goes on")
        return {"stopped": True, "iteration": iteration or 0}

    def begin(self) -> bool:
        """Take the last sound checkpoint's state on --resume, else the program's own, measured; False if stopped."""
        if self.config.resume and self.checkpoints.latest_step() is not None:
            self.resume()
            return True
        self.output.truncate(0)
        folder = self.output.directory.sft
        with self._saved_where_it_ends():
            begun = self.program.begin(folder)
        self._keep_config()
        if begun is None:
            return False
        identity = identity_of(self.config, self.program.identity)
        self.state = begun.state
        self.progress = Progress(0, self.program.iterations, None, 0, dict(begun.seconds), [0], identity, begun.notes)
        self.output.say(begun.line)
        self.save(wait=True)
        self._remove(folder)
        return True

    def resume(self) -> None:
        """Restore the last sound checkpoint; UserError if it is of another configuration or data, or further on."""
        # Before the state, which may not fit.
        progress = Progress.read(self.checkpoints.read_meta("latest"), self.checkpoints.folder)
        require_same(progress.identity, self.config, self.program.identity, self.checkpoints.folder)
        identity = identity_of(self.config, self.program.identity)
        before, now = (one["task"].get(TRAINING_ROWS) for one in (progress.identity, identity))
        if before != now:
            self.output.note(f"the training rows have changed: {before} → {now}; the run goes on with the new ones")
        iterations = self.program.iterations
        if progress.iteration > iterations:
            raise UserError(f"--resume: {progress.iteration} iterations are done, and the run is to have {iterations}")
        self._keep_config()
        template = self.program.template()
        saved, _ = self.checkpoints.restore("latest", self.program.saved(template))
        self._remove(self.output.directory.sft)  # of a run killed at its first checkpoint
        rows = progress.iteration - (progress.unvalidated is not None)
        written = self.output.truncate(progress.iteration, rows=rows)
        if written < rows:
            self.output.note(f"metrics.jsonl has {written} rows of {rows} iterations: what is missing stays so")
        self.output.say(f"resumed after iteration {progress.iteration} of {iterations}")
        if progress.iterations != iterations:
            self.output.say(
                f"the run has {iterations} iterations now, it had {progress.iterations}: schedules go by the new length"
            )
        if progress.best_iteration and "best" not in self.checkpoints.available():
            self.output.note("there is no sound best checkpoint any more: the next validation makes one")
            progress = progress._replace(best_score=None, best_iteration=0)
        self.state = self.program.restored(saved, template)
        starts = [*progress.starts, progress.iteration]
        self.progress = progress._replace(iterations=iterations, starts=starts, identity=identity)

    def _remove(self, folder: Path) -> None:
        if is_main_process():
            shutil.rmtree(folder, ignore_errors=True)

    def _keep_config(self) -> None:
        """On --resume, write what was overridden, such as --on_judge_error, into config.yaml for the next resume.

        Comes after what may refuse the resume: config.yaml must not keep what was refused.
        """
        if self.config.resume and is_main_process():
            self.output.directory.write_config(to_yaml(self.config.replace(resume=False)))

    def train(self) -> None:
        """Advance to the end, a stop, a judge's failure, or updates that learn nothing; save the last good state."""
        training = self.config.training
        announced = self._now.iteration  # the last whose checkpoint callbacks have seen
        self.output.start(self.program.iterations, announced)
        if self._now.unvalidated is not None:
            self.validate()
        while not self._is_over() and not any_process(self.stop.is_set()):
            failure = self.step()
            if failure:
                self.save(wait=True)
                raise UserError(failure)
            if training.save_every and self._now.iteration % training.save_every == 0:
                self._save_and_tell()
                announced = self._now.iteration
            worked = time.monotonic() - self.clock
            if training.max_hours and is_main_process() and worked >= 3600 * training.max_hours and not self._is_over():
                self.output.say(f"training.max_hours = {training.max_hours:g} are over")
                self.stop.set()
        if announced < self._now.iteration:
            self._save_and_tell()
        self.save(wait=True)
        if reason := self._early_end():
            self.output.say(f"early stopping after iteration {self._now.iteration}: {reason}")

    def _save_and_tell(self) -> None:
        """Save a checkpoint of the loop; in the background unless a callback waits for it."""
        self.save(wait=self.callbacks.on_checkpoint is not None)
        self._tell("on_checkpoint", {}, self.checkpoints.folder / f"step_{self._now.iteration}")

    def _tell(self, name: str, metrics: Row, checkpoint: Path | None = None) -> None:
        """Call the callback of that name; if it asks to, and anything is left to do, request a stop."""
        if getattr(self.callbacks, name) is None:
            return
        number = int(metrics.get("step", self._now.iteration))
        folder = self.output.directory.path.absolute()
        event = IterationEvent(number, self.program.iterations, dict(metrics), folder, checkpoint)
        asked = False
        failure = ""
        cause: UserError | None = None
        try:
            asked = is_main_process() and self.callbacks.ask(name, event)
        except UserError as error:
            failure = str(error)
            cause = error
        asked, failure = broadcast([asked, failure])
        if failure:
            self.save(wait=True)
            saved = f"Saved after iteration {self._now.iteration}; fix it and go on with {self.again}"
            raise UserError(f"{failure}. {saved}") from cause
        if asked and not self._is_over():
            self.output.say(f"{name} asks to stop")
            self.stop.set()

    def step(self) -> str:
        """Advance, validate and record; return why this step is the last ("" if it need not be)."""
        progress = self._now
        with self._saved_where_it_ends():
            advanced = self.program.advance(self.state, progress.iteration, progress.notes)
        *before, last = advanced.rows
        for row in before:
            self.output.iteration(row)
        self.state = advanced.state
        self.progress = progress._replace(
            iteration=progress.iteration + len(advanced.rows),
            seconds=added(progress.seconds, advanced.seconds),
            notes=advanced.notes,
            unvalidated=last,
        )
        if advanced.completions is not None:
            self.output.completions(self.progress.iteration, advanced.completions)
        self.validate(before)
        return advanced.failure

    def validate(self, before: Sequence[Row] = ()) -> None:
        """Validate the last iteration if due, write its row, and call back for it and for those `before` it."""
        row = self._now.unvalidated or {}
        try:
            with self._saved_where_it_ends():
                self.progress, measures = self._measured(self._now._replace(unvalidated=None))
        except BaseException:
            self.output.iteration(row)  # written again, with its measures, when the run goes on
            raise
        row = {**row, **measures}
        self.output.iteration(row)
        self._epoch += [*before, row]
        if row.get("epoch", 0.5) % 1 == 0:
            self.output.say(epoch_line(self._epoch)) if len(self._epoch) > 1 else None
            self._epoch = []
        if measures and self._now.best_iteration == self._now.iteration:  # after its row: --resume may go on from it
            self.checkpoints.save_as("best", *self._saved())
            self.output.say(f"new best checkpoint after iteration {self._now.iteration}: {self._now.best_score:.4g}")
        for written in (*before, row):
            self._tell("on_iteration", written)
        if measures:
            self._tell("on_validation", measures)

    def _measured(self, progress: Progress) -> tuple[Progress, dict[str, float]]:
        """Measure for the choice of the best checkpoint when it is due; return the measures."""
        started = time.monotonic()
        validation = self.program.validate(self.state, progress.iteration, progress.notes)
        if validation is None:
            return progress, {}
        scored = {**validation.measures, SCORE: validation.score}
        waited = after_validation(Waited(**(progress.waited or {})), scored, progress.iteration, self.config)
        seconds = added(progress.seconds, {"evaluate": time.monotonic() - started})
        progress = progress._replace(seconds=seconds, waited=waited._asdict())
        score = broadcast(float(validation.chosen_by))
        # Without a single reward it is NaN, which no later one would exceed, and of what may not be the best too.
        if math.isfinite(score) and (progress.best_score is None or score > progress.best_score):
            progress = progress._replace(best_score=score, best_iteration=progress.iteration)
        return progress, {f"validation/{name}": value for name, value in scored.items()}

    def finish(self) -> Record:
        """Save `final`, measure the end, and write policy, summary and report."""
        progress = self._now
        self.checkpoints.save_as("final", *self._saved())
        finished = self.program.finish(self.state, progress, self.output.directory)
        summary = {
            "suspect": [],
            **finished.summary,
            "seconds": with_total(finished.summary["seconds"], self.clock),
            "seed": self.config.seed,
            "versions": versions(),
        }
        if reason := self._early_end():
            summary["early_stopping"] = reason
        self.output.finish(finished._replace(summary=summary), config=self.config, starts=progress.starts)
        return summary

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint in the background; at once if `wait`."""
        self.checkpoints.save(*self._saved(), wait=wait)

    def _saved(self) -> tuple[int, Record, Record]:
        """Return step, state and metadata of a checkpoint."""
        progress = self._now
        meta = {"progress": progress._replace(seconds=with_total(progress.seconds, self.clock))._asdict()}
        return progress.iteration, self.program.saved(self.state), meta

    @contextmanager
    def _saved_where_it_ends(self) -> Iterator[None]:
        """Save the state before an exception ends the run; report a failed reward in one line."""
        try:
            yield
        except Stopped as stopped:
            if self.progress is not None:
                self.save(wait=True)
                stopped.iteration = self.progress.iteration
            raise
        except (StageError, StopRun) as error:
            if process_count() > 1 and isinstance(error, StageError) and _is_own_failure(error):
                raise  # the others may be in the middle of it: they do not save
            saved = "Nothing was trained yet"
            if self.progress is not None:
                self.save(wait=True)
                saved = f"Saved after iteration {self.progress.iteration}"
            # interrupted SFT is saved too; without anything saved the folder does not stay.
            resumable = self.output.directory.holds_checkpoint() or self.config.resume
            again = f"go on with {self.again}" if resumable else "start again"
            cause = error if isinstance(error, StopRun) else error.__cause__
            if isinstance(cause, StopRun):
                raise StopRun(f"{' '.join(str(cause).split())}. {saved}; {again} when that is fixed") from error
            assert isinstance(error, StageError)
            if error.stage == "sample":  # the policy's own stage: no reward is at fault
                if isinstance(cause, UserError):
                    raise UserError(f"{' '.join(str(cause).split())}. {saved}; {again} when that is fixed") from error
                raise
            if isinstance(error, StageTimeout):
                hint = _KILLABLE
            else:
                hint = "" if self.config.on_judge_error == "missing" else ", or choose --on_judge_error missing"
                hint += "" if resumable else "; --debug shows the traceback"
            reason = cause if isinstance(cause, UserError) else error  # a reward names itself
            at_fault = _AT_FAULT.get(error.stage.partition(" ")[0], "the reward")
            raise UserError(f"{' '.join(str(reason).split())}. {saved}; fix {at_fault} and {again}{hint}") from error


def _is_own_failure(error: StageError) -> bool:
    """Return whether the policy failed in this process, and not a judge or an input, which all processes know."""
    return error.stage.startswith("sample") and not isinstance(error.__cause__, UserError)
