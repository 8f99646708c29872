"""A CartPole run from its first line to its summary: all seeds in one compiled block of iterations, called in turn."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax import config as configuration
from grpo_jax.errors import UserError
from grpo_jax.reports import console as reporting
from grpo_jax.reports.console import RunOutput
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.signals import stop_requests
from grpo_jax.runs.timing import add_seconds, remembered, with_total
from grpo_jax.tasks.cartpole.config import CartPoleConfig
from grpo_jax.tasks.cartpole.environment import MAX_STEPS
from grpo_jax.tasks.cartpole.seeds import over_seeds, seed_devices, seed_keys, split_processor
from grpo_jax.tasks.cartpole.training import Training, TrainState, make_train

_MEASURES = ("episode_return", "centred", "distance")
_ORACLE = {"episode_return": float(MAX_STEPS), "centred": None, "distance": 0.0}


class Progress(NamedTuple):
    """What a checkpoint remembers beside the arrays; all of it JSON.

    Attributes:
        iteration: Iterations done.
        before: Each measure of the start, by seed.
        solved_at: Environment steps at the first measurement that counts as solved, by seed; None for not yet.
        seconds: Seconds so far by what they were spent on; "total" of the processes before this one, in a checkpoint of
            all until then.
        fingerprint: Of the config's fields that change what is learned.
    """

    iteration: int
    before: dict[str, list[float]]
    solved_at: list[int | None]
    seconds: dict[str, float]
    fingerprint: str


class Run(NamedTuple):
    """What every step of a run needs.

    Attributes:
        config: The config.
        training: The config's pure functions.
        devices: Those that share the seeds.
        block: The compiled block of iterations, over all seeds.
        checkpoints: Where states are saved.
        output: Console, metric files and the run directory.
        clock: `time.monotonic()` at the start of this process's part of the run.
    """

    config: CartPoleConfig
    training: Training
    devices: list[jax.Device]
    block: Callable[[TrainState], Any]
    checkpoints: Checkpoints
    output: RunOutput
    clock: float


def run_cartpole(config: CartPoleConfig) -> dict[str, Any]:
    """Trains all seeds of a config side by side and leaves a run directory.

    Returns:
        What summary.json holds, and "stopped": whether a signal ended the run early.

    Raises:
        UserError: gymnax is missing, or the run directory cannot be used; checkpoints stay valid.
    """
    clock = time.monotonic()
    split_processor()
    training = make_train(config)
    devices = seed_devices(config.num_seeds)
    with RunOutput(config, folders=()) as output, stop_requests() as stop:
        announce(config, training, devices, output)
        state = over_seeds(training.init, devices)(seed_keys(config.seed, config.num_seeds))
        started = time.monotonic()
        block = over_seeds(training.block, devices).lower(state).compile()
        seconds = {"compile": time.monotonic() - started, "train": 0.0}
        keep = config.training.keep_checkpoints
        with Checkpoints(output.directory.checkpoints, keep=keep) as checkpoints:
            run = Run(config, training, devices, block, checkpoints, output, clock)
            state, progress = begin(run, state, seconds)
            return execute(run, state, progress, stop)


def announce(config: CartPoleConfig, training: Training, devices: list[jax.Device], output: RunOutput) -> None:
    """The opening lines: what is trained, on what, by which algorithm."""
    rollout, algorithm = config.rollout, config.algorithm
    played = f"{rollout.groups} x {rollout.group_size} episodes"
    if algorithm.name == "ppo":
        played = f"{rollout.environments} carts x {rollout.steps} steps"
    counts = ", ".join(f"{name} {count:,} parameters" for name, count in training.parameters.items())
    seeds = "seed" if config.num_seeds == 1 else "seeds"
    where = ", ".join(map(str, devices))
    output.part("task", f"CartPole-v1, {config.num_seeds} {seeds} from {config.seed}, on {where}")
    output.part("networks", f"{counts}; hidden {config.network.hidden}, {config.network.activation}")
    output.part("algorithm", f"{algorithm.name}, {' + '.join(algorithm.objectives)}; {played} per iteration")


def fingerprint(config: CartPoleConfig) -> str:
    """A hash of the config's fields that change what is learned; a resumed run must have the same."""
    values = dataclasses.asdict(config)
    for name in ("run_dir", "resume", "debug", "report_to"):
        values.pop(name)
    for name in ("save_every", "keep_checkpoints"):
        values["training"].pop(name)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def begin(run: Run, state: TrainState, seconds: dict[str, float]) -> tuple[TrainState, Progress]:
    """The state to start from: the last checkpoint's on --resume, else the given one, measured."""
    config, output, mark = run.config, run.output, fingerprint(run.config)
    if config.resume:
        kept = dataclasses.replace(config, resume=False)
        output.directory.write_config(configuration.to_yaml(kept))
    if config.resume and run.checkpoints.latest_step() is not None:
        restored, meta = run.checkpoints.restore("latest", saved_parts(state))
        progress = Progress(**meta["progress"])
        if progress.fingerprint != mark:
            raise UserError(
                f"--resume: the checkpoint in {run.checkpoints.folder} belongs to another configuration; resume with "
                "the run's own config.yaml, or start a new run in another --run_dir"
            )
        output.truncate(progress.iteration)
        output.say(f"resumed after iteration {progress.iteration} of {config.training.iterations}")
        return restored_state(restored), progress._replace(seconds=add_seconds(progress.seconds, seconds))
    output.truncate(0)
    measured = over_seeds(run.training.evaluate, run.devices)(state)
    before = {name: np.asarray(measured[name]).tolist() for name in _MEASURES}
    progress = Progress(0, before, [None] * config.num_seeds, seconds, mark)
    output.say(f"before training: mean return {np.mean(before['episode_return']):.1f} of {MAX_STEPS}")
    save(run, state, progress)
    return state, progress


