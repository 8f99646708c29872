"""All output of a run except checkpoints: folder, terminal, log, metrics, completions, report.

metrics.jsonl is always written, TensorBoard and Weights & Biases if in `report_to`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TextIO

from grpo_jax.config.fields import to_yaml
from grpo_jax.config.files import Values, read_text
from grpo_jax.config.run import Config
from grpo_jax.errors import StageError, UserError, one_line
from grpo_jax.models.broadcast import is_main_process, on_all_processes
from grpo_jax.models.hf.folder import push_folder, require_hub, write_card
from grpo_jax.reports.console import Console, Update, result_lines
from grpo_jax.reports.page import RunEnd, write_end, write_report
from grpo_jax.rollout.env import EnvError
from grpo_jax.rollout.rewards import RewardError
from grpo_jax.runs.directory import (
    AppendedFile,
    Output,
    RunDirectory,
    finite,
    read_metrics,
    truncate_metrics,
    write_atomically,
)
from grpo_jax.tasks.task import Finished, GalleryEntry

_COMPLETIONS = 64  # completions per iteration in a table of Weights & Biases
_CELLS = (str, bool, int, float, type(None))


class RunOutput(Output):
    """The output of one run; closed when its block ends."""

    def __init__(self, config: Config, *, stream: TextIO | None = None):
        """Create or open the run directory and write config.yaml; `stream` replaces standard output.

        Raises:
            UserError: The run directory cannot be used, a service of `report_to` is not installed, or `push_to_hub`
                has no login.
        """
        if "wandb" in config.report_to:
            importlib.import_module("wandb")  # `extras_named` tells of a missing package
        self._repo = config.push_to_hub
        if self._repo:
            require_hub(self._repo)
        self._config, self._display = config, config.task.display
        self.directory = RunDirectory.open(str(config.run_dir), resume=config.resume)
        try:
            if not config.resume:
                write_atomically(self.directory.config, to_yaml(config))
            self.console = Console(self.directory.log, stream=stream)
        except BaseException:
            self.directory.take_back()
            self.directory.close()
            raise
        self.info, self.warning = self.console.info, self.console.warning
        self._finished = False
        self._metrics: AppendedFile | None = None
        self._services: list[TensorBoard | WeightsAndBiases] = []
        self._show: Update | None = None
        self._open_line = ExitStack()

    def truncate(self, step: int, *, rows: int | None = None) -> int:
        """Remove the output after a step (0 for a new run), open the metrics and return the number of rows.

        `step` is the last step whose completions stay, `rows` the last whose metrics stay (the same if None).
        """
        rows = step if rows is None else rows
        if self._config.resume:
            self.directory.forget_completions(step)
            truncate_metrics(self.directory.metrics, rows)
        self._metrics = AppendedFile(self.directory.metrics)
        if "tensorboard" in self._config.report_to:
            try:
                self._services.append(TensorBoard(self.directory, rows if self._config.resume else None))
            except ImportError:
                self.warning("no TensorBoard events: pip install tensorboard adds them")
            except OSError as error:
                self.warning(f"no TensorBoard events: {one_line(error)}")
        if "wandb" in self._config.report_to:
            self._services.append(WeightsAndBiases(self.directory, self._config.model_dump()))
        return len(read_metrics(self.directory.metrics))

    def start(self, total: int, done: int = 0) -> None:
        """Start the progress bar of `total` iterations, `done` of them before a resume."""
        self._show = self._open_line.enter_context(self.console.live(total, self._display, done=done))

    def completions(self, step: int, columns: Mapping[str, Sequence[object]]) -> None:
        """Write the completions of an iteration: columns, one entry each."""
        self.directory.write_completions(step, columns)
        self._tell(lambda service: service.completions(step, columns))

    def iteration(self, row: Values) -> None:
        """Write and show an iteration's metrics, with "step"; non-finite numbers become null."""
        step = int(row["step"])
        assert self._metrics is not None
        self._metrics.write(json.dumps(finite({"step": step, **row})) + "\n")
        self._tell(lambda service: service.write(step, row))
        if self._show is not None:
            self._show(step, row)

    def _tell(self, act: Callable[[TensorBoard | WeightsAndBiases], None]) -> None:
        """Notify each service; a failing one is ended with a warning, and the run continues."""
        for service in list(self._services):
            try:
                act(service)
            except Exception as error:
                self._services.remove(service)
                self.warning(f"{type(service).__name__} failed and is disabled: {one_line(error)}")

    def finish(self, finished: Finished, *, config: Config) -> None:
        """Write summary.json, images/, report.json, report.html and the policy's card, and print the end of a run."""
        self._end_line()
        self._finished, summary = True, finished.summary
        if self.directory.policy.is_dir():
            write_card(self.directory.policy, base=config.policy.path)
        self.directory.write_images(finished.gallery, finished.episodes)
        end = RunEnd(finished.gallery, finished.episodes, finished.tables, to_yaml(config))
        write_end(self.directory, end)
        write_report(self.directory, self._display, summary, end)
        self._tell(lambda service: service.finish(summary, finished.gallery))
        # last, so a run with a summary is complete
        write_atomically(self.directory.summary, json.dumps(finite(summary), indent=2) + "\n")
        self.info()
        for line in [*result_lines(summary, self._display), *finished.lines]:
            self.info(line)
        best = (summary.get("best") or {}).get("iteration")
        if self.directory.policy.is_dir() and best not in (None, 0, summary["iterations"]):
            self.info(
                f"policy/ is the final checkpoint, which was measured; the best in validation, of iteration {best}, is "
                "checkpoints/best (evaluate, export, predict: --checkpoint best)"
            )
        self.info(f"report: {self.directory.report}", style="bold green")
        if self._repo and self.directory.policy.is_dir():
            try:
                self.info(f"pushed: {push_folder(self.directory.policy, self._repo)}")
            except UserError as error:  # the run is complete
                self.warning(str(error))

    def close(self) -> None:
        """Close progress bar, metrics and log."""
        self._end_line()
        self._tell(lambda service: service.close())
        if self._metrics is not None:
            self._metrics.close()
        self.console.close()

    def __enter__(self) -> RunOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Close; write the page of an unfinished run, or remove its directory if nothing was saved.

        The log keeps the error that ended the run, with the traceback of an unexpected error.
        """
        try:
            with suppress(UserError):  # the disk may have failed
                if error is not None:
                    self.console.record(_error_text(error))
                if self._metrics is not None and not self._finished and read_metrics(self.directory.metrics):
                    write_report(self.directory, self._display, {}, RunEnd(config=to_yaml(self._config)))
                self.close()
            if kind is not None and not self.directory.holds_checkpoint():
                self.directory.take_back()
        finally:
            self.directory.close()

    def _end_line(self) -> None:
        self._open_line.close()
        self._show = None


def open_output(config: Config) -> Output:
    """Open a run's output; with several processes, only process 0 has one."""
    return on_all_processes(lambda: RunOutput(config) if is_main_process() else Output(config))


