"""GDPO, GRPO and their variants with three useful rewards, each in a unit of its own.

    python benchmarks/three_rewards.py [--arms gdpo gdpo_conditioned grpo grpo_standardised grpo_searched shuffled]
                                       [--seeds 400 401 …] [--out DIR] [--kept FILE] [--collect]
                                       [--section.field VALUE ...]

Each run is the default config with 80 iterations and three rewards: `alignment` in logits of the miniature's CLIP,
`faithfulness` as the shipped reward has it (a similarity below .7, at most 0), and `length`, tokens beyond half of the
encoder's window. They weigh 1, .2 and .1 as in the default config, whose own length reward is 0 for short rewrites.

gdpo                normalises each reward in its group
gdpo_conditioned    faithfulness and length count where alignment reaches 3 logits, halfway from the start to the oracle
grpo                the weighted sum of the rewards in their units
grpo_standardised   the weighted sum of the rewards, each standardised by its running moments
grpo_searched       grpo with a searched weight of alignment
shuffled            gdpo with rewards permuted within each group, on the first three seeds

Each arm has three tries on seed 100, and the highest pixel accuracy decides: learning rates 1e-3, 2e-3 and 4e-3, and
for grpo_searched weights .1, 1 and 10 at 2e-3. "shuffled" takes GDPO's. All else was fixed before the first run.

The figures of a run are a line of DIR/runs.jsonl, or of --kept FILE, and a run that is there is not run again: --kept
benchmarks/three_rewards.jsonl finishes the experiment, and --collect runs nothing. Prints tables for RESULTS.md, of the
seeds that all arms have: 128 held-out requests, greedy, and GDPO minus each arm (95 % interval, Student's t).
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path

import miniature
import numpy as np
from grpo_iteration import machine
from seeds import paired_difference

from grpo_jax.tasks import pictures

GRPO = ["--algorithm.advantage", "grpo"]
ARMS = {
    "gdpo": [],
    "gdpo_conditioned": [],
    "grpo": GRPO,
    "grpo_standardised": [*GRPO, "--algorithm.standardise_rewards", "true"],
    "grpo_searched": GRPO,
    "shuffled": [],
}
SEEDS, SHUFFLED, SEARCH = range(400, 410), range(400, 403), 100
TRIES = [("2e-3", 1.0), ("1e-3", 1.0), ("4e-3", 1.0)]  # learning rate, weight of alignment
SEARCHED = [("2e-3", 1.0), ("2e-3", 0.1), ("2e-3", 10.0)]
SETTINGS = ["--training.max_steps", "80", "--training.save_every", "0", "--evaluation.every", "0"]
SETTINGS += ["--evaluation.samples", "0"]
MEASURES = ("pixel_accuracy", "alignment", "faithfulness", "length")
WHEN = ("before", "after", "oracle")
LOGIT_SCALE = 25.89  # of the miniature's CLIP

Try = tuple[str, float]


def alignment(prompts: list[str], completions: list[str], *, images, scorer) -> np.ndarray:
    """CLIP's logit of picture and request."""
    return LOGIT_SCALE * pictures.alignment(prompts, images=images, scorer=scorer)


