"""The value of seeing: a policy that sees, its controls, three seeds, the same held-out prompts and noises.

    python benchmarks/evidence/vision.py [--arms seeing blind] [--seeds 0 1 2] [--jobs 1] [--out runs/vision_evidence]
                                         [--section.field VALUE …]

Each run is `prompt_refinement_miniature` with another seed, through the real command. A stopped run continues, and a
finished one does not run again. Then its exported policy is measured prompt by prompt. *seeing* writes a prompt, sees
its picture behind a hidden lens, and writes another; *blind* is the control, trained and measured without the picture.
The seeing policy is also measured blind, with wrong pictures, and with the better of two samples of its first turn,
chosen by the reward or the checker. Prints JSON and Markdown: pixel accuracies, with 95 % intervals from resampling
seeds and prompts.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ARMS = {"seeing": [], "blind": ["--task.shown", "none"]}
MEASURE = "pixel_accuracy"


def load(run_dir: Path) -> Any:
    """Load a finished run, with its exported policy."""
    from grpo_jax.runs.loading import load
    from grpo_jax.runs.policy import run_config

    config = run_config(run_dir)
    policy = config.policy.replace(path=str(run_dir / "policy"))
    return load(config.replace(policy=policy), info=lambda *_: None)


def collected(ctx: Any, sample: Any, environment: Any) -> Any:
    """The held-out prompts' rollout with fixed noise."""
    from grpo_jax.rollout.rollout import collect

    return collect(
        environment,
        sample,
        ctx.policy.variables,
        ctx.test_rows,
        key=ctx.key,
        iteration=None,
        work=ctx.work(32),
    )


def by_prompt(run_dir: Path) -> dict[str, list[float]]:
    """Return the pixel accuracy of each held-out prompt, by measurement."""
    ctx = load(run_dir)
    environment, place = ctx.fns, ctx.fns.eval_reward_names.index(MEASURE)
    found = {}
    turns = ctx.task_data.environment
    answers = {"end": turns.step, **{f"end_{name}": one for name, one in turns.controls.items()}}
    for name, step in answers.items():
        env = environment.env._replace(step=step)
        rollout = collected(ctx, ctx.samplers.greedy, environment._replace(env=env))
        found[name] = rollout.final_eval_rewards[:, 0, place].tolist()
        found["turn_1"] = rollout.eval_rewards[:, 0, 0, place].tolist()
    return found | best_of_two(ctx, environment._replace(env=None), place)


def best_of_two(ctx: Any, environment: Any, place: int) -> dict[str, list[float]]:
    """Two samples of the first turn: as many drawings as two turns take."""
    from grpo_jax.sampling.sampler import SamplingParams, make_sampler

    section, loaded = ctx.config.sampling, ctx.policy.folder
    sample = make_sampler(
        ctx.policy,
        SamplingParams(2, section.max_new_tokens, section.temperature),
        eos_ids=loaded.eos_ids,
        pad_id=loaded.pad_id,
        allowed_tokens=ctx.allowed_tokens,
    )
    rollout = collected(ctx, sample, environment)
    weights = np.array([ctx.rewards.weights[name] for name in environment.reward_names])
    chosen, pixels = (rollout.final_rewards @ weights).argmax(1), rollout.final_eval_rewards[:, :, place]
    return {
        "best_of_two": np.take_along_axis(pixels, chosen[:, None], 1)[:, 0].tolist(),
        "best_of_two_by_the_checker": pixels.max(1).tolist(),
    }


