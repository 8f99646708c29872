"""How close a batch comes to its slowest stage: stages that wait rather than compute, and the miniature's real ones.

    python benchmarks/pipeline.py [--chunks 16] [--unit 0.05] [--repeats 5] [--json benchmarks/pipeline.json]

Prints JSON. `ratio` is the time of a batch over the total of its slowest stage; filling and emptying the
pipe is included (`floor` is the ratio a perfect pipeline has: (total of the slowest + the others' one
chunk) / slowest). `steady_ratio` leaves that out: it is the time between the last stage's first and last
result, over the slowest stage's time for as many chunks. `sequential_ratio` is a plain loop, measured in
the same run.

`miniature` samples, draws and scores batches of the default run in chunks of four prompts: seconds of each stage, time
of a batch through the pipeline and in a plain loop, each over the slowest stage's seconds in that loop. Its three
stages compute on the same cores, so they overlap only as far as one of them leaves a core idle.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

from grpo_jax.rollout.pipeline import Stage, run_pipeline


def waiting_stages(parts, unit, finished):
    def wait(seconds, last):
        def call(chunk):
            time.sleep(seconds)
            if last:
                finished.append(time.perf_counter())
            return chunk

        return call

    names = ("sample", "render", "score")
    return [Stage(name, wait(part * unit, name == names[-1])) for name, part in zip(names, parts, strict=True)]


def measure(parts, chunks, unit):
    finished = []
    stages = waiting_stages(parts, unit, finished)
    start = time.perf_counter()
    _, seconds = run_pipeline(range(chunks), stages)
    total = time.perf_counter() - start
    start = time.perf_counter()
    for chunk in range(chunks):
        for stage in stages:
            chunk = stage.function(chunk)
    sequential = time.perf_counter() - start
    slowest = max(seconds.values())
    return {
        "ratio": total / slowest,
        "steady_ratio": (finished[chunks - 1] - finished[0]) / (slowest * (chunks - 1) / chunks),
        "sequential_ratio": sequential / slowest,
        "seconds": total,
    }


def measure_miniature(repeats):
    """The default run's stages on a chunk of 4 prompts x 8 completions; every batch draws new pictures."""
    import jax
    import numpy as np

    from grpo_jax.config.command_line import parse
    from grpo_jax.rollout.rollout import collect
    from grpo_jax.runs.parts import load_parts

    config = parse(["--config=prompt_enhancement_miniature", "--run_dir=unused", "--judges.renderer.batch_size=32"])
    parts = load_parts(config, say=lambda *_: None)
    count = config.training.prompts_per_batch

    def batch(iteration, chunk_prompts):
        rows = [parts.prompts.train[(iteration * count + i) % len(parts.prompts.train)] for i in range(count)]
        start = time.perf_counter()
        seconds = {}
        if chunk_prompts:
            rollouts = [rows]
        else:  # a plain loop: each chunk through all stages before the next
            rollouts = [rows[i : i + 4] for i in range(0, count, 4)]
        for part in rollouts:
            episodes, _ = collect(
                parts.environment,
                parts.samplers.training,
                parts.policy.variables,
                part,
                key=parts.key,
                iteration=iteration,
                scheduling=parts.scheduling(chunk_prompts),
            )
            for name, value in episodes.seconds.items():
                seconds[name] = seconds.get(name, 0.0) + value
        return time.perf_counter() - start, seconds

    for iteration in range(2):
        batch(iteration, 4), batch(iteration + 2, 0)  # compiles
    runs = [(batch(4 + 2 * i, 4), batch(5 + 2 * i, 0)) for i in range(repeats)]
    alone = {name: float(np.median([loop[1][name] for _, loop in runs])) for name in runs[0][1][1]}
    piped, loop = (float(np.median([run[which][0] for run in runs])) for which in (0, 1))
    stages = {name: seconds for name, seconds in alone.items() if name in ("sample", "render", "score")}
    return {
        "device": str(jax.devices()[0]),
        "cores": os.cpu_count(),
        "prompts": count,
        "chunk_prompts": 4,
        "stage_seconds_alone": {name: round(seconds, 4) for name, seconds in stages.items()},
        "pipeline_seconds": round(piped, 4),
        "loop_seconds": round(loop, 4),
        "ratio": round(piped / max(stages.values()), 4),
        "loop_ratio": round(loop / max(stages.values()), 4),
        "pipeline_over_loop": round(piped / loop, 4),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--unit", type=float, default=0.05, help="seconds that stand for 1 in 1:3:1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no_miniature", action="store_true", help="the waiting stages alone")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    report = {
        "benchmark": "pipeline",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": sys.platform,
        "chunks": args.chunks,
        "unit_seconds": args.unit,
        "cases": {},
    }
    measure((1, 1, 1), 2, 0.001)  # warm-up: thread start-up and imports
    for parts in ((1, 1, 1), (1, 3, 1)):
        runs = [measure(parts, args.chunks, args.unit) for _ in range(args.repeats)]
        case = {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}
        slowest = max(parts) * args.chunks
        case["floor"] = round((slowest + sum(parts) - max(parts)) / slowest, 4)
        report["cases"][":".join(map(str, parts))] = case
    if not args.no_miniature:
        report["miniature"] = measure_miniature(args.repeats)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
