"""A run from its first line to its summary: begin or resume, iterate, validate, save, report.

Host code only. Its state is a `TrainState` and a `Progress`; both are in every checkpoint, so that a run which was
killed at any moment goes on as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from grpo_jax import config as configuration
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.config import Config
from grpo_jax.tasks.recommendation.sections import SERVICE_FIELDS
from grpo_jax.errors import StopRun, UserError
from grpo_jax.evaluate import Evaluation, evaluate_policy, measure_all, weighted_reward
from grpo_jax.runs.loop import Learner, run_iteration
from grpo_jax.runs.parts import Parts, own_bridges
from grpo_jax.rollout.pipeline import StageError
from grpo_jax.tasks.recommendation.parts import require_same_retrieval, warm_start_pairs
from grpo_jax.tasks.recommendation.report import policy_ranks
from grpo_jax.runs.results import finish_run
from grpo_jax.training.trainer import PATIENCE, TrainState, release, restored_state, saved_parts
from grpo_jax.training.supervised import warm_start

UNTRAINED = "untrained"
"""The policy as it was loaded, before the warm start."""

_RUN_FIELDS = ("run_dir", "resume", "debug", "report_to", "judge_timeout", "devices", "on_judge_error")


class Progress(NamedTuple):
    """What a checkpoint remembers beside the arrays; all of it JSON.

    Attributes:
        iteration: Iterations done.
        before: Held-out measures of the start, by kind of text ("greedy", "sampled", "unchanged", "oracle"), and of the
            policy before a warm start ("untrained").
        best_score: Best validation score so far, or None.
        best_iteration: Where it was reached.
        seconds: Seconds by stage so far, "total" included.
        fingerprint: Of the config's fields that change what is learned.
        ranks: Recommendation: rank of each test row's target, before training.
        retrieval: Recommendation: fingerprint of catalogue and encoder.
    """

    iteration: int
    before: dict[str, dict[str, float]]
    best_score: float | None
    best_iteration: int
    seconds: dict[str, float]
    fingerprint: str
    ranks: dict[str, list[float]] | None = None
    retrieval: dict[str, str] | None = None


class Run(NamedTuple):
    """What every step of a run needs.

    Attributes:
        parts: Policy, data and judges.
        learner: Compiled steps.
        checkpoints: Where states are saved.
        output: Console, metric files and the run directory.
        clock: `time.monotonic()` at the start of this process's part of the run.
    """

    parts: Parts
    learner: Learner
    checkpoints: Checkpoints
    output: Any
    clock: float


def fingerprint(config: Config) -> str:
    """A hash of the config's fields that change what is learned; a resumed run must have the same."""
    values = configuration.to_dict(config)
    for name in _RUN_FIELDS:
        values.pop(name)
    for name in ("save_every", "keep_checkpoints"):
        values["training"].pop(name)
    values["evaluation"].pop("gallery")
    values["policy"].pop("mesh")  # the same numbers to rounding, wherever they lie
    # The retriever's own fingerprint tells another catalogue or encoder, wherever it is and whatever it is called.
    for name in (*SERVICE_FIELDS, "encoder"):
        values["retrieval"].pop(name)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def execute(run: Run, stop: threading.Event) -> dict[str, Any]:
    """Begins or resumes, trains, and finishes unless `stop` is set on the way.

    Returns:
        The summary, with "stopped".
    """
    begun = begin(run, stop)
    if begun is None:
        run.output.say(f"stopped and saved in the warm start: --resume --run_dir {run.parts.config.run_dir} goes on")
        return {"stopped": True, "iteration": 0}
    state, progress = begun
    state, progress = train(run, state, progress, stop)
    if progress.iteration < run.learner.iterations:
        where = run.parts.config.run_dir
        run.output.say(f"stopped and saved after iteration {progress.iteration}: --resume --run_dir {where} goes on")
        return {"stopped": True, "iteration": progress.iteration}
    with _judges_may_fail(run, state, progress):
        return {**finish_run(run, state, progress), "stopped": False}


def begin(run: Run, stop: threading.Event) -> tuple[TrainState, Progress] | None:
    """The state to start from: the last checkpoint's on --resume, else the policy's, warm-started and measured.

    None if it was stopped in the warm start.
    """
    if run.parts.config.resume and run.checkpoints.latest_step() is not None:
        return resume(run)
    parts = run.parts
    retrieval = None if parts.task is None else parts.task.retriever.fingerprint._asdict()
    progress = _interrupted(run) or Progress(0, {}, None, 0, {}, fingerprint(parts.config), {}, retrieval)
    _keep_config(run)
    run.output.truncate(0)
    with _judges_may_fail(run, None, None):
        if parts.config.warm_start.steps:
            warmed = warm_up(run, progress, stop)
            if warmed is None:
                return None
            state, progress = warmed
        else:
            state = run.learner.start(parts.variables)
        started = time.monotonic()
        before = measure_all(parts, state.variables)
    measures = {kind: evaluation.measures for kind, evaluation in before.items()}
    progress = progress._replace(
        before=progress.before | measures,
        seconds=_add(progress.seconds, {"evaluate": time.monotonic() - started}),
        ranks=progress.ranks | _ranks(parts, "before", before),
    )
    told = "  ".join(f"{name} {value:.3f}" for name, value in measures["greedy"].items())
    run.output.say(f"baseline on {len(parts.test_rows)} held-out prompts: {told}")
    save(run, state, progress, wait=True)
    shutil.rmtree(run.output.directory.warm_start, ignore_errors=True)
    return state, progress


