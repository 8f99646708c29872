"""A run from its first line to its summary: begin or resume, advance, validate, save, finish.

Host code only. What an iteration is, the run's program knows (`tasks.task.Program`); its state and a `Progress` are in
every checkpoint, so that a run which was killed at any moment goes on as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.config.build import to_yaml
from grpo_jax.errors import StageError, StageTimeout, Stopped, StopRun, UserError, one_line
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.processes import StopRequests
from grpo_jax.runs.progress import (
    SCORE,
    Progress,
    Waited,
    added,
    after_validation,
    identity_of,
    reason_to_end,
    require_same,
    with_total,
)
from grpo_jax.runs.results import versions
from grpo_jax.tasks.task import Program


@dataclass(frozen=True)
class IterationEvent:
    """What a callback is told.

    Attributes:
        step: Iterations done.
        iterations: That there are to be.
        metrics: By name as in metrics.jsonl: on an iteration its row, on a validation that row's "validation/…"; on a
            checkpoint nothing.
        run_dir: Of the run.
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
    """Who is told of what; None for nobody.

    Attributes:
        on_iteration: Each iteration, when its row of metrics.jsonl is written.
        on_validation: Each validation behind it.
        on_checkpoint: Each checkpoint of the loop, when it is on disk.
    """

    on_iteration: Callback | None = None
    on_validation: Callback | None = None
    on_checkpoint: Callback | None = None

    def ask(self, name: str, event: IterationEvent) -> bool:
        """Tells the callback of that name; whether it asks to stop.

        Raises:
            UserError: It raised, or returned something else.
        """
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


State = Any
Row = Mapping[str, Any]


class Run(NamedTuple):
    """What every step of a run needs.

    Attributes:
        program: What it drives.
        checkpoints: Where states are saved.
        output: Terminal, metric files and the run directory (`reports.output.RunOutput`).
        clock: `time.monotonic()` at the start of this process's part of the run.
        callbacks: Who is told of it.
        stop: Whether it is to be left early.
    """

    program: Program
    checkpoints: Checkpoints
    output: Any
    clock: float
    callbacks: Callbacks = Callbacks()
    stop: StopRequests = StopRequests()

    @property
    def config(self) -> Any:
        """The program's."""
        return self.program.config

    @property
    def again(self) -> str:
        """The command line that goes on."""
        return f"--resume --run_dir {self.config.run_dir}"


def execute(run: Run, stop: StopRequests) -> dict[str, Any]:
    """Begins or resumes, trains, and finishes unless `stop` is set on the way.

    Returns:
        The summary, with "stopped".
    """
    run = run._replace(stop=stop)
    try:
        begun = begin(run)
        if begun is None:
            return _stopped(run, None)
        state, progress = train(run, *begun)
        if not _is_over(run, progress):
            return _stopped(run, progress.iteration)
        with _saved_where_it_ends(run, state, progress):
            return {**finish(run, state, progress), "stopped": False}
    except Stopped as stopped:
        return _stopped(run, stopped.iteration)
    finally:
        run.program.close()


def _early_end(run: Run, progress: Progress) -> str:
    """Return why no iteration is to follow although there are more; "" otherwise."""
    return reason_to_end(Waited(**(progress.waited or {})), run.config.training)


def _is_over(run: Run, progress: Progress) -> bool:
    """Whether no iteration is to follow."""
    return progress.iteration >= run.program.iterations or bool(_early_end(run, progress))


def _stopped(run: Run, iteration: int | None) -> dict[str, Any]:
    """Says where the run was stopped; returns what a summary has of it."""
    saved = "stopped and saved" if run.output.directory.holds_checkpoint() else "stopped"
    when = f"after iteration {iteration}" if iteration else "before the first iteration"
    run.output.say(f"{saved} {when}: {run.again} goes on")
    return {"stopped": True, "iteration": iteration or 0}


def begin(run: Run) -> tuple[State, Progress] | None:
    """Return the state to start from: the last sound checkpoint's on --resume, else the program's own, measured.

    None if it was stopped on the way.
    """
    if run.config.resume:
        for line in run.checkpoints.set_aside_damaged():
            run.output.note(line)
        if run.checkpoints.latest_step() is not None:
            return resume(run)
    run.output.truncate(0)
    folder = run.output.directory.warm_start
    with _saved_where_it_ends(run, None, None):
        begun = run.program.begin(folder)
    _keep_config(run)
    if begun is None:
        return None
    identity = identity_of(run.config, run.program.identity)
    progress = Progress(0, run.program.iterations, None, 0, dict(begun.seconds), [0], identity, begun.notes)
    run.output.say(begun.line)
    save(run, begun.state, progress, wait=True)
    shutil.rmtree(folder, ignore_errors=True)
    return begun.state, progress


