"""Program of a language policy: SFT, iterations, validation, the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.config.build import to_yaml
from grpo_jax.config.named import IN_PYTHON
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError
from grpo_jax.models.broadcast import broadcast, is_main_process, together
from grpo_jax.models.variables import PyTree
from grpo_jax.rollout.rewards import (
    constant_rewards,
    constant_streaks,
    join_names,
    missing_rewards,
    missing_streaks,
    no_reward_lately,
    no_reward_yet,
)
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.directory import RunDirectory
from grpo_jax.runs.evaluation import Evaluation, asked_to_watch, evaluate_policy, measure_all, watched_values
from grpo_jax.runs.iteration import Learner, SampledAhead, make_learner, run_iteration
from grpo_jax.runs.measures import TOTAL, fallen
from grpo_jax.runs.parts import RunContext, load_parts
from grpo_jax.runs.progress import SCORE, Progress, Record, added, identity_of, require_same, with_total
from grpo_jax.runs.python_input import from_python, keep_prompts, kept_prompts
from grpo_jax.runs.results import finish_language, statistics_of
from grpo_jax.runs.sft import run_sft
from grpo_jax.runs.stopping import StopRequests
from grpo_jax.tasks.display import of_turns
from grpo_jax.tasks.task import Advanced, Begun, Finished, Validated
from grpo_jax.training.state import TrainState, free_buffers, restored_state, saved_parts
from grpo_jax.training.update import PATIENCE

UNTRAINED = "untrained"
"""The policy as it was loaded, before SFT."""


@dataclass(frozen=True)
class LanguageProgram:
    """A language policy's run.

    Its notes are "before", held-out measures of the start by kind of text ("greedy", "sampled", "unchanged", "oracle")
    and of the policy before SFT ("untrained"); "samples", `evaluation.sample_measures` of the start;
    "watched", what was watched of each test and validation prompt then; "remembered", for the task's findings;
    "absent", the number of consecutive iterations without a reward, by its name; and "constant", the only value of a
    reward and for how many iterations, by its name. `config` also names
    the Python input; `parts.config` is this machine's.
    """

    config: Config
    parts: RunContext
    learner: Learner
    say: Callable[[str], None]
    clock: float

    @cached_property
    def ahead(self) -> SampledAhead | None:
        """Batches that are sampled ahead (training.async_level); None where each is sampled with the newest weights."""
        return SampledAhead(self.parts) if self.parts.config.training.async_level else None

    @property
    def iterations(self) -> int:
        """Number of iterations in all."""
        return self.learner.iterations

    @property
    def identity(self) -> Mapping[str, str]:
        """Identity of the task's data and models, compared on resume."""
        return self.parts.task_data.identity

    def template(self) -> TrainState:
        """The start without its arrays: two states at once may not fit."""
        state = self.learner.start(self.parts.policy.variables)
        free_buffers(saved_parts(state))
        return state

    def saved(self, state: TrainState) -> Record:
        """Arrays that training changes; frozen weights are left out."""
        return saved_parts(state)

    def restored(self, saved: Mapping[str, PyTree], template: TrainState) -> TrainState:
        """Join restored arrays with the frozen weights of the template."""
        return restored_state(saved, template.variables)

    def begin(self, folder: Path) -> Begun | None:
        """Warm up if configured, and measure the start."""
        seconds: dict[str, float] = {}
        notes: Record = {"before": {}, "remembered": {}}
        if self.parts.config.sft.steps:
            warmed = self._warm_up(folder)
            if warmed is None:
                return None
            state, notes, seconds = warmed
        else:
            state = self.learner.start(self.parts.policy.variables)
        started = time.monotonic()
        before = measure_all(self.parts, state.variables)
        notes = {**self._noted(notes, "before", before), "watched": self._watched(before, state)}
        seconds = added(seconds, {"evaluate": time.monotonic() - started})
        line = "no prompts are held out: nothing is measured before and after training"
        if before:
            measured = before["greedy"].measures
            measures = "  ".join(
                f"{name} {value:.3f}" for name, value in measured.items() if not of_turns(name, measured)
            )
            line = f"baseline on {len(self.parts.test_rows)} held-out prompts: {measures}"
            values = self._by_name(np.moveaxis(before["greedy"].rollout.final_rewards, -1, 0))
            if missing := missing_rewards(values, self.parts.rewards.weights):
                self.say(f"note: no held-out completion got the reward {join_names(missing)}")
        return Begun(state, notes, seconds, line)

    def _warm_up(self, folder: Path) -> tuple[TrainState, Record, dict[str, float]] | None:
        """Measure the policy as it was loaded and teach it the task's pairs; None if stopped on the way."""
        parts = self.parts
        meta = self._interrupted(folder)
        if meta is None:
            started = time.monotonic()
            notes: Record = {"before": {}, "remembered": {}}
            if parts.test_rows:
                untrained = evaluate_policy(parts, parts.policy.variables, parts.test_rows)
                remembered = parts.task_data.report.remember(UNTRAINED, {"greedy": untrained.rollout})
                notes = {"before": {UNTRAINED: untrained.measures}, "remembered": remembered}
            seconds = {"evaluate": time.monotonic() - started}
            meta = {"identity": identity_of(parts.config, self.identity), "notes": notes, "seconds": seconds}

        begun = meta

        def to_save() -> Record:
            return {**begun, "seconds": with_total(begun["seconds"], self.clock)}

        with Checkpoints(folder, keep=2, note=lambda line: self.say(f"note: {line}")) as checkpoints:
            warmed = run_sft(parts, checkpoints=checkpoints, meta=to_save, say=self.say)
        if warmed is None:
            return None
        variables, seconds = warmed
        return self.learner.start(variables), meta["notes"], {**meta["seconds"], "sft": seconds}

    def _interrupted(self, folder: Path) -> Record | None:
        if not broadcast(folder.is_dir()):
            return None
        with Checkpoints(folder, read_only=True) as checkpoints:
            if checkpoints.latest_step() is None:
                return None
            meta = checkpoints.read_meta("latest")
        require_same(meta["identity"], self.parts.config, self.identity, folder)
        return {name: meta[name] for name in ("identity", "notes", "seconds")}

    def _noted(self, notes: Record, name: str, evaluations: Mapping[str, Evaluation]) -> Record:
        measures = {kind: evaluation.measures for kind, evaluation in evaluations.items()}
        if not evaluations:
            return dict(notes)
        rollouts = {kind: evaluation.rollout for kind, evaluation in evaluations.items()}
        noted = {
            "before": notes["before"] | measures,
            "remembered": notes["remembered"] | self.parts.task_data.report.remember(name, rollouts),
        }
        samples = statistics_of(evaluations)
        return noted if samples is None else noted | {"samples": samples}

    def _watched(self, before: Mapping[str, Evaluation], state: TrainState) -> Record:
        """Watched measures of the start by prompt, of test prompts and of those that "best" is chosen on."""
        parts = self.parts
        watched = {"test": watched_values(parts, before["greedy"])} if before else {}
        if asked_to_watch(parts) and parts.config.evaluation.every and parts.validation_rows:
            validation = evaluate_policy(parts, state.variables, parts.validation_rows)
            watched["validation"] = watched_values(parts, validation)
        return watched

    def _by_name(self, values: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self.parts.environment.reward_names, values, strict=True))

    def advance(self, state: TrainState, iteration: int, notes: Record) -> Advanced:
        """Run one iteration."""
        result = run_iteration(self.parts, self.learner, state, iteration, self.ahead)
        values = self._by_name(np.moveaxis(result.rewards, -1, 0))
        absent = missing_streaks(notes.get("absent", {}), values, self.parts.rewards.weights)
        if single := no_reward_yet(absent, iteration + 1, self.iterations):
            self.say(f"note: {single}")
        constant = constant_streaks(notes.get("constant", {}), values, self.parts.rewards.weights)
        for warning in constant_rewards(constant):
            self.say(warning)
        failure = self._nothing_learned(result.state, iteration + 1) or self._nothing_judged(absent, iteration + 1)
        noted = {**notes, "absent": absent, "constant": constant}
        return Advanced(result.state, [result.row], result.seconds, noted, result.completions, failure)

    def _nothing_judged(self, absent: Mapping[str, int], iteration: int) -> str:
        """Failure message if no reward has come lately, or none at all in a short run; "" before."""
        silence = no_reward_lately(absent, self.iterations)
        if not silence:
            return ""
        saved = f"Saved after iteration {iteration}"
        return f"{silence}. {saved}; fix the rewards, or what they ask, and {self._again(iteration)}"

    def _nothing_learned(self, state: TrainState, iteration: int) -> str:
        """Failure message if every update of a few iterations was left out, or most of a short run."""
        skipped = int(state.skipped)
        updates = self.learner.updates_per_iteration
        if skipped < max(1, min(PATIENCE * updates, self.iterations * updates - 1)):
            return ""
        where = self.parts.config.run_dir
        return (
            f"the loss or its gradient was not finite in {skipped} updates in a row; they were left out. Saved after "
            f"iteration {iteration}, with the weights before them. If a reward or a prompt is at fault, fix it and "
            f"{self._again(iteration)}; else give a new run a lower optimizer.learning_rate, and these "
            f"weights: python -m grpo_jax.export --run {where} --checkpoint {iteration} --out FOLDER, --policy.path "
            "FOLDER"
        )

    def _again(self, iteration: int) -> str:
        resumed = f"go on with --resume --run_dir {self.parts.config.run_dir}"
        return resumed if iteration < self.iterations else "start again"

    def validate(self, state: TrainState, iteration: int, notes: Record) -> Validated | None:
        """Return the validation prompts' measures; what is watched must not have fallen for it to be the best."""
        every = self.parts.config.evaluation.every
        due = every and (iteration % every == 0 or iteration == self.iterations)
        if not due or not self.parts.validation_rows:
            return None
        self._settle()
        evaluation = evaluate_policy(self.parts, state.variables, self.parts.validation_rows)
        measures = dict(evaluation.measures)
        score = measures.pop(TOTAL)
        chosen_by = {**measures, SCORE: score}[self.parts.config.evaluation.best_by]
        start = notes.get("watched", {}).get("validation", {})
        if fell := fallen(start, watched_values(self.parts, evaluation)):
            self.say(f"validation after iteration {iteration}: {join_names(fell)} fell below the start: not the best")
            chosen_by = math.nan
        return Validated(measures, score, chosen_by)

    def finish(self, state: TrainState, progress: Progress, directory: RunDirectory) -> Finished:
        """Measure the held-out prompts after training, and write `policy/` and `adapter/`."""
        failure = self._nothing_judged(progress.notes.get("absent", {}), progress.iteration)
        if int(state.step) == 0:
            failure = failure or self._nothing_learned(state, progress.iteration)
        if failure:
            raise UserError(failure)
        self._settle()
        return finish_language(self.parts, state, progress, directory)

    def close(self) -> None:
        """Stop what is sampled ahead."""
        if self.ahead is not None:
            self.ahead.close()

    def _settle(self) -> None:
        """Wait for batches on their way: held-out prompts have sampler and judges alone."""
        if self.ahead is not None:
            self.ahead.settle()


