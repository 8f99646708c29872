"""A tool call by a small real model, with an easy reward that excludes it: GRPO and GDPO, conditioned or not.

    python benchmarks/several_rewards_text.py --model FOLDER [--arms gdpo grpo ...] [--seeds 200 201 202] [--out DIR]
                                              [--section.field VALUE ...]

FOLDER holds SmolLM2-135M-Instruct (docs/recipes/arithmetic.md). The prompt shows two calls of a calculator, then an
answer without one. `brief` is 1 where the completion has at most 6 characters, which a call exceeds; `correct` is -3
without a call, -1 with one, and 2 more for each right number. So the easy reward excludes the hard one. "conditioned"
counts brief only where correct is 3; "shuffled" permutes GDPO's rewards in each group.
Prints both rewards of held-out products, greedy, and of all training batches, with GDPO's difference to each arm there.
"""

import argparse
import json
import random
import re
from pathlib import Path

import miniature
import numpy as np
from seeds import paired_difference

CALL = re.compile(r"calc\((\d{1,2}) ?\* ?(\d{1,2})\)")
ARMS = ("gdpo", "grpo", "gdpo_conditioned", "grpo_conditioned", "shuffled")
EXAMPLES = ("What is 12 * 34?", "calc(12 * 34)", "What is 56 * 78?", "calc(56 * 78)", "What is 15 * 21?", "315")
SETTINGS = """--task text --policy.lora.rank 16 --sampling.max_new_tokens 12 --training.prompts_per_batch 4
--training.max_steps 10 --sampling.temperature 0.7 --optimizer.learning_rate 5e-4 --evaluation.every 0"""


def brief(completions: list[str], **columns: list) -> list[float]:
    """Whether a text has at most 6 characters."""
    return [float(len(text.strip()) <= 6) for text in completions]


def correct(completions: list[str], first: list[str], second: list[str], **columns: list) -> list[float]:
    """From -3, without a call, to 3, with both numbers."""
    calls = zip(map(CALL.search, completions), first, second, strict=True)
    return [-3.0 if call is None else -1.0 + 2 * (call[1] == a) + 2 * (call[2] == b) for call, a, b in calls]


def write_products(path: Path) -> None:
    """256 products to train on, 64 held out."""
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100) if f"What is {a} * {b}?" not in EXAMPLES]
    with path.open("w") as file:
        for place, (a, b) in enumerate(random.Random(0).sample(pairs, 320)):
            turns = zip(("user", "assistant") * 4, (*EXAMPLES, f"What is {a} * {b}?"), strict=False)
            prompt = [{"role": role, "content": content} for role, content in turns]
            row = {"prompt": prompt, "first": str(a), "second": str(b), "split": "test" if place < 64 else "train"}
            file.write(json.dumps(row) + "\n")


def evaluation(arm: str, seed: int, folder: Path, given: list[str]) -> dict:
    """Both rewards of a run, made unless it is there: of held-out products, and the mean of all batches."""
    rewards = [
        {"name": f"{Path(__file__).resolve()}:{function}", "messages": False} for function in ("brief", "correct")
    ]
    rewards[0] |= {"condition_on": "correct", "threshold": 3.0} if arm.endswith("conditioned") else {}
    options = ["--seed", str(seed), "--rewards", json.dumps(rewards), *SETTINGS.split()]
    options += ["--algorithm.advantage", "grpo" if arm.startswith("grpo") else "gdpo", *given]
    run_dir = folder / f"{arm}_{seed}"
    measured = miniature.summary(run_dir, options, miniature.control(arm, seed))["evaluation"]
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    batches = {name: np.array([step[f"reward/{name}/mean"] for step in steps]) for name in ("brief", "correct")}
    learned = np.flatnonzero(batches["correct"] >= 2.5) + 1
    return {
        name: {**measured[name], "batches": means.mean(), "learned": str(learned[0]) if learned.size else "–"}
        for name, means in batches.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[200, 201, 202])
    parser.add_argument("--out", type=Path, default=Path("runs/several_rewards_text"))
    options, extra = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_products(options.out / "products.jsonl")
    given = ["--policy.path", options.model, "--data.prompts", str(options.out / "products.jsonl"), *extra]
    head = "| arm | reward | before | after | batches | batches, GDPO minus this | first batch ≥ 2.5 in iteration |"
    seen, lines = {}, [head, "|---" * 7 + "|"]
    for arm in options.arms:
        found = [evaluation(arm, seed, options.out, given) for seed in options.seeds]
        for name in ("brief", "correct"):
            columns = {when: np.array([each[name][when] for each in found]) for when in ("before", "after", "batches")}
            seen[arm, name] = dict(zip(options.seeds, columns["batches"], strict=True))
            ours = seen.get(("gdpo", name)) if arm != "gdpo" else None
            less = paired_difference(ours, seen[arm, name]) if ours else ""
            cells = " | ".join(f"{values.mean():.3f}" for values in columns.values())
            learned = ", ".join(each[name]["learned"] for each in found) if name == "correct" else ""
            lines.append(f"| {arm} | {name} | {cells} | {less} | {learned} |")
    print("\n".join(lines))