def resume(run: Run) -> tuple[State, Progress]:
    """Restore the last sound checkpoint.

    Raises:
        UserError: The checkpoint is of another configuration, or of other data; or it is further than the run is to go.
    """
    # Before the state, which may not fit.
    progress = Progress.read(run.checkpoints.read_meta("latest"), run.checkpoints.folder)
    require_same(progress.identity, run.config, run.program.identity, run.checkpoints.folder)
    iterations = run.program.iterations
    if progress.iteration > iterations:
        raise UserError(f"--resume: {progress.iteration} iterations are done, and the run is to have {iterations}")
    _keep_config(run)
    template = run.program.template()
    saved, _ = run.checkpoints.restore("latest", run.program.saved(template))
    shutil.rmtree(run.output.directory.warm_start, ignore_errors=True)  # of a run killed at its first checkpoint
    rows = progress.iteration - (progress.unvalidated is not None)
    written = run.output.truncate(progress.iteration, rows=rows)
    if written < rows:
        run.output.note(f"metrics.jsonl has {written} rows of {rows} iterations: what is missing stays so")
    run.output.say(f"resumed after iteration {progress.iteration} of {iterations}")
    if progress.iterations != iterations:
        run.output.say(
            f"the run has {iterations} iterations now, it had {progress.iterations}: schedules go by the new length"
        )
    if progress.best_iteration and "best" not in run.checkpoints.available():
        run.output.note("there is no sound best checkpoint any more: the next validation makes one")
        progress = progress._replace(best_score=None, best_iteration=0)
    progress = progress._replace(iterations=iterations, starts=[*progress.starts, progress.iteration])
    return run.program.restored(saved, template), progress


def _keep_config(run: Run) -> None:
    """On --resume, config.yaml follows what was overridden, such as --on_judge_error: the next one starts from it.

    Behind what may refuse the resume: config.yaml must not keep what was refused.
    """
    if run.config.resume:
        run.output.directory.write_config(to_yaml(dataclasses.replace(run.config, resume=False)))


def train(run: Run, state: State, progress: Progress) -> tuple[State, Progress]:
    """Advances to the end, an early one perhaps, or until a stop is asked for; the last state is saved.

    Raises:
        Stopped: On the way through an iteration; the state before it is saved.
        UserError: A judge failed; the state before that step is saved. Or nothing could be learned for a few iterations
            in a row; the last good state is saved.
    """
    training = run.config.training
    announced = progress.iteration  # the last whose checkpoint callbacks were told of
    run.output.start(run.program.iterations, progress.iteration)
    if progress.unvalidated is not None:
        progress = validate(run, state, progress)
    while not _is_over(run, progress) and not run.stop.is_set():
        state, progress, failure = step(run, state, progress)
        if failure:
            save(run, state, progress, wait=True)
            raise UserError(failure)
        if training.save_every and progress.iteration % training.save_every == 0:
            _save_and_tell(run, state, progress)
            announced = progress.iteration
        worked = time.monotonic() - run.clock
        if training.max_hours and worked >= 3600 * training.max_hours and not _is_over(run, progress):
            run.output.say(f"training.max_hours = {training.max_hours:g} are over")
            run.stop.set()
    if announced < progress.iteration:
        _save_and_tell(run, state, progress)
    save(run, state, progress, wait=True)
    if reason := _early_end(run, progress):
        run.output.say(f"early stopping after iteration {progress.iteration}: {reason}")
    return state, progress


def _save_and_tell(run: Run, state: State, progress: Progress) -> None:
    """Saves a checkpoint of the loop; in the background unless somebody is told of it."""
    save(run, state, progress, wait=run.callbacks.on_checkpoint is not None)
    path = run.checkpoints.folder / f"step_{progress.iteration}"
    _tell(run, state, progress, "on_checkpoint", {}, path)


def _tell(run: Run, state: State, progress: Progress, name: str, metrics: Row, checkpoint: Path | None = None) -> None:
    """Tells the callback of that name, and asks for a stop if it does and there is anything left to do.

    Raises:
        UserError: It failed; the state is saved.
    """
    number = int(metrics.get("step", progress.iteration))
    folder = run.output.directory.path.absolute()
    event = IterationEvent(number, run.program.iterations, dict(metrics), folder, checkpoint)
    try:
        asked = run.callbacks.ask(name, event)
    except UserError as error:
        save(run, state, progress, wait=True)
        saved = f"Saved after iteration {progress.iteration}; mend it and go on with {run.again}"
        raise UserError(f"{error}. {saved}") from error
    if asked and not _is_over(run, progress):
        run.output.say(f"{name} asks to stop")
        run.stop.set()


def step(run: Run, state: State, progress: Progress) -> tuple[State, Progress, str]:
    """One step of the program with its validation and its records, and why it is the last ("" if it need not be)."""
    with _saved_where_it_ends(run, state, progress):
        advanced = run.program.advance(state, progress.iteration, progress.notes)
    *before, last = advanced.rows
    for row in before:
        run.output.iteration(row)
    progress = progress._replace(
        iteration=progress.iteration + len(advanced.rows),
        seconds=added(progress.seconds, advanced.seconds),
        notes=advanced.notes,
        unvalidated=last,
    )
    if advanced.completions is not None:
        run.output.completions(progress.iteration, advanced.completions)
    progress = validate(run, advanced.state, progress, before)
    return advanced.state, progress, advanced.failure


