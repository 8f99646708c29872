"""How close an iteration of grpo_jax comes to what the machine can do: work counted, ceilings measured, shares reached.

    python benchmarks/floor.py [--cases small large-vocab long-prompt] [--threads 1 2] [--iterations 3]

Counted is the work the mathematics asks for, each prompt once for its whole group, causal attention without the
masked half, float32; not recomputation, padding, norms and softmax. Bytes are those that must come from memory at
least once if nothing but the step's own results stays in the caches: weights, keys and values, logits of the sampler,
the optimizer's state. A phase's floor is the larger of FLOPs over the matmul ceiling and bytes over the bandwidth;
`share` is that floor over the measured seconds. Measured is the worker of grpo_iteration.py. Writes JSON and prints a
table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import grpo_iteration
import iteration_work as work

FLOAT = 4  # bytes


class Work(NamedTuple):
    """What a phase has to do: floating-point operations (a multiply-add is two) and bytes to and from memory."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def layer_weights(case: work.Case) -> int:
    """Entries of one layer's matrices: W = 2·D·H·E + 2·D·K·E + 3·D·M."""
    heads = case.heads * case.head_size
    return case.hidden * (2 * heads + 2 * case.kv_heads * case.head_size + 3 * case.mlp)


def parameters(case: work.Case) -> int:
    """All trained entries; norms and biases left out."""
    return case.layers * layer_weights(case) + case.vocabulary * case.hidden


def attention_flops(case: work.Case, pairs: float) -> float:
    """Scores and weighted values of `pairs` (query, key) pairs in every layer and head."""
    return case.layers * case.heads * 4 * case.head_size * pairs


def cache_bytes(case: work.Case, tokens: float) -> float:
    """Keys and values of `tokens` tokens in every layer."""
    return case.layers * 2 * case.kv_heads * case.head_size * FLOAT * tokens


def triangle(n: int) -> float:
    """1 + 2 + … + n: the pairs of causal attention."""
    return n * (n + 1) / 2


def sampling_work(case: work.Case) -> Work:
    """Prefill of P·L tokens with P rows of logits, then T - 1 steps of P·G rows with logits each."""
    rows, steps = case.prompts * case.group, case.new_tokens - 1
    weights, head = case.layers * layer_weights(case), case.vocabulary * case.hidden
    logits = case.vocabulary * FLOAT * 2  # of one row, written and read
    prompt = case.prompts * case.prompt_tokens
    prefill = Work(
        2 * weights * prompt
        + attention_flops(case, case.prompts * triangle(case.prompt_tokens))
        + 2 * head * case.prompts,
        FLOAT * (weights + head) + cache_bytes(case, prompt) + logits * case.prompts,
    )
    decode = Work(
        steps * rows * 2 * (weights + head)
        + attention_flops(case, rows * (steps * case.prompt_tokens + triangle(steps))),
        steps * (FLOAT * (weights + head) + logits * rows)
        # The prompt's keys and values once per group, the completion's own once per row.
        + cache_bytes(case, steps * prompt + rows * (triangle(steps) + steps)),
    )
    return prefill + decode


def forward_work(case: work.Case) -> Work:
    """Log-probabilities of the completions: L tokens per prompt, T - 1 per completion, logits never in memory."""
    rows, length = case.prompts * case.group, case.new_tokens - 1
    tokens = case.prompts * case.prompt_tokens + rows * length
    pairs = case.prompts * triangle(case.prompt_tokens) + rows * (length * case.prompt_tokens + triangle(length))
    weights, head = case.layers * layer_weights(case), case.vocabulary * case.hidden
    # The state that predicts the first token is the prompt's last one: one row of logits per prompt.
    flops = 2 * weights * tokens + attention_flops(case, pairs) + 2 * head * (case.prompts + rows * length)
    return Work(flops, FLOAT * (weights + head))


def update_work(case: work.Case) -> Work:
    """Forward, and a backward pass of twice its work; AdamW reads four numbers of each parameter and writes three."""
    forward = forward_work(case)
    return Work(3 * forward.flops, 3 * forward.bytes + 7 * FLOAT * parameters(case))


COUNTS = {"sampling": sampling_work, "logprobs": forward_work, "update": update_work}


def shares(case: work.Case, seconds: dict[str, float], ceilings: dict[str, float]) -> dict[str, dict[str, float]]:
    """Each phase's work, the floor of its time, and the share of the ceiling that is reached."""
    found = {}
    for phase, count in COUNTS.items():
        flops, size = count(case)
        floor = max(flops / ceilings["flops_per_second"], size / ceilings["bytes_per_second"])
        found[phase] = {
            "gflop": flops / 1e9,
            "gb": size / 1e9,
            "floor_seconds": floor,
            "seconds": seconds[phase],
            "gflop_per_second": flops / seconds[phase] / 1e9,
            "share": floor / seconds[phase],
        }
    return found


