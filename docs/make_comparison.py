"""Make docs/comparison.md: PPO, GRPO and GDPO on CartPole, with measurements and pictures.

    python docs/make_comparison.py                              # trains on CartPole and rewrites the page
    python docs/make_comparison.py --draw_only                  # page and pictures again, from docs/comparison.json

All figures are kept in docs/comparison.json; a part that is not measured anew stays as it is there. Needs matplotlib
(pip install -e ".[figures]"). CartPole takes a few minutes on two cores, ten seeds side by side.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from comparison_figures import draw_learning, draw_objectives, draw_signal
from comparison_page import write_page

from grpo_jax.cartpole import environment as task
from grpo_jax.cartpole.program import over_seeds, seed_devices, seed_keys, split_processor
from grpo_jax.cartpole.settings import OBJECTIVES, SETTINGS, Settings
from grpo_jax.cartpole.training import HIDDEN, episode_rewards, make_training
from grpo_jax.core.advantages import (
    gdpo_advantages,
    group_advantages,
    groups_without_signal,
    sum_rewards,
)
from grpo_jax.models.layers import make_mlp
from grpo_jax.models.lora import count_weights

HERE = Path(__file__).parent
# One group of each seed of this run is played at every measurement, to look at what its rewards turn into.
WATCHED, GROUP, SIGNAL_STREAM = "GRPO on the sum", 16, 2**31 - 9
RUNS: dict[str, Settings] = {
    "PPO": SETTINGS["ppo"],
    "GRPO": SETTINGS["grpo"],
    "GRPO on the sum": replace(SETTINGS["gdpo"], algorithm="grpo"),
    "GDPO": SETTINGS["gdpo"],
    "GDPO, weighted": replace(SETTINGS["gdpo"], weights=(2.0, 1.0)),
    "GDPO, conditioned": replace(SETTINGS["gdpo"], condition=400),
}


class Measured(NamedTuple):
    """One algorithm's seeds: curves by seed, and single figures."""

    curves: dict[str, list[list[float]]]
    figures: dict[str, Any]


def make_signal(settings: Settings):
    """signal(params, key) → what a group of the policy's episodes teaches: rewards joined by sum and by GDPO.

    Every episode is one member of its group, with the sum of its rewards, as a completion is in language.
    "share/…" are correlations of the joined advantage with each objective's own. "passed" turns the same episodes
    into two yes-or-no rewards: at least 475 steps, and 0.6 of "centred" for each step (a mean distance of 0.2).
    """
    policy = make_mlp(task.FEATURES, hidden=HIDDEN)
    both = replace(settings, objectives=OBJECTIVES, weights=(), condition=0)

    def signal(params: Any, key: jax.Array) -> dict[str, jax.Array]:
        start, act = jax.random.split(key)
        starts = jax.tree.map(lambda x: jnp.repeat(x, GROUP, axis=0), task.reset(start, 1))
        episodes = task.play_episodes(lambda x: policy.apply(params, x), starts, act)
        rewards = episode_rewards(both, episodes.positions.T[None], episodes.mask.T[None]).sum(axis=2)
        upright, centred = rewards[..., 0], rewards[..., 1]
        passed = jnp.stack([upright >= 475, centred >= 0.6 * upright], axis=-1).astype(jnp.float32)
        figures = {}
        for kind, given in (("", rewards), ("_passed", passed)):
            for name, dead in zip(OBJECTIVES, groups_without_signal(given)[0], strict=True):
                figures[f"dead{kind}/{name}"] = dead
            figures[f"dead{kind}/sum"] = groups_without_signal(sum_rewards(given))[0]
        for how, advantages in joined(rewards).items():
            for name, own in zip(OBJECTIVES, (upright, centred), strict=True):
                figures[f"share/{how}/{name}"] = correlation(advantages[0], group_advantages(own)[0])
        return figures

    return signal


def joined(rewards: jax.Array) -> dict[str, jax.Array]:
    """Advantages of several objectives, by sum and by GDPO."""
    return {"sum": group_advantages(sum_rewards(rewards)), "gdpo": gdpo_advantages(rewards, whiten=None)}


def correlation(x: jax.Array, y: jax.Array) -> jax.Array:
    """Pearson's; NaN where one of the two does not vary."""
    x, y = x - x.mean(), y - y.mean()
    return jnp.sum(x * y) / jnp.sqrt(jnp.sum(x * x) * jnp.sum(y * y))


