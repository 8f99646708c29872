"""CartPole as a run: repeated calls of one compiled block of iterations for all seeds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.models.lora import count_weights
from grpo_jax.tasks.cartpole.environment import MAX_STEPS
from grpo_jax.tasks.cartpole.training import EPISODES, HIDDEN, SOLVED, Carry, Metrics, Training, make_train
from grpo_jax.tasks.task import Finished, Info, Notes, Table

if TYPE_CHECKING:
    from grpo_jax.tasks.cartpole.task import CartPoleConfig

_ORACLE = {"episode_return": float(MAX_STEPS), "centred": None, "distance": 0.0}


@dataclass(frozen=True)
class CartPoleBlocks:
    """All seeds of a config in parallel: they are the first axis of `start` and `block`, and `devices` share them.

    Notes hold each measure before training, and the environment steps at which each seed was solved.
    """

    config: CartPoleConfig
    training: Training
    devices: list[jax.Device]
    start: Carry
    block: Callable[[Carry], tuple[Carry, Metrics, Metrics]]
    compile_seconds: float

    @property
    def parameters(self) -> dict[str, int]:
        """Return the number of weights of each network."""
        return {name: count_weights(tree) // self.config.num_seeds for name, tree in self.start.variables.items()}

    def measure_start(self) -> tuple[Notes, dict[str, float], str]:
        """Evaluate the start; return notes, seconds, and a line to print."""
        before = self._measure(self.start)
        notes = {"before": before, "solved_at": [None] * self.config.num_seeds}
        line = f"before training: mean return {np.mean(before['episode_return']):.1f} of {MAX_STEPS}"
        return notes, {"compile": self.compile_seconds, "train": 0.0}, line

    def advance(
        self, state: Carry, iteration: int, notes: Notes
    ) -> tuple[Carry, list[dict[str, float]], dict[str, float], Notes]:
        """Run `evaluation.every` iterations of every seed, and evaluate; return state, metrics rows, seconds, notes."""
        steps_before = np.asarray(state.steps, np.int64).sum()
        started = time.monotonic()
        state, metrics, measures = jax.block_until_ready(self.block(state))
        seconds = time.monotonic() - started
        steps, returns = np.asarray(state.steps, np.int64), np.asarray(measures["episode_return"])
        solved, pace = returns >= SOLVED, float(steps.sum() - steps_before) / seconds
        means = {  # over the seeds with a number
            name: np.ma.masked_invalid(np.asarray(values, np.float64)).mean(axis=0).filled(np.nan).tolist()
            for name, values in metrics.items()
        }
        rows: list[dict[str, float]] = [
            {"step": iteration + number, **dict(zip(means, row, strict=True)), "environment_steps_per_second": pace}
            for number, row in enumerate(zip(*means.values(), strict=True), start=1)
        ]
        rows[-1] |= {f"evaluation/{name}": float(np.mean(values)) for name, values in measures.items()}
        rows[-1] |= {"evaluation/lowest": float(returns.min()), "evaluation/highest": float(returns.max())}
        rows[-1] |= {"solved": int(solved.sum())}
        solved_at = [
            int(count) if first is None and now else first
            for first, now, count in zip(notes["solved_at"], solved, steps, strict=True)
        ]
        return state, rows, {"train": seconds}, {**notes, "solved_at": solved_at}

    def finish(self, state: Carry, iteration: int, seconds: Mapping[str, float], notes: Notes) -> Finished:
        """Evaluate all seeds on fresh starts: evaluation.<measure>.{before, after, oracle}, seeds solved, pace."""
        # One more than the last evaluation's number: these starts have not influenced any choice.
        after = self._measure(state._replace(iteration=state.iteration + 1))
        before, solved_at, config = notes["before"], notes["solved_at"], self.config
        steps = int(np.asarray(state.steps, np.int64).sum())
        summary = {
            "suspect": [],
            "evaluation": {
                name: {"before": float(np.mean(before[name])), "after": float(np.mean(after[name])), "oracle": oracle}
                for name, oracle in _ORACLE.items()
            },
            "measured_on": "greedy episodes",
            "algorithm": config.algorithm.name,
            "seeds": config.num_seeds,
            "solved": sum(value >= SOLVED for value in after["episode_return"]),
            "returns": after["episode_return"],
            "solved_at": solved_at,
            "iterations": iteration,
            "environment_steps": steps,
            "environment_steps_per_second": steps / seconds["train"],
            "parameters": self.parameters,
            "seconds": seconds,
            "devices": {"policy": ", ".join(map(str, self.devices))},
        }
        first = [count for count in solved_at if count is not None]
        when = f", first after {int(np.median(first)):,} steps (median)" if first else ""
        lines = [
            f"solved (mean return >= {SOLVED:g} over {EPISODES} episodes): "
            f"{summary['solved']} of {config.num_seeds} seeds{when}",
            f"{steps:,} environment steps in {seconds['train']:.1f} s: {steps / seconds['train']:,.0f} per second; "
            f"compiled in {seconds['compile']:.1f} s",
        ]
        columns = ("seed", "return before", "return after", "distance from the centre", "steps until first solved")
        until = ["–" if count is None else count for count in solved_at]
        values = before["episode_return"], after["episode_return"], after["distance"], until
        rows = list(zip(range(config.seed, config.seed + config.num_seeds), *values, strict=True))
        return Finished(summary, lines, tables=[Table("Seeds", columns, rows)])

    def _measure(self, state: Carry) -> dict[str, list[float]]:
        measures = over_seeds(self.training.evaluate, self.devices)(state)
        return {name: np.asarray(values).tolist() for name, values in measures.items()}


def make_blocks(config: CartPoleConfig, info: Info) -> CartPoleBlocks:
    """Compile a config's training, and print task, device and algorithm."""
    split_processor()
    training, devices = make_train(config), seed_devices(config.num_seeds)
    start = over_seeds(training.init, devices)(seed_keys(config.seed, config.num_seeds))
    seeds = "seed" if config.num_seeds == 1 else "seeds"
    info("task", f"CartPole-v1, {config.num_seeds} {seeds} from {config.seed}, on {', '.join(map(str, devices))}")
    started = time.monotonic()
    block = over_seeds(training.block, devices).lower(start).compile()
    blocks = CartPoleBlocks(config, training, devices, start, block, time.monotonic() - started)
    counts = ", ".join(f"{name} {count:,} parameters" for name, count in blocks.parameters.items())
    info("networks", f"{counts}; hidden {list(HIDDEN)}, tanh")
    info("algorithm", f"{config.algorithm.name}, {' + '.join(config.algorithm.objectives)}")
    return blocks


