"""Learning of the default run: GDPO, GRPO on summed rewards, RAFT, PPO and shuffled rewards, from the same start.

    python benchmarks/miniature.py [--seeds 0 1 2 | --fresh 20] [--variants gdpo grpo max_at_k raft ppo shuffled scenes]
                                   [--jobs 1] [--out DIR]

Each run is the default config with another seed; finished ones in --out are not repeated. Prints JSON, and a table for
RESULTS.md: pixel accuracy on the same held-out prompts, before, after, with the oracle's rewrite, and the closed share
of the gap. "shuffled" permutes the training rewards within each group, so that its gain is not learned from rewards.
"scenes" is the harder world, with figures also by kind of request. With --evaluation.samples above 1, "samples" in the
JSON has best@k and pass@k.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from seeds import mean_interval, paired_difference

VARIANTS = {
    "gdpo": ["--algorithm.advantage", "gdpo"],
    "grpo": ["--algorithm.advantage", "grpo"],
    "max_at_k": ["--algorithm.advantage", "max_at_k"],  # the best of 4 completions
    "raft": ["--algorithm.advantage", "raft"],  # the best of each group alone
    # with the pictures, rate and KL of the default run
    "ppo": [
        *("--config", "prompt_enhancement_ppo", "--judges.renderer.steps", "1"),
        *("--optimizer.learning_rate", "2e-3", "--ppo.kl_coef", "0.06"),
    ],
    "shuffled": ["--algorithm.advantage", "gdpo"],
    "scenes": ["--config", "prompt_enhancement_scenes"],
    "scenes_shuffled": ["--config", "prompt_enhancement_scenes"],
}


def fresh_seeds(count: int) -> list[int]:
    """Return the first of twenty fixed seeds, small and large in turn: nothing was chosen on them."""
    rng = np.random.default_rng(51)
    small, large = rng.choice(np.arange(200, 1000), 10, replace=False), rng.integers(2**20, 2**31, 10)
    return np.stack([np.sort(small), np.sort(large)], axis=1).ravel()[:count].tolist()


def shuffled(score, seed: int):
    """A score whose rewards are permuted within each group; groups of one, as in evaluation, stay."""
    rng = np.random.default_rng(seed)

    def permuted(rows, episodes, pictures, **told):
        rewards, watched = score(rows, episodes, pictures, **told)
        order = rng.permuted(np.tile(np.arange(rewards.shape[1]), (rewards.shape[0], 1)), axis=1)
        return np.take_along_axis(rewards, order[..., None], axis=1), watched

    return permuted


def control(arm: str, seed: int):
    """The `change` of `one` for an arm with shuffled rewards; None for any other."""
    return partial(shuffled, seed=seed) if arm.endswith("shuffled") else None


def one(options: list[str], change=None, adapt=None, clock: list[float] | None = None) -> None:
    """Run once in this process; `change` replaces the score, `adapt` the context.

    `clock` gets the CPU seconds of this process when training on rewards begins, and after each iteration.
    """
    from grpo_jax.config.command_line import parse
    from grpo_jax.reports.output import RunOutput
    from grpo_jax.runs.checkpoint import Checkpoints
    from grpo_jax.runs.loading import load
    from grpo_jax.runs.session import Callbacks
    from grpo_jax.runs.stopping import stop_requests
    from grpo_jax.runs.trainer import Trainer

    config = parse(options)
    algorithm, size = config.algorithm, config.sampling.group_size
    if algorithm.advantage == "raft":  # its loss is 1 / G of one on the best alone, and so are the other terms
        coefficients = {"kl_coef": algorithm.kl_coef / size, "entropy_coef": algorithm.entropy_coef / size}
        config = config.replace(algorithm=algorithm.replace(**coefficients))
    started, ticks = time.monotonic(), [] if clock is None else clock
    callbacks = Callbacks(on_iteration=lambda event: ticks.append(time.process_time()))
    with RunOutput(config) as output, stop_requests() as stop:
        ctx = load(config, info=output.info, stopping=stop.is_set)
        if change is not None:
            ctx = ctx._replace(fns=ctx.fns._replace(score=change(ctx.fns.score)))
        if adapt is not None:
            ctx = adapt(ctx)
        with Checkpoints(output.directory.checkpoints, keep=1) as checkpoints:
            trainer = Trainer(ctx, output, checkpoints, stop, callbacks, started)
            trainer.begin()
            ticks.append(time.process_time())
            trainer.train()
            trainer.finish()


def summary(run_dir: Path, options: list[str], change=None, clock: list[float] | None = None) -> dict:
    """The summary of a run in this process, made unless it is there."""
    if not (run_dir / "summary.json").exists():
        one([*options, "--run_dir", str(run_dir)], change, clock=clock)
    return json.loads((run_dir / "summary.json").read_text())


def measure(variant: str, seed: int, folder: Path, extra: list[str]) -> dict:
    """A run in a process of its own, and its figures."""
    run_dir = folder / f"{variant}_{seed}"
    command = [sys.executable, __file__, "--one", variant, str(seed), str(run_dir), *extra]
    with open(folder / f"{variant}_{seed}.log", "a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    summary = json.loads((run_dir / "summary.json").read_text())
    pixels, alignment = (summary["evaluation"][name] for name in ("pixel_accuracy", "alignment"))
    return {
        "variant": variant,
        "seed": seed,
        **{kind: pixels[kind] for kind in ("unchanged", "before", "after", "oracle")},
        "before_sampled": pixels["before_sampled"],
        "after_sampled": pixels["after_sampled"],
        "gap_closed": (pixels["after"] - pixels["before"]) / (pixels["oracle"] - pixels["before"]),
        "kinds": {
            name.partition("/")[2]: {when: values[when] for when in ("before", "after", "oracle")}
            for name, values in summary["evaluation"].items()
            if name.startswith("pixel_accuracy/")
        },
        "samples": summary.get("samples", {}).get("measures", {}).get("pixel_accuracy", {}),
        "alignment_before": alignment["before"],
        "alignment_after": alignment["after"],
        "alignment_oracle": alignment["oracle"],
        "seconds": summary["seconds"]["total"],
        "prompts": summary["prompts"],
        "iterations": summary["iterations"],
        "versions": summary["versions"],
    }


def table(results: list[dict]) -> str:
    """The results as Markdown."""
    columns = ("unchanged", "before", "after", "oracle", "gap_closed", "alignment_after", "seconds")
    lines = ["| run | seed | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for variant in dict.fromkeys(row["variant"] for row in results):
        rows = [row for row in results if row["variant"] == variant]
        for row in rows:
            lines.append(f"| {variant} | {row['seed']} | " + " | ".join(f"{row[name]:.3f}" for name in columns) + " |")
        means = " | ".join(f"{np.mean([row[name] for row in rows]):.3f}" for name in columns)
        lines.append(f"| **{variant}** | mean | {means} |")
    return "\n".join(lines)


def interval_table(results: list[dict]) -> str:
    """Pixel accuracy after training and GDPO's paired differences, with 95 % intervals, as Markdown."""
    after: dict[str, dict[int, float]] = {}
    for row in results:
        after.setdefault(row["variant"], {})[row["seed"]] = row["after"]
    lines = ["| run | seeds | mean | least | most | GDPO minus this |", "|---|---|---|---|---|---|"]
    for variant, values in after.items():
        others = after.get("gdpo", {})
        less = paired_difference(others, values) if variant != "gdpo" and others.keys() & values.keys() else ""
        mean, low, high = mean_interval([*values.values()]), min(values.values()), max(values.values())
        lines.append(f"| {variant} | {len(values)} | {mean} | {low:.3f} | {high:.3f} | {less} |")
    return "\n".join(lines)