def _error_text(error: BaseException) -> str:
    """Return the log's text of an error: a line, with the traceback of a user's reward or environment."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if not isinstance(error, UserError | StageError):
        return "".join(traceback.format_exception(error)).rstrip()
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RewardError | EnvError):
        cause = cause.__cause__
    raised = traceback.format_exception(cause.__cause__) if cause is not None and cause.__cause__ else []
    return "".join([*raised, f"error: {error}"])


class TensorBoard:
    """Event files, through the tensorboard package only."""

    def __init__(self, run: RunDirectory, resume_step: int | None):
        """Open a new event file; `resume_step` makes TensorBoard discard all events after that step."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._proto: Any = event_pb2
        self._summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue] made at run time
        self._writer = EventFileWriter(str(run.tensorboard))
        if resume_step is not None:
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._add(resume_step + 1, session_log=start)

    def _add(self, step: int, **content: object) -> None:
        self._writer.add_event(self._proto.Event(wall_time=time.time(), step=step, **content))

    def write(self, step: int, metrics: Values) -> None:
        """Write the numbers of a row as scalars."""
        named = numbers(metrics).items()
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in named]
        self._add(step, summary=self._summary(value=values))
        self._writer.flush()

    def completions(self, *_: object) -> None:
        """Skip completions, and the summary."""

    finish = completions

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """The Weights & Biases run that Python has started, as in transformers, or one that a resume continues."""

    def __init__(self, run: RunDirectory, config: Values):
        """Start or continue the run; UserError if wandb refuses."""
        import wandb

        self._wandb = wandb
        id_file = run.path / "wandb_id"
        identity = read_text(id_file).strip() if id_file.exists() else f"{time.time_ns():x}"
        project = os.environ.get("WANDB_PROJECT", "grpo_jax")
        named: dict[str, Any] = {"project": project, "name": run.path.name, "dir": str(run.path), "id": identity}
        active = getattr(wandb, "run", None)
        self._ends = active is None
        try:
            self._run = active or wandb.init(**named, resume="allow")
            self._run.config.update(dict(config), allow_val_change=True)
        except Exception as error:
            reason = one_line((str(error).strip().splitlines() or [type(error).__name__])[0])
            hint = "run `wandb login`, or set WANDB_MODE=offline"
            raise UserError(f"report_to: wandb does not start ({reason}); {hint}") from error
        write_atomically(id_file, self._run.id)

    def write(self, step: int, metrics: Values) -> None:
        """Log the numbers of a row."""
        self._run.log(numbers(metrics), step=step)

    def completions(self, step: int, columns: Mapping[str, Sequence[object]]) -> None:
        """Log the first completions as a table, with the iteration's numbers."""
        first = {name: finite(column[:_COMPLETIONS]) for name, column in columns.items()}
        cells = {name: column for name, column in first.items() if all(isinstance(cell, _CELLS) for cell in column)}
        table = self._wandb.Table(columns=list(cells), data=[list(row) for row in zip(*cells.values(), strict=True)])
        self._run.log({"completions": table}, step=step)

    def finish(self, summary: Values, gallery: Sequence[GalleryEntry]) -> None:
        """Update the run's summary, and log the gallery's pictures under their texts."""
        self._run.summary.update(finite(summary))
        pairs = []
        for entry in gallery:
            pairs += [(entry.prompt, entry.before), *((entry.completion, one) for one in (entry.between, entry.after))]
        if images := [self._wandb.Image(picture, caption=text) for text, picture in pairs if picture is not None]:
            self._run.log({"gallery": images})

    def close(self) -> None:
        """Finish the run, unless Python does."""
        if self._ends:
            self._run.finish()


def numbers(metrics: Values) -> dict[str, float]:
    """Return the finite numbers of a row, without its step."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "step" and value is not None and not isinstance(value, str) and math.isfinite(float(value))
    }
