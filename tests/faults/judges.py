"""Every fault of `judge_faults` through the training command, where failing judges stop a run and where they may."""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import yaml
from faults.judge_faults import FAULTS, Fault
from faults.outcome import Outcome
from support.text_task import make_place, rows

MODES = ("stop", "missing")
LONGEST = 300
COMPLETIONS = 16
RESUMED = 8  # of so many runs that stopped, one goes on


def campaign(folder: Path, seed: int, count: int | None = None) -> Iterator[Outcome]:
    """Puts faults through the command.

    Args:
        folder: For policy, prompts and runs.
        seed: Chooses the faults, and the order.
        count: How many; None for all of them in both modes.
    """
    folder = folder / "judges"
    folder.mkdir(parents=True)
    place = make_place(folder)
    cases = [(fault, mode) for fault in FAULTS for mode in MODES]
    random.Random(seed).shuffle(cases)
    for number, (fault, mode) in enumerate(cases[:count]):
        if number % 20 == 0:
            jax.clear_caches()  # programs of all runs together are gigabytes
        run = folder / f"run_{number}"
        yield tried(place.config, run, fault, mode, resumed=number % RESUMED == 0)


def tried(config: Path, run: Path, fault: Fault, mode: str, *, resumed: bool) -> Outcome:
    """One fault through the command."""
    case = f"{fault.name} ({mode})"
    try:
        code, told = command(tiny(config, run, fault), run, "--on_judge_error", mode, "--config", str(run) + ".yaml")
        refused = fault.early == "import" or (mode == "stop" and fault.missing != "none")
        found = stopped(run, fault, code, told) if refused else went_on(run, fault, code, told)
        if not found and refused and resumed and fault.early == "":
            found = resumes(run)
    except BaseException as error:  # what came through the command
        return Outcome(case, handled=False, note=f"{type(error).__name__}: {str(error)[:200]}")
    return Outcome(case, handled=not found, note=found)


def tiny(config: Path, run: Path, fault: Fault) -> dict[str, str]:
    """Writes the reward and a config of two small steps that asks it; what the environment must say."""
    module = run.parent / f"{run.name}_judge.py"
    module.write_text(fault.source)
    values: dict[str, Any] = yaml.safe_load(config.read_text())
    sound = values["rewards"][1]
    values["rewards"] = [{"name": f"{module}:judged", "isolated": fault.isolated}, sound]
    values["training"] |= {"max_steps": 2, "inner_epochs": 1, "minibatches": 1, "save_every": 1}
    values["algorithm"] = {}
    values["evaluation"] = {"every": 0, "prompts": 2, "sampled": False}
    values["judge_timeout"] = fault.timeout
    Path(f"{run}.yaml").write_text(yaml.safe_dump(values))
    return {"JUDGE_FAULT": "1", "JUDGE_RUN": str(run), "JUDGE": "work:0"}


def command(environment: Mapping[str, str], run: Path, *arguments: str) -> tuple[int, str]:
    """The training command in this process: its exit code, and what it wrote to standard error."""
    from grpo_jax.train import main

    before, told = dict(os.environ), io.StringIO()
    os.environ.update(environment)
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            return main([*arguments, "--run_dir", str(run)]), told.getvalue()
    finally:
        os.environ.clear()
        os.environ.update(before)


def wrong_line(told: str) -> str:
    """What is wrong with what a refused command wrote; "" for one short line that names the reward."""
    lines = [line for line in told.splitlines() if line.startswith("error:")]
    if "Traceback" in told or len(lines) != 1:
        return f"not one line: {told[-300:]!r}"
    if len(lines[0]) >= LONGEST or not lines[0].isprintable():
        return f"too long or not printable: {lines[0]!r}"
    return "" if "judged" in lines[0] else f"the reward is not named: {lines[0]!r}"


def stopped(run: Path, fault: Fault, code: int, told: str) -> str:
    """What is wrong with a run that had to stop."""
    if code != 2:
        return f"exit code {code}: {told[-300:]!r}"
    found = wrong_line(told)
    if found or fault.early:
        return found or ("" if not run.exists() else "a run directory is left, with nothing in it")
    return "" if saved_step(run) == 1 else f"saved after {saved_step(run)} iterations"


def went_on(run: Path, fault: Fault, code: int, told: str) -> str:
    """What is wrong with a run that had to go on without the rewards that failed."""
    if code != 0:
        return f"exit code {code}: {told[-300:]!r}"
    share = {"all": 1.0, "first": 1 / COMPLETIONS, "none": 0.0}[fault.missing]
    mean = None if fault.missing == "all" else fault.number
    healthy = (1.0, None) if fault.early else (0.0, 1.0)
    table = [(row["missing/judged"], row["reward/judged/mean"]) for row in rows(run)]
    if not all(map(same, table, (healthy, (share, mean)))) or len(table) != 2:
        return f"shares and means are {table}"
    return "" if all(row["missing/brief"] == 0 for row in rows(run)) else "the other reward is missing too"


def same(came: tuple[float, float | None], expected: tuple[float, float | None]) -> bool:
    """Whether share and mean are equal up to rounding."""
    numbers = zip(came, expected, strict=True)
    return all(a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6)) for a, b in numbers)


def resumes(run: Path) -> str:
    """What is wrong with going on from a run that stopped, by a reward that works again."""
    os.environ.pop("JUDGE_FAULT", None)
    forget(run)
    code, told = command({"JUDGE_RUN": str(run), "JUDGE": "work:0"}, run, "--resume")
    if code != 0 or [row["missing/judged"] for row in rows(run)] != [0, 0]:
        return f"resumed with exit code {code}: {told[-300:]!r}"
    return ""


def forget(run: Path) -> None:
    """Lets the reward's module be imported again: it has looked at the environment."""
    import sys

    for name in [name for name in sys.modules if name.startswith(f"grpo_jax_file_{run.name}_")]:
        del sys.modules[name]


def saved_step(run: Path) -> int | None:
    """The iteration of the last checkpoint, read as a resume does."""
    from grpo_jax.runs.checkpoint import Checkpoints

    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.read_meta("latest")["progress"]["iteration"]
