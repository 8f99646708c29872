"""Seconds from a command to its first update: nothing compiled yet, and once more with what was kept; beside TRL.

    python benchmarks/first_update.py [--cases small default] [--rounds 3] [--trl_python PYTHON]

`small` is the case of grpo_iteration.py as a text run; `default` is `grpo train` without a config, its measurement
before training included. Seconds end when the first row of metrics.jsonl (TRL: the worker's report) is written; CPU
seconds are those of the whole process. Prints JSON lines, the machine and its load first.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpo_iteration
import iteration_work as work

# AutoTokenizer would make a Qwen2 tokenizer of the folder, whose tokens are whole words.
TRAIN = """import transformers
transformers.AutoTokenizer = transformers.PreTrainedTokenizerFast
from grpo_jax.train import main
raise SystemExit(main())"""
REWARD = "def share(completions, **_):\n    return [text.count('1') / len(text) for text in completions]\n"


def measure(command: list[str], written: Path, env: dict[str, str]) -> dict[str, float]:
    """Run a command; return the seconds until a file was last written, and the process's CPU seconds."""
    env = {name: value for name, value in (os.environ | env).items() if not name.startswith("JAX_")}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(
        command,
        env={name: value for name, value in (os.environ | env).items() if not name.startswith("JAX_")},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": round(written.stat().st_mtime - start, 2), "cpu": round(cpu, 2)}


def our_command(case: str, root: Path) -> list[str]:
    """Return the words of a run of one iteration without validation."""
    words = ["--training.max_steps=1", "--training.save_every=0", "--evaluation.every=0"]
    if case == "default":
        return ["-m", "grpo_jax.train", *words]
    shape = work.CASES[case]
    (root / "reward.py").write_text(REWARD)
    texts = work.prompt_texts(shape, 0)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = {
        "task": "text",
        "policy": {"path": str(grpo_iteration.make_folder(shape, root))},
        "data": {"prompts": str(root / "prompts.jsonl"), "held_out": 0, "max_prompt_tokens": shape.prompt_tokens},
        "sampling": {"group_size": shape.group, "max_new_tokens": shape.new_tokens},
        "algorithm": {"kl_coef": work.KL_COEF},
        "training": {"prompts_per_batch": shape.prompts},
        "rewards": [f"{root / 'reward.py'}:share"],
    }
    (root / f"{case}.yaml").write_text(json.dumps(config))  # JSON is YAML
    return ["-c", TRAIN, *words, "--config", str(root / f"{case}.yaml")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["small", "default"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl_python", default=sys.executable)
    given = parser.parse_args()
    print(json.dumps(grpo_iteration.machine()))
    for turn, case in ((turn, case) for turn in range(given.rounds) for case in given.cases):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            command, env = our_command(case, root), {"XDG_CACHE_HOME": folder, "PYTHONPATH": str(grpo_iteration.ROOT)}
            row: dict[str, object] = {"case": case, "round": turn}
            for start in ("cold", "warm"):
                run = root / start
                words = [sys.executable, *command, "--run_dir", str(run)]
                row[start] = measure(words, run / "metrics.jsonl", env)
            if case != "default":
                shape, out = work.CASES[case], root / "trl.json"
                told = work.Assignment(shape, root / shape.shape, 1, os.cpu_count() or 1, "plain", "wall", out)
                words = [given.trl_python, str(Path(__file__).with_name("iteration_trl.py")), *work.command_line(told)]
                row["trl"] = measure(words, out, grpo_iteration.environment(told.threads))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
