"""CartPole: grpo_jax against the same algorithm as a plain PyTorch loop (cartpole_torch.py).

    python benchmarks/cartpole.py [--algorithms grpo ppo] [--seeds 10] [--out benchmarks/cartpole.json]

Environment steps exclude padding and evaluation. Seconds include rollouts, updates and evaluations on both
sides; compilation is timed separately. Parallel seeds share all cores, as in the command; a single seed has one core.
Both sides alternate, seed by seed, with runs of all vmapped seeds between them. Two PyTorch processes on two cores
could reach at most twice the figure of one core. Writes JSON and prints a table; about five minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import cartpole_torch
import grpo_iteration
import jax
import numpy as np
import torch

from grpo_jax.cartpole.program import EVERY, over_seeds, seed_devices, seed_keys, split_processor
from grpo_jax.cartpole.settings import SETTINGS, Settings
from grpo_jax.cartpole.training import SOLVED, make_training

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "gymnasium", "numpy")


def machine() -> dict:
    """Describe this machine."""
    versions = {name: version(name) for name in PACKAGES}
    return grpo_iteration.machine() | {"jax_device": jax.devices()[0].device_kind, "versions": versions}


def outcome(run: dict) -> dict:
    """Add the rate, and the environment steps and seconds at which the evaluation first reached SOLVED."""
    first = next((e for e in run["evaluations"] if e[3] >= SOLVED), None)
    return {
        **run,
        "steps_per_second": run["steps"] / run["seconds"],
        "solved_at_steps": first and first[1],
        "solved_after_seconds": first and first[2],
        "final_return": run["evaluations"][-1][3],
    }


class Jax:
    """The compiled blocks of a number of seeds side by side."""

    def __init__(self, settings: Settings, count: int):
        self.settings, self.count, training = settings, count, make_training(settings)
        keys = seed_keys(0, count)
        began = time.perf_counter()
        devices = seed_devices(count)
        self.init = over_seeds(training.init, devices).lower(keys).compile()
        start = jax.block_until_ready(self.init(keys))
        self.block = over_seeds(partial(training.train, iterations=EVERY), devices).lower(start).compile()
        self.compile_seconds = time.perf_counter() - began

    def run(self, seed: int) -> list[dict]:
        """Train the seeds from `seed` on together; return one result each, with the seconds of all."""
        began = time.perf_counter()
        state = self.init(seed_keys(seed, self.count))
        evaluations = []
        for _ in range(self.settings.iterations // EVERY):
            state, _, measures = self.block(state)
            rows = [np.asarray(one) for one in (state.iteration, state.steps, measures["episode_return"])]
            evaluations.append((rows[0], rows[1], time.perf_counter() - began, rows[2]))
        seconds, steps = time.perf_counter() - began, np.asarray(state.steps)
        return [
            {
                "seed": seed + index,
                "steps": int(steps[index]),
                "seconds": seconds,
                "evaluations": [(int(i[index]), int(s[index]), t, float(r[index])) for i, s, t, r in evaluations],
            }
            for index in range(self.count)
        ]


def torch_run(settings: Settings, seed: int) -> dict:
    """One PyTorch run."""
    return outcome(cartpole_torch.train(settings, seed))


def measure(settings: Settings, seeds: int) -> dict:
    """Measure one algorithm."""
    torch.set_num_threads(1)
    one, many = Jax(settings, 1), Jax(settings, seeds)
    singles, peers, together = [], [], []
    for seed in range(seeds):
        peers.append(torch_run(settings, seed))
        singles.append(outcome(one.run(seed)[0]))
        if seed % 4 == 0:
            together.append([outcome(run) for run in many.run(0)])
    rates = [sum(run["steps"] for run in runs) / runs[0]["seconds"] for runs in together]
    middle = together[int(np.argsort(rates)[len(rates) // 2])]
    return {
        "torch": {"runs": peers},
        "jax_one": {"compile_seconds": one.compile_seconds, "runs": singles},
        "jax_together": {"compile_seconds": many.compile_seconds, "rates": rates, "runs": middle},
        "summary": summary(peers, singles, middle, statistics.median(rates)),
    }


def summary(peers, singles, together, rate: float) -> dict:
    """Medians over seeds, and ratios."""

    def middle(runs, name):
        present = [run[name] for run in runs if run[name] is not None]
        return statistics.median(present) if present else None

    def line(runs):
        return {
            "steps_per_second": middle(runs, "steps_per_second"),
            "seconds": middle(runs, "seconds"),
            "solved": sum(run["solved_at_steps"] is not None for run in runs),
            "solved_at_the_end": sum(run["final_return"] >= SOLVED for run in runs),
            "seeds": len(runs),
            "steps_until_solved": middle(runs, "solved_at_steps"),
            "seconds_until_solved": middle(runs, "solved_after_seconds"),
        }

    peer, one, all_seeds = line(peers), line(singles), line(together) | {"steps_per_second": rate}
    return {
        "torch": peer,
        "jax_one": one,
        "jax_together": all_seeds,
        "one_against_one": one["steps_per_second"] / peer["steps_per_second"],
        "together_against_one": rate / peer["steps_per_second"],
        "together_against_two_processes_at_best": rate / (2 * peer["steps_per_second"]),
    }


def table(results: dict[str, dict]) -> str:
    """The summary as Markdown."""
    lines = [
        "| algorithm | loop | env steps / s | × PyTorch | seconds | solved | steps to solve | seconds to solve |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        figures, peer = result["summary"], result["summary"]["torch"]["steps_per_second"]
        seeds = figures["jax_together"]["seeds"]
        titles = {
            "torch": "PyTorch, one seed",
            "jax_one": "grpo_jax, one seed",
            "jax_together": f"grpo_jax, {seeds} seeds vmapped",
        }
        for key, title in titles.items():
            row = figures[key]
            until = "–" if row["steps_until_solved"] is None else f"{row['steps_until_solved']:,.0f}"
            after = "–" if row["seconds_until_solved"] is None else f"{row['seconds_until_solved']:.2f}"
            lines.append(
                f"| {name} | {title} | {row['steps_per_second']:,.0f} | {row['steps_per_second'] / peer:.1f} "
                f"| {row['seconds']:.2f} | {row['solved']}/{row['seeds']} | {until} | {after} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=("grpo", "ppo"), default=("grpo", "ppo"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "cartpole.json")
    options = parser.parse_args()
    split_processor()
    report = {"benchmark": "cartpole", **machine(), "seeds": options.seeds}
    results = {name: measure(SETTINGS[name], options.seeds) for name in options.algorithms}
    report["results"] = results
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: result["summary"] for name, result in results.items()}, indent=2))
    for name, result in results.items():
        compiling = [result[key]["compile_seconds"] for key in ("jax_one", "jax_together")]
        print(f"{name}: compiled in {compiling[0]:.1f} s (one seed), {compiling[1]:.1f} s (all seeds)")
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
