"""Disks that are full, broken or forbidden: every call of a run that changes its files fails once, one after the other.

Runs are the real command in a process of their own, under `failing_writes.c`, on a small tmpfs, or with a limit on the
size of a file. What is compared with, and what goes on after a fault, is the same command without.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from faults.outcome import Outcome
from support.text_task import ROOT, assert_same_bits, assert_same_run, make_place

CODES = (errno.ENOSPC, errno.EIO, errno.EACCES)
PATIENCE = 60  # seconds more than the run without a fault: who takes longer hangs
LONGEST_LINE = 300
TMPFS = ("16k", "64k", "256k", "512k", "1m", "2m", "4m", "16m", "64m")
FILE_SIZES = (0, 1, 512, 4096, 16384, 65536, 262144)
CARTPOLE = {
    "task": "cartpole",
    "num_seeds": 1,
    "report_to": [],
    "algorithm": {"name": "ppo", "kl_coef": 0.0, "epochs": 1, "minibatches": 1},
    "rollout": {"environments": 4, "steps": 16},
    "network": {"hidden": [8]},
    "training": {"iterations": 2, "save_every": 1},
    "evaluation": {"every": 1, "episodes": 4},
}
NAMES = {  # what is called otherwise in every run
    r"[0-9a-f]{32}": "*",  # tensorstore's data
    r"#\d+ \(deleted\)": "#*",
    r"/(\.[\w.]+\.(?:yaml|jsonl?|html|parquet|png))\.\w+": r"/\1.*",  # written whole, then renamed
    r"/\.tmp\w+": "/.tmp*",
    r"writing-\d+": "writing-*",
}


class Unavailable(Exception):
    """There is no C compiler here, or this is no Linux: the message says which."""


class Task(NamedTuple):
    """What is run.

    Attributes:
        name: in cases.
        config: file of the config.
        same: raises AssertionError where two run directories differ in more than times.
    """

    name: str
    config: Path
    same: Callable[[Path, Path], None]


class Site(NamedTuple):
    """One call of a run: the `occurrence`-th, from 1, that fits `match` (as FAULT_MATCH of failing_writes.c)."""

    match: str
    occurrence: int


class Ended(NamedTuple):
    """How a command ended; `code` is None if it had to be killed."""

    code: int | None
    out: str
    err: str


def campaign(folder: Path, seed: int, count: int | None = None) -> Iterator[Outcome]:
    """All of the faults of this file, or `count` of them.

    Args:
        folder: for runs; what is kept there are those without a fault.
        seed: of the choice.
        count: how many; None for every site and error.
    """
    folder = folder.resolve()
    rng = random.Random(seed)
    tasks = [cartpole_task(folder), text_task(folder)]
    try:
        library = build(folder)
    except Unavailable as reason:
        yield Outcome(f"failing calls: left out, {reason}", True)
        return
    references = {task.name: reference(task, library, folder) for task in tasks}
    cases = []
    for task in tasks:
        sites = references[task.name][1]
        cases += [(task, site, code, 1) for site in sites for code in CODES]
        cases += [(task, site, errno.ENOSPC, -1) for site in sites]  # as a disk that stays full
    numbers = itertools.count()
    for task, site, code, times in cases if count is None else chosen(cases, rng, count):
        run = folder / f"case_{next(numbers)}" / "run"
        outcome = one_call(task, library, run, site, code, times, references[task.name][0])
        if outcome is not None:
            yield outcome
        shutil.rmtree(run.parent)
    small = [(task, size) for task in tasks for size in FILE_SIZES]
    for task, size in small if count is None else rng.sample(small, min(len(small), count // 10)):
        yield limited(task, folder / f"limit_{next(numbers)}" / "run", size, references[task.name][0])
    small = [(task, size) for task in tasks for size in TMPFS]
    for task, size in small if count is None else rng.sample(small, min(len(small), count // 10)):
        yield from small_disk(task, folder / f"disk_{next(numbers)}", size, references[task.name][0])


def chosen(cases: list, rng: random.Random, count: int) -> list:
    """Some of the cases; each kind of call is as likely as another, however often it is made."""
    kinds: dict[tuple, list] = {}
    for case in cases:
        kinds.setdefault((case[0].name, re.sub(r"\d+", "0", case[1].match)), []).append(case)
    return [rng.choice(kinds[rng.choice(sorted(kinds))]) for _ in range(count)]


def build(folder: Path) -> Path:
    """The compiled library.

    Raises:
        Unavailable: There is no compiler, or another system.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        raise Unavailable("no C compiler" if sys.platform == "linux" else f"Linux only, this is {sys.platform}")
    library = folder / "failing_writes.so"
    source = Path(__file__).with_name("failing_writes.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def failing(
    library: Path, folder: Path, log: Path, *, match: str = "", at: int = 0, times: int = 1, code: int = errno.ENOSPC
) -> dict[str, str]:
    """The environment in which calls fail, or with `at` 0 are counted."""
    return {
        "LD_PRELOAD": str(library),
        "FAULT_FOLDER": str(folder.resolve()),
        "FAULT_LOG": str(log),
        "FAULT_MATCH": match,
        "FAULT_AT": str(at),
        "FAULT_TIMES": str(times),
        "FAULT_ERRNO": str(code),
    }


