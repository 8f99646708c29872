"""Disks that are full: no file of a run may grow beyond a size, and each write beyond it fails, in C++ too."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path

from faults.children import Ended, preload, value_of
from faults.kills import Reference, train
from faults.outcome import Outcome
from faults.runs import Tried, differences, make_runs, outcome_of

FILE_SIZES = (0, 1, 512, 4096, 16384, 65536, 262144)


def campaign(folder: Path, seed: int, count: int, names: tuple[str, ...] = ("cartpole", "text")) -> Iterator[Outcome]:
    """`count` runs of which no file may grow beyond a size, each gone on with without the limit."""
    preload(names)
    tried = [(kind, size) for kind in make_runs(folder, names) for size in FILE_SIZES]
    for number, (kind, size) in enumerate(random.Random(seed).sample(tried, min(count, len(tried)))):
        reference = Reference.of(kind, folder / kind.name)
        yield _limited(kind, folder / kind.name / f"limit_{number}", size, reference)


def _limited(kind: Tried, target: Path, size: int, reference: Reference) -> Outcome:
    def limit() -> None:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # its files are not the run's
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    ended = train(kind, target, before=limit)
    wrong = _complaint(ended) if size >= 4096 else ""  # what the command says must fit into a file as well
    if ended.code != 0:
        again = train(kind, target)
        wrong += f"; then {again.code}: {again.err.strip()[-300:]}" if again.code != 0 else ""
    case = f"{kind.name}: files of at most {size} bytes"
    if not (target / "summary.json").is_file():
        return Outcome(case, not wrong, False, wrong or f"no summary: {ended.out.strip()[-200:]}")
    different = differences(value_of(outcome_of, target, folder=target.parent), reference.outcome)
    return Outcome(case, not wrong, not different, "; ".join(filter(None, (wrong, different))))


def _complaint(ended: Ended) -> str:
    """What a command did that it does not promise; "" for nothing."""
    if ended.code == 0:
        return f"noise: {ended.err[:300]}" if ended.err else ""
    if ended.code != 2 or not ended.is_one_line:
        return f"exit code {ended.code}: {ended.err[:300]}"
    return ""
