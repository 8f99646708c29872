"""Runs with `deterministic` through the real loop: stopped and resumed ones equal whole ones bit for bit.

On text the policy is the miniature's and the reward a function; the miniature itself draws and judges pictures too.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from outcome import Figures, Measurements, needs
from safetensors.numpy import load_file

from grpo_jax import train
from grpo_jax.config.run import Config, make_config

TIMINGS = ("seconds/", "tokens_per_second")
WORDS = ("red", "green", "blue", "large", "small", "circle", "square", "left", "right", "striped", "two", "three")


def measurements(tiny: bool) -> Measurements:
    """Text needs nothing but JAX; the miniature what the `diffusion` extra installs."""
    steps = 2 if tiny else 6
    sizes = {"training": {"prompts_per_batch": 2}, "sampling": {"group_size": 2}} if tiny else {}
    prompts = [f"a {word}" for word in WORDS]
    return {
        "text, resumed": functools.partial(resumed, make_config(text(steps)), prompts=prompts),
        "miniature, resumed": functools.partial(pictures, make_config(miniature(steps), **sizes)),
    }


def pictures(config: Config) -> Figures:
    """The miniature draws pictures and judges them."""
    needs("torch", "diffusers", "open_clip")
    return resumed(config)


def letters(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward: how many different letters there are."""
    return [len(set(text)) / 26 for text in completions]


def common(steps: int) -> dict[str, Any]:
    """Of both runs: few steps, a checkpoint half way, nothing that only reports."""
    return {
        "seed": 3,
        "deterministic": True,
        "report_to": [],
        "policy": {"path": "miniature"},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"prompts_per_batch": 4, "max_steps": steps, "save_every": steps // 2},
        "evaluation": {"every": 0, "prompts": 0, "validation_prompts": 0, "samples": 0},
    }


def text(steps: int) -> dict[str, Any]:
    """Prompts and reward are given in Python."""
    return common(steps) | {
        "task": "text",
        "data": {"held_out": 0, "max_prompt_tokens": 32},
        "sampling": {"group_size": 4, "max_new_tokens": 8},
        "algorithm": {"kl_coef": 0.01},
    }


def miniature(steps: int) -> dict[str, Any]:
    """The default config, shortened."""
    renderer = {"path": "miniature", "steps": 2, "eval_steps": 4}
    return common(steps) | {
        "task": "prompt_enhancement",
        "data": {"prompts": "miniature", "form": "rewrite"},
        "sampling": {"group_size": 8, "max_new_tokens": 14},
        "algorithm": {"preset": "grpo", "advantage": "gdpo", "kl_coef": 0.01, "entropy_coef": 0.03},
        "judges": {"renderer": renderer, "scorer": {"model": "miniature"}},
        "rewards": [{"name": "alignment"}, {"name": "length", "weight": 0.1}],
    }


def resumed(config: Config, prompts: list[str] | None = None) -> Figures:
    """The run at once, and the run stopped at its first checkpoint and resumed: what they left, compared."""
    given = {} if prompts is None else {"prompts": prompts, "rewards": letters}
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / name for name in ("whole", "stopped")]
        whole, stopped = (config.replace(run_dir=str(folder)) for folder in folders)
        train.run(whole, **given)
        broken_off = train.run(stopped, **given, on_checkpoint=lambda moment: True)
        assert broken_off["stopped"], "the run did not stop at its checkpoint"
        train.run(stopped.replace(resume=True), **given)
        rows = [metrics(folder) for folder in folders]
        weights = [load_file(folder / "policy" / "model.safetensors") for folder in folders]
    same = [weights[0][name].tobytes() == weights[1][name].tobytes() for name in weights[0]]
    apart = max(float(np.abs(weights[0][name] - weights[1][name]).max()) for name in weights[0])
    return {
        "steps": len(rows[0]),
        "moved": any(row["grad_norm"] > 0 for row in rows[0]),
        "same_metrics": rows[0] == rows[1],
        "same_weights": all(same),
        "largest_difference": apart,
        "agrees": rows[0] == rows[1] and all(same),
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without timings."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMINGS)} for line in lines]
