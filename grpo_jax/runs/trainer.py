"""Train a policy: begin or resume, run the loop, validate, save, finish.

Every random number and every position in the data depends only on (seed, iteration). A checkpoint holds the arrays and
a `Progress`, so a run that is killed at any moment resumes exactly.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from grpo_jax.config.fields import to_yaml
from grpo_jax.config.run import Config
from grpo_jax.errors import StageError, Stopped, StopRun, UserError
from grpo_jax.models.broadcast import any_process, broadcast, from_main_process, is_main_process, process_count
from grpo_jax.models.sharding import on_host
from grpo_jax.rollout.data import TRAINING_ROWS
from grpo_jax.rollout.rewards import join_names
from grpo_jax.runs.batches import Rollouts, batch_of
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.directory import write_atomically
from grpo_jax.runs.evaluation import asked_to_evaluate, eval_reward_values, evaluate, measure_all
from grpo_jax.runs.loading import RunContext, load
from grpo_jax.runs.metrics import TOTAL, completion_columns, fallen, iteration_row, reward_streaks, update_metrics
from grpo_jax.runs.policy import load_teacher
from grpo_jax.runs.processes import enable_compile_cache, ending_together, join, require_shared
from grpo_jax.runs.python_input import from_python, keep_prompts
from grpo_jax.runs.results import baseline_lines, report, statistics_of
from grpo_jax.runs.session import (
    SCORE,
    Callbacks,
    EarlyStopping,
    Progress,
    Record,
    Session,
    added,
    explained,
    identity_of,
    nothing_judged,
    nothing_learned,
    stop_requests,
)
from grpo_jax.runs.sft import warm_up
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

    `open_output(config)` creates or opens the run directory (`reports.output`).
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
                ctx = load_run(config, output, prompts, rewards, stop.is_set, leaving)
        except Stopped:
            output.info(f"stopped while loading: continue with --resume --run_dir {config.run_dir}")
            return {"stopped": True, "iteration": 0}
        keep = config.training.keep_checkpoints
        with Checkpoints(output.directory.checkpoints, keep=keep, warning=output.warning) as checkpoints:
            session = Session(ctx.config, output, checkpoints, stop, callbacks, clock)
            trainer = Trainer(session, ctx)
            try:
                with trainer.saved_where_it_ends():
                    trainer.begin()
                    trainer.train()
                    return trainer.finish()
            except Stopped:
                return session.stopped(trainer.progress.iteration if trainer.begun else 0)
            finally:
                trainer.rollouts.close()


def load_run(
    config: Config, output: Any, prompts: Any, rewards: Any, stopping: Callable[[], bool], leaving: ExitStack
) -> RunContext:
    """Load a training run, and store its config and its prompts from Python for later processes."""
    given, directory = from_python(config, prompts, rewards), output.directory

    def write_config(config: Config) -> None:
        if not config.resume and is_main_process():  # a resume may still be refused
            write_atomically(directory.config, to_yaml(config))

    write_config(given.config)  # it names the objects from Python
    from_main_process(lambda: keep_prompts(given, directory, output.warning))
    data = {"prompts": given.prompts, "rewards": given.rewards}
    ctx = load(given.config, output.info, **data, stopping=stopping, leaving=leaving, trains=True)
    write_config(ctx.config)  # it has the chat template's date
    return ctx


class Trainer:
    """One process's part of a run; `save` writes `state` and `progress`, those after the last iteration."""

    state: TrainState
    progress: Progress

    def __init__(self, session: Session, ctx: RunContext):
        self.session, self.ctx, self.config, self.output = session, ctx, ctx.config, session.output
        self.checkpoints, self.stop, self.clock = session.checkpoints, session.stop, session.clock
        self.iterations = ctx.iterations
        written = {"allowed_tokens": ctx.allowed_tokens, "trie": ctx.trie}
        self.learner = make_learner(ctx.config, ctx.policy, ctx.iterations, **written)
        self.teacher = load_teacher(ctx.config, ctx.policy, **written)
        self.rollouts = Rollouts(ctx)
        self.begun = False  # whether there are a state and a progress to save

    def begin(self) -> None:
        """Restore the latest checkpoint on --resume, or initialise and evaluate."""
        ctx, output = self.ctx, self.output
        if progress := self.session.resumed(ctx.task_data.identity, self.iterations):
            return self.resume(progress)
        output.truncate(0)
        try:
            variables, notes, seconds = warm_up(ctx, output.directory.sft, self.clock, output.info)
        except Stopped:
            self.session.keep_config()
            raise
        self.session.keep_config()
        self.state = self.learner.start(variables)
        started = time.monotonic()
        before = measure_all(ctx, self.state.variables)
        notes["before"] |= {kind: one.measures for kind, one in before.items()}
        if before:
            rollouts = {kind: one.rollout for kind, one in before.items()}
            notes["remembered"] |= ctx.task_data.report.remember("before", rollouts)
            if samples := statistics_of(before):
                notes["samples"] = samples
        notes["watched"] = {"test": eval_reward_values(ctx, before["greedy"])} if before else {}
        if asked_to_evaluate(ctx) and self.config.evaluation.every and ctx.validation_rows:
            validation = evaluate(ctx, self.state.variables, ctx.validation_rows)
            notes["watched"]["validation"] = eval_reward_values(ctx, validation)
        seconds = added(seconds, {"evaluate": time.monotonic() - started})
        identity = identity_of(self.config, ctx.task_data.identity)
        self.progress = Progress(0, self.iterations, None, 0, seconds, identity, notes)
        self.begun = True
        for line in baseline_lines(ctx, before):
            output.info(line)
        self.save(wait=True)
        self._remove_sft()

    def resume(self, progress: Progress) -> None:
        """Restore the state of the latest valid checkpoint."""
        output, checkpoints = self.output, self.checkpoints
        identity = identity_of(self.config, self.ctx.task_data.identity)
        before, now = (one["task"].get(TRAINING_ROWS) for one in (progress.identity, identity))
        if before != now:
            output.warning(f"the training rows have changed: {before} → {now}; the run continues with the new ones")
        done, iterations = progress.iteration, self.iterations
        self.session.keep_config()
        template = self.learner.start(self.ctx.policy.variables)
        free_buffers(saved_parts(template))  # two states may not fit in memory
        saved, _ = checkpoints.restore("latest", saved_parts(template))
        self._remove_sft()  # left by a run killed at its first checkpoint
        rows = done - (progress.unvalidated is not None)
        written = output.truncate(done, rows=rows)
        if written < rows:
            output.warning(f"metrics.jsonl has {written} rows of {rows} iterations: missing rows stay missing")
        output.info(f"resumed after iteration {done} of {iterations}")
        if progress.iterations != iterations:
            output.info(
                f"the run has {iterations} iterations now, it had {progress.iterations}: schedules use the new length"
            )
        if progress.best_iteration and "best" not in checkpoints.available():
            output.warning("no valid best checkpoint is left; the next validation makes one")
            progress = progress._replace(best_score=None, best_iteration=0)
        self.state = restored_state(saved, template.variables)
        self.progress = progress._replace(iterations=iterations, identity=identity)
        self.begun = True

    def train(self) -> None:
        """Run the loop: sample and judge, update, log, and save if due."""
        ctx, training, output = self.ctx, self.config.training, self.output
        first = announced = self.progress.iteration  # the last iteration with an announced checkpoint
        output.start(self.iterations, announced)
        if self.progress.unvalidated is not None:
            self.log(self.progress.unvalidated)
        for i in range(self.progress.iteration, self.iterations):
            if self.session.early_end(self.progress) or any_process(self.stop.is_set()):
                break
            started = time.monotonic()
            rollout, objectives, drawn, self.state = self.rollouts.draw(self.state, i)
            before_update = time.perf_counter()
            batch = batch_of(ctx, rollout, objectives)
            if self.teacher is not None:
                batch = batch._replace(ref_logprobs=self.teacher(batch))
            if i == first:
                output.info("compiling the update …")
            rate = self.learner.learning_rate(self.state)
            key = jax.random.fold_in(jax.random.fold_in(ctx.key, _UPDATE_STREAM), i)
            self.state, report = jax.block_until_ready(self.learner.update(self.state, batch, key))
            seconds = {**rollout.seconds, "update": time.perf_counter() - before_update}
            self.state = self.learner.refresh(self.state, i)
            learned = update_metrics(report, rate)
            row = iteration_row(ctx, i, drawn, learned, seconds, started)
            streaks, warnings = reward_streaks(ctx, rollout, self.progress.notes, i + 1)
            notes = {**self.progress.notes, **streaks}
            for line in warnings:
                output.warning(line)
            seconds = added(self.progress.seconds, seconds)
            self.progress = self.progress._replace(iteration=i + 1, seconds=seconds, notes=notes, unvalidated=row)
            output.completions(i + 1, completion_columns(ctx, rollout, report["advantages"]))
            self.log(row)
            if failure := self._nothing_learned() or nothing_judged(self.progress, self.config.run_dir):
                self.save(wait=True)
                raise UserError(failure)
            if training.save_every and (i + 1) % training.save_every == 0:
                self._save_and_call_back()
                announced = i + 1
            self.session.watch_clock(self.progress)
        if announced < self.progress.iteration:
            self._save_and_call_back()
        self.save(wait=True)
        if reason := self.session.early_end(self.progress):
            output.info(f"early stopping after iteration {self.progress.iteration}: {reason}")
        if not self.session.is_over(self.progress):
            raise Stopped

    def log(self, row: Record) -> None:
        """Validate the last iteration if due, write its row, and call back."""
        done = self.progress.iteration
        try:
            measures = self.validate()
        except BaseException:
            self.output.iteration(row)  # a resumed run writes it again, with its measures
            raise
        self.progress = self.progress._replace(unvalidated=None)
        row = {**row, **measures}
        self.output.iteration(row)
        if measures and self.progress.best_iteration == done:  # after its row: --resume may continue from it
            self.save(name="best")
            self.output.info(f"new best checkpoint after iteration {done}: {self.progress.best_score:.4g}")
        self.session.call_back("on_iteration", self.progress, row)
        if measures:
            self.session.call_back("on_validation", self.progress, measures)

    def validate(self) -> dict[str, float]:
        """Evaluate the validation prompts if due; for "best", no eval reward may have fallen since the start."""
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
        if fell := fallen(progress.notes["watched"].get("validation", {}), eval_reward_values(ctx, evaluation)):
            self.output.info(
                f"validation after iteration {done}: {join_names(fell)} fell below the start: not the best"
            )
            score = math.nan
        waited = EarlyStopping(**(progress.early_stopping or {})).after(measures, done, self.config)
        seconds = added(progress.seconds, {"evaluate": time.monotonic() - started})
        progress = progress._replace(seconds=seconds, early_stopping=waited._asdict(), unvalidated=None)
        score = broadcast(float(score))
        # NaN without any reward, and for an iteration that may not be the best; no later value would exceed it.
        if math.isfinite(score) and (progress.best_score is None or score > progress.best_score):
            progress = progress._replace(best_score=score, best_iteration=done)
        self.progress = progress
        return {f"validation/{name}": value for name, value in measures.items()}

    def finish(self) -> Record:
        """Save `final`, evaluate the held-out prompts, and write policy, summary and report."""
        ctx, progress, directory, variables = self.ctx, self.progress, self.output.directory, self.state.variables
        self.save(name="final")
        failure = nothing_judged(progress, self.config.run_dir)
        if int(self.state.step) == 0:
            failure = failure or self._nothing_learned()
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
        return self.session.finish(progress, report(ctx, progress, after, seconds))

    def save(self, *, name: str = "", wait: bool = False) -> None:
        """Write a checkpoint of state and progress (`Session.save`)."""
        self.session.save(self.progress, saved_parts(self.state), name=name, wait=wait)

    @contextmanager
    def saved_where_it_ends(self) -> Iterator[None]:
        """Save the state before an exception ends the run; report a failed reward in one line."""
        try:
            yield
        except (Stopped, StageError, StopRun) as error:
            of_policy = isinstance(error, StageError) and error.stage == "sample"
            if process_count() > 1 and of_policy and not isinstance(error.__cause__, UserError):
                raise  # other processes may be inside this stage and cannot save
            if self.begun:
                self.save(wait=True)
            if isinstance(error, Stopped):
                raise
            # Interrupted SFT is saved too; if nothing is saved, the folder is removed.
            resumable = self.output.directory.holds_checkpoint() or self.config.resume
            hint = "" if self.config.on_judge_error == "missing" else ", or choose --on_judge_error missing"
            hint += "" if resumable else "; --debug shows the traceback"
            iteration = self.progress.iteration if self.begun else None
            told = explained(error, iteration, self.config.run_dir, resumable=resumable, hint=hint)
            if told is error:
                raise
            raise told from error

    def _remove_sft(self) -> None:
        if is_main_process():
            shutil.rmtree(self.output.directory.sft, ignore_errors=True)

    def _nothing_learned(self) -> str:
        updates = self.config.training.inner_epochs * self.config.training.minibatches
        return nothing_learned(int(self.state.skipped), updates, self.progress, self.config.run_dir)

    def _save_and_call_back(self) -> None:
        """Save a checkpoint of the loop, in the background unless a callback waits for it."""
        self.save(wait=self.session.callbacks.on_checkpoint is not None)
        self.session.call_back("on_checkpoint", self.progress, {})