def validate(run: Run, state: State, progress: Progress, before: Sequence[Row] = ()) -> Progress:
    """Measures the last iteration if it is time to, writes its row, and tells of it and of those `before` it."""
    row = progress.unvalidated or {}
    try:
        with _saved_where_it_ends(run, state, progress):
            progress, measures = _measured(run, state, progress._replace(unvalidated=None))
    except BaseException:
        run.output.iteration(row)  # written again, with its measures, when the run goes on
        raise
    row = {**row, **measures}
    run.output.iteration(row)
    for written in (*before, row):
        _tell(run, state, progress, "on_iteration", written)
    if measures:
        _tell(run, state, progress, "on_validation", measures)
    return progress


def _measured(run: Run, state: State, progress: Progress) -> tuple[Progress, dict[str, float]]:
    """Measures what chooses the best checkpoint when it is time, and keeps it; returns the measures."""
    started = time.monotonic()
    validation = run.program.validate(state, progress.iteration)
    if validation is None:
        return progress, {}
    measures, score = validation
    scored = {**measures, SCORE: score}
    waited = after_validation(Waited(**(progress.waited or {})), scored, progress.iteration, run.config.training)
    seconds = added(progress.seconds, {"evaluate": time.monotonic() - started})
    progress = progress._replace(seconds=seconds, waited=waited._asdict())
    # Without a single reward the score is NaN, which no later score would exceed.
    if math.isfinite(score) and (progress.best_score is None or score > progress.best_score):
        progress = progress._replace(best_score=score, best_iteration=progress.iteration)
        run.checkpoints.save_best(progress.iteration, run.program.saved(state), _meta(run, progress))
    return progress, {f"validation/{name}": value for name, value in scored.items()}


def finish(run: Run, state: State, progress: Progress) -> dict[str, Any]:
    """Saves `final`, measures the end, and writes policy, summary and report.

    Returns:
        What summary.json holds.
    """
    run.checkpoints.save_final(progress.iteration, run.program.saved(state), _meta(run, progress))
    finished = run.program.finish(state, progress, run.output.directory)
    summary = {
        **finished.summary,
        "seconds": with_total(finished.summary["seconds"], run.clock),
        "seed": run.config.seed,
        "versions": versions(),
    }
    if reason := _early_end(run, progress):
        summary["early_stopping"] = reason
    run.output.finish(finished._replace(summary=summary), config=run.config, starts=progress.starts)
    return summary


def save(run: Run, state: State, progress: Progress, *, wait: bool = False) -> None:
    """Writes a checkpoint in the background; at once if `wait`."""
    run.checkpoints.save(progress.iteration, run.program.saved(state), _meta(run, progress), wait=wait)


def _meta(run: Run, progress: Progress) -> dict[str, Any]:
    return {"progress": progress._replace(seconds=with_total(progress.seconds, run.clock))._asdict()}


@contextmanager
def _saved_where_it_ends(run: Run, state: State | None, progress: Progress | None) -> Iterator[None]:
    """What ends the run inside does so after the state before it (None: the start) is saved; a judge in one line."""
    try:
        yield
    except Stopped as stopped:
        if progress is not None:
            save(run, state, progress, wait=True)
            stopped.iteration = progress.iteration
        raise
    except (StageError, StopRun) as error:
        saved = "Nothing was trained yet"
        if progress is not None:
            save(run, state, progress, wait=True)
            saved = f"Saved after iteration {progress.iteration}"
        # An interrupted warm start is saved too; without anything saved the folder does not stay.
        resumable = run.output.directory.holds_checkpoint() or run.config.resume
        again = f"go on with {run.again}" if resumable else "start again"
        cause = error if isinstance(error, StopRun) else error.__cause__
        if isinstance(cause, StopRun):
            raise StopRun(f"{' '.join(str(cause).split())}. {saved}; {again} when that is mended") from error
        assert isinstance(error, StageError)
        if error.stage == "sample":  # the policy's own stage: there is no judge to mend
            if isinstance(cause, UserError):
                raise UserError(f"{' '.join(str(cause).split())}. {saved}; {again} when that is mended") from error
            raise
        if isinstance(error, StageTimeout):
            other_way = ", or give it a process that can be ended: isolated: true"
        else:
            other_way = "" if run.config.on_judge_error == "missing" else ", or choose --on_judge_error missing"
        reason = cause if isinstance(cause, UserError) else error  # a reward names itself
        raise UserError(f"{' '.join(str(reason).split())}. {saved}; mend the judge and {again}{other_way}") from error
