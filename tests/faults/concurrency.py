"""Several processes on one run directory: one writes, the others say so; reading disturbs nobody."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults.children import Ended, preload, run, value_of
from faults.kills import Reference, train
from faults.outcome import Outcome
from faults.runs import Tried, differences, make_runs, outcome_of


def campaign(folder: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Races of two to four processes that begin or resume one run, and evaluations beside a training run."""
    preload()
    draw = random.Random(seed)
    text, cartpole = make_runs(folder, ("text", "cartpole"))
    known = {kind.name: Reference.of(kind, folder / kind.name) for kind in (text, cartpole)}
    for number in range(count):
        if number % 4 == 3:
            yield _evaluated(text, known["text"], folder / "text" / f"read_{number}")
        else:
            racers, resumed = draw.randrange(2, 5), number % 2 == 1
            yield _raced(cartpole, known["cartpole"], folder / "cartpole" / f"race_{number}", racers, resumed)


def _raced(kind: Tried, reference: Reference, target: Path, racers: int, resumed: bool) -> Outcome:
    case = f"{kind.name}: {racers} processes {'resume' if resumed else 'begin'} one run"
    if resumed:
        _unfinished(target.parent / "uninterrupted", target)
    named = ["--resume"] if resumed else ["--config", str(kind.config)]
    arguments = [*named, "--run_dir", str(target)]
    ends = _together([lambda i=i: run(arguments, folder=target.parent / f"racer_{i}") for i in range(racers)])
    refused = [ended for ended in ends if ended.code == 2 and ended.is_one_line and _says_why(ended)]
    done = [ended for ended in ends if ended.code == 0 and not ended.err]
    if not done or len(done) + len(refused) != racers:
        return Outcome(case, False, None, "; ".join(f"{ended.code}: {ended.err[:200]}" for ended in ends))
    different = differences(value_of(outcome_of, target, folder=target.parent), reference.outcome)
    return Outcome(case, not different, not different, different)


def _says_why(ended: Ended) -> bool:
    """In use; or, for who came after the end, there is a run already."""
    return "is in use by process" in ended.err or "continue it with --resume" in ended.err


def _evaluated(kind: Tried, reference: Reference, target: Path) -> Outcome:
    """Two processes measure the checkpoints of a run over and over while it goes on."""
    ended = threading.Event()
    wrong: list[str] = []

    def measure(which: str) -> None:
        done = 0
        while not ended.is_set() or not done:
            if not (target / "config.yaml").is_file():
                ended.wait(0.1)
                continue
            found = _evaluate(target, which, target.parent / f"reader_{which}")
            done += found.code == 0
            none = found.code == 2 and found.is_one_line and ("no checkpoint" in found.err or "no such" in found.err)
            if found.code != 0 and not none:
                wrong.append(f"evaluate --checkpoint {which}: {found.code}: {found.err[:200]}")
                return

    def learn() -> Ended:
        try:
            return train(kind, target)
        finally:
            ended.set()

    trained, *_ = _together([learn, lambda: measure("best"), lambda: measure("latest")])
    if trained.code != 0:
        wrong.append(f"the run: {trained.code}: {trained.err[:200]}")
    if not wrong:
        wrong += filter(None, [differences(value_of(outcome_of, target, folder=target.parent), reference.outcome)])
    return Outcome(f"{kind.name}: two evaluations beside it", not wrong, not wrong, "; ".join(wrong))


def _evaluate(target: Path, which: str, folder: Path) -> Ended:
    def first() -> None:
        os.environ["JUDGE_RUN"] = str(target)

    arguments = ["--run", str(target), "--checkpoint", which]
    return run(arguments, before=first, folder=folder, command="grpo_jax.evaluate")


def _together(calls: list[Callable[[], Ended]]) -> list[Ended]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def _unfinished(run: Path, to: Path) -> None:
    """A copy of a finished run that was stopped before its end was measured."""
    shutil.copytree(run, to)
    shutil.rmtree(to / "checkpoints" / "final")
    (to / "summary.json").unlink()