def warm_up(run: Run, progress: Progress, stop: threading.Event) -> tuple[TrainState, Progress] | None:
    """Measures the policy as it was loaded and teaches it `warm_start.pairs`; None if stopped on the way."""
    parts = run.parts
    if not progress.before:
        started = time.monotonic()
        untrained = evaluate_policy(parts, parts.variables, parts.test_rows)
        progress = progress._replace(
            before={UNTRAINED: untrained.measures},
            ranks=_ranks(parts, UNTRAINED, {"greedy": untrained}),
            seconds={"evaluate": time.monotonic() - started},
        )
    with Checkpoints(run.output.directory.warm_start, keep=1) as checkpoints:
        warmed = warm_start(
            parts,
            warm_start_pairs(parts.config, parts.task.dataset),
            checkpoints=checkpoints,
            meta={"progress": progress._asdict()},
            stop=stop,
            say=run.output.say,
        )
    if warmed is None:
        return None
    variables, seconds = warmed
    return run.learner.start(variables), progress._replace(seconds={**progress.seconds, "warm_start": seconds})


def resume(run: Run) -> tuple[TrainState, Progress]:
    """The last checkpoint's state.

    Raises:
        UserError: The checkpoint is of another configuration, or of another catalogue or encoder.
    """
    state = run.learner.start(run.parts.variables)
    release(saved_parts(state))  # two states at once may not fit
    restored, meta = run.checkpoints.restore("latest", saved_parts(state))
    progress = Progress(**meta["progress"])
    _require_same(run, progress, run.checkpoints)
    _keep_config(run)
    shutil.rmtree(run.output.directory.warm_start, ignore_errors=True)  # of a run killed at its first checkpoint
    run.output.truncate(progress.iteration)
    run.output.say(f"resumed after iteration {progress.iteration} of {run.learner.iterations}")
    return restored_state(restored, state.variables), progress


def _interrupted(run: Run) -> Progress | None:
    """What the last checkpoint of an interrupted warm start remembers; None if there is none."""
    folder = run.output.directory.warm_start
    if not folder.is_dir():
        return None
    with Checkpoints(folder, read_only=True) as checkpoints:
        if checkpoints.latest_step() is None:
            return None
        progress = Progress(**checkpoints.read_meta("latest")["progress"])
        _require_same(run, progress, checkpoints)
    return progress


def _require_same(run: Run, progress: Progress, checkpoints: Checkpoints) -> None:
    require_same_retrieval(run.parts.task, progress.retrieval, own_bridges)
    if progress.fingerprint != fingerprint(run.parts.config):
        raise UserError(
            f"--resume: the checkpoint in {checkpoints.folder} belongs to another configuration; resume with "
            "the run's own config.yaml, or start a new run in another --run_dir"
        )


def _ranks(parts: Parts, name: str, evaluations: dict[str, Evaluation]) -> dict[str, list[float]]:
    """What the table at the end needs of an evaluation before training; nothing for other tasks."""
    return {} if parts.task is None else {key: ranks.tolist() for key, ranks in policy_ranks(name, evaluations).items()}


def _keep_config(run: Run) -> None:
    """On --resume, config.yaml follows what was overridden, such as --on_judge_error; the next one starts from it."""
    if run.parts.config.resume:
        run.output.directory.write_config(configuration.to_yaml(dataclasses.replace(run.parts.config, resume=False)))


def train(run: Run, state: TrainState, progress: Progress, stop: threading.Event) -> tuple[TrainState, Progress]:
    """Iterates to the end, or to the first iteration after `stop` is set; the last state is saved.

    Raises:
        UserError: A judge failed; the state before that iteration is saved. Or nothing could be learned for a few
            iterations in a row; the last good state is saved.
    """
    every, iterations = run.parts.config.training.save_every, run.learner.iterations
    run.output.start(iterations, progress.iteration)
    while progress.iteration < iterations and not stop.is_set():
        state, progress = step(run, state, progress)
        _require_updates(run, state, progress)
        if every and progress.iteration % every == 0:
            save(run, state, progress)
    save(run, state, progress, wait=True)
    return state, progress


