"""A long run of a tiny task: memory and open files stay flat, and no iteration is slower than those before."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from faults.children import preload
from faults.kills import train
from faults.outcome import Outcome
from faults.runs import make_runs

MEGABYTES, FILES, SLOWER = 40.0, 5, 1.3
"""What may be added between the second quarter of a run and its last, and the ratio of their seconds."""


class Sample(NamedTuple):
    """What /proc says of a process after some iterations."""

    iteration: int
    megabytes: float
    files: int


def campaign(folder: Path, seed: int, count: int) -> Iterator[Outcome]:
    """One run of `count` iterations."""
    preload()
    (kind,) = make_runs(folder / "long", ("text",))
    values = yaml.safe_load(kind.config.read_text())
    _shorten(values, seed, count)
    kind.config.write_text(yaml.safe_dump(values))
    target = kind.config.parent / "run"
    samples: list[Sample] = []
    ended = train(kind, target, after=lambda pid: _watch(pid, target / "metrics.jsonl", samples, count))
    if ended.code != 0:
        yield Outcome(f"{count} iterations", False, None, ended.err[-300:])
        return
    rows = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    before, after = (_part(samples, count, quarter) for quarter in (2, 4))
    added = {name: _median(after, name) - _median(before, name) for name in ("megabytes", "files")}
    early, late = (statistics.median(_seconds(rows, quarter)) for quarter in (2, 4))
    figures = (
        f"{count} iterations: {_median(after, 'megabytes'):.0f} MB ({added['megabytes']:+.1f} between second and last "
        f"quarter), {_median(after, 'files'):.0f} open files ({added['files']:+.0f}), "
        f"{1000 * early:.0f} ms then {1000 * late:.0f} ms an iteration"
    )
    flat = added["megabytes"] < MEGABYTES and added["files"] <= FILES and late < SLOWER * early
    yield Outcome(figures, flat, len(rows) == count, "" if flat else "it grows")


def _shorten(values: dict[str, Any], seed: int, count: int) -> None:
    values |= {"seed": seed, "algorithm": {}, "evaluation": {"every": 100, "sampled": False}}
    values["sampling"] = {"group_size": 2, "max_new_tokens": 4}
    values["training"] = {"prompts_per_batch": 2, "max_steps": count, "save_every": 50}


def _watch(pid: int, metrics: Path, samples: list[Sample], count: int) -> None:
    """Looks at the process until it is near its end."""
    while os.path.exists(f"/proc/{pid}/statm"):
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{pid}/fd"))
            done = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        except (OSError, IndexError):
            return
        if done:
            samples.append(Sample(done, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files))
        if done >= count:
            return
        time.sleep(0.5)


def _part(samples: list[Sample], count: int, quarter: int) -> list[Sample]:
    return [sample for sample in samples if quarter - 1 < 4 * sample.iteration / count <= quarter]


def _median(samples: list[Sample], name: str) -> float:
    return statistics.median(getattr(sample, name) for sample in samples)


def _seconds(rows: list[dict[str, Any]], quarter: int) -> list[float]:
    part = slice(len(rows) * (quarter - 1) // 4, len(rows) * quarter // 4)
    return [row["seconds/total"] for row in rows[part]]
