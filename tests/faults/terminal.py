"""Terminals that go away, judges that close them or hang, folders that vanish: the run goes on, or ends in one line."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from faults.children import Ended, preload, value_of
from faults.kills import Reference, train
from faults.outcome import Outcome
from faults.runs import Tried, differences, make_runs, outcome_of

STOP_SECONDS = 30.0


def campaign(folder: Path, seed: int, count: int) -> Iterator[Outcome]:
    """The first `count` of the cases; nothing in them is random."""
    preload()
    text, cartpole = make_runs(folder, ("text", "cartpole"))
    known = {kind.name: Reference.of(kind, folder / kind.name) for kind in (text, cartpole)}
    cases: list[tuple[str, Tried, Callable[[Tried, Path], str]]] = [
        ("the judge hangs and SIGTERM comes", text, _judge_hangs),
        ("the judge closes its streams", text, _judge_closes),
        ("nobody reads standard output", cartpole, _nobody_reads),
        ("standard output is a full disk", cartpole, _full_output),
        ("standard output is closed", cartpole, _closed_output),
        ("the run directory is deleted", cartpole, _deleted),
        ("nobody reads standard output", text, _nobody_reads),
        ("standard output is a full disk", text, _full_output),
        ("Ctrl-C twice", cartpole, _twice),
        ("Ctrl-C twice", text, _twice),
        ("SIGTERM while loading", text, _while_loading),
    ]
    for number, (case, kind, act) in enumerate(cases[:count]):
        target = folder / kind.name / f"terminal_{number}"
        wrong, equal = act(kind, target), None
        if not wrong and act is not _deleted:
            if not (target / "summary.json").is_file():
                ended = train(kind, target)
                wrong = "" if ended.code == 0 else f"it does not go on: {ended.err[-200:]}"
            if not wrong:
                wrong = differences(value_of(outcome_of, target, folder=target.parent), known[kind.name].outcome)
                equal = not wrong
        yield Outcome(f"{kind.name}: {case}", not wrong, equal, wrong)


def _ends_well(ended: Ended) -> str:
    return "" if ended.code == 0 and not ended.err else f"exit code {ended.code}: {ended.err[:300]}"


def _nobody_reads(kind: Tried, target: Path) -> str:
    def act() -> None:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)

    return _ends_well(train(kind, target, before=act)) or _noted(target)


def _full_output(kind: Tried, target: Path) -> str:
    ended = train(kind, target, before=lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1) and None)
    return _ends_well(ended) or _noted(target)


def _closed_output(kind: Tried, target: Path) -> str:
    return _ends_well(train(kind, target, before=lambda: os.closerange(0, 2)))


def _noted(target: Path) -> str:
    log = (target / "train.log").read_text()
    return "" if "the terminal is gone" in log and "report: " in log else "the log does not go on"


def _judge_closes(kind: Tried, target: Path) -> str:
    return _ends_well(train(kind, target, judge="close:1"))


def _judge_hangs(kind: Tried, target: Path) -> str:
    told = [0.0]

    def stop(pid: int) -> None:
        _wait_for(target / "held")
        os.kill(pid, signal.SIGTERM)
        told[0] = time.monotonic()

    ended = train(kind, target, judge="hold:1", after=stop)
    seconds = time.monotonic() - told[0]
    (target / "held").unlink()
    return _ends_well(ended) or ("" if seconds < STOP_SECONDS else f"it took {seconds:.0f} s to stop")


def _while_loading(kind: Tried, target: Path) -> str:
    def stop(pid: int) -> None:
        _wait_for(target / "train.log")
        os.kill(pid, signal.SIGTERM)

    ended = train(kind, target, after=stop)
    return _ends_well(ended) or ("" if "stopped" in ended.out else "it went on")


def _twice(kind: Tried, target: Path) -> str:
    def stop(pid: int) -> None:
        _wait_for(target / "metrics.jsonl")
        for _ in range(2):
            os.kill(pid, signal.SIGINT)
            time.sleep(0.05)

    ended = train(kind, target, after=stop)
    quiet = ended.err in ("", "interrupted\n") and ended.code in (0, 130)
    return "" if quiet else f"exit code {ended.code}: {ended.err[:300]}"


def _deleted(kind: Tried, target: Path) -> str:
    def remove(pid: int) -> None:
        _wait_for(target / "metrics.jsonl")
        shutil.rmtree(target, ignore_errors=True)

    ended = train(kind, target, after=remove)
    right = ended.code == 2 and ended.is_one_line and "deleted under the run" in ended.err
    return "" if right else f"exit code {ended.code}: {ended.err[:300]}"


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