def step(run: Run, state: TrainState, progress: Progress) -> tuple[TrainState, Progress]:
    """One iteration with its validation and its records."""
    started = time.monotonic()
    with _judges_may_fail(run, state, progress):
        result = run_iteration(run.parts, run.learner, state, progress.iteration)
    state = result.state
    seconds = {**result.seconds, "total": time.monotonic() - started}
    row = {**result.row, **_timings(seconds, result.row, run.parts)}
    progress = progress._replace(iteration=progress.iteration + 1, seconds=_add(progress.seconds, seconds))
    validation: dict[str, float] = {}
    try:
        with _judges_may_fail(run, state, progress):
            progress, validation = validate(run, state, progress)
    finally:
        # The row is kept where validation fails: the state saved then is the one after this iteration.
        run.output.iteration({**row, **validation}, run.parts, result)
    run.output.epoch(row["epoch"])
    return state, progress


@contextmanager
def _judges_may_fail(run: Run, state: TrainState | None, progress: Progress | None) -> Iterator[None]:
    """A failing judge ends the run with one line, after the state before it (None: the start) is saved."""
    try:
        yield
    except (StageError, StopRun) as error:
        saved = "Nothing was trained yet"
        if progress is not None:
            save(run, state, progress, wait=True)
            saved = f"Saved after iteration {progress.iteration}"
        gone = error if isinstance(error, StopRun) else error.__cause__
        if isinstance(gone, StopRun):
            again = f"go on with --resume --run_dir {run.parts.config.run_dir} when that is mended"
            again = again if progress is not None else "start again when that is mended"
            raise StopRun(f"{' '.join(str(gone).split())}. {saved}; {again}") from error
        if error.stage == "sample":  # the policy's own stage: there is no judge to mend
            raise
        raise UserError(
            f"{' '.join(str(error).split())}. {saved}; mend the judge and go on with --resume --run_dir "
            f"{run.parts.config.run_dir}, or give such completions no reward: --on_judge_error missing"
        ) from error


def _require_updates(run: Run, state: TrainState, progress: Progress) -> None:
    """Ends a run that left out every update for a few iterations, after saving."""
    skipped = int(state.skipped)
    if skipped < PATIENCE * run.learner.updates_per_iteration:
        return
    save(run, state, progress, wait=True)
    where, last = run.parts.config.run_dir, progress.iteration
    raise UserError(
        f"the loss or its gradient was not finite in {skipped} updates in a row; they were left out. Saved after "
        f"iteration {last}, with the weights before them. If a reward or a prompt is at fault, mend it and go on with "
        f"--resume --run_dir {where}; else give a new run a lower optimizer.learning_rate, and these weights: "
        f"python -m grpo_jax.export --run {where} --checkpoint {last} --out FOLDER, --policy.path FOLDER"
    )


def validate(run: Run, state: TrainState, progress: Progress) -> tuple[Progress, dict[str, float]]:
    """Measures the validation prompts when it is time, and keeps the best policy; gives the measures."""
    section = run.parts.config.evaluation
    due = section.every and (progress.iteration % section.every == 0 or progress.iteration == run.learner.iterations)
    if not due or not run.parts.validation_rows:
        return progress, {}
    started = time.monotonic()
    measures = evaluate_policy(run.parts, state.variables, run.parts.validation_rows).measures
    score = weighted_reward(run.parts, measures)
    progress = progress._replace(seconds=_add(progress.seconds, {"evaluate": time.monotonic() - started}))
    # Without a single reward the score is NaN, which no later score would exceed.
    if math.isfinite(score) and (progress.best_score is None or score > progress.best_score):
        progress = progress._replace(best_score=score, best_iteration=progress.iteration)
        run.checkpoints.save_best(progress.iteration, saved_parts(state), {"progress": progress._asdict()})
    return progress, {f"validation/{name}": value for name, value in measures.items()} | {"validation/score": score}


def save(run: Run, state: TrainState, progress: Progress, *, wait: bool = False) -> None:
    """Writes a checkpoint in the background; at once if `wait`."""
    run.checkpoints.save(progress.iteration, saved_parts(state), {"progress": progress._asdict()}, wait=wait)


def _add(total: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return {name: total.get(name, 0.0) + more.get(name, 0.0) for name in {**total, **more}}


def _timings(seconds: dict[str, float], row: dict[str, float], parts: Parts) -> dict[str, float]:
    prompts = parts.config.training.prompts_per_batch * row.get("draws", 1)
    tokens = row["completion_tokens"] * prompts * parts.config.sampling.group_size
    timings = {f"seconds/{name}": value for name, value in seconds.items()}
    return {**timings, "tokens_per_second": tokens / max(seconds["sample"], 1e-9)}