def seed_keys(seed: int, number: int) -> jax.Array:
    """Return the keys of seeds seed, seed + 1, …, to vmap over; a seed's result does not depend on the others."""
    return jax.vmap(jax.random.key)(jnp.arange(seed, seed + number))


def split_processor() -> None:
    """Request one CPU device per core; without effect if JAX has started, or XLA_FLAGS sets a number.

    The networks are too small to split one product between threads, so cores share whole seeds.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", cores)


def seed_devices(seeds: int) -> list[jax.Device]:
    """Return the largest number of JAX's devices that divides the seeds evenly."""
    devices = jax.devices()
    return devices[: max(count for count in range(1, len(devices) + 1) if seeds % count == 0)]


def over_seeds(function: Callable, devices: Sequence[jax.Device]) -> Callable:
    """Compile `function` for many seeds, the first axis of all arguments and results.

    Each device runs its seeds independently: a loop ends when the device's last seed is done.
    """
    vectorised = jax.vmap(function)
    if len(devices) == 1:
        return jax.jit(vectorised)
    mesh, seeds = Mesh(devices, ("seed",)), PartitionSpec("seed")
    # Nothing is reduced over devices, so the check of such reductions is not needed.
    shared = jax.shard_map(vectorised, mesh=mesh, in_specs=seeds, out_specs=seeds, check_vma=False)
    return jax.jit(shared, in_shardings=NamedSharding(mesh, seeds), out_shardings=NamedSharding(mesh, seeds))