def run(arm: str, seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """A run in a process of its own, measured in another; its figures."""
    run_dir = folder / f"{arm}_{seed}"
    with open(folder / f"{run_dir.name}.log", "a") as log:

        def call(*arguments: str) -> None:
            subprocess.run([sys.executable, *arguments], check=True, stdout=log, stderr=subprocess.STDOUT)

        if not (run_dir / "summary.json").exists():
            options = ["--config", "prompt_refinement_miniature", *ARMS[arm], "--seed", str(seed), *extra]
            if (run_dir / "checkpoints").exists():  # it was stopped
                options = ["--resume"]
            call("-m", "grpo_jax.train", *options, "--run_dir", str(run_dir))
        if not (run_dir / "by_prompt.json").exists():
            call(__file__, "--measure", str(run_dir))
    summary = json.loads((run_dir / "summary.json").read_text())
    pixels = summary["evaluation"][MEASURE]
    return {
        "task": "refinement",
        "arm": arm,
        "seed": seed,
        **{kind: pixels[kind] for kind in ("before", "after", "oracle")},
        "gap_closed": (pixels["after"] - pixels["before"]) / (pixels["oracle"] - pixels["before"]),
        "evaluation": {
            name.removeprefix(f"{MEASURE}_"): {kind: values[kind] for kind in ("before", "after")}
            for name, values in summary["evaluation"].items()
            if name.startswith(f"{MEASURE}_")
        },
        "by_prompt": json.loads((run_dir / "by_prompt.json").read_text()),
        "seconds": summary["seconds"],
        "prompts": summary["prompts"],
        "iterations": summary["iterations"],
        "versions": summary["versions"],
    }


def interval(seeds: list[np.ndarray], *, draws: int = 4000) -> list[float]:
    """Mean over seeds and prompts, and the ends of its 95 % interval: seeds are resampled, then prompts within each."""
    rng = np.random.default_rng(0)
    means = [
        np.mean([values[rng.integers(len(values), size=len(values))].mean() for values in _again(rng, seeds)])
        for _ in range(draws)
    ]
    low, high = np.percentile(means, [2.5, 97.5])
    return [round(float(value), 4) for value in (np.mean([values.mean() for values in seeds]), low, high)]


def _again(rng: np.random.Generator, seeds: list[np.ndarray]) -> list[np.ndarray]:
    return [seeds[i] for i in rng.integers(len(seeds), size=len(seeds))]


def intervals(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return mean and interval of each measurement of each arm, and of the claimed differences."""
    values: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for row in results:
        for name, prompts in row["by_prompt"].items():
            values.setdefault((row["task"], row["arm"], name), []).append(np.array(prompts))
    found = {" ".join(key): interval(seeds) for key, seeds in values.items()}
    others = {
        "turn 2 less turn 1": ("seeing", "turn_1"),
        "seeing less blind": ("blind", "end"),
        "seeing less best of two": ("seeing", "best_of_two"),
        "seeing less best of two by the checker": ("seeing", "best_of_two_by_the_checker"),
        "right less wrong picture": ("seeing", "end_wrong"),
        "right less no picture": ("seeing", "end_blind"),
    }
    end = values.get(("refinement", "seeing", "end"), [])
    for name, key in others.items():
        if end and len(values.get(("refinement", *key), ())) == len(end):
            pairs = zip(end, values[("refinement", *key)], strict=True)
            found[f"refinement: {name}"] = interval([a - b for a, b in pairs])
    return found


def table(results: list[dict[str, Any]], found: dict[str, list[float]]) -> str:
    """The results as Markdown."""
    columns = ("before", "after", "oracle", "gap_closed")
    lines = ["| arm | seed | " + " | ".join(columns) + " | seconds |", "|---|---|" + "---|" * 5]
    for row in results:
        cells = " | ".join(f"{row[name]:.3f}" for name in columns)
        lines.append(f"| {row['arm']} | {row['seed']} | {cells} | {row['seconds']['total']:.0f} |")
    lines += ["", "| measured | mean | 95 % interval |", "|---|---|---|"]
    lines += [f"| {name} | {mean:.3f} | {low:.3f} to {high:.3f} |" for name, (mean, low, high) in found.items()]
    return "\n".join(lines)


def main() -> None:
    """Run everything and print the figures."""
    if sys.argv[1:2] == ["--measure"]:
        run_dir = Path(sys.argv[2])
        (run_dir / "by_prompt.json").write_text(json.dumps(by_prompt(run_dir)) + "\n")
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="Runs at once; seconds are comparable for 1 alone.")
    parser.add_argument("--out", type=Path, default=Path("runs/vision_evidence") / time.strftime("%Y%m%d-%H%M%S"))
    options, extra = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = [(arm, seed) for seed in options.seeds for arm in options.arms]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda job: run(*job, options.out, extra), jobs))
    results.sort(key=lambda row: (list(ARMS).index(row["arm"]), row["seed"]))
    found = intervals(results)
    kept = [{name: value for name, value in row.items() if name != "by_prompt"} for row in results]
    machine = f"{platform.processor() or platform.machine()}, {platform.system()}"
    report = {"machine": machine, "jobs": options.jobs, "arguments": extra, "intervals": found, "runs": kept}
    print(json.dumps(report, indent=2))
    print(f"\n{table(results, found)}")


if __name__ == "__main__":
    main()
