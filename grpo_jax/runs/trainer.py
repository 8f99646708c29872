"""Train a policy: begin or resume, run the loop, validate, save, finish.

Every random number and every position in the data depends only on (seed, iteration). A checkpoint holds the arrays and
a `Progress`, so a run that is killed at any moment resumes exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import numpy as np

from grpo_jax.config.fields import identity, to_yaml
from grpo_jax.config.run import Config
from grpo_jax.errors import StageError, Stopped, StopRun, UserError, one_line, short_repr
from grpo_jax.models.broadcast import broadcast, from_main_process, is_main_process, process_count
from grpo_jax.models.sharding import on_host
from grpo_jax.models.variables import PyTree
from grpo_jax.rollout.rewards import join_names
from grpo_jax.runs import metrics
from grpo_jax.runs.batches import CollectedBatch, Rollouts
from grpo_jax.runs.checkpoint import DRAWING, Checkpoints
from grpo_jax.runs.compile_cache import enable_compile_cache
from grpo_jax.runs.context import RunContext
from grpo_jax.runs.directory import Output, read_metrics, write_atomically
from grpo_jax.runs.endings import rewards_missing_reason, updates_skipped_reason, with_remedy
from grpo_jax.runs.evaluation import caption_values, configured_eval_rewards, eval_reward_values, evaluate, measure_all
from grpo_jax.runs.loading import load
from grpo_jax.runs.policy import load_teacher
from grpo_jax.runs.processes import exit_if_peer_failed, join, require_shared, versions
from grpo_jax.runs.python_input import from_python, keep_prompts
from grpo_jax.runs.results import baseline_lines, report, statistics_of
from grpo_jax.runs.session import NOTED, SCORE, Callbacks, IterationEvent, Notes, Progress, Record, require_same
from grpo_jax.runs.sft import warm_up
from grpo_jax.runs.stopping import StopRequests, stop_requests
from grpo_jax.training.batch import Batch, make_batch
from grpo_jax.training.estimators import standardise_objectives, update_moments
from grpo_jax.training.state import TrainState, free_buffers, restored_state, saved_parts
from grpo_jax.training.update import make_learner

_UPDATE_STREAM = 2**31 - 3


def train(
    config: Config,
    open_output: Callable[[Config], AbstractContextManager[Output]],
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
        exit_if_peer_failed(str(config.run_dir)),
        open_output(config) as output,
        ExitStack() as exit_stack,
    ):
        require_shared(output.directory.path)
        try:
            with stop.raise_immediately():
                ctx = load_run(config, output, prompts, rewards, stop.is_set, exit_stack)
        except Stopped:
            output.info(f"stopped while loading: continue with --resume --run_dir {config.run_dir}")
            return {"stopped": True, "iteration": 0}
        keep = config.training.keep_checkpoints
        with Checkpoints(output.directory.checkpoints, keep=keep, warning=output.warning) as checkpoints:
            trainer = Trainer(ctx, output, checkpoints, stop, callbacks, clock)
            try:
                with trainer.save_on_failure():
                    trainer.begin()
                    trainer.train()
                    return trainer.finish()
            except Stopped:
                done = trainer.progress.iteration if trainer.has_state else 0
                saved = "stopped and saved" if output.directory.holds_checkpoint() else "stopped"
                when = f"after iteration {done}" if done else "before the first iteration"
                output.info(f"{saved} {when}: continue with --resume --run_dir {config.run_dir}")
                return {"stopped": True, "iteration": done}
            finally:
                trainer.rollouts.close()


def load_run(
    config: Config, output: Output, prompts: Any, rewards: Any, stopping: Callable[[], bool], exit_stack: ExitStack
) -> RunContext:
    """Load a training run, and store its config and its prompts from Python for later processes."""
    inputs, directory = from_python(config, prompts, rewards), output.directory

    def write_config(config: Config) -> None:
        if not config.resume and is_main_process():  # a resume may still be refused
            write_atomically(directory.config, to_yaml(config))

    write_config(inputs.config)  # it names the objects from Python
    from_main_process(lambda: keep_prompts(inputs, directory, output.warning))
    data = {"prompts": inputs.prompts, "rewards": inputs.rewards}
    ctx = load(inputs.config, output.info, **data, stopping=stopping, exit_stack=exit_stack, trains=True)
    write_config(ctx.config)  # it has the chat template's date
    return ctx


class Trainer:
    """One process's part of a run; `save` writes `state` and `progress`, those after the last iteration."""

    state: TrainState
    progress: Progress

    def __init__(
        self,
        ctx: RunContext,
        output: Output,  # run directory, terminal and metric writers (`reports.output`)
        checkpoints: Checkpoints,
        stop: StopRequests,
        callbacks: Callbacks,
        clock: float,  # time.monotonic() when the process began
    ):
        self.ctx, self.config, self.iterations, self.output = ctx, ctx.config, ctx.iterations, output
        self.checkpoints, self.stop, self.callbacks, self.clock = checkpoints, stop, callbacks, clock
        self.identity = {"config": identity(ctx.config.resolved), "task": dict(ctx.task_data.identity)}
        distribution = {"allowed_tokens": ctx.allowed_tokens, "trie": ctx.trie}
        self.learner = make_learner(ctx.config, ctx.policy, ctx.iterations, **distribution)
        self.update = _keep_policy if ctx.config.learns == "renderer" else self.learner.update
        self.teacher = load_teacher(ctx.config, ctx.policy, **distribution)
        self.rollouts = Rollouts(ctx)
        self.algorithm = ctx.config.resolved_algorithm
        self.has_state = False  # whether there are a state and a progress to save

    def begin(self) -> None:
        """Restore the latest checkpoint on --resume, or initialise and evaluate."""
        ctx, output = self.ctx, self.output
        if progress := self.saved_progress():
            return self.resume(progress)
        output.truncate(0)
        try:
            variables, notes, seconds = warm_up(ctx, output.info)
        except Stopped:
            self._keep_config()
            raise
        self._keep_config()
        self.state = self.learner.start(variables)
        started = time.monotonic()
        before = measure_all(ctx, self.state.variables)
        task_data, at_start = notes.task_data, {}
        if before:
            rollouts = {kind: evaluation.rollout for kind, evaluation in before.items()}
            task_data = {**task_data, **ctx.task_data.report.remember("before", rollouts)}
            at_start["test"] = eval_reward_values(ctx, before["greedy"])
        if configured_eval_rewards(ctx) and self.config.evaluation.every and ctx.validation_rows:
            validation = evaluate(ctx, self.state.variables, ctx.validation_rows)
            at_start["validation"] = eval_reward_values(ctx, validation) | caption_values(ctx)
        measures = {**notes.before, **{kind: evaluation.measures for kind, evaluation in before.items()}}
        notes = Notes(measures, statistics_of(before), at_start, task_data)
        progress = Progress(0, self.iterations, None, 0, seconds, self.identity, notes)
        self.progress = progress.add_seconds({"evaluate": time.monotonic() - started})
        self.has_state = True
        for line in baseline_lines(ctx, before):
            output.info(line)
        self.save(wait=True)

    def saved_progress(self) -> Progress | None:
        """Return the progress of the latest valid checkpoint on --resume; None for a new run.

        UserError if the checkpoint has another configuration, other data, or more iterations, or if a run that has
        trained has none: it would begin again.
        """
        checkpoints = self.checkpoints
        if not self.config.resume:
            return None
        if checkpoints.latest_step() is None:
            if trained := len(read_metrics(self.output.directory.metrics)):
                lost = f"{checkpoints.folder} has no checkpoint, though {trained} iterations are done"
                raise UserError(f"--resume: {lost}: put it back, or start a new run in another --run_dir")
            return None
        progress = Progress.read(checkpoints.read_meta("latest"), checkpoints.folder)
        require_same(progress.identity, self.config, self.ctx.task_data.identity, checkpoints.folder)
        done, iterations = progress.iteration, self.iterations
        if done > iterations:
            raise UserError(f"--resume: {done} iterations are done, more than the run's {iterations}")
        return progress

    def resume(self, progress: Progress) -> None:
        """Restore the state of the latest valid checkpoint."""
        output, checkpoints = self.output, self.checkpoints
        for name in NOTED:
            before, now = (facts["task"].get(name) for facts in (progress.identity, self.identity))
            if before and before != now:
                output.warning(f"the {name} have changed: {before} → {now}; the run continues with the new ones")
        done, iterations = progress.iteration, self.iterations
        self._keep_config()
        template = self.learner.start(self.ctx.policy.variables)
        free_buffers(saved_parts(template))  # two states may not fit in memory
        saved, _ = checkpoints.restore("latest", saved_parts(template) | self.drawing_parts())
        if (renderer := self.ctx.renderer) is not None:
            renderer.restore(saved.pop(DRAWING))
        rows = done - (progress.unvalidated is not None)
        count = output.truncate(done, rows=rows)
        if count < rows:
            output.warning(f"metrics.jsonl has {count} rows of {rows} iterations: missing rows stay missing")
        output.info(f"resumed after iteration {done} of {iterations}")
        if progress.iterations != iterations:
            had = f"the run has {iterations} iterations now, it had {progress.iterations}"
            output.info(f"{had}: schedules use the new length")
        if progress.best_iteration and "best" not in checkpoints.available():
            output.warning("no valid best checkpoint is left; the next validation makes one")
            progress = progress._replace(best_score=None, best_iteration=0)
        self.state = restored_state(saved, template.variables)
        self.progress = progress._replace(iterations=iterations, identity=self.identity)
        self.has_state = True

    def train(self) -> None:
        """Run the loop: sample and judge, update, log, and save if due."""
        first = self.progress.iteration
        self.output.start(self.iterations, first)
        if self.progress.unvalidated is not None:
            self.log()
        for i in range(first, self.iterations):
            if self.early_stop_reason() or self.ctx.is_stopped():
                break
            started = time.monotonic()
            collected, self.state = self.rollouts.collect(self.state, i)  # samples and judges
            judged = time.monotonic()
            batch = self.make_batch(collected)
            if i == first:
                self.output.info("compiling the update …")
            rate = self.learner.learning_rate(self.state)
            key = jax.random.fold_in(jax.random.fold_in(self.ctx.key, _UPDATE_STREAM), i)
            self.state, report = jax.block_until_ready(self.update(self.state, batch, key))
            self.state, report["learning_rate"] = self.learner.refresh(self.state, i), rate
            collected = self.learn_pictures(collected, i)
            self.record(collected, report, started=started, judged=judged)
            self.log()  # validates, and saves the best, where due
            self.save_if_due()
            self.stop_after_max_hours()
        if first < self.progress.iteration and not self._save_is_due():
            self._save_and_call_back()
        self.save(wait=True)
        if reason := self.early_stop_reason():
            self.output.info(f"early stopping after iteration {self.progress.iteration}: {reason}")
        if not self.is_over():
            raise Stopped

    def make_batch(self, collected: CollectedBatch) -> Batch:
        """Return the update's batch on the policy's devices, with advantages and a teacher's log-probabilities."""
        device, mesh = self.ctx.policy_device, self.ctx.policy.mesh
        objectives = collected.objectives
        if self.algorithm.standardise_rewards:
            objectives = standardise_objectives(objectives, update_moments(objectives, self.progress.notes.moments))
        batch = make_batch(collected.rollout, objectives, self.algorithm, device=device, mesh=mesh)
        return batch if self.teacher is None else batch._replace(ref_logprobs=self.teacher(batch))

    def learn_pictures(self, collected: CollectedBatch, i: int) -> CollectedBatch:
        """Train the renderer, if it learns; return the batch with its metrics and seconds."""
        ctx, learn = self.ctx, self.ctx.task_data.learn
        if ctx.renderer is None:
            return collected
        assert learn is not None
        started, (rollout, objectives, row) = time.monotonic(), collected
        weights = [weight * (name in ctx.fns.picture_rewards) for name, weight in ctx.rewards.weights.items()]
        row = row | learn(ctx.renderer, rollout, i, weights=weights, conditions=ctx.rewards.conditions, key=ctx.key)
        seconds = {**rollout.seconds, "renderer": time.monotonic() - started}
        return CollectedBatch(rollout._replace(seconds=seconds), objectives, row)

    def record(self, collected: CollectedBatch, report: Record, *, started: float, judged: float) -> None:
        """Write completions, warn of rewards that teach nothing, and keep the row for `log`; times are monotonic."""
        done, rollout = self.progress.iteration + 1, collected.rollout
        seconds = {**rollout.seconds, "update": time.monotonic() - judged - rollout.seconds.get("renderer", 0.0)}
        row = metrics.iteration_row(self.ctx, done, collected.metrics, report, seconds, started)
        notes = metrics.reward_streaks(self.ctx, rollout, self.progress.notes)
        if self.algorithm.standardise_rewards:
            notes = notes._replace(moments=update_moments(collected.objectives, notes.moments))
        for line in metrics.streak_warnings(self.ctx, notes, done):
            self.output.warning(line)
        self.progress = self.progress.add_seconds(seconds)._replace(iteration=done, notes=notes, unvalidated=row)
        self.output.completions(done, metrics.completion_columns(self.ctx, rollout, report["advantages"]))

    def log(self) -> None:
        """Validate the last iteration if due, write its row, and call back."""
        row, done = self.progress.unvalidated or {}, self.progress.iteration
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
        self.call_back("on_iteration", row)
        if measures:
            self.call_back("on_validation", measures)

    def call_back(self, name: str, values: Record) -> None:
        """Call the callback of that name; request a stop if it asks to and iterations are left."""
        callback = getattr(self.callbacks, name)
        if callback is None:
            return
        step, folder = self.progress.iteration, self.output.directory.path
        checkpoint = self.checkpoints.folder / f"step_{step}" if name == "on_checkpoint" else None
        event = IterationEvent(step, self.iterations, dict(values), folder, checkpoint)
        stops, message, failure = False, "", None
        try:
            answer = callback(event) if is_main_process() else None
            if not (answer is None or isinstance(answer, bool | np.bool_)):  # as of `lambda event: file.write(…)`
                raise TypeError(f"expected None, or True to stop, got {short_repr(answer)}")
            stops = bool(answer)
        except Exception as error:
            message, failure = f"{name}: {type(error).__name__}: {one_line(error)}", error
        stops, message = broadcast([stops, message])
        if message:
            raise StopRun(message) from failure
        if stops and not self.is_over():
            self.output.info(f"{name} requested a stop")
            self.stop.set()

    def stop_after_max_hours(self) -> None:
        """Request a stop after training.max_hours."""
        hours, worked = self.config.training.max_hours, time.monotonic() - self.clock
        if hours and is_main_process() and worked >= 3600 * hours and not self.is_over():
            self.output.info(f"training.max_hours = {hours:g} reached; saving")
            self.stop.set()

    def early_stop_reason(self) -> str:
        """Return the reason to stop early; "" if there is none."""
        return self.progress.early_stopping.reason(self.config)

    def is_over(self) -> bool:
        """Return whether nothing is left to train."""
        return self.progress.iteration >= self.iterations or bool(self.early_stop_reason())

    def validate(self) -> dict[str, float]:
        """Evaluate the validation prompts if due; for "best", no eval reward may have regressed since the start."""
        ctx, section, progress = self.ctx, self.config.evaluation, self.progress
        done, started = progress.iteration, time.monotonic()
        due = section.every and (done % section.every == 0 or done == self.iterations)
        if not due or not ctx.validation_rows:
            return {}
        self.rollouts.wait()  # held-out prompts have sampler and judges alone
        evaluation = evaluate(ctx, self.state.variables, ctx.validation_rows)
        measures = dict(evaluation.measures)
        measures[SCORE] = measures.pop(metrics.TOTAL)
        score, at_start = measures[section.best_by], progress.notes.eval_rewards_at_start.get("validation", {})
        captions = caption_values(ctx)
        measures |= {name: metrics.present_mean(np.array(values)) for name, values in captions.items()}
        if names := metrics.regressed_measures(at_start, eval_reward_values(ctx, evaluation) | captions):
            fell = f"{join_names(names)} fell below their initial values; not saved as best"
            self.output.info(f"validation after iteration {done}: {fell}")
            score = math.nan
        progress = progress._replace(early_stopping=progress.early_stopping.after(measures, done, self.config))
        progress = progress.add_seconds({"evaluate": time.monotonic() - started})
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
        if failure := self._failure(last=True):
            raise UserError(failure)
        self.rollouts.wait()  # held-out prompts have sampler and judges alone
        started = time.monotonic()
        after = measure_all(ctx, variables, references=ctx.renderer is not None)
        progress = progress.add_seconds({"evaluate": time.monotonic() - started})
        variables = on_host(variables) if process_count() > 1 else variables
        if is_main_process():
            ctx.policy.save(directory.policy, variables)
            if ctx.policy.lora is not None:
                ctx.policy.save_adapters(directory.adapter, variables)
        finished = report(ctx, progress, after)
        progress = progress.add_seconds({"total": time.monotonic() - self.clock})
        summary = {**finished.summary, "seconds": progress.seconds}
        summary |= {"seed": self.config.seed, "versions": versions()}
        if reason := self.early_stop_reason():
            summary["early_stopping"] = reason
        self.output.finish(finished._replace(summary=summary), config=self.config)
        return {**summary, "stopped": False}

    def save(self, *, name: str = "", wait: bool = False) -> None:
        """Write a checkpoint of state and progress, in the background unless `wait`; also under `name`, if given."""
        progress = self.progress.add_seconds({"total": time.monotonic() - self.clock})
        parts = saved_parts(self.state) | self.drawing_parts()
        saved = progress.iteration, parts, {"progress": progress.as_json()}
        if name:
            self.checkpoints.save_as(name, *saved)
        else:
            self.checkpoints.save(*saved, wait=wait)

    def drawing_parts(self) -> dict[str, PyTree]:
        """Return a trained renderer's part of a checkpoint; nothing without one."""
        return {} if self.ctx.renderer is None else {DRAWING: self.ctx.renderer.state()}

    @contextmanager
    def save_on_failure(self) -> Iterator[None]:
        """Save the state before an exception ends the run; report a failed reward in one line."""
        try:
            yield
        except (Stopped, StageError, StopRun) as error:
            of_policy = isinstance(error, StageError) and error.stage == "sample"
            if process_count() > 1 and of_policy and not isinstance(error.__cause__, UserError):
                raise  # other processes may be inside this stage and cannot save
            if self.has_state:
                self.save(wait=True)
            if isinstance(error, Stopped):
                raise
            # If nothing is saved, the folder is removed.
            resumable = self.output.directory.holds_checkpoint() or self.config.resume
            iteration = self.progress.iteration if self.has_state else None
            remedied = with_remedy(error, iteration, self.config, resumable=resumable)
            if remedied is error:
                raise
            raise remedied from error

    def _keep_config(self) -> None:
        """On --resume, write overridden fields into config.yaml for the next, after all checks of the resume."""
        if self.config.resume and is_main_process():
            write_atomically(self.output.directory.config, to_yaml(self.config.replace(resume=False)))

    def _failure(self, *, last: bool = False) -> str:
        """Return the reason to end a run that does not learn; "" if it does. The `last` weights had an update once."""
        training, renderer, state = self.config.training, self.ctx.renderer, self.state
        models = [(state.step, state.skipped, training.inner_epochs * training.minibatches)]
        models += [] if renderer is None else [(renderer.updates, renderer.skipped, renderer.train.updates)]
        for place, (done, count, updates) in enumerate(models):
            skipped = 0 if last and int(done) else int(count)
            progress, run_dir = self.progress, self.config.run_dir
            if reason := updates_skipped_reason(skipped, updates, progress, run_dir, renderer=place > 0):
                return reason
        return rewards_missing_reason(self.progress, self.config.run_dir)

    def save_if_due(self) -> None:
        """Save every training.save_every iterations; end a run that does not learn, saved."""
        if failure := self._failure():
            self.save(wait=True)
            raise UserError(failure)
        if self._save_is_due():
            self._save_and_call_back()

    def _save_is_due(self) -> bool:
        every = self.config.training.save_every
        return every > 0 and self.progress.iteration % every == 0

    def _save_and_call_back(self) -> None:
        """Save a checkpoint of the loop, in the background unless a callback waits for it."""
        self.save(wait=self.callbacks.on_checkpoint is not None)
        self.call_back("on_checkpoint", {})


def _keep_policy(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Record]:
    """Update nothing, since only the renderer learns; return the state and a report."""
    return state, {"advantages": np.zeros(batch.tokens.shape[:2], np.float32)}
