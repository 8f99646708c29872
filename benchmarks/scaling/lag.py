"""What sampling ahead is worth: stages that wait rather than compute, through the loop of a real run.

    python benchmarks/scaling/lag.py [--unit 2] [--chunks 8] [--iterations 12] [--json benchmarks/scaling/lag.json]

Prints JSON. Sampling, judging and learning wait `--unit` seconds of a batch each, 1 : 1 : 1, besides the real sampling
and update of a tiny policy. A case is a run of its own: training.async_level 0 or 1, the batch in one chunk or in
several. `seconds` is the mean time between one iteration's end and the next one's, but for the first three, in which
programs are compiled and the pipe is filled; `ratio` is that over the case without overlap (async_level 0, one chunk).
`floor` is what the waiting alone comes to by the formula of docs/scaling.md, `predicted` the same
of the stages' seconds as the run measured them (medians): what is left is the pipeline's and the loop's own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

SKIPPED = 3  # iterations


def waiting(function, seconds):
    """The function, so many seconds later."""

    def call(*given, **named):
        time.sleep(seconds)
        return function(*given, **named)

    return call


def slowed(program, unit: float, chunks: int):
    """A run's program whose three stages take `unit` seconds of a batch more."""
    parts, learner = program.parts, program.learner
    environment = parts.environment._replace(score=waiting(parts.environment.score, unit / chunks))
    samplers = parts.samplers._replace(training=waiting(parts.samplers.training, unit / chunks))
    learner = learner._replace(update=waiting(learner.update, unit))
    return dataclasses.replace(
        program, parts=parts._replace(environment=environment, samplers=samplers), learner=learner
    )


def reckoned(sample: float, score: float, update: float, lag: int, chunks: int) -> float:
    """Seconds of an iteration by the formula; nobody shares a card here, for who waits takes none."""
    slowest = max(sample, score)
    batch = (sample + score) / chunks + (1 - 1 / chunks) * slowest
    return round(max(slowest, update, (batch + update) / 2) if lag else batch + update, 4)


def medians(run_dir: Path) -> dict[str, float]:
    """Seconds of the stages, as the run's metrics have them."""
    from grpo_jax.runs.directory import read_metrics

    rows = read_metrics(run_dir / "metrics.jsonl")[SKIPPED:]
    return {name: statistics.median(row[f"seconds/{name}"] for row in rows) for name in ("sample", "score", "update")}


def measure(folder: Path, lag: int, chunks: int, most_chunks: int, unit: float, iterations: int) -> dict:
    """One run, and how long its iterations took."""
    from grpo_jax.config import make_config
    from grpo_jax.reports.output import RunOutput
    from grpo_jax.runs.checkpoint import Checkpoints
    from grpo_jax.runs.experiment import Callbacks, Run
    from grpo_jax.runs.language import load_program
    from grpo_jax.runs.stopping import stop_requests

    config = make_config(
        task="text",
        run_dir=str(folder / f"lag{lag}_chunks{chunks}"),
        report_to=[],
        policy={"path": "miniature"},
        data={"held_out": 0, "max_prompt_tokens": 16, "form": "append"},
        sampling={"group_size": 2, "max_new_tokens": 2},
        training={
            "prompts_per_batch": most_chunks,
            "chunk_prompts": most_chunks // chunks,
            "max_steps": iterations,
            "save_every": 0,
            "async_level": lag,
        },
        evaluation={"every": 0, "samples": 0},
    )
    prompts = [f"a {word} tree" for word in ("red", "blue", "green", "small", "large", "round", "dark", "old")] * 2
    ends, clock = [], time.monotonic()

    def lengths(completions):
        return [float(len(text)) for text in completions]

    def ended(moment):
        ends.append((time.perf_counter(), os.getloadavg()[0]))

    leaving = contextlib.ExitStack()
    with contextlib.redirect_stdout(sys.stderr), RunOutput(config) as output, stop_requests() as stop, leaving:
        given = {"prompts": prompts, "rewards": [lengths]}
        program = load_program(config, output, **given, clock=clock, stop=stop, leaving=leaving)
        with Checkpoints(output.directory.checkpoints, keep=1) as checkpoints:
            run = Run(slowed(program, unit, chunks), checkpoints, output, clock, stop, Callbacks(on_iteration=ended))
            run.execute()
    steady = [after[0] - before[0] for before, after in zip(ends[SKIPPED - 1 :], ends[SKIPPED:], strict=False)]
    return {
        "async_level": lag,
        "chunks": chunks,
        "seconds": round(statistics.mean(steady), 4),
        "slowest": round(max(steady), 4),
        "floor": reckoned(unit, unit, unit, lag, chunks),
        "predicted": reckoned(**medians(Path(config.run_dir)), lag=lag, chunks=chunks),
        "load": round(statistics.mean(load for _, load in ends), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit", type=float, default=2.0, help="seconds of a batch in each stage")
    parser.add_argument("--chunks", type=int, default=8, help="prompts of a batch, and chunks where there are several")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    import jax

    with tempfile.TemporaryDirectory() as folder:
        cases = [
            measure(Path(folder), lag, chunks, args.chunks, args.unit, args.iterations)
            for lag in (0, 1)
            for chunks in (1, args.chunks)
        ]
    report = {
        "benchmark": "lag",
        "device": str(jax.devices()[0]),
        "cores": os.cpu_count(),
        "machine": f"{platform.machine()}, {sys.platform}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "unit_seconds": args.unit,
        "iterations": args.iterations,
        "cases": [{**case, "ratio": round(case["seconds"] / cases[0]["seconds"], 4)} for case in cases],
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
