"""What of a training step is not compiled work or a judge, and whether any step compiles twice.

    python benchmarks/host_share.py [--iterations 12] [--json benchmarks/host_share.json]

The miniature: iterations of the default run, timed whole. Inside, four kinds of work are timed where they are called:
the sampler and the update until their arrays are there, the renderer, and CLIP's networks. What is left is the host's:
drawing prompts, encoding and decoding text, rewards, the pixel checker, advantages, metrics. With one chunk of prompts
nothing overlaps, so the parts add up. CartPole: blocks of iterations are one compiled program; the host's part is the
time between its end and the next one's start, with the metrics read.

Compilations are counted from JAX's own events, by iteration: after the first there should be none.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import jax
import numpy as np

COMPILED = "/jax/core/compile/backend_compile_duration"


class Clock:
    """Seconds spent in wrapped functions, and programs compiled since the last `restart`."""

    def __init__(self):
        self.seconds, self.compiled = {}, 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event, _, **__):
        self.compiled += event == COMPILED

    def restart(self):
        self.seconds, self.compiled = {}, 0

    def timed(self, name, function):
        def call(*given, **named):
            start = time.perf_counter()
            result = jax.block_until_ready(function(*given, **named))
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        return call


def summary(rows):
    """Medians over the iterations after the first two, and the share of what no wrapped function took."""
    steady = rows[2:]
    whole = statistics.median(row["total"] for row in steady)
    parts = {name: statistics.median(row["parts"].get(name, 0.0) for row in steady) for name in steady[0]["parts"]}
    host = statistics.median(row["total"] - sum(row["parts"].values()) for row in steady)
    return {
        "iterations": len(rows),
        "seconds": round(whole, 5),
        "parts": {name: round(seconds, 5) for name, seconds in parts.items()},
        "host_seconds": round(host, 5),
        "host_share": round(host / whole, 4),
        "compiled_by_iteration": [row["compiled"] for row in rows],
    }


def iterate(clock, step, iterations):
    rows = []
    for number in range(iterations):
        clock.restart()
        start = time.perf_counter()
        step(number)
        total = time.perf_counter() - start
        rows.append({"total": total, "parts": dict(clock.seconds), "compiled": clock.compiled})
    return summary(rows)


def miniature(clock, iterations):
    from bridges import clip
    from grpo_jax.config.command_line import parse
    from grpo_jax.runs.iteration import make_learner, run_iteration
    from grpo_jax.runs.parts import load_parts

    config = parse(["--config=prompt_enhancement_miniature", "--run_dir=unused"])
    parts = load_parts(config, say=lambda *_: None)
    for name in ("image_features", "text_features"):
        setattr(clip.Scorer, name, clock.timed("clip", getattr(clip.Scorer, name)))
    environment = parts.environment._replace(render=clock.timed("render", parts.environment.render))
    samplers = parts.samplers._replace(training=clock.timed("sample", parts.samplers.training))
    parts = parts._replace(environment=environment, samplers=samplers)
    learner = make_learner(parts)
    learner = learner._replace(update=clock.timed("update", learner.update))
    state = learner.start(parts.policy.variables)

    def step(number):
        nonlocal state
        state = run_iteration(parts, learner, state, number).state

    return iterate(clock, step, iterations)


def cartpole(clock, iterations):
    from grpo_jax.config.command_line import parse
    from grpo_jax.tasks.cartpole.training import make_train

    config = parse(["--config=cartpole_grpo", "--run_dir=unused"])
    training = make_train(config)
    block = clock.timed("block", jax.jit(training.block, donate_argnums=0))
    state = jax.jit(training.init)(jax.random.key(0))

    def step(_):
        nonlocal state
        state, metrics, measures = block(state)
        metrics, measures = jax.device_get((metrics, measures))
        return [{name: float(value[i]) for name, value in metrics.items()} for i in range(config.evaluation.every)]

    return iterate(clock, step, iterations)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/host_share.json"))
    args = parser.parse_args()
    clock = Clock()
    report = {
        "benchmark": "host_share",
        "device": str(jax.devices()[0]),
        "cores": os.cpu_count(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "miniature": miniature(clock, args.iterations),
        "cartpole": cartpole(clock, args.iterations),
    }
    args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
