"""Train a language policy: begin or resume, the loop, validate, save, finish.

Every random number and every position follows from (seed, iteration): a run is resumed by its number of iterations
and its arrays. A checkpoint holds a `Progress` beside the arrays, so that a run killed at any moment goes on as if
nothing had happened.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax

from grpo_jax.config.fields import to_yaml
from grpo_jax.config.run import Config
from grpo_jax.errors import StageError, Stopped, StopRun, UserError
from grpo_jax.models.broadcast import any_process, broadcast, is_main_process, process_count
from grpo_jax.models.sharding import on_host
from grpo_jax.rollout.data import TRAINING_ROWS
from grpo_jax.rollout.rewards import join_names
from grpo_jax.runs.batches import Rollouts, batch_of, weigh
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.evaluation import asked_to_watch, evaluate, measure_all, watched_values
from grpo_jax.runs.loading import RunContext
from grpo_jax.runs.measures import TOTAL, fallen
from grpo_jax.runs.metrics import completion_columns, epoch_line, iteration_row, reward_streaks, update_metrics
from grpo_jax.runs.processes import enable_compile_cache, ending_together, join, require_shared, versions
from grpo_jax.runs.progress import SCORE, Progress, Record, added, identity_of, require_same, with_total
from grpo_jax.runs.python_input import load_given
from grpo_jax.runs.results import baseline_lines, report, statistics_of
from grpo_jax.runs.sft import warm_up
from grpo_jax.runs.stopping import (
    Callbacks,
    EarlyStopping,
    IterationEvent,
    StopRequests,
    explained,
    nothing_judged,
    nothing_learned,
    stop_requests,
)
from grpo_jax.training.state import TrainState, free_buffers, restored_state, saved_parts
from grpo_jax.training.update import make_learner

_UPDATE_STREAM = 2**31 - 3


def train(
    config: Config,
    open_output: Callable[[Config], Any],
    *,
    prompts: Any = None,
    rewards: Any = None,
    callbacks: Callbacks = Callbacks(),
) -> Record:
    """Train a policy and leave a run directory; return the contents of summary.json, and "stopped".

    `open_output(config)` makes or opens the run directory (`reports.output`).
    """
    enable_compile_cache()
    config, clock = join(config), time.monotonic()
    with (
        stop_requests() as stop,
        ending_together(config.run_dir),
        open_output(config) as output,
        ExitStack() as leaving,
    ):
        require_shared(output.directory.path)
        try:
            with stop.at_once():
                ctx = load_given(config, output, prompts, rewards, stop.is_set, leaving)
        except Stopped:
            output.info(f"stopped while loading: --resume --run_dir {config.run_dir} goes on")
            return {"stopped": True, "iteration": 0}
        keep = config.training.keep_checkpoints
        with Checkpoints(output.directory.checkpoints, keep=keep, warning=output.warning) as checkpoints:
            trainer = Trainer(ctx, output, checkpoints, stop, callbacks, clock)
            try:
                with trainer.saved_where_it_ends():
                    trainer.begin()
                    trainer.train()
                    return trainer.finish()
            except Stopped:
                return trainer.stopped()
            finally:
                trainer.rollouts.close()


class Trainer:
    """One process's part of a run; `state` and `progress` are those after the last iteration, which `save` writes."""

    state: TrainState
    progress: Progress

    def __init__(
        self,
        ctx: RunContext,
        output: Any,
        checkpoints: Checkpoints,
        stop: StopRequests,
        callbacks: Callbacks,
        clock: float,
    ):
        self.ctx, self.config, self.output, self.checkpoints = ctx, ctx.config, output, checkpoints
        self.stop, self.callbacks, self.clock = stop, callbacks, clock
        self.iterations = ctx.iterations
        self.learner = make_learner(
            ctx.config, ctx.policy, self.iterations, allowed_tokens=ctx.allowed_tokens, trie=ctx.trie
        )
        self.rollouts = Rollouts(ctx)
        self._begun = False  # there are a state and a progress to save
        self._epoch: list[Record] = []

    def begin(self) -> None:
        """Take the last sound checkpoint's state on --resume, else the policy's own, measured."""
        ctx, output = self.ctx, self.output
        if self.config.resume and self.checkpoints.latest_step() is not None:
            return self.resume()
        output.truncate(0)
        try:
            variables, notes, seconds = warm_up(ctx, output.directory.sft, self.clock, output.info)
        except Stopped:
            self._keep_config()
            raise
        self._keep_config()
        self.state = self.learner.start(variables)
        started = time.monotonic()
        before = measure_all(ctx, self.state.variables)
        notes["before"] |= {kind: one.measures for kind, one in before.items()}
        if before:
            rollouts = {kind: one.rollout for kind, one in before.items()}
            notes["remembered"] |= ctx.task_data.report.remember("before", rollouts)
            if samples := statistics_of(before):
                notes["samples"] = samples
        notes["watched"] = {"test": watched_values(ctx, before["greedy"])} if before else {}
        if asked_to_watch(ctx) and self.config.evaluation.every and ctx.validation_rows:
            validation = evaluate(ctx, self.state.variables, ctx.validation_rows)
            notes["watched"]["validation"] = watched_values(ctx, validation)
        seconds = added(seconds, {"evaluate": time.monotonic() - started})
        identity = identity_of(self.config, ctx.task_data.identity)
        self.progress = Progress(0, self.iterations, None, 0, seconds, [0], identity, notes)
        self._begun = True
        for line in baseline_lines(ctx, before):
            output.info(line)
        self.save(wait=True)
        self._remove(output.directory.sft)

    def resume(self) -> None:
        """Restore the last sound checkpoint; UserError if it is of another configuration or data, or further on."""
        output, checkpoints, task = self.output, self.checkpoints, self.ctx.task_data.identity
        progress = Progress.read(checkpoints.read_meta("latest"), checkpoints.folder)
        require_same(progress.identity, self.config, task, checkpoints.folder)
        identity = identity_of(self.config, task)
        before, now = (one["task"].get(TRAINING_ROWS) for one in (progress.identity, identity))
        if before != now:
            output.warning(f"the training rows have changed: {before} → {now}; the run goes on with the new ones")
        done, iterations = progress.iteration, self.iterations
        if done > iterations:
            raise UserError(f"--resume: {done} iterations are done, and the run is to have {iterations}")
        self._keep_config()
        template = self.learner.start(self.ctx.policy.variables)
        free_buffers(saved_parts(template))  # two states at once may not fit
        saved, _ = checkpoints.restore("latest", saved_parts(template))
        self._remove(output.directory.sft)  # of a run killed at its first checkpoint
        rows = done - (progress.unvalidated is not None)
        written = output.truncate(done, rows=rows)
        if written < rows:
            output.warning(f"metrics.jsonl has {written} rows of {rows} iterations: what is missing stays so")
        output.info(f"resumed after iteration {done} of {iterations}")
        if progress.iterations != iterations:
            output.info(
                f"the run has {iterations} iterations now, it had {progress.iterations}: schedules go by the new length"
            )
        if progress.best_iteration and "best" not in checkpoints.available():
            output.warning("there is no sound best checkpoint any more: the next validation makes one")
            progress = progress._replace(best_score=None, best_iteration=0)
        self.state = restored_state(saved, template.variables)
        starts = [*progress.starts, done]
        self.progress = progress._replace(iterations=iterations, starts=starts, identity=identity)
        self._begun = True

    def train(self) -> None:
        """The loop: sample and judge, learn, log, and save where it is due."""
        ctx, training, output = self.ctx, self.config.training, self.output
        announced = self.progress.iteration  # the last whose checkpoint callbacks have seen
        output.start(self.iterations, announced)
        if self.progress.unvalidated is not None:
            self.log(self.progress.unvalidated)
        for i in range(self.progress.iteration, self.iterations):
            if self._early_end() or any_process(self.stop.is_set()):
                break
            started = time.monotonic()
            rollout, drawn, self.state = self.rollouts.draw(self.state, i)
            before_update = time.perf_counter()
            objectives = weigh(ctx, rollout, training=True)
            batch = batch_of(ctx, rollout, objectives)
            if i == self.progress.starts[-1]:
                output.info("compiling the update …")
            rate = self.learner.learning_rate(self.state)
            key = jax.random.fold_in(jax.random.fold_in(ctx.key, _UPDATE_STREAM), i)
            self.state, report = jax.block_until_ready(self.learner.update(self.state, batch, key))
            seconds = {**rollout.seconds, "update": time.perf_counter() - before_update}
            self.state = self.learner.refresh(self.state, i)
            learned = update_metrics(report, rate, self.state)
            row = iteration_row(ctx, i, drawn, learned, seconds, started)
            streaks, lines = reward_streaks(ctx, rollout, self.progress.notes, i + 1)
            notes = {**self.progress.notes, **streaks}
            for line in lines:
                output.info(line)
            seconds = added(self.progress.seconds, seconds)
            self.progress = self.progress._replace(iteration=i + 1, seconds=seconds, notes=notes, unvalidated=row)
            output.completions(i + 1, completion_columns(ctx, rollout, report["advantages"]))
            self.log(row)
            if failure := self._nothing_learned() or self._nothing_judged():
                self.save(wait=True)
                raise UserError(failure)
            if training.save_every and (i + 1) % training.save_every == 0:
                self._save_and_tell()
                announced = i + 1
            worked = time.monotonic() - self.clock
            if training.max_hours and is_main_process() and worked >= 3600 * training.max_hours and not self._is_over():
                output.info(f"training.max_hours = {training.max_hours:g} are over")
                self.stop.set()
        if announced < self.progress.iteration:
            self._save_and_tell()
        self.save(wait=True)
        if reason := self._early_end():
            output.info(f"early stopping after iteration {self.progress.iteration}: {reason}")
        if not self._is_over():
            raise Stopped

    def log(self, row: Record) -> None:
        """Validate the last iteration if due, write its row, and call back."""
        done = self.progress.iteration
        try:
            measures = self.validate()
        except BaseException:
            self.output.iteration(row)  # written again, with its measures, when the run goes on
            raise
        self.progress = self.progress._replace(unvalidated=None)
        row = {**row, **measures}
        self.output.iteration(row)
        self._epoch.append(row)
        if row["epoch"] % 1 == 0:
            if len(self._epoch) > 1:
                self.output.info(epoch_line(self._epoch))
            self._epoch = []
        if measures and self.progress.best_iteration == done:  # after its row: --resume may go on from it
            self.checkpoints.save_as("best", *self._saved())
            self.output.info(f"new best checkpoint after iteration {done}: {self.progress.best_score:.4g}")
        self._tell("on_iteration", row)
        if measures:
            self._tell("on_validation", measures)

    def validate(self) -> dict[str, float]:
        """Measure the validation prompts if due; the best must not have eval rewards that fell below the start."""
        ctx, section, progress = self.ctx, self.config.evaluation, self.progress
        done, started = progress.iteration, time.monotonic()
        due = section.every and (done % section.every == 0 or done == self.iterations)
        if not due or not ctx.validation_rows:
            return {}
        self.rollouts.settle()  # held-out prompts have sampler and judges alone
        evaluation = evaluate(ctx, self.state.variables, ctx.validation_rows)
        measures = dict(evaluation.measures)
        measures[SCORE] = measures.pop(TOTAL)
        score = measures[section.best_by]
        if fell := fallen(progress.notes["watched"].get("validation", {}), watched_values(ctx, evaluation)):
            self.output.info(
                f"validation after iteration {done}: {join_names(fell)} fell below the start: not the best"
            )
            score = math.nan
        waited = EarlyStopping(**(progress.early_stopping or {})).after(measures, done, self.config)
        seconds = added(progress.seconds, {"evaluate": time.monotonic() - started})
        progress = progress._replace(seconds=seconds, early_stopping=waited._asdict(), unvalidated=None)
        score = broadcast(float(score))
        # Without a single reward it is NaN, which no later one would exceed, and of what may not be the best too.
        if math.isfinite(score) and (progress.best_score is None or score > progress.best_score):
            progress = progress._replace(best_score=score, best_iteration=done)
        self.progress = progress
        return {f"validation/{name}": value for name, value in measures.items()}

    def finish(self) -> Record:
        """Save `final`, measure the held-out prompts, and write policy, summary and report."""
        ctx, progress, directory, variables = self.ctx, self.progress, self.output.directory, self.state.variables
        self.checkpoints.save_as("final", *self._saved())
        failure = self._nothing_judged() or (self._nothing_learned() if int(self.state.step) == 0 else "")
        if failure:
            raise UserError(failure)
        self.rollouts.settle()  # held-out prompts have sampler and judges alone
        started = time.monotonic()
        after = measure_all(ctx, variables, references=False)
        seconds = added(progress.seconds, {"evaluate": time.monotonic() - started})
        variables = on_host(variables) if process_count() > 1 else variables
        if is_main_process():
            ctx.policy.save(directory.policy, variables)
            if ctx.policy.lora is not None:
                ctx.policy.save_adapters(directory.adapter, variables)
        finished = report(ctx, progress, after, seconds)
        summary = {
            **finished.summary,
            "seconds": with_total(seconds, self.clock),
            "seed": self.config.seed,
            "versions": versions(),
        }
        if reason := self._early_end():
            summary["early_stopping"] = reason
        self.output.finish(finished._replace(summary=summary), config=self.config, starts=progress.starts)
        return {**summary, "stopped": False}

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint in the background; at once if `wait`."""
        self.checkpoints.save(*self._saved(), wait=wait)

    def stopped(self) -> Record:
        """Say how a run goes on that was stopped."""
        done = self.progress.iteration if self._begun else 0
        saved = "stopped and saved" if self.output.directory.holds_checkpoint() else "stopped"
        when = f"after iteration {done}" if done else "before the first iteration"
        self.output.info(f"{saved} {when}: --resume --run_dir {self.config.run_dir} goes on")
        return {"stopped": True, "iteration": done}

    @contextmanager
    def saved_where_it_ends(self) -> Iterator[None]:
        """Save the state before an exception ends the run; report a failed reward in one line."""
        try:
            yield
        except (Stopped, StageError, StopRun) as error:
            if process_count() > 1 and isinstance(error, StageError) and _is_own_failure(error):
                raise  # the others may be in the middle of it: they do not save
            if self._begun:
                self.save(wait=True)
            if isinstance(error, Stopped):
                raise
            # Interrupted SFT is saved too; without anything saved the folder does not stay.
            resumable = self.output.directory.holds_checkpoint() or self.config.resume
            hint = "" if self.config.on_judge_error == "missing" else ", or choose --on_judge_error missing"
            hint += "" if resumable else "; --debug shows the traceback"
            iteration = self.progress.iteration if self._begun else None
            told = explained(error, iteration, self.config.run_dir, resumable=resumable, hint=hint)
            if told is error:
                raise
            raise told from error

    def _saved(self) -> tuple[int, Record, Record]:
        """Return step, state and metadata of a checkpoint."""
        progress = self.progress._replace(seconds=with_total(self.progress.seconds, self.clock))
        return progress.iteration, saved_parts(self.state), {"progress": progress._asdict()}

    def _keep_config(self) -> None:
        """On --resume, write what was overridden, such as --on_judge_error, into config.yaml for the next resume.

        Comes after what may refuse the resume: config.yaml must not keep what was refused.
        """
        if self.config.resume and is_main_process():
            self.output.directory.write_config(to_yaml(self.config.replace(resume=False)))

    def _remove(self, folder: Path) -> None:
        if is_main_process():
            shutil.rmtree(folder, ignore_errors=True)

    def _early_end(self) -> str:
        return EarlyStopping(**(self.progress.early_stopping or {})).reason(self.config)

    def _is_over(self) -> bool:
        return self.progress.iteration >= self.iterations or bool(self._early_end())

    def _nothing_judged(self) -> str:
        progress = self.progress
        streaks = progress.notes.get("streaks", {})
        return nothing_judged(streaks, progress.iteration, self.iterations, self.config.run_dir)

    def _nothing_learned(self) -> str:
        skipped, updates = int(self.state.skipped), self.learner.updates_per_iteration
        return nothing_learned(skipped, updates, self.progress.iteration, self.iterations, self.config.run_dir)

    def _save_and_tell(self) -> None:
        """Save a checkpoint of the loop; in the background unless a callback waits for it."""
        self.save(wait=self.callbacks.on_checkpoint is not None)
        self._tell("on_checkpoint", {}, self.checkpoints.folder / f"step_{self.progress.iteration}")

    def _tell(self, name: str, metrics: Record, checkpoint: Path | None = None) -> None:
        """Call the callback of that name; if it asks to, and anything is left to do, request a stop."""
        if getattr(self.callbacks, name) is None:
            return
        folder = self.output.directory.path.absolute()
        event = IterationEvent(self.progress.iteration, self.iterations, dict(metrics), folder, checkpoint)
        asked, failure, cause = False, "", None
        try:
            asked = is_main_process() and self.callbacks.ask(name, event)
        except UserError as error:
            failure, cause = str(error), error
        asked, failure = broadcast([asked, failure])
        if failure:
            self.save(wait=True)
            again = f"go on with --resume --run_dir {self.config.run_dir}"
            raise UserError(
                f"{failure}. Saved after iteration {self.progress.iteration}; fix it and {again}"
            ) from cause
        if asked and not self._is_over():
            self.output.info(f"{name} asks to stop")
            self.stop.set()


def _is_own_failure(error: StageError) -> bool:
    """Return whether the policy failed in this process, and not a judge or an input, which all processes know."""
    return error.stage == "sample" and not isinstance(error.__cause__, UserError)