def cartpole_task(folder: Path) -> Task:
    """Two iterations in a second or two, most of which is compiled; without texts."""
    config = folder / "cartpole.yaml"
    config.write_text(yaml.safe_dump(CARTPOLE))
    return Task("cartpole", config, same_cartpole)


def text_task(folder: Path) -> Task:
    """Two iterations of the tiny text task: completions, a policy folder."""
    place = make_place(folder / "text")
    values = yaml.safe_load(place.config.read_text())
    values["training"] |= {"max_steps": 2, "save_every": 1}
    values["evaluation"]["every"] = 1
    place.config.write_text(yaml.safe_dump(values))
    return Task("text", place.config, assert_same_run)


def same_cartpole(came: Path, expected: Path) -> None:
    """Metrics and final checkpoint bit for bit, and what was measured."""

    def read(run: Path) -> tuple:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        rows = [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]
        summary = json.loads((run / "summary.json").read_text())
        return rows, summary["evaluation"], summary["returns"], (run / "report.html").exists()

    assert read(came) == read(expected)
    assert_same_bits(final_arrays(came), final_arrays(expected))


def final_arrays(run: Path) -> dict[str, dict]:
    """All arrays of the final checkpoint, read past the library."""
    (final,) = (run / "checkpoints" / "final").glob("version_?")
    with ocp.PyTreeCheckpointer() as reader, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where arrays were placed is read from the file as well
        found = {item: reader.restore(final / item) for item in ("variables", "training")}
    return jax.tree.map(np.asarray, found)


def start(task: Task, run: Path, more: dict[str, str], patience: float, *, limit: int | None = None) -> Ended:
    """The command in a process of its own, with a limit on the size of its files."""
    before = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit is not None else None
    judge = {"JUDGE": "work:0", "JUDGE_RUN": str(run), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "grpo_jax.train", "--config", str(task.config), "--run_dir", str(run)]
    process = subprocess.Popen(
        command,
        env=os.environ | judge | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )
    try:
        out, err = process.communicate(timeout=patience)
        return Ended(process.returncode, out, err)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return Ended(None, out, err)


def reference(task: Task, library: Path, folder: Path) -> tuple[Path, list[Site]]:
    """A run without a fault, and every call of it that changed files."""
    run, log = folder / f"{task.name}_expected" / "run", folder / f"{task.name}.log"
    ended = start(task, run, failing(library, run, log), 10 * PATIENCE)
    assert ended.code == 0 and not ended.err, ended
    seen: dict[str, int] = {}
    sites = []
    for line in log.read_text().splitlines():
        _, call, path = line.split(" ", 2)
        for pattern, name in NAMES.items():
            path = re.sub(pattern, name, path)
        match = f"{call} *{path.removeprefix(str(run.parent))}"
        seen[match] = seen.get(match, 0) + 1
        sites.append(Site(match, seen[match]))
    return run, sites


