"""The work of runs beside TRL, the same for both libraries: sums, reward, settings, and report.

Imported by the workers, `time_to_reward.py` and `reasoning_gym_tasks.py`: the standard library, and `iteration_work`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import iteration_work as work

PROMPTS, GROUP, NEW_TOKENS = 4, 8, 12
RATE, BETA1, BETA2, CLIP_NORM = 3e-4, 0.9, 0.99, 1.0
RANK, ALPHA = 16, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEAST, MOST = 10, 40  # of a summand


def sums() -> list[dict[str, str]]:
    """All prompts, with their answers."""
    pairs = [(a, b) for a in range(LEAST, MOST) for b in range(LEAST, MOST)]
    return [{"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)} for a, b in pairs]


def chat(prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
    """A prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def share(text: str, answer: str) -> float:
    """The share of the digits of a text's last number that are those of the answer."""
    number = (re.findall(r"\d+", text) or [""])[-1]
    return sum(a == b for a, b in zip(number, answer, strict=False)) / max(len(number), len(answer))


def digits(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
    """The reward, with the arguments that both libraries give it; completions are texts, or messages in TRL."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [share(text, right) for text, right in zip(texts, answer, strict=True)]


def brevity(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
    """A second reward in another unit: minus the characters by which a text is longer or shorter than the answer."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [-float(abs(len(text.strip()) - len(right))) for text, right in zip(texts, answer, strict=True)]


@dataclass(frozen=True)
class Assignment:
    """A worker's assignment: folder, prompts, seed, steps, variant, time of its start, rewards by commas, sampling."""

    folder: Path
    rows: Path
    seed: int
    steps: int
    variant: str
    started: float
    out: Path
    reward: str = "reward_work:digits"
    temperature: float = 1.0
    new_tokens: int = NEW_TOKENS

    @property
    def functions(self) -> list[Callable[..., list[float]]]:
        """The rewards, by their import paths."""
        paths = [path.partition(":") for path in self.reward.split(",")]
        return [getattr(importlib.import_module(module), name) for module, _, name in paths]

    def command_line(self) -> list[str]:
        return [text for name, value in vars(self).items() for text in (f"--{name}", str(value))]


def assignment(arguments: Sequence[str] | None = None) -> Assignment:
    """Reads a worker's command line, as `Assignment.command_line` writes it."""
    parser = argparse.ArgumentParser()
    for name, kind in (("folder", Path), ("rows", Path), ("seed", int), ("steps", int), ("variant", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    further = (("started", float), ("out", Path), ("reward", str), ("temperature", float), ("new_tokens", int))
    for name, kind in further:
        parser.add_argument(f"--{name}", type=kind, required=True)
    return Assignment(**vars(parser.parse_args(arguments)))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, with imports, and of its finished children."""
    return sum(os.times()[:4])


@dataclass
class Stopwatch:
    """One row per step: means of its batch (the reward, further measures), and the seconds since the process began."""

    given: Assignment
    rows: list[dict[str, float]] = field(default_factory=list)

    def step(self, reward: float, **measures: float) -> None:
        self.rows.append({"reward": reward, **measures, **self.now()})

    def now(self) -> dict[str, float]:
        """Seconds and memory so far."""
        return {"cpu": cpu_seconds(), "wall": time.time() - self.given.started, "peak_mib": work.peak_mib()}

    def write(self, packages: Sequence[str], **found: float) -> None:
        if len(self.rows) != self.given.steps:
            raise RuntimeError(f"expected {self.given.steps} steps, saw {len(self.rows)}")
        report = {"steps": self.rows, "process": self.now(), "versions": work.versions(packages), **found}
        self.given.out.write_text(json.dumps(report))