def length(prompts: list[str], completions: list[str], *, renderer) -> np.ndarray:
    """Minus the tokens beyond half of the encoder's window."""
    return renderer.window * pictures.Length(renderer.window // 2)(completions, renderer=renderer)


def rewards(arm: str, weight: float) -> list[dict]:
    """The `rewards` of an arm's config."""
    where = {"condition_on": "alignment", "threshold": 3.0} if arm == "gdpo_conditioned" else {}
    return [
        {"name": f"{Path(__file__).resolve()}:alignment", "weight": weight},
        {"name": "faithfulness", "weight": 0.2, "options": {"margin": 0.7}, **where},
        {"name": f"{Path(__file__).resolve()}:length", "weight": 0.1, **where},
    ]


def measure(arm: str, tried: Try, seed: int, options: argparse.Namespace, extra: list[str]) -> dict | None:
    """The figures of a run, made in this process unless they are kept; None with --collect for a run that is not."""
    from grpo_jax.runs.compile_cache import enable_compile_cache

    rate, weight = tried
    name = f"{'grpo' if arm == 'grpo_searched' else arm}_{rate}_{weight:g}_{seed}"
    lines = options.kept.read_text().splitlines() if options.kept.exists() else []
    run = next((run for run in map(json.loads, lines) if run["run"] == name), None)
    if run is None and not options.collect:
        words = ["--seed", str(seed), "--rewards", json.dumps(rewards(arm, weight)), "--optimizer.learning_rate", rate]
        enable_compile_cache()
        started = time.process_time()
        change = miniature.control(arm, seed)
        found = miniature.summary(options.out / name, [*words, *SETTINGS, *ARMS[arm], *extra], change)
        figures = {measure: {when: found["evaluation"][measure][when] for when in WHEN} for measure in MEASURES}
        run = {"run": name, **figures, "cpu_seconds": round(time.process_time() - started, 1), "machine": machine()}
        with options.kept.open("a") as file:
            file.write(json.dumps(run) + "\n")
    return run and {"arm": arm, "seed": seed, "learning_rate": rate, "weight": weight, **run}


def best_of(tries: list[dict]) -> Try:
    """The setting with the highest pixel accuracy."""
    best = max(tries, key=lambda run: run["pixel_accuracy"]["after"])
    return best["learning_rate"], best["weight"]


def table(runs: list[dict], arms: list[str]) -> str:
    """Markdown over the seeds that all arms have (the control: its own): a table of means, and GDPO minus each arm."""
    found = {(run["arm"], run["seed"]): run for run in runs}
    seeds = [seed for seed in SEEDS if all((arm, seed) in found for arm in arms if arm != "shuffled")]

    def after(arm: str, measure: str) -> dict[int, float]:
        return {seed: found[arm, seed][measure]["after"] for seed in seeds if (arm, seed) in found}

    def row(*cells: object) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    means = [row("arm", "seeds", *MEASURES, "lowest pixel_accuracy"), "|---" * (3 + len(MEASURES)) + "|"]
    gaps = [row("GDPO minus", "seeds", *MEASURES), "|---" * (2 + len(MEASURES)) + "|"]
    for arm in arms:
        values = {measure: after(arm, measure) for measure in MEASURES}
        count = len(values["length"])
        if count:
            cells = [*(np.mean([*those.values()]) for those in values.values()), min(values["pixel_accuracy"].values())]
            means.append(row(f"`{arm}`", count, *(f"{cell:.3f}" for cell in cells)))
        if count and arm != "gdpo" and "gdpo" in arms:
            less = (paired_difference(after("gdpo", measure), those) for measure, those in values.items())
            gaps.append(row(f"`{arm}`", count, *less))
    return "\n".join([*means, "", *gaps])


def main() -> None:
    """Run what is missing and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="None: the tries alone.")
    parser.add_argument("--out", type=Path, default=Path("runs/three_rewards"))
    parser.add_argument("--kept", type=Path, help="Figures, one line a run (default: runs.jsonl in --out).")
    parser.add_argument("--collect", action="store_true", help="Run nothing: print the figures that are kept.")
    options, extra = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.kept = options.kept or options.out / "runs.jsonl"
    run = partial(measure, options=options, extra=extra)
    tuned = {arm: "gdpo" if arm == "shuffled" else arm for arm in options.arms}  # the control has GDPO's setting
    tries: dict[str, list[dict]] = {arm: [] for arm in tuned.values()}
    for place in range(len(TRIES)):
        for arm, those in tries.items():
            found = run(arm, (SEARCHED if arm == "grpo_searched" else TRIES)[place], SEARCH)
            those += [found] if found else []
    jobs = [
        (arm, best_of(tries[tuned[arm]]), seed)
        for seed in options.seeds
        for arm in options.arms
        if len(tries[tuned[arm]]) == len(TRIES) and (arm != "shuffled" or seed in SHUFFLED)
    ]
    runs = [found for job in jobs if (found := run(*job))]
    for arm, those in tries.items():
        for each in those:
            held = ", ".join(f"{measure} {each[measure]['after']:.3f}" for measure in MEASURES)
            print(f"{arm}, seed {SEARCH}, learning rate {each['learning_rate']}, weight {each['weight']:g}: {held}")
    print(f"\n{table(runs, options.arms)}")


if __name__ == "__main__":
    main()
