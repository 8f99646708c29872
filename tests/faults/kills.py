"""Runs that are killed or stopped at random moments of every phase, and resumed: each must equal an undisturbed run.

A reference run measures how long each call of each phase takes; a fault comes in one of these calls, after a random
part of that time.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from faults.children import Ended, preload, run, value_of
from faults.outcome import Outcome
from faults.runs import NAMES, Tried, differences, make_runs, outcome_of

PHASES = {
    "load": "grpo_jax.runs.trainer:load",
    "baseline": "grpo_jax.runs.trainer:measure_all",
    "SFT": "grpo_jax.runs.trainer:warm_up",
    "iteration": "grpo_jax.runs.batches:collect_batch",
    "records": "grpo_jax.reports.output:RunOutput.iteration",
    "validation": "grpo_jax.runs.trainer:Trainer.validate",
    "save": "grpo_jax.runs.checkpoint:Checkpoints.save",
    "seal": "grpo_jax.runs.checkpoint:Checkpoints._seal",
    "name": "grpo_jax.runs.checkpoint:Checkpoints.save_as",
    "export": "grpo_jax.models.policy:Policy.save",
    "images": "grpo_jax.runs.directory:RunDirectory.write_images",
    "report": "grpo_jax.reports.output:write_report",
    "resume": "grpo_jax.runs.trainer:Trainer.resume",
}
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ACKNOWLEDGED = {
    signal.SIGTERM: r"SIGTERM: stopping( after this iteration)?\n",
    signal.SIGINT: r"stopping( after this iteration)?; Ctrl-C again stops now\n",
}
"""Line that a stopped run may write to standard error; SIGHUP is ignored."""


class Moment(NamedTuple):
    """When a fault comes: in the call of a phase, so many seconds after it began."""

    phase: str
    call: int
    seconds: float
    signal: int


def campaign(folder: Path, seed: int, count: int, names: tuple[str, ...] = NAMES) -> Iterator[Outcome]:
    """Kills `count` runs, each once or twice; their kinds in turn."""
    preload(names)
    draw = random.Random(seed)
    tried = make_runs(folder, names)
    known: dict[str, Reference] = {}
    for number in range(count):
        kind = tried[number % len(tried)]
        if kind.name not in known:
            known[kind.name] = Reference.of(kind, folder / kind.name)
        yield _case(kind, known[kind.name], folder / kind.name / f"case_{number}", draw)


class Reference(NamedTuple):
    """A run without a fault: what it came to, and how long the calls of its phases took."""

    outcome: dict[str, Any]
    seconds: dict[str, list[float]]

    @classmethod
    def of(cls, kind: Tried, folder: Path) -> Reference:
        """Makes it, unless it was made."""
        times = folder / "times.jsonl"
        target = folder / "uninterrupted"
        if not (target / "summary.json").is_file():
            ended = train(kind, target, before=lambda: _watch(lambda *call: _note(times, *call)))
            if ended.code != 0:
                raise RuntimeError(f"the run without a fault failed: {ended.err or ended.out}")
        seconds: dict[str, list[float]] = {}
        for phase, spent in map(json.loads, times.read_text().splitlines()):
            seconds.setdefault(phase, []).append(spent)
        return cls(value_of(outcome_of, target, folder=folder), seconds)


def _case(kind: Tried, reference: Reference, target: Path, draw: random.Random) -> Outcome:
    """One run, killed once or twice."""
    moments = [_moment(reference, draw)]
    if draw.random() < 0.5:
        moments.append(_moment(reference, draw, again=True))
    shown = [f"{signal.Signals(m.signal).name} in {m.phase} {m.call + 1} +{m.seconds:.2f} s" for m in moments]
    wrong = []
    for moment in moments:
        ended = train(kind, target, before=lambda moment=moment: _arm(moment))
        wrong += _judge(ended, moment)
        if (target / "summary.json").is_file():
            break
    else:
        ended = train(kind, target)
        wrong += [f"the last one ended with {ended.code}: {ended.err.strip()[-300:]}"] if ended.code != 0 else []
    equal = None
    if not wrong:
        different = differences(value_of(outcome_of, target, folder=target.parent), reference.outcome)
        equal = not different
        wrong += [f"different: {different}"] if different else []
    return Outcome(f"{kind.name}: {', then '.join(shown)}", not wrong, equal, "; ".join(wrong))


def train(kind: Tried, target: Path, *, before: Callable[[], None] = lambda: None) -> Ended:
    """Begins a run, or goes on with it; `before` is called in its process."""

    def first() -> None:
        os.environ["JUDGE"], os.environ["JUDGE_RUN"] = "work:0", str(target)
        before()

    known = (target / "config.yaml").is_file()
    named = ["--resume"] if known else ["--config", str(kind.config)]
    return run([*named, "--run_dir", str(target)], before=first, folder=target.parent / f".{target.name}")


def _judge(ended: Ended, moment: Moment) -> list[str]:
    """Return the broken promises of a killed or stopped run."""
    if moment.signal == signal.SIGKILL:
        return [] if ended.code in (-signal.SIGKILL, 0) else [f"exit code {ended.code}: {ended.err[-200:]}"]
    wrong = []
    if ended.code != 0:
        wrong.append(f"exit code {ended.code}: {ended.err.strip()[-300:]}")
    if ended.err and not re.fullmatch(ACKNOWLEDGED.get(moment.signal, ""), ended.err):
        wrong.append(f"said on standard error: {ended.err[:200]}")
    return wrong


def _moment(reference: Reference, draw: random.Random, *, again: bool = False) -> Moment:
    phases = sorted(reference.seconds)
    phase = "resume" if again and draw.random() < 0.2 else draw.choice(phases)
    spent = reference.seconds.get(phase, [0.3])
    call = draw.randrange(len(spent))
    number = signal.SIGKILL if draw.random() < 0.7 else draw.choice(STOPS)
    return Moment(phase, call, draw.uniform(0, spent[call]), number)


def _watch(told: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Puts `told(phase, call)` in the place of every function of the phases; it makes the call."""
    for phase, place in PHASES.items():
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, name, _wrapped(getattr(owner, name), phase, told))


def _wrapped(function: Callable[..., Any], phase: str, told: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return told(phase, lambda: function(*arguments, **named))

    return call


def _note(path: Path, phase: str, call: Callable[[], Any]) -> Any:
    started = time.monotonic()
    try:
        return call()
    finally:
        with open(path, "a") as file:
            file.write(json.dumps([phase, time.monotonic() - started]) + "\n")


def _arm(moment: Moment) -> None:
    """Sends this process the signal at its moment."""
    calls = [0]

    def fire() -> None:
        time.sleep(moment.seconds)
        os.kill(os.getpid(), moment.signal)

    def told(phase: str, call: Callable[[], Any]) -> Any:
        if phase == moment.phase:
            calls[0] += 1
            if calls[0] == moment.call + 1:
                threading.Thread(target=fire, daemon=True).start()
        return call()

    _watch(told)
