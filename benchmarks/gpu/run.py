"""A shipped config through the training command, shortened: does it run on the GPU, how long by stage, does it learn.

The second config hands pictures from torch to JAX by dlpack in every iteration: the policy sees what it drew.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from outcome import Figures, Measurements, needs

ROOT = Path(__file__).parents[2]
LENGTHS = {"prompt_enhancement_miniature": (40, 32), "prompt_refinement_miniature": (12, 16)}
"""Iterations, and held-out prompts."""
TINY = {"training.prompts_per_batch": 2, "sampling.group_size": 2}
PLAIN_KERNELS = "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"


def measurements(tiny: bool, config: str = "prompt_enhancement_miniature") -> Measurements:
    """One run."""
    return {config: functools.partial(run, config, tiny)}


def run(config: str, tiny: bool) -> Figures:
    """The run; after a failure once more with XLA's plainest kernels, which shows whether the compiler fails."""
    needs("torch", "diffusers", "open_clip")
    try:
        return train(config, tiny)
    except subprocess.CalledProcessError:
        return train(config, tiny, PLAIN_KERNELS) | {"ran": "only without Triton's products", "agrees": False}


def train(config: str, tiny: bool, flags: str = "") -> Figures:
    """Train in a process; return its figures."""
    steps, prompts = (2, 2) if tiny else LENGTHS[config]
    fields = {"training.max_steps": steps, "training.save_every": steps, "evaluation.every": 0}
    fields |= {"evaluation.prompts": prompts, "evaluation.validation_prompts": 0, **(TINY if tiny else {})}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = ["--config", config, "--run_dir", str(run_dir), "--debug"]
        words += [word for name, value in fields.items() for word in (f"--{name}", str(value))]
        env = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
        subprocess.run([sys.executable, "-m", "grpo_jax.train", *words], cwd=ROOT, env=env, check=True)
        return figures(run_dir, tiny)


def figures(run_dir: Path, tiny: bool) -> Figures:
    """Median seconds of each stage behind the fourth iteration, the first's, and the held-out rewards."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in lines if "seconds/total" in row]
    late = rows[4:] or rows[1:]
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    before, after = (summary["evaluation"]["total"][name] for name in ("before", "after"))
    on_gpu = all(device.startswith("gpu") for device in summary["devices"].values())
    stages = sorted({name for row in late for name in row if name.startswith(("seconds/", "tokens_per_second"))})
    return {
        "iterations": len(rows),
        "devices": ", ".join(f"{name} {device}" for name, device in summary["devices"].items()),
        **{name: statistics.median(row[name] for row in late if name in row) for name in stages},
        "first_seconds": rows[0]["seconds/total"],
        "sampler_gap": max(row["sampler_gap"] for row in rows if "sampler_gap" in row),
        "grad_norm": rows[0]["grad_norm"],
        "reward_before": before,
        "reward_after": after,
        "agrees": tiny or (on_gpu and after > before),
    }