def kinds_table(results: list[dict]) -> str:
    """Before, after and oracle by kind of request, means over the seeds of a variant, as Markdown."""
    lines = ["| run | kind | before | after | lowest after | oracle |", "|---|---|---|---|---|---|"]
    for variant in dict.fromkeys(row["variant"] for row in results if row["kinds"]):
        rows = [row["kinds"] for row in results if row["variant"] == variant]
        for kind in rows[0]:
            values = {when: [row[kind][when] for row in rows] for when in ("before", "after", "oracle")}
            before, after, oracle = map(np.mean, values.values())
            figures = " | ".join(f"{value:.3f}" for value in (before, after, min(values["after"]), oracle))
            lines.append(f"| {variant} | {kind} | {figures} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def main() -> None:
    """Run everything and print the figures."""
    if sys.argv[1:2] == ["--one"]:
        variant, seed, run_dir, *extra = sys.argv[2:]
        summary(Path(run_dir), ["--seed", seed, *VARIANTS[variant], *extra], control(variant, int(seed)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fresh", type=int, default=0, help="So many of twenty fixed seeds, in place of --seeds.")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1, help="Runs at once; seconds are comparable for 1 alone.")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark") / time.strftime("%Y%m%d-%H%M%S"))
    parser.add_argument("--kept", type=Path, help="Print the intervals of this file's runs, and run nothing.")
    options, extra = parser.parse_known_args()
    if options.kept:
        print(interval_table(json.loads(options.kept.read_text())["runs"]))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = fresh_seeds(options.fresh) or options.seeds
    jobs = [(variant, seed) for variant in options.variants for seed in seeds]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda job: measure(*job, options.out, extra), jobs))
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "jobs": options.jobs,
        "arguments": extra,
        "runs": results,
    }
    print(json.dumps(report, indent=2))
    print(f"\n{table(results)}\n\n{interval_table(results)}\n\n{kinds_table(results)}")


if __name__ == "__main__":
    main()
