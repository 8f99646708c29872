"""Seconds from a command to its first update: without and with cached programs, and with TRL.

    python benchmarks/first_update.py [small default]

`small` is a text run of the size of grpo_iteration.py's case, by a Llama with random weights (for TRL that case's
Qwen2). `default` is `grpo train` without a config, with its evaluation before training. Seconds end when the first row
of metrics.jsonl (for TRL the worker's report) is written; CPU seconds are those of the whole process. Prints JSON
lines, beginning with the machine and its load.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpo_iteration
import iteration_work as work

from grpo_jax.config.sections import NewPolicySection
from grpo_jax.models.random_init import write_policy

ROUNDS = 3
REWARD = "def share(completions, **_):\n    return [text.count('1') / (1 + len(text)) for text in completions]\n"


def measure(command: list[str], written: Path, env: dict[str, str]) -> dict[str, float]:
    """Run a command; return the seconds until a file was last written, and the process's CPU seconds."""
    env = {name: value for name, value in (os.environ | env).items() if not name.startswith("JAX_")}
    before, start = os.times(), time.time()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    cpu = sum(os.times()[2:4]) - sum(before[2:4])  # of children that ended
    return {"wall": round(written.stat().st_mtime - start, 2), "cpu": round(cpu, 2)}


def our_command(case: str, root: Path) -> list[str]:
    """Return the words of a run of one iteration without validation."""
    words = ["-m", "grpo_jax.train", "--training.max_steps=1", "--training.save_every=0", "--evaluation.every=0"]
    if case == "default":
        return words
    shape = work.CASES[case]
    (root / "reward.py").write_text(REWARD)
    size = NewPolicySection(width=shape.hidden, layers=shape.layers, heads=shape.heads, mlp=shape.mlp)
    texts = [text.rpartition(" ")[0] for text in work.prompt_texts(shape, 0)]  # a mark stands behind each
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    fields = {
        "policy.path": write_policy(root / case, (f"t{i}" for i in range(shape.vocabulary)), size),
        "data.prompts": root / "prompts.jsonl",
        "data.held_out": 0,
        "data.max_prompt_tokens": shape.prompt_tokens,
        "sampling.group_size": shape.group,
        "sampling.max_new_tokens": shape.new_tokens,
        "algorithm.kl_coef": work.KL_COEF,
        "training.prompts_per_batch": shape.prompts,
        "rewards": json.dumps([f"{root / 'reward.py'}:share"]),
    }
    return [*words, "--task=text", *(f"--{name}={value}" for name, value in fields.items())]


def main() -> None:
    print(json.dumps(grpo_iteration.machine()))
    for case in (sys.argv[1:] or ["small", "default"]) * ROUNDS:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            command, env = our_command(case, root), {"XDG_CACHE_HOME": folder, "PYTHONPATH": str(grpo_iteration.ROOT)}
            row: dict[str, object] = {"case": case}
            for run in (root / "cold", root / "warm"):
                words = [sys.executable, *command, "--run_dir", str(run)]
                row[run.name] = measure(words, run / "metrics.jsonl", env)
            if case != "default":
                shape, out = work.CASES[case], root / "trl.json"
                policy = grpo_iteration.make_folder(shape, root)
                told = work.Assignment(shape, policy, 1, os.cpu_count() or 1, "plain", "wall", out)
                words = [sys.executable, str(Path(__file__).with_name("iteration_trl.py")), *work.command_line(told)]
                row["trl"] = measure(words, out, grpo_iteration.environment(told.threads))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
