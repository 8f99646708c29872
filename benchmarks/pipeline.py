"""How close a batch comes to its slowest stage: stages that wait rather than compute.

    python benchmarks/pipeline.py [--chunks 16] [--unit 0.05] [--repeats 5]

Prints JSON. `ratio` is the time of a batch over the total of its slowest stage; filling and emptying the
pipe is included (`floor` is the ratio a perfect pipeline has: (total of the slowest + the others' one
chunk) / slowest). `steady_ratio` leaves that out: it is the time between the last stage's first and last
result, over the slowest stage's time for as many chunks. `sequential_ratio` is a plain loop, measured in
the same run.
"""

import argparse
import json
import platform
import statistics
import sys
import time

from grpo_jax.pipeline import Stage, run_pipeline


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--unit", type=float, default=0.05, help="seconds that stand for 1 in 1:3:1")
    parser.add_argument("--repeats", type=int, default=5)
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
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
