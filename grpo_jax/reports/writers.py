"""Where the numbers of each step go: metrics.jsonl always, TensorBoard and Weights & Biases when asked."""

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_jax.errors import UserError
from grpo_jax.runs.directory import (
    AppendedFile,
    RunDirectory,
    disk_errors,
    encode_png,
    finite,
    truncate_metrics,
    write_atomically,
)
from grpo_jax.tasks.display import GalleryEntry

_COMPLETIONS = 64  # of an iteration that a table shows
_CELLS = (str, bool, int, float, type(None))


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

        values = [
            Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items() if _is_number(value)
        ]
        self._add(step, values)
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


class WeightsAndBiases:
    """A run on Weights & Biases; the same one again on resume."""

    def __init__(self, run: RunDirectory, config: Mapping[str, Any]):
        """Starts or continues the run.

        Raises:
          UserError: wandb is not installed, or refuses to start.
        """
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "report_to: wandb is not installed; pip install wandb, or leave it out of report_to"
            ) from error
        self._id_file = run.path / "wandb_id"
        identity = self._id_file.read_text().strip() if self._id_file.is_file() else f"{time.time_ns():x}"
        project = config.get("wandb_project") or "grpo_jax"
        try:
            self._run = wandb.init(
                project=project, name=run.path.name, dir=str(run.path), id=identity, resume="allow",
                config=dict(config),
            )  # fmt: skip
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"report_to: wandb does not start ({reason}); run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        write_atomically(self._id_file, identity)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one row."""
        self._run.log({name: value for name, value in metrics.items() if _is_number(value)}, step=step)

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Logs the first of them as a table, with the iteration's numbers."""
        import wandb

        first = {name: [_plain(value) for value in column[:_COMPLETIONS]] for name, column in columns.items()}
        shown = {name: column for name, column in first.items() if all(isinstance(cell, _CELLS) for cell in column)}
        table = wandb.Table(columns=list(shown), data=[list(row) for row in zip(*shown.values(), strict=True)])
        self._run.log({"completions": table}, step=step)

    def finish(self, summary: Mapping[str, Any], tables: Sequence[Any], gallery: Sequence[GalleryEntry] = ()) -> None:
        """Puts the summary into the run's, logs each table under its title, and the gallery as one with pictures."""
        import wandb

        self._run.summary.update(finite(summary))
        for table in tables:
            rows: list[Any] = [list(row) for row in table.rows]
            name = re.sub(r"\W+", "_", table.title)  # part of a file's name
            self._run.log({f"table/{name}": wandb.Table(columns=list(table.columns), data=rows)})

        def image(picture: Any) -> Any:
            return None if picture is None else wandb.Image(picture)

        if gallery:
            rows = [[entry.prompt, entry.rewrite, image(entry.before), image(entry.after)] for entry in gallery]
            columns: list[Any] = ["prompt", "text", "before", "after"]
            self._run.log({"table/gallery": wandb.Table(columns=columns, data=rows)})

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


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
      report_to: any of "tensorboard", "wandb".
      resume_step: the step that the run continues after; None for a new run.
      config: shown by Weights & Biases; its `wandb_project` is where.

    Returns:
      The writers, and notes for the user about those left out.

    Raises:
      UserError: a writer is unknown, cannot write, or wandb was asked for and is missing.
    """
    unknown = sorted(set(report_to) - {"tensorboard", "wandb"})
    if unknown:
        raise UserError(f"report_to: expected tensorboard or wandb, got {', '.join(unknown)}")
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


def _plain(value: Any) -> Any:
    """A cell of a table: a plain number or text."""
    return value.item() if hasattr(value, "item") else value


def _is_number(value) -> bool:
    return value is not None and not isinstance(value, str) and math.isfinite(float(value))
