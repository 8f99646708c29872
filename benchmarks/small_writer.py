"""SmolLM2-135M writes the prompts of the miniature's renderer: supervision on a few pairs, then rewards.

    python benchmarks/small_writer.py --model FOLDER [--arms gdpo sft shuffled trl] [--seeds 300 301 302 303 304]
                                      [--pairs 32] [--out DIR] [--section.field VALUE ...]

FOLDER holds SmolLM2-135M-Instruct (docs/recipes/arithmetic.md) or another chat model; LoRA trains it. Requests,
renderer, CLIP and rewards are those of the default run. The prompt holds the request alone. Each seed draws its own
pairs of a request and the oracle's rewrite. Settings were chosen on seed 100, in two runs, those of "examples" in one.
A run that is there in DIR is not run again.

| arm | after the policy is loaded |
|---|---|
| gdpo | a few supervised updates on the pairs, then training on rewards |
| shuffled | the same, with the rewards permuted within each group |
| sft | supervision alone on the same pairs, 140 updates: about the CPU seconds of a whole run of gdpo |
| trl | our supervised updates, then training by TRL's GRPOTrainer in a process of its own (`writer_trl.py`) |
| examples | training on rewards alone, 200 iterations, of answers after six examples in the prompt, at temperature .5 |

Prints JSON and a table for RESULTS.md: pixel accuracy of held-out requests by greedy rewrites, and gdpo minus each arm
on the same seeds with its 95 % interval (Student's t). "batches" and "cpu" are the pixel accuracy of each iteration's
batch and the CPU seconds from the beginning of training on rewards to the iteration's end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import miniature
import numpy as np
import reward_work
from grpo_iteration import machine
from seeds import paired_difference
from time_to_reward import called

from bridges.miniature import world

SEEDS = (300, 301, 302, 303, 304)
"""Fixed before the first run."""
SETTINGS = """--config prompt_enhancement_miniature --policy.lora.rank 16 --policy.lora.alpha 32
--data.max_prompt_tokens 64 --sampling.max_new_tokens 12 --sampling.group_size 8
--training.prompts_per_batch 4 --training.inner_epochs 1 --training.max_steps 45 --training.save_every 0
--optimizer.learning_rate 2e-4 --optimizer.schedule cosine --optimizer.warmup_steps 10
--algorithm.kl_coef 0.03 --algorithm.entropy_coef 0.01 --sft.batch 8
--evaluation.every 0 --evaluation.validation_prompts 0 --evaluation.samples 0
--eval_rewards grpo_jax.tasks.pictures:pixel_accuracy"""
SUPERVISED = "--sft.steps 40"
ARMS = {
    **dict.fromkeys(("gdpo", "shuffled", "trl"), SUPERVISED),
    "sft": "--sft.steps 140 --training.max_steps 1",
    "examples": "--sft.steps 0 --data.max_prompt_tokens 256 --sampling.temperature 0.5 --training.max_steps 200",
}
"""An arm's settings. A run has at least one iteration; "sft" is measured before it."""
CONDITIONED = """[{name: alignment}, {name: length, weight: 0.1},
{name: faithfulness, weight: 0.2, options: {margin: 0.7}, condition_on: alignment, threshold: 0.25}]"""
"""Rewards of "examples": a copy of the request is faithful, but earns nothing."""
ROWS = {"train": 2048, "test": 128}


def examples(seed: int) -> list[dict[str, str]]:
    """Return six training requests and the oracle's rewrites as chat messages; each one adds the most words."""
    rows = world.prompts("world", "train", ROWS["train"])
    order, seen, messages = np.random.default_rng(seed).permutation(len(rows)), set(), []
    for _ in range(6):
        row = rows[max(order, key=lambda place: len({*rows[place]["oracle"].split()} - seen))]
        seen |= {*row["oracle"].split()}
        messages += [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["oracle"]}]
    return messages


def write_requests(
    path: Path, seed: int, pairs: int, counts: dict[str, int], before: Sequence[dict[str, str]] = ()
) -> None:
    """Write the miniature's requests after the messages `before`; `pairs` of the training ones have a completion."""
    rows = {split: world.prompts("world", split, count) for split, count in counts.items()}
    labelled = set(np.random.default_rng(seed).choice(counts["train"], pairs, replace=False).tolist())
    with path.open("w") as file:
        for split, some in rows.items():
            for place, row in enumerate(some):
                completion = {"completion": row["oracle"]} if split == "train" and place in labelled else {}
                asked = [*before, {"role": "user", "content": row["prompt"]}] if before else row["prompt"]
                file.write(json.dumps({**row, "prompt": asked, **completion, "split": split}) + "\n")