def saved_parts(state: TrainState) -> dict[str, Any]:
    """A state as `Checkpoints` takes it."""
    return {"variables": state.params, **{name: x for name, x in state._asdict().items() if name != "params"}}


def restored_state(parts: dict[str, Any]) -> TrainState:
    """The inverse of `saved_parts`."""
    return TrainState(params=parts["variables"], **{name: x for name, x in parts.items() if name != "variables"})


def save(run: Run, state: TrainState, progress: Progress, *, wait: bool = False) -> None:
    """Writes a checkpoint in the background; at once if `wait`."""
    run.checkpoints.save(progress.iteration, saved_parts(state), remembered(progress, run.clock), wait=wait)


def execute(run: Run, state: TrainState, progress: Progress, stop: threading.Event) -> dict[str, Any]:
    """Trains to the end, or to the first block after `stop` is set, saves, and finishes unless stopped."""
    section = run.config.training
    run.output.start(section.iterations, progress.iteration)
    while progress.iteration < section.iterations and not stop.is_set():
        state, progress = advance(run, state, progress)
        if section.save_every and progress.iteration % section.save_every == 0:
            save(run, state, progress)
    save(run, state, progress, wait=True)
    if progress.iteration < section.iterations:
        where = run.config.run_dir
        run.output.say(f"stopped and saved after iteration {progress.iteration}: --resume --run_dir {where} goes on")
        return {"stopped": True, "iteration": progress.iteration}
    return {**finish(run, state, progress), "stopped": False}


def advance(run: Run, state: TrainState, progress: Progress) -> tuple[TrainState, Progress]:
    """One block: `evaluation.every` iterations of every seed, their rows, and a measurement."""
    started = time.monotonic()
    before = _total(state)
    state, metrics, measures = jax.block_until_ready(run.block(state))
    seconds = time.monotonic() - started
    pace = (_total(state) - before) / seconds
    returns, steps = np.asarray(measures["episode_return"]), np.asarray(state.steps)
    solved = returns >= run.config.evaluation.solved
    rows = metric_rows(metrics, progress.iteration, {"environment_steps_per_second": pace})
    rows[-1] |= {f"evaluation/{name}": float(np.mean(measures[name])) for name in _MEASURES}
    rows[-1] |= {"evaluation/lowest": float(returns.min()), "evaluation/highest": float(returns.max())}
    rows[-1]["solved"] = int(solved.sum())
    solved_at = [
        int(steps[index]) if first is None and solved[index] else first
        for index, first in enumerate(progress.solved_at)
    ]
    progress = progress._replace(
        iteration=progress.iteration + len(rows),
        solved_at=solved_at,
        seconds=add_seconds(progress.seconds, {"train": seconds}),
    )
    for row in rows:
        run.output.row(row)
    return state, progress


