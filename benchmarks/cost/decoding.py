"""CPU seconds of a token of greedy texts, by numbers of prompts and completions, in this checkout and in another.

    git worktree add /tmp/before COMMIT
    python benchmarks/cost/decoding.py /tmp/before [--cases small growth] [--tokens 256] [--turns 7] [--out FILE]

For each shape a worker for either checkout, pinned to the first core: one call that compiles, then calls in turn, whose
order changes every time. Prints a table: medians of CPU milliseconds a token, the median of the ratios of calls side
by side, CPU seconds of the first call, and whether both wrote the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import growth
import grpo_iteration
import iteration_work as work

HERE = Path(__file__).resolve().parents[2]
SHAPES = ((1, 1), (8, 1), (1, 8), (8, 8))
PROMPT_TOKENS = 32


def serve(tree: str, name: str, prompts: int, group: int, tokens: int) -> None:
    """Write completions once for each line of standard input; say the CPU seconds and the sum of the tokens."""
    sys.path.insert(0, tree)
    import jax
    import numpy as np

    import grpo_jax
    from grpo_jax.models.decoder import init_variables
    from grpo_jax.models.policy import make_policy
    from grpo_jax.sampling.sampler import SamplingParams, make_sampler

    assert Path(grpo_jax.__file__).is_relative_to(tree), grpo_jax.__file__
    config = work.decoder_config({**work.CASES, "growth": growth.BASE}[name])
    sample = make_sampler(make_policy(config), SamplingParams(group, tokens, 0.0), eos_ids=(), pad_id=0)
    given = np.random.default_rng(0).integers(1, config.vocab_size, (prompts, PROMPT_TOKENS))
    keys = jax.random.split(jax.random.key(0), prompts)
    variables = init_variables(config, jax.random.key(0))
    for _ in sys.stdin:
        start = time.process_time()
        written = jax.block_until_ready(sample(variables, given, given > 0, keys))
        print(json.dumps([time.process_time() - start, int(written.tokens.sum())]), flush=True)


def measure(trees: list[Path], name: str, shape: tuple[int, int], tokens: int, turns: int) -> dict[str, Any]:
    """Two checkouts side by side."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    first = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, __file__]
    commands = [[*first, "--serve", str(tree), name, *map(str, (*shape, tokens))] for tree in trees]
    workers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=env) for command in commands]

    def ask(worker: subprocess.Popen[str]) -> list[float]:
        print(file=worker.stdin, flush=True)
        return json.loads(worker.stdout.readline())

    compiled, seconds = [ask(worker) for worker in workers], ([], [])
    for turn in range(turns):
        for i in (0, 1) if turn % 2 else (1, 0):
            seconds[i].append(ask(workers[i])[0])
    for worker in workers:
        worker.communicate()
    return {
        "case": name,
        "shape": shape,
        "milliseconds": [1000 * statistics.median(one) / tokens for one in seconds],
        "ratio": statistics.median(new / old for old, new in zip(*seconds, strict=True)),
        "first_seconds": [one[0] for one in compiled],
        "same": compiled[0][1] == compiled[1][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--cases", nargs="+", default=["small", "growth"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the rows there as JSON")
    chosen = parser.parse_args()
    machine, rows = grpo_iteration.machine(), []
    print("| case | P × G | before, ms | now, ms | ratio | first call, s: before, now | same tokens |")
    print("|---|---|---|---|---|---|---|")
    for name in chosen.cases:
        for shape in SHAPES:
            rows.append(row := measure([chosen.before.resolve(), HERE], name, shape, chosen.tokens, chosen.turns))
            before, now = row["milliseconds"]
            told = f"{name} | {shape[0]} × {shape[1]} | {before:.3g} | {now:.3g} | {row['ratio']:.2f}"
            print(f"| {told} | {', '.join(f'{s:.1f}' for s in row['first_seconds'])} | {row['same']} |", flush=True)
    if chosen.out:
        found = {"machine": machine, "tokens": chosen.tokens, "turns": chosen.turns, "rows": rows}
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:4], *map(int, sys.argv[4:]))
    else:
        main()
