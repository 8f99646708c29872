"""What reports and model cards read of a run's directory: its summary, and what its end was shown with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_jax.config.build import typed
from grpo_jax.config.files import load_json, read_text
from grpo_jax.errors import UserError
from grpo_jax.runs.directory import RunDirectory, finite, write_atomically

_SUMMARY: Mapping[str, Any] = {
    "iterations": int,
    "prompts": int,
    "evaluation": dict[str, dict[str, float | None]],
    "best": dict[str, float | None] | None,
    "seconds": dict[str, float | None],
    "versions": dict[str, str],
    "samples": dict[str, Any],
}
"""What pages and cards compute with, where a summary has it."""
_SAMPLES = dict[str, dict[str, dict[str, list[float | None] | None]]]


class RunEnd(NamedTuple):
    """What report.html shows that stands in no other file of a run; report.json.

    Attributes:
        sections: HTML of the gallery, the episodes and the tables by these names, in which all text is escaped.
        starts: Iterations done when a process began: the one after compiles.
        config: The configuration of the last process, as YAML.
    """

    sections: Mapping[str, str] = {}
    starts: Sequence[int] = (0,)
    config: str = ""


def write_end(run: RunDirectory, end: RunEnd) -> None:
    """Writes report.json.

    Raises:
        UserError: The disk is full.
    """
    write_atomically(run.end, json.dumps(finite(end._asdict()), indent=1) + "\n")


def read_end(run: RunDirectory) -> RunEnd:
    """Read report.json of a finished run.

    Raises:
        UserError: It is damaged, or of an earlier version.
    """
    if not run.end.exists():
        return RunEnd(config=read_config(run))
    stored = load_json(run.end)
    if "sections" not in stored:
        raise UserError(f"{run.end} is of another version of grpo_jax: report.html stays as that one wrote it")
    try:
        return RunEnd(
            typed(dict[str, str], stored["sections"], "sections"),
            typed(list[int], stored.get("starts"), "starts"),
            typed(str, stored.get("config"), "config"),
        )
    except UserError as error:
        raise UserError(f"{run.end}: {error}") from error


def read_config(run: RunDirectory) -> str:
    """Return the text of config.yaml."""
    return read_text(run.config) if run.config.is_file() else ""


def read_summary(run: RunDirectory, rows: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Read summary.json; empty for a run that has not finished, or goes on after it had.

    Args:
        run: Whose.
        rows: Of its metrics.jsonl.

    Raises:
        UserError: It is damaged.
    """
    summary = load_json(run.summary) if run.summary.exists() else {}
    try:
        for name in _SUMMARY.keys() & summary.keys():
            typed(_SUMMARY[name], summary[name], name)
        typed(_SAMPLES, summary.get("samples", {}).get("measures", {}), "samples.measures")
    except UserError as error:
        raise UserError(f"{run.summary}: {error}") from error
    return {} if rows and summary.get("iterations", rows[-1]["step"]) < rows[-1]["step"] else summary
