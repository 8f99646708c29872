"""What the order of prompts does for what is learned: at random, from easy to hard, by how far rewards spread.

    python benchmarks/evidence/prompt_order.py --policy smollm2 [--seeds 0 1 2] [--work runs/prompt_order]

SmolLM2-135M-Instruct, unpacked as `docs/recipes/arithmetic.md` does, learns sums by GRPO with LoRA: 144 sums, a third
each with summands of one, two and four digits, whose right answers earn 1. The first are soon right each time and the
last hardly ever, so that two groups of three teach nothing. 48 other sums are held out and answered greedily every few
iterations; CPU seconds are those of iterations alone, without compilation and measuring. Each run is a process on one
core. Finished runs lie in --work; prints a table and writes prompt_order.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

OUT = Path(__file__).with_name("prompt_order.json")
ORDERS = {"random": {}, "curriculum": {"curriculum": "digits"}, "informative": {"informative_half_life": 16.0}}
STEPS, EVERY, DIGITS = 40, 8, (1, 2, 4)


def sums() -> list[dict[str, object]]:
    """The prompts, the same for all runs; a third of each part has as many digits."""
    draw = random.Random(0)
    rows = []
    for digits in DIGITS:
        seen: set[tuple[int, int]] = set()
        while len(seen) < 64:
            seen.add(tuple(draw.randrange(10 ** (digits - 1), 10**digits) for _ in range(2)))
        for number, (a, b) in enumerate(sorted(seen, key=lambda _: draw.random())):
            split = "train" if number < 48 else "validation"
            prompt = f"What is {a} + {b}? Answer with the number only."
            rows.append({"prompt": prompt, "answer": str(a + b), "digits": digits, "split": split})
    return rows


def one_run(policy: Path, order: str, seed: int, out: Path) -> None:
    """Train, and write what each validation measured and the CPU seconds of the iterations until then."""
    from grpo_jax import make_config, run

    data = out.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    config = make_config(
        task="text",
        run_dir=str(out.with_suffix(".run")),
        seed=seed,
        policy={"path": str(policy), "lora": {"rank": 16}},
        data={"prompts": str(data), **ORDERS[order]},
        sampling={"group_size": 8, "max_new_tokens": 14},
        algorithm={"advantage": "grpo"},
        optimizer={"learning_rate": 3e-4, "schedule": "constant"},
        training={"prompts_per_batch": 4, "max_steps": STEPS, "save_every": 0},
        evaluation={"every": EVERY, "sampled": False, "validation_prompts": 48},
        rewards=[{"name": "grpo_jax.rewards:numeric_answer"}],
        report_to=[],
    )
    rows: list[dict[str, float]] = []
    last = time.process_time()

    def note(event: object) -> None:
        nonlocal last
        now = time.process_time()
        rows.append({"cpu": now - last, **{name: float(value) for name, value in event.metrics.items()}})
        last = now

    run(config, on_iteration=note)
    out.write_text(json.dumps(rows))


def curve(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Share of right answers to held-out sums, of dead groups, and CPU seconds, at each validation."""
    usual = statistics.median(row["cpu"] for row in rows)  # compilation and measuring lie in some
    at = range(EVERY, STEPS + 1, EVERY)
    return {
        "right": [rows[step - 1]["validation/numeric_answer"] for step in at],
        "dead": [statistics.mean(row["dead_groups/total"] for row in rows[step - EVERY : step]) for step in at],
        "cpu": [usual * step for step in at],
    }


def main() -> None:
    """Run what is missing, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/prompt_order"))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        order, seed = options.one
        one_run(options.policy.resolve(), order, int(seed), options.work / f"{order}-{seed}.json")
        return
    options.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, list[float]]]] = {order: [] for order in ORDERS}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    for seed in options.seeds:
        for order in ORDERS:
            out = options.work / f"{order}-{seed}.json"
            if not out.exists():
                subprocess.run([sys.executable, *sys.argv, "--one", order, str(seed)], env=env, check=True)
            found[order].append(curve(json.loads(out.read_text())))
            print(order, seed, found[order][-1], flush=True)
    OUT.write_text(json.dumps({"seeds": options.seeds, "steps": STEPS, "runs": found}, indent=1) + "\n")
    for order, runs in found.items():
        for name in runs[0]:
            print(f"{order:<12}{name:<6}", *(f"{statistics.mean(run[name][i] for run in runs):8.3f}" for i in range(5)))


if __name__ == "__main__":
    main()
