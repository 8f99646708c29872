"""Metric writers: metrics.jsonl always, TensorBoard and Weights & Biases where `report_to` names them."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config.files import Values, read_text
from grpo_jax.errors import UserError, one_line
from grpo_jax.runs.directory import (
    AppendedFile,
    RunDirectory,
    disk_errors,
    finite,
    truncate_metrics,
    write_atomically,
)
from grpo_jax.tasks.display import GalleryEntry

_COMPLETIONS = 64  # of an iteration, in a table of Weights & Biases
_CELLS = (str, bool, int, float, type(None))


class MetricWriter:
    """Takes the numbers of each step; what it has no place for it leaves out."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row."""
        raise NotImplementedError

    def completions(self, step: int, columns: Mapping[str, Sequence[object]]) -> None:
        """Take the completions of an iteration, columns of one entry each."""

    def finish(self, summary: Values, gallery: Sequence[GalleryEntry] = ()) -> None:
        """Take summary and pictures of a finished run."""

    def close(self) -> None:
        """Flush and close."""


class JsonLines(MetricWriter):
    """metrics.jsonl: one object per row, on disk when `write` returns."""

    def __init__(self, path: str | Path):
        self._file = AppendedFile(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row; a number that is not finite becomes null."""
        self._file.write(json.dumps(finite({"step": step, **metrics})) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard(MetricWriter):
    """Event files, through the tensorboard package alone."""

    def __init__(self, folder: str | Path, *, resume_step: int | None = None):
        """Open a new event file; `resume_step` makes TensorBoard forget all events after that step."""
        import tensorboard.compat.proto.event_pb2 as event_pb2
        import tensorboard.compat.proto.summary_pb2 as summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = folder
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        with disk_errors(folder):
            self._writer = EventFileWriter(str(folder))
            if resume_step is not None:
                start = self._events.SessionLog(status=self._events.SessionLog.START)
                event = self._events.Event(wall_time=time.time(), step=resume_step + 1, session_log=start)
                self._writer.add_event(event)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers as scalars."""
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in numbers(metrics).items()]
        summary = self._summaries.Summary(value=values)
        with disk_errors(self._folder):
            self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
            self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        with disk_errors(self._folder):
            self._writer.close()


class WeightsAndBiases(MetricWriter):
    """A run on Weights & Biases, the same one again on resume: the run directory keeps its id."""

    def __init__(self, run: RunDirectory, config: Values):
        """Start or continue the run; UserError if wandb refuses."""
        import wandb

        self._wandb = wandb
        id_file = run.path / "wandb_id"
        identity = read_text(id_file).strip() if id_file.exists() else f"{time.time_ns():x}"
        options: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "grpo_jax"),
            "name": run.path.name,
            "dir": str(run.path),
        }
        try:
            self._run = wandb.init(**options, id=identity, resume="allow", config=dict(config))
        except Exception as error:
            reason = one_line((str(error).strip().splitlines() or [type(error).__name__])[0])
            hint = "run `wandb login`, or set WANDB_MODE=offline"
            raise UserError(f"report_to: wandb does not start ({reason}); {hint}") from error
        write_atomically(id_file, identity)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log(numbers(metrics), step=step)

    def completions(self, step: int, columns: Mapping[str, Sequence[object]]) -> None:
        """Log the first of them as a table, with the iteration's numbers."""
        first = {name: [_plain(value) for value in column[:_COMPLETIONS]] for name, column in columns.items()}
        cells = {name: column for name, column in first.items() if all(isinstance(cell, _CELLS) for cell in column)}
        table = self._wandb.Table(columns=list(cells), data=[list(row) for row in zip(*cells.values(), strict=True)])
        self._run.log({"completions": table}, step=step)

    def finish(self, summary: Values, gallery: Sequence[GalleryEntry] = ()) -> None:
        """Update the run's summary, and log the gallery's pictures under their texts."""
        self._run.summary.update(finite(summary))
        pairs = [pair for entry in gallery for pair in ((entry.prompt, entry.before), (entry.completion, entry.after))]
        if images := [self._wandb.Image(picture, caption=text) for text, picture in pairs if picture is not None]:
            self._run.log({"gallery": images})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def require_writers(report_to: Sequence[str]) -> None:
    """Refuse Weights & Biases if it is not installed; TensorBoard may be missing."""
    if "wandb" in report_to:
        try:
            importlib.import_module("wandb")
        except ImportError as error:
            raise UserError(
                "report_to: wandb is not installed; pip install wandb, or leave it out of report_to"
            ) from error


def open_writers(
    run: RunDirectory,
    report_to: Sequence[str] = (),
    *,
    resume_step: int | None = None,
    config: Values | None = None,
) -> tuple[list[MetricWriter], list[str]]:
    """Open metrics.jsonl and the writers of `report_to`; return them, and notes about those left out.

    A run that goes on after `resume_step` is rewound to it. Weights & Biases shows `config`, and takes `project` from
    it.
    """
    require_writers(report_to)
    if resume_step is not None:
        truncate_metrics(run.metrics, resume_step)
    writers: list[MetricWriter] = [JsonLines(run.metrics)]
    notes = []
    try:
        if "tensorboard" in report_to:
            try:
                writers.append(TensorBoard(run.tensorboard, resume_step=resume_step))
            except ImportError:
                notes.append("no TensorBoard events: pip install tensorboard adds them")
        if "wandb" in report_to:
            writers.append(WeightsAndBiases(run, config or {}))
    except BaseException:
        for writer in writers:
            writer.close()
        raise
    return writers, notes


def numbers(metrics: Values) -> dict[str, float]:
    """Return the finite numbers of a row, without its step."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "step" and value is not None and not isinstance(value, str) and math.isfinite(float(value))
    }


def _plain(value: Any) -> object:
    return value.item() if hasattr(value, "item") else value
