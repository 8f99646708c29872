"""Seconds of an iteration's stages: as a run measured them, or as a command line gives them."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.command_line import load_config
from grpo_jax.config.run import Config
from grpo_jax.errors import UserError, said, shown
from grpo_jax.planning.request import JUDGES
from grpo_jax.planning.stages import UPDATE
from grpo_jax.runs.directory import RunDirectory, read_metrics

SAMPLE, RENDER, SCORE = "sample", "render", "score"
PIPE = ("read", SAMPLE, RENDER, SCORE, "respond")
"""Stages of a batch that a run may have, in their order; `UPDATE` comes after them."""
_COUNT = "completions"
_NUMBERS = f"{JUDGES} sample=12,render=40,score=3,update=9"


class Measured(NamedTuple):
    """What was measured of an iteration.

    Attributes:
        seconds: By stage, `UPDATE` the last.
        where: Where that stands, in words.
        config: Of the run that was measured; None where each stage had one replica and one device.
        completions: Of the iteration, where that is said; None for those of `config`, or of the planned one.
        total: Seconds of the whole iteration; None where nothing is known of it.
    """

    seconds: dict[str, float]
    where: str
    config: Config | None = None
    completions: int | None = None
    total: float | None = None


def read_measured(words: str, config: Config) -> Measured:
    """What --judges names.

    Args:
        words: A run's folder, its metrics.jsonl, "stage=seconds,…", or "" for the run_dir of the config.
        config: Of the plan.

    Raises:
        UserError: There are no such seconds; it says what is expected.
    """
    if not words and config.run_dir is None:
        raise UserError(f"{JUDGES}: say which run was measured, {JUDGES} runs/short, or give seconds, {_NUMBERS}")
    if "=" in words and not os.path.exists(words):
        return _given(words)
    return _of_run(Path(os.path.expanduser(words or str(config.run_dir))))


def _given(words: str) -> Measured:
    """Numbers of a command line."""
    known, found = (*PIPE, UPDATE, _COUNT), {}
    for part in words.split(","):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise UserError(f"{JUDGES}: {said(name)} is no stage; expected {', '.join(known)}, as in {_NUMBERS}")
        if name in found:
            raise UserError(f"{JUDGES}: {name} stands there twice")
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = math.nan
        if not (equals and 0 <= found[name] < math.inf):
            raise UserError(f"{JUDGES}: {name}: expected seconds of an iteration, a number >= 0, got {shown(text)}")
    count = found.pop(_COUNT, None)
    if count is not None and (count < 1 or count % 1):
        raise UserError(f"{JUDGES}: {_COUNT}: expected how many an iteration had, a whole number >= 1, got {count:g}")
    seconds = _in_order(found, "the command line", _NUMBERS)
    return Measured(seconds, "the command line", completions=None if count is None else int(count))


def _of_run(path: Path) -> Measured:
    """Medians over a run's iterations but for the first, in which programs are compiled."""
    folder = path.parent if path.is_file() else path
    metrics = path if path.is_file() else RunDirectory(path).metrics
    rows = read_metrics(metrics)
    if not rows:
        raise UserError(f"{JUDGES} {said(path)}: no metrics there; name a run's folder, or give seconds, {_NUMBERS}")
    if len(rows) < 2:
        raise UserError(
            f"{JUDGES} {said(path)}: one iteration alone, in which programs were compiled; train two or more"
        )
    saved = folder / "config.yaml"
    if not saved.is_file():
        raise UserError(
            f"{JUDGES} {said(path)}: no config.yaml beside it, which says what was measured; give seconds, {_NUMBERS}"
        )
    measured = load_config(saved)
    if not isinstance(measured, Config):
        raise UserError(f"{JUDGES} {said(path)}: not a run of a language policy; it has no such stages")
    medians = {name: _median(rows[1:], name, metrics) for name in (*PIPE, UPDATE, "total")}
    seconds = {name: value for name, value in medians.items() if value is not None}
    total = seconds.pop("total", None)
    where = f"{folder}, medians of {len(rows) - 1} iterations behind the first"
    return Measured(
        _in_order(seconds, str(path), "a run's seconds/sample and seconds/update"), where, measured, None, total
    )


def _median(rows: Sequence[Mapping[str, Any]], stage: str, path: Path) -> float | None:
    """Of seconds/STAGE; None where no row has it."""
    values = [row[f"seconds/{stage}"] for row in rows if f"seconds/{stage}" in row]
    if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in values):
        raise UserError(f"{path}: seconds/{stage}: expected numbers >= 0; mend or delete those lines")
    return statistics.median(values) if values else None


def _in_order(found: Mapping[str, float], where: str, example: str) -> dict[str, float]:
    for name in (SAMPLE, UPDATE):
        if name not in found:
            raise UserError(f"{JUDGES}: {said(where)} has no seconds of {name}; expected {example}")
    return {name: found[name] for name in (*PIPE, UPDATE) if name in found}