def load_program(
    config: Config,
    output: Any,
    *,
    prompts: object,
    rewards: object,
    clock: float,
    stop: StopRequests,
    leaving: ExitStack,
) -> LanguageProgram:
    """Load a language run."""
    source = from_python(config, prompts, rewards)
    if source.config is not config and not config.resume and is_main_process():  # a resume may be refused yet
        output.directory.write_config(to_yaml(source.config))
    together(lambda: keep_prompts(source, output.directory, output.note) if is_main_process() else None)
    if source.prompts is None and config.data.prompts == IN_PYTHON:
        source = source._replace(prompts=kept_prompts(output.directory))
    given = {"prompts": source.prompts, "rewards": source.rewards}
    parts = load_parts(source.config, output.part, **given, stopping=stop.is_set, leaving=leaving)
    learner = make_learner(parts)
    learner = learner._replace(update=_announced(learner.update, output.say))
    config = source.config.replace(data=parts.config.data)
    if config != source.config and not config.resume and is_main_process():  # data.template_date is filled in
        output.directory.write_config(to_yaml(config))
    return LanguageProgram(config, parts, learner, output.say, clock)


def _announced(update: Callable[..., Any], say: Callable[[str], None]) -> Callable[..., Any]:
    """Say before the first call that it compiles, which takes minutes for a large policy."""
    lines = ["compiling the update …"]

    def call(*arguments: Any) -> Any:
        while lines:
            say(lines.pop())
        return update(*arguments)

    return call