def measure_ceilings(now: Callable[[], float]) -> dict[str, float]:
    """Matmul and stream rates of this process's cores, in JAX: the best of several sizes and tries."""
    import jax
    import jax.numpy as jnp

    def best(function, *arrays, tries: int = 8) -> float:
        jax.block_until_ready(function(*arrays))
        seconds = []
        for _ in range(tries):
            start = now()
            jax.block_until_ready(function(*arrays))
            seconds.append(now() - start)
        return min(seconds)

    multiply = jax.jit(jnp.matmul)
    rates = {}
    for size in (512, 1024, 2048):
        matrix = jax.random.normal(jax.random.key(0), (size, size))
        rates[f"matmul_{size}"] = 2 * size**3 / best(multiply, matrix, matrix)
    size = 2**26  # 256 MB each: far larger than any cache
    first, second, third = (jnp.full(size, float(i)) for i in range(3))
    triad = jax.jit(lambda _, a, b: a + 3.0 * b, donate_argnums=0)  # writes into memory that is there already
    seconds = []
    for _ in range(6):
        start = now()
        first = jax.block_until_ready(triad(first, second, third))
        seconds.append(now() - start)
    stream = 3 * FLOAT * size / min(seconds)
    return {"flops_per_second": max(rates.values()), "bytes_per_second": stream, **rates}


def ceilings_of(threads: int, clock: str) -> dict[str, float]:
    """`measure_ceilings` in a process pinned to that many cores."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    command = ["taskset", "-c", cores, sys.executable, __file__, "--ceilings", "--clock", clock]
    done = subprocess.run(command, env=grpo_iteration.environment(threads), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measured(case: work.Case, threads: int, iterations: int, clock: str, root: Path) -> dict[str, float]:
    """Median seconds of each phase, first iteration left out."""
    folder = grpo_iteration.make_folder(case, root)
    given = work.Assignment(case, folder, iterations + 1, threads, "", clock, root / f"{case.name}-{threads}.json")
    report = grpo_iteration.run_worker("ours", given, sys.executable)
    if "error" in report:
        raise SystemExit(f"{case.name}: the worker failed: {report['error']}")
    return work.median_row(report["iterations"][1:])


def table(results: list[dict]) -> str:
    lines = [
        "| case | threads | phase | GFLOP | GB | floor s | measured s | GFLOP/s | of the ceiling |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for phase, row in result["phases"].items():
            cells = [f"{row[name]:.2f}" for name in ("gflop", "gb", "floor_seconds", "seconds")]
            cells += [f"{row['gflop_per_second']:.0f}", f"{row['share']:.0%}"]
            lines.append(f"| {result['case']} | {result['threads']} | {phase} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["small", "large-vocab", "long-prompt"], choices=list(work.CASES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("floor.json"))
    parser.add_argument(
        "--clock", choices=list(work.CLOCKS), default="wall", help="cpu: for a busy machine, one thread"
    )
    parser.add_argument("--ceilings", action="store_true", help="only measure this process's ceilings, as JSON")
    chosen = parser.parse_args()
    if chosen.ceilings:
        print(json.dumps(measure_ceilings(work.CLOCKS[chosen.clock])))
        return
    outcome = {"machine": grpo_iteration.machine(), "clock": chosen.clock, "ceilings": {}, "results": []}
    with tempfile.TemporaryDirectory() as root:
        for threads in chosen.threads:
            ceilings = outcome["ceilings"][str(threads)] = ceilings_of(threads, chosen.clock)
            for name in chosen.cases:
                case = work.CASES[name]
                seconds = measured(case, threads, chosen.iterations, chosen.clock, Path(root))
                row = {"case": name, "threads": threads, "phases": shares(case, seconds, ceilings)}
                outcome["results"].append(row)
    chosen.out.write_text(json.dumps(outcome, indent=1) + "\n")
    for threads, ceilings in outcome["ceilings"].items():
        flops, stream = ceilings["flops_per_second"] / 1e9, ceilings["bytes_per_second"] / 1e9
        print(f"{threads} thread(s): {flops:.0f} GFLOP/s matmul, {stream:.1f} GB/s stream")
    print(table(outcome["results"]))


if __name__ == "__main__":
    main()