def metric_rows(metrics: dict[str, jax.Array], done: int, common: dict[str, float]) -> list[dict[str, Any]]:
    """One row per iteration from metrics `[seeds, iterations]`: the mean of the seeds that have a number."""
    table = {name: np.asarray(values, np.float64) for name, values in metrics.items()}
    length = next(iter(table.values())).shape[1]
    rows = []
    for index in range(length):
        columns = {name: values[:, index] for name, values in table.items()}
        means = {name: _mean(column) for name, column in columns.items()}
        rows.append({"step": done + index + 1, **means, **common})
    return rows


def _mean(values: np.ndarray) -> float:
    present = values[np.isfinite(values)]
    return float(present.mean()) if present.size else float("nan")


def finish(run: Run, state: TrainState, progress: Progress) -> dict[str, Any]:
    """Measures all seeds on fresh starts, writes `final`, report.html and summary.json."""
    config, output = run.config, run.output
    # One more than the last measurement's: starts that chose nothing.
    fresh = state._replace(iteration=state.iteration + 1)
    measured = over_seeds(run.training.evaluate, run.devices)(fresh)
    after = {name: np.asarray(measured[name]).tolist() for name in _MEASURES}
    run.checkpoints.save_final(progress.iteration, saved_parts(state), remembered(progress, run.clock))
    seconds = with_total(progress.seconds, run.clock)
    summary = summarise(run, state, progress._replace(seconds=seconds), after)
    output.directory.write_summary(summary)
    table = [
        {
            "seed": config.seed + index,
            "return before": progress.before["episode_return"][index],
            "return after": after["episode_return"][index],
            "distance from the centre": after["distance"][index],
            "steps until first solved": "–" if first is None else first,
        }
        for index, first in enumerate(progress.solved_at)
    ]
    reporting.write_run_report(
        output.directory,
        summary=summary,
        table=table,
        table_title="Seeds",
        config_text=configuration.to_yaml(config),
    )
    output.result(summary, closing_lines(summary))
    return summary


def summarise(run: Run, state: TrainState, progress: Progress, after: dict[str, list[float]]) -> dict[str, Any]:
    """evaluation.<measure>.{before, after, oracle}, seeds solved, steps and their pace, times, versions, device."""
    config = run.config
    mean = {name: (float(np.mean(progress.before[name])), float(np.mean(after[name]))) for name in _MEASURES}
    steps = np.asarray(state.steps).astype(np.int64)
    returns = np.asarray(after["episode_return"])
    return {
        "evaluation": {
            name: {"before": first, "after": last, "oracle": _ORACLE[name]} for name, (first, last) in mean.items()
        },
        "measured_on": "greedy episodes",
        "algorithm": config.algorithm.name,
        "episodes": config.evaluation.episodes,
        "seeds": config.num_seeds,
        "solved": int((returns >= config.evaluation.solved).sum()),
        "solved_threshold": config.evaluation.solved,
        "returns": after["episode_return"],
        "solved_at": progress.solved_at,
        "iterations": progress.iteration,
        "environment_steps": int(steps.sum()),
        "environment_steps_by_seed": steps.tolist(),
        "environment_steps_per_second": int(steps.sum()) / progress.seconds["train"],
        "parameters": run.training.parameters,
        "seconds": progress.seconds,
        "seed": config.seed,
        "devices": {"policy": ", ".join(map(str, run.devices))},
        "versions": reporting.versions(),
    }


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """Seeds solved, steps and pace."""
    first = [steps for steps in summary["solved_at"] if steps is not None]
    when = f", first after {int(np.median(first)):,} steps (median)" if first else ""
    return [
        f"solved (mean return >= {summary['solved_threshold']:g} over {summary['episodes']} episodes): "
        f"{summary['solved']} of {summary['seeds']} seeds{when}",
        f"{summary['environment_steps']:,} environment steps in {summary['seconds']['train']:.1f} s: "
        f"{summary['environment_steps_per_second']:,.0f} per second; compiled in {summary['seconds']['compile']:.1f} s",
    ]


def _total(state: TrainState) -> int:
    return int(np.asarray(state.steps).astype(np.int64).sum())
