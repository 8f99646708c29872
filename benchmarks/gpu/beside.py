"""GRPO iterations in grpo_jax and in TRL on the same GPU, by the workers of `grpo_iteration.py`.

Model, prompts, reward and KL are those of that benchmark, with Qwen2.5's shapes and random weights. grpo_jax trains
float32 weights with bfloat16 products ("mixed"), and so does TRL by autocast ("bfloat16"). TRL also holds weights and
moments in bfloat16 ("narrow"). From 1.5 B on both compute layers again in the backward pass. Each has a process of its
own, whose first iteration compiles or warms up.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import grpo_iteration
import iteration_work
import shapes
import timing
from outcome import Figures, Measurements, needs, needs_torch_beside_jax, release

ROOT = Path(__file__).parents[2]
WORKERS = (("ours", "mixed", "layer"), ("trl", "bfloat16", "checkpointing"), ("trl", "narrow", "checkpointing"))
"""Library, precision, and the variant that saves memory."""
ITERATIONS = 4  # with the first


def measurements(tiny: bool, size: str = "0.5B") -> Measurements:
    """grpo_jax, then TRL by precision; at 1.5 B TRL's autocast alone."""
    lengths = dict(prompt_tokens=8, new_tokens=6) if tiny else dict(prompt_tokens=128, new_tokens=128)
    case = shapes.case(size, tiny, prompts=2 if tiny else 8, group=4 if tiny else 8, **lengths)
    small = size == "0.5B"
    return {
        f"{size}, {library}, {precision}": functools.partial(
            iterate, case, library, precision if small else f"{precision} {less_memory}"
        )
        for library, precision, less_memory in (WORKERS if small else WORKERS[:2])
    }


@functools.cache
def root_of(case: iteration_work.Case) -> Path:
    """A temporary folder with the model's."""
    root = tempfile.TemporaryDirectory()
    atexit.register(root.cleanup)
    with _torch_device():
        grpo_iteration.make_folder(case, Path(root.name))
    release()
    return Path(root.name)


def _torch_device() -> AbstractContextManager[object]:
    """A context in which torch draws the weights on its GPU: a CPU takes a minute."""
    import torch

    device = needs_torch_beside_jax()
    return torch.device(device) if device == "cuda" else nullcontext()


def worker_environment() -> dict[str, str]:
    """This process's variables with the checkout on the path, and one GPU: TRL would spread over several."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": gpu}


def iterate(case: iteration_work.Case, library: str, variant: str) -> Figures:
    """Median seconds by phase behind the first iteration, tokens per second, and peak memory of the process."""
    needs("torch", "transformers", *(("trl", "datasets") if library == "trl" else ()))
    start, root = time.monotonic(), root_of(case)
    out, threads = root / f"{library}-{variant.replace(' ', '-')}.json", len(os.sched_getaffinity(0))
    assignment = iteration_work.Assignment(case, root / case.shape, ITERATIONS, threads, variant, "wall", out)
    report = grpo_iteration.run_worker(library, assignment, sys.executable, worker_environment())
    if "error" in report:
        raise RuntimeError(report["error"])
    first, *rows = report["iterations"]
    medians = iteration_work.median_row(rows)
    return {
        **{f"{name}_seconds": value for name, value in medians.items()},
        "tokens_per_second": first["tokens"] / medians["total"],
        "sampled_per_second": first["tokens"] / medians["sampling"],
        "first_seconds": first["total"],
        "process_seconds": time.monotonic() - start,
        "peak_gib": timing.gib(report["gpu_bytes"]),
    }