def measure(arm: str, seed: int, pairs: int, options: argparse.Namespace, extra: list[str]) -> dict:
    """Run in this process, unless the run is there; return its figures."""
    from grpo_jax.runs.compile_cache import enable_compile_cache

    name = f"{arm}_{pairs}_{seed}"
    path, run_dir, requests = (options.out / f"{name}{ending}" for ending in (".json", "", ".jsonl"))
    if path.exists():
        return json.loads(path.read_text())
    shown = examples(seed) if arm == "examples" else []
    write_requests(requests, seed, 0 if shown else pairs, ROWS, shown)
    given = [*SETTINGS.split(), *ARMS[arm].split(), *([] if pairs else ["--sft.steps", "0"])]
    given += ["--policy.path", options.model, "--data.prompts", str(requests), "--seed", str(seed), *extra]
    given += ["--rewards", CONDITIONED] if shown else []
    enable_compile_cache()
    run = by_trl if arm == "trl" else by_ours
    result = {"arm": arm, "seed": seed, "pairs": pairs, **run(arm, seed, run_dir, given)}
    path.write_text(json.dumps(result, indent=1))
    return result


def by_ours(arm: str, seed: int, run_dir: Path, given: list[str]) -> dict:
    """Run in this process."""
    started, clock = time.process_time(), []
    found = miniature.summary(run_dir, given, miniature.control(arm, seed), clock)
    measures = found["evaluation"]["pixel_accuracy"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "untrained": measures.get("untrained", measures["before"]),
        "before": measures["before"],
        "after": measures["before" if arm == "sft" else "after"],
        "oracle": measures["oracle"],
        "iterations": 0 if arm == "sft" else found["iterations"],
        "cpu_seconds": round(time.process_time() - started, 1),
        "versions": found["versions"],
        "batches": [round(row["eval_rewards/pixel_accuracy/mean"], 3) for row in rows],
        "cpu": [round(seconds - clock[0], 1) for seconds in clock[1:]],
    }


def by_trl(arm: str, seed: int, run_dir: Path, given: list[str]) -> dict:
    """Supervise in this process, and train on rewards by TRL in one of its own, on the same core."""
    from grpo_jax.config.command_line import parse
    from grpo_jax.config.fields import to_yaml
    from grpo_jax.runs.loading import load
    from grpo_jax.runs.sft import run_sft

    started, config = time.process_time(), parse([*given, "--run_dir", str(run_dir)])
    model, folder, steps = Path(config.policy.path), run_dir.resolve(), config.training.max_steps
    ctx = load(config, info=print)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
    ctx.policy.save_adapters(folder / "adapter", run_sft(ctx, print))
    (folder / "config.yaml").write_text(to_yaml(config))
    supervised, files = time.process_time() - started, (folder / "rows.jsonl", folder / "trl.json")
    assignment = reward_work.Assignment(model.resolve(), files[0], seed, steps, str(folder / "adapter"), 0.0, files[1])
    report = called("writer_trl.py", assignment, [], min(os.sched_getaffinity(0)))  # it reads the config's requests
    return {
        **{when: report[when] for when in ("before", "after")},
        "iterations": steps,
        "cpu_seconds": round(supervised + report["process"]["cpu"], 1),
        "versions": report["versions"],
        "batches": [round(row["pixel_accuracy"], 3) for row in report["steps"]],
        "cpu": [round(row["cpu"] - report["began"], 1) for row in report["steps"]],
    }


def table(results: list[dict]) -> str:
    """Return the results as Markdown: each seed's accuracy, means, and the difference of gdpo to each arm."""
    found = {(row["arm"], row["pairs"], row["seed"]): row for row in results}
    seeds = sorted({row["seed"] for row in results})
    head = ("arm", "pairs", *map(str, seeds), "mean", "gdpo minus arm", "after the first supervision", "CPU seconds")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm, pairs in dict.fromkeys((row["arm"], row["pairs"]) for row in results):
        rows = [found[arm, pairs, seed] for seed in seeds if (arm, pairs, seed) in found]
        after = {row["seed"]: row["after"] for row in rows}
        ours = {seed: found["gdpo", pairs, seed]["after"] for seed in after if ("gdpo", pairs, seed) in found}
        gap = paired_difference(ours, after) if ours and arm != "gdpo" else ""
        cells = [f"{after[seed]:.3f}" if seed in after else "" for seed in seeds]
        start = "" if arm == "sft" else f"{np.mean([row['before'] for row in rows]):.3f}"
        seconds = np.mean([row["cpu_seconds"] for row in rows])
        mean = f"{np.mean([*after.values()]):.3f}"
        lines.append(f"| {arm} | {pairs} | {' | '.join(cells)} | {mean} | {gap} | {start} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--pairs", type=int, nargs="+", default=[32])
    parser.add_argument("--out", type=Path, default=Path("runs/small_writer"))
    options, extra = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = [(arm, seed, pairs) for pairs in options.pairs for arm in options.arms for seed in options.seeds]
    results = [measure(*job, options, extra) for job in jobs]
    print(json.dumps({"machine": machine(), "arguments": extra, "runs": results}, indent=1))
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
