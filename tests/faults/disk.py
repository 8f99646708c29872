"""Disks that are full, broken or forbidden: every call of a run that changes its files fails, one after the other.

Runs are the real command in forked children, under `failing_writes.c`, on a small tmpfs, or with a limit on the size of
a file. What is compared with, and what goes on after a fault, is the same command without.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from faults.children import Ended, preload, value_of
from faults.kills import Reference, train
from faults.outcome import Outcome
from faults.runs import Tried, differences, make_runs, outcome_of

CODES = (errno.ENOSPC, errno.EIO, errno.EACCES)
TMPFS = ("16k", "64k", "256k", "512k", "1m", "2m", "4m", "16m", "64m")
FILE_SIZES = (0, 1, 512, 4096, 16384, 65536, 262144)
LIBRARY = "GRPO_JAX_FAILING_WRITES"
NAMES = {  # what is called otherwise in every run
    r"[0-9a-f]{32}": "*",  # tensorstore's data
    r"#\d+ \(deleted\)": "#*",
    r"/(\.[\w.]+\.(?:yaml|jsonl?|html|parquet|png))\.\w+": r"/\1.*",  # written whole, then renamed
    r"/\.tmp\w+": "/.tmp*",
    r"writing-\d+": "writing-*",
}


class Unavailable(Exception):
    """There is no C compiler here, or this is no Linux: the message says which."""


class Site(NamedTuple):
    """One call of a run: the `occurrence`-th, from 1, that fits `match` (as FAULT_MATCH of failing_writes.c)."""

    match: str
    occurrence: int


class Case(NamedTuple):
    """A call that fails in a run: once, or with `times` -1 each time from there on."""

    kind: Tried
    site: Site
    code: int
    times: int

    def __str__(self) -> str:
        """In a few words."""
        always = "" if self.times == 1 else " and ever after"
        return f"{self.kind.name}: {errno.errorcode[self.code]} at {self.site.match} no. {self.site.occurrence}{always}"


def prepare(folder: Path) -> None:
    """Starts this process again with the library in it, which must come before everything else."""
    if LIBRARY in os.environ:
        return
    folder.mkdir(parents=True, exist_ok=True)
    library = str(build(folder))
    os.execve(sys.executable, sys.orig_argv, os.environ | {LIBRARY: library, "LD_PRELOAD": library})


def campaign(folder: Path, seed: int, count: int, names: tuple[str, ...] = ("cartpole", "text")) -> Iterator[Outcome]:
    """`count` calls that fail, each kind of call in turn; beside them small disks and limits on the size of files."""
    preload()
    folder = folder.resolve() / "disk"  # its runs are shorter than those of other faults
    folder.mkdir(exist_ok=True)
    draw = random.Random(seed)
    kinds = make_runs(folder, names)
    for kind in kinds:
        _shorten(kind)
    known = {kind.name: Reference.of(kind, folder / kind.name) for kind in kinds}
    cases = [
        Case(kind, site, *fault)
        for kind in kinds
        for site in sites_of(kind)
        for fault in ((errno.ENOSPC, 1), (errno.EIO, 1), (errno.EACCES, 1), (errno.ENOSPC, -1))
    ]
    for number, case in enumerate(chosen(cases, draw, count)):
        target = folder / case.kind.name / f"case_{number}"
        outcome = one_call(case, target, known[case.kind.name])
        if outcome is not None:
            yield outcome
        shutil.rmtree(target, ignore_errors=True)
    small = [(kind, size) for kind in kinds for size in FILE_SIZES]
    for number, (kind, size) in enumerate(draw.sample(small, min(len(small), count // 10))):
        yield limited(kind, folder / kind.name / f"limit_{number}", size, known[kind.name])
    disks = [(kind, size) for kind in kinds for size in TMPFS]
    for number, (kind, size) in enumerate(draw.sample(disks, min(len(disks), count // 10))):
        yield from small_disk(kind, folder / kind.name / f"disk_{number}", size, known[kind.name])


def _shorten(kind: Tried) -> None:
    """Two saves and an end are all the writes there are."""
    values = yaml.safe_load(kind.config.read_text())
    steps = {"iterations": 10, "save_every": 5} if kind.name == "cartpole" else {"max_steps": 2, "save_every": 1}
    values["training"] |= steps
    values["evaluation"] |= {} if kind.name == "cartpole" else {"every": 1}
    kind.config.write_text(yaml.safe_dump(values))


def chosen(cases: list[Case], draw: random.Random, count: int) -> list[Case]:
    """Some of the cases; each kind of call is as likely as another, however often it is made."""
    kinds: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        kinds.setdefault((case.kind.name, re.sub(r"\d+", "0", case.site.match)), []).append(case)
    order = sorted(kinds)
    draw.shuffle(order)
    return [draw.choice(kinds[order[number % len(order)]]) for number in range(count)]


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
    folder: Path, log: Path, *, match: str = "", at: int = 0, times: int = 1, code: int = errno.ENOSPC
) -> dict[str, str]:
    """The environment in which calls fail, or with `at` 0 are counted."""
    return {
        "FAULT_FOLDER": str(folder.resolve()),
        "FAULT_LOG": str(log),
        "FAULT_MATCH": match,
        "FAULT_AT": str(at),
        "FAULT_TIMES": str(times),
        "FAULT_ERRNO": str(code),
    }


def armed(environment: dict[str, str]) -> Callable[[], None]:
    """What a child does first so that its calls are counted and fail."""

    def begin() -> None:
        os.environ.update(environment)
        ctypes.CDLL(os.environ[LIBRARY]).fault_begin()

    return begin


def sites_of(kind: Tried) -> list[Site]:
    """Every call of a run that changes files."""
    folder = kind.config.parent
    run, log = folder / "counted", folder / "counted.log"
    ended = train(kind, run, before=armed(failing(run, log)))
    assert ended.code == 0 and not ended.err, ended
    seen: dict[str, int] = {}
    sites = []
    for line in log.read_text().splitlines():
        _, call, path = line.split(" ", 2)
        for pattern, name in NAMES.items():
            path = re.sub(pattern, name, path)
        match = f"{call} *{path.removeprefix(str(run))}"
        seen[match] = seen.get(match, 0) + 1
        sites.append(Site(match, seen[match]))
    return sites


def one_call(case: Case, target: Path, reference: Reference) -> Outcome | None:
    """What comes of it; None if this run never came to the call."""
    log = target.with_suffix(".log")
    environment = failing(target, log, match=case.site.match, at=case.site.occurrence, times=case.times, code=case.code)
    ended = train(case.kind, target, before=armed(environment))
    if not log.exists() or len(log.read_text().splitlines()) < case.site.occurrence:
        return None
    return judged(str(case), case.kind, target, ended, reference)


def limited(kind: Tried, target: Path, size: int, reference: Reference) -> Outcome:
    """No file may grow beyond a size."""

    def limit() -> None:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # its files are not the run's
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    # Its own output is none of the run's files either.
    ended = train(kind, target, before=limit)
    return judged(f"{kind.name}: files of at most {size} bytes", kind, target, ended, reference, said=size >= 4096)


def small_disk(kind: Tried, folder: Path, size: str, reference: Reference) -> Iterator[Outcome]:
    """The run directory on a disk of its own, which grows before the run goes on; nothing where that needs root."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        return
    try:
        target = folder / "run"
        ended = train(kind, target, output=folder.with_suffix(".output"))
        subprocess.run(["mount", "-o", "remount,size=256m", str(folder)], check=True)
        yield judged(f"{kind.name}: a disk of {size}", kind, target, ended, reference)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def judged(case: str, kind: Tried, target: Path, ended: Ended, reference: Reference, *, said: bool = True) -> Outcome:
    """Whether the command did what it promises, and what came of the run when it went on without the fault."""
    wrong = complaint(ended) if said else ""
    output = target.parent.with_suffix(".again") if target.name == "run" else None
    if ended.code != 0:
        again = train(kind, target, output=output)
        wrong += f"; then {again.code}: {again.err.strip()[-300:]}" if again.code != 0 else ""
    if not (target / "summary.json").is_file():
        return Outcome(case, not wrong, False, wrong or f"no summary: {ended.out.strip()[-200:]}")
    different = differences(value_of(outcome_of, target, folder=kind.config.parent), reference.outcome)
    return Outcome(case, not wrong, not different, "; ".join(filter(None, (wrong, different))))


def complaint(ended: Ended) -> str:
    """What a command did that it does not promise; "" for nothing."""
    lines = ended.err.splitlines()
    seen = f" ({len(lines)} lines: {' | '.join(lines[:1] + lines[-1:])[:300]})"
    if ended.code == 0:
        return "noise" + seen if lines else ""
    if ended.code != 2:
        return f"exit code {ended.code}" + seen
    return "" if ended.is_one_line else "not one line" + seen