def train(name: str, seeds: int, iterations: int | None) -> Measured:
    """Trains all seeds of one algorithm, block by block, and looks at them after every block."""
    settings = replace(RUNS[name], **({"iterations": iterations} if iterations else {}))
    every = 1 if settings.algorithm == "ppo" else 2  # a PPO iteration has more steps than GRPO's first ones
    training, keys = make_training(settings), seed_keys(0, seeds)
    began, devices = time.perf_counter(), seed_devices(seeds)
    state = over_seeds(training.init, devices)(keys)
    block = over_seeds(partial(training.train, iterations=every), devices).lower(state).compile()
    evaluate = over_seeds(training.evaluate, devices).lower(state).compile()
    compiling, seconds, at, rows, seen = time.perf_counter() - began, 0.0, [0.0], [evaluate(state)], []
    signal = over_seeds(make_signal(settings), devices) if name == WATCHED else None
    for index in range(settings.iterations // every):
        began = time.perf_counter()
        state, _, measures = jax.block_until_ready(block(state))
        seconds += time.perf_counter() - began
        at.append(seconds)
        rows.append(measures)
        if signal:
            looks = jax.vmap(lambda key, i=index: jax.random.fold_in(jax.random.fold_in(key, SIGNAL_STREAM), i))(keys)
            seen.append(signal(state.variables["policy"], looks))
    curves = {key: stacked(rows, key) for key in ("environment_steps", "episode_return", "centred", "distance")}
    curves |= {key: stacked(seen, key) for key in (seen[0] if seen else ())}
    sizes = jax.eval_shape(training.init, jax.random.key(0))
    schedule = "linear" if settings.algorithm == "ppo" else "constant"
    figures = {
        "objectives": list(settings.objectives),
        "width": task.WIDTH,
        "condition": settings.condition,
        "seconds": seconds,
        "seconds_at": at,
        "compile_seconds": compiling,
        "parameters": {name: count_weights(tree) for name, tree in sizes.variables.items()},
        "optimizer_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(sizes.optimizer)),
        "iterations": settings.iterations,
        "learning_rate": f"{settings.learning_rate:g}, {schedule}",
        "every": every,
    }
    return Measured(curves, figures)


def stacked(rows: list[dict[str, jax.Array]], key: str) -> list[list[float | None]]:
    """A measure by seed and measurement; None where it is undefined, which JSON can hold."""
    values = np.stack([np.asarray(row[key], float) for row in rows], axis=1)
    return [[round(x, 3) if math.isfinite(x) else None for x in seed] for seed in values]


def machine() -> dict[str, Any]:
    """Return the place and date of CartPole's measurement."""
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {platform.system()}, {jax.devices()[0].device_kind}",
        "versions": {name: version(name) for name in names},
    }


def main() -> None:
    """Measures what is asked for, keeps it, draws everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw_only", action="store_true", help="Train nothing.")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="Train these anew.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--iterations", type=int, help="Instead of the settings', for a quick look.")
    parser.add_argument("--out", type=Path, default=HERE, help="Folder of comparison.json, comparison.md and images/.")
    options = parser.parse_args()
    split_processor()
    kept = options.out / "comparison.json"
    results = json.loads(kept.read_text()) if kept.exists() else {"cartpole": {}}
    load = os.getloadavg()[0]  # of others: this script has done nothing yet
    for name in [] if options.draw_only else options.only:
        measured = train(name, options.seeds, options.iterations)
        results["cartpole"][name] = {**measured.figures, "curves": measured.curves, "load": load} | machine()
        print(f"{name}: {measured.figures['seconds']:.1f} s", flush=True)
    if not options.draw_only:
        kept.write_text(json.dumps(results, separators=(",", ":")).replace("],[", "],\n[") + "\n")
    images = options.out / "images"
    images.mkdir(exist_ok=True)
    draw_learning(results["cartpole"], images / "comparison_learning.png")
    draw_objectives(results["cartpole"], images / "comparison_objectives.png")
    draw_signal(results["cartpole"], images / "comparison_signal.png")
    write_page(options.out / "comparison.md", results, group=GROUP)


if __name__ == "__main__":
    main()
