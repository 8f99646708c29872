"""A tool call by a small real model, form and correctness apart: GRPO and GDPO, conditioned or not.

    python benchmarks/several_rewards_text.py --model FOLDER [--arms gdpo grpo ...] [--seeds 200 201 202] [--out DIR]
                                              [--section.field VALUE ...]

FOLDER holds SmolLM2-135M-Instruct (docs/recipes/arithmetic.md). An example in the prompt shows a calculator's call.
`form` is 1 where the text is a call and nothing else; `correct` is -3 without a call, -1 with one, and 2 more for each
right number. "conditioned" counts form only where correct is 3; "shuffled" permutes GDPO's rewards in each group.
Prints both rewards of held-out products, greedy, and their difference to GDPO's on the same seeds.
"""

import argparse
import json
import random
import re
from functools import partial
from pathlib import Path

import miniature
import numpy as np
from several_rewards import interval

CALL = re.compile(r"calc\((\d{1,2}) ?\* ?(\d{1,2})\)")
ARMS = ("gdpo", "grpo", "gdpo_conditioned", "grpo_conditioned", "shuffled")
EXAMPLE = [{"role": "user", "content": "What is 12 * 34?"}, {"role": "assistant", "content": "calc(12 * 34)"}]
SETTINGS = """--task text --policy.lora.rank 16 --sampling.max_new_tokens 12 --training.prompts_per_batch 4
--training.max_steps 12 --optimizer.learning_rate 5e-4 --evaluation.every 0"""


def form(completions: list[str], **columns: list) -> list[float]:
    """Whether a text is a call and nothing else."""
    return [float(CALL.fullmatch(text.strip()) is not None) for text in completions]


def correct(completions: list[str], first: list[str], second: list[str], **columns: list) -> list[float]:
    """From -3, without a call, to 3, with both numbers."""
    calls = zip(map(CALL.search, completions), first, second, strict=True)
    return [-3.0 if call is None else -1.0 + 2 * (call[1] == a) + 2 * (call[2] == b) for call, a, b in calls]


def write_products(path: Path) -> None:
    """256 products to train on, 64 held out."""
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100) if (a, b) != (12, 34)]
    with path.open("w") as file:
        for place, (a, b) in enumerate(random.Random(0).sample(pairs, 320)):
            prompt = [*EXAMPLE, {"role": "user", "content": f"What is {a} * {b}?"}]
            row = {"prompt": prompt, "first": str(a), "second": str(b), "split": "test" if place < 64 else "train"}
            file.write(json.dumps(row) + "\n")


def evaluation(arm: str, seed: int, folder: Path, given: list[str]) -> dict:
    """Held-out rewards of a run, made unless it is there."""
    rewards = [{"name": f"{Path(__file__).resolve()}:{function}"} for function in ("form", "correct")]
    rewards[0] |= {"condition_on": "correct", "threshold": 3.0} if arm.endswith("conditioned") else {}
    options = ["--seed", str(seed), "--rewards", json.dumps(rewards), *SETTINGS.split()]
    options += ["--algorithm.advantage", "grpo" if arm.startswith("grpo") else "gdpo", *given]
    change = partial(miniature.shuffled, seed=seed) if arm == "shuffled" else None
    return miniature.summary(folder / f"{arm}_{seed}", options, change)["evaluation"]


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
    after, lines = {}, ["| arm | reward | before | after | this less GDPO |", "|---|---|---|---|---|"]
    for arm in options.arms:
        found = [evaluation(arm, seed, options.out, given) for seed in options.seeds]
        for name in ("form", "correct"):
            before, after[arm, name] = (np.array([each[name][when] for each in found]) for when in ("before", "after"))
            less = interval(after[arm, name] - after["gdpo", name]) if ("gdpo", name) in after else ""
            lines.append(f"| {arm} | {name} | {before.mean():.3f} | {after[arm, name].mean():.3f} | {less} |")
    print("\n".join(lines))
