"""Where the numbers of each step go: metrics.jsonl always, TensorBoard and services (`trackers`) when asked."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_jax.errors import UserError
from grpo_jax.reports.trackers import TRACKERS, numbers, require_tracker
from grpo_jax.runs.directory import AppendedFile, RunDirectory, disk_errors, encode_png, finite, truncate_metrics
from grpo_jax.tasks.display import GalleryEntry


class MetricWriter(Protocol):
    """Takes the numbers of one step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one row."""

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Takes the completions of an iteration, columns of one entry each, if it has a place for them."""

    def finish(self, summary: Mapping[str, Any], tables: Sequence[Any], gallery: Sequence[GalleryEntry] = ()) -> None:
        """Takes what summary.json holds, `Table`s and pictures of a finished run, if it has a place for them."""

    def close(self) -> None:
        """Flushes."""


class JsonLines:
    """metrics.jsonl: one object per row, on disk when `write` returns."""

    def __init__(self, path: str | Path):
        """Opens the file to append."""
        self._file = AppendedFile(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one row; what is not finite becomes null.

        Raises:
          UserError: the disk is full.
        """
        self._file.write(json.dumps(finite({"step": step, **metrics})) + "\n")

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Nothing: completions/ lies beside."""

    def finish(self, summary: Mapping[str, Any], tables: Sequence[Any], gallery: Sequence[GalleryEntry] = ()) -> None:
        """Nothing: summary.json and report.html lie beside."""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Event files, through the tensorboard package alone."""

    def __init__(self, folder: str | Path, *, resume_step: int | None = None):
        """Opens a new event file; `resume_step` makes TensorBoard forget what came after that step."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder, self._last = folder, 0
        with disk_errors(folder):
            self._writer = EventFileWriter(str(folder))
            if resume_step is not None:
                start = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the numbers as scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        self._add(step, [Summary.Value(tag=name, simple_value=value) for name, value in numbers(metrics).items()])
        self._last = step

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Nothing: TensorBoard has no place for tables."""

    def finish(self, summary: Mapping[str, Any], tables: Sequence[Any], gallery: Sequence[GalleryEntry] = ()) -> None:
        """Writes the gallery's pictures, at the last step."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = []
        for index, entry in enumerate(gallery):
            for name, picture in (("before", entry.before), ("after", entry.after)):
                if picture is not None:
                    height, width = picture.shape[:2]
                    image = Summary.Image(
                        height=height, width=width, colorspace=3, encoded_image_string=encode_png(picture)
                    )
                    values.append(Summary.Value(tag=f"gallery/{index:03d}/{name}", image=image))
        if values:
            self._add(self._last, values)

    def _add(self, step: int, values: Sequence[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        with disk_errors(self._folder):
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes."""
        with disk_errors(self._folder):
            self._writer.close()


def open_writers(
    run: RunDirectory,
    report_to: Sequence[str] = (),
    *,
    resume_step: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[list[MetricWriter], list[str]]:
    """Opens metrics.jsonl and the writers asked for.

    Args:
      run: where they write; on resume, rewound to `resume_step`.
      report_to: any of "tensorboard", "wandb", "mlflow", "trackio".
      resume_step: the step that the run continues after; None for a new run.
      config: shown by the services; its `project` is where.

    Returns:
      The writers, and notes for the user about those left out.

    Raises:
      UserError: a writer is unknown or cannot write, or a service was asked for and is missing or does not start.
    """
    unknown = sorted(set(report_to) - {"tensorboard", *TRACKERS})
    if unknown:
        raise UserError(f"report_to: expected tensorboard, {', '.join(TRACKERS)}, got {', '.join(unknown)}")
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
        for name, tracker in TRACKERS.items():
            if name in report_to:
                require_tracker(name)
                writers.append(tracker(run, config or {}))
    except BaseException:
        for writer in writers:
            writer.close()
        raise
    return writers, notes