def one_call(task: Task, library: Path, run: Path, site: Site, code: int, times: int, expected: Path) -> Outcome | None:
    """One call fails, or with `times` -1 each from there on; None if this run never came to it."""
    run.parent.mkdir()
    log = run.parent / "log"
    faults = failing(library, run, log, match=site.match, at=site.occurrence, times=times, code=code)
    ended = start(task, run, faults, 2 * PATIENCE)
    if not log.exists() or len(log.read_text().splitlines()) < site.occurrence:
        return None
    always = "" if times == 1 else " and ever after"
    case = f"{task.name}: {errno.errorcode[code]} at {site.match} no. {site.occurrence}{always}"
    return judged(case, task, run, ended, expected)


def limited(task: Task, run: Path, size: int, expected: Path) -> Outcome:
    """No file may grow beyond a size."""
    run.parent.mkdir()
    quiet = {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # its files are not the run's
    ended = start(task, run, quiet, 2 * PATIENCE, limit=size)
    return judged(f"{task.name}: files of at most {size} bytes", task, run, ended, expected)


def small_disk(task: Task, folder: Path, size: str, expected: Path) -> Iterator[Outcome]:
    """The run directory on a disk of its own, which grows before the run goes on; nothing where that needs root."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        return
    try:
        ended = start(task, folder / "run", {}, 2 * PATIENCE)
        subprocess.run(["mount", "-o", "remount,size=256m", str(folder)], check=True)
        yield judged(f"{task.name}: a disk of {size}", task, folder / "run", ended, expected)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def judged(case: str, task: Task, run: Path, ended: Ended, expected: Path) -> Outcome:
    """Whether the command did what it promises, and what came of the run when it went on without the fault."""
    wrong = complaint(ended)
    if ended.code != 0:
        went = go_on(task, run)
        wrong += went and f"; then {went}"
    try:
        task.same(run, expected)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Outcome(case, not wrong, False, "; ".join(filter(None, (wrong, lines[0][:200]))))
    return Outcome(case, not wrong, True, wrong)


def complaint(ended: Ended) -> str:
    """What a command did that it does not promise; "" for nothing."""
    lines = ended.err.splitlines()
    seen = f" ({len(lines)} lines: {' | '.join(lines[:1] + lines[-1:])[:300]})"
    if ended.code is None:
        return "hangs" + seen
    if ended.code == 0:
        return "noise" + seen if any(not line.startswith(("note: ", "warning: ")) for line in lines) else ""
    if ended.code != 2:
        return f"exit code {ended.code}" + seen
    one = len(lines) == 1 and lines[0].startswith("error: ")
    return "" if one and len(lines[0]) < LONGEST_LINE else "not one line" + seen


def go_on(task: Task, run: Path) -> str:
    """Resumes a run as its user would, or starts it again where nothing was saved; why it does not come to its end."""
    from grpo_jax.runs.directory import RunDirectory

    new = ["--config", str(task.config)]
    saved = RunDirectory(run).holds_checkpoint()
    code, said = here(run, ["--resume"] if saved else new)
    if code == 2 and not saved and "--resume" in said:
        code, said = here(run, ["--resume"])
    return "" if code == 0 else f"exit code {code} without the fault: {said[-300:]}"


def here(run: Path, arguments: list[str]) -> tuple[int, str]:
    """The command in this process, which has imported what it needs; its exit code and what it wrote as errors."""
    from grpo_jax.train import main

    err = io.StringIO()
    os.environ |= {"JUDGE": "work:0", "JUDGE_RUN": str(run)}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            return main([*arguments, "--run_dir", str(run)]), err.getvalue()
        except Exception as error:
            return 1, f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    began = time.monotonic()
    for found in campaign(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None):
        print(f"{time.monotonic() - began:6.0f} s {found}", flush=True)
