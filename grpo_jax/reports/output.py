"""All output of a run but its checkpoints: folder, terminal, log, metrics, completions, report."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TextIO

from grpo_jax.config.fields import to_yaml
from grpo_jax.config.files import Values
from grpo_jax.config.run import Config
from grpo_jax.errors import StageError, UserError, one_line
from grpo_jax.models.broadcast import is_main_process, together
from grpo_jax.models.hf.folder import push_folder, require_hub, write_card
from grpo_jax.reports.console import Console, Update, result_lines
from grpo_jax.reports.page import RunEnd, write_end
from grpo_jax.reports.report import write_final_report
from grpo_jax.reports.writers import JsonLines, MetricWriter, open_writers, require_writers
from grpo_jax.rollout.env import EnvError
from grpo_jax.rollout.rewards import RewardError
from grpo_jax.runs.directory import RunDirectory, read_metrics
from grpo_jax.tasks.task import Finished


class RunOutput:
    """The output of one run; closed when its block ends."""

    def __init__(self, config: Any, *, stream: TextIO | None = None):
        """Make or open the run directory and write config.yaml; `stream` is written in place of standard output.

        Raises:
            UserError: The run directory cannot be used, a service of `report_to` is not installed, or nobody is
                logged in to the hub that the policy is to be pushed to.
        """
        require_writers(config.report_to)
        self._repo = getattr(config, "push_to_hub", "")  # which a task may have no use for
        if self._repo:
            require_hub(self._repo)
        self._config, self._display = config, config.task.display
        self.directory = RunDirectory.open(config.run_dir, resume=config.resume)
        try:
            if not config.resume:
                self.directory.write_config(to_yaml(config))
            self.console = Console(self.directory.log, stream=stream)
        except BaseException:
            self.directory.take_back()
            self.directory.close()
            raise
        self.info, self.warning = self.console.info, self.console.warning
        self._writers: list[MetricWriter] = []
        self._show: Update | None = None
        self._open_line = ExitStack()

    def truncate(self, step: int, *, rows: int | None = None) -> int:
        """Remove the output after a step (0 for a new run), open the metric writers and return the number of rows.

        `step` is the last whose completions stay, `rows` the last whose metrics stay (the same if None).
        """
        resume_step = (step if rows is None else rows) if self._config.resume else None
        if self._config.resume:
            self.directory.forget_completions(step)
        self._writers, notes = open_writers(
            self.directory, self._config.report_to, resume_step=resume_step, config=self._config.model_dump()
        )
        for note in notes:
            self.warning(note)
        return len(read_metrics(self.directory.metrics))

    def start(self, total: int, done: int = 0) -> None:
        """Start the live line of `total` iterations, `done` of them before a resume."""
        self._show = self._open_line.enter_context(self.console.live(total, self._display, done=done))

    def completions(self, step: int, columns: Mapping[str, Sequence[object]]) -> None:
        """Write the completions of an iteration: columns, one entry each."""
        self.directory.write_completions(step, columns)
        for writer in list(self._writers):
            self._try(writer, lambda writer=writer: writer.completions(step, columns))

    def iteration(self, row: Values) -> None:
        """Write and show one iteration by its metrics, with "step"."""
        step = int(row["step"])
        for writer in list(self._writers):
            self._try(writer, lambda writer=writer: writer.write(step, row))
        if self._show is not None:
            self._show(step, row)

    def _try(self, writer: MetricWriter, act: Callable[[], None]) -> None:
        """Write something that the run can do without: a failure ends its writer with a note."""
        try:
            act()
        except Exception as error:
            if isinstance(writer, JsonLines):
                raise
            self._writers.remove(writer)
            self.warning(f"no more events for {type(writer).__name__}: {one_line(error)}")

    def finish(self, finished: Finished, *, config: Any, starts: Sequence[int] = ()) -> None:
        """Write summary.json, images/, report.json, report.html and the policy's card, and print the end of a run.

        `starts` are the iterations done when a process began: the one after compiles.
        """
        self._end_line()
        summary = finished.summary
        if self.directory.policy.is_dir():
            write_card(self.directory.policy, base=config.policy.path)
        self.directory.write_images(finished.gallery)
        self.directory.write_episodes(finished.episodes)
        end = RunEnd(finished.gallery, finished.episodes, finished.tables, starts, to_yaml(config))
        write_end(self.directory, end)
        write_final_report(self.directory, self._display, summary, end)
        for writer in list(self._writers):
            self._try(writer, lambda writer=writer: writer.finish(summary, finished.gallery))
        self.directory.write_summary(summary)  # last: a run that has one is complete
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
            self._push()

    def _push(self) -> None:
        """Push the policy's folder; a hub that refuses is a note, for the run is complete."""
        try:
            address = push_folder(self.directory.policy, self._repo)
        except UserError as error:
            self.warning(str(error))
        else:
            self.info(f"pushed: {address}")

    def close(self) -> None:
        """Close live line, writers and log."""
        self._end_line()
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer.close()
            except Exception as error:
                self.warning(f"{type(writer).__name__} did not end well: {one_line(error)}")
        self.console.close()

    def __enter__(self) -> RunOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Close; remove the run directory where a start failed before it had saved anything.

        The log keeps the error that ended the run, of one that nobody foresaw the traceback too.
        """
        try:
            with suppress(UserError):  # the disk may be what failed
                if error is not None:
                    self.console.record(_error_text(error))
                self.close()
            if kind is not None and not self.directory.holds_checkpoint():
                self.directory.take_back()
        finally:
            self.directory.close()

    def _end_line(self) -> None:
        self._open_line.close()
        self._show = None


def open_output(config: Any) -> RunOutput | NoOutput:
    """Open a run's output; of several processes process 0 has it."""
    return together(lambda: RunOutput(config) if is_main_process() else NoOutput(config))


class NoOutput:
    """The output of any process of a run but process 0: none."""

    def __init__(self, config: Config):
        """Name the run directory; touch nothing."""
        self.directory = RunDirectory(config.run_dir or "")

    def info(self, *_: object, **__: object) -> None:
        """Print nothing; so do the others."""

    warning = start = completions = iteration = finish = info

    def truncate(self, step: int, *, rows: int | None = None) -> int:
        """Return the number of rows that are to stay."""
        return step if rows is None else rows

    def __enter__(self) -> NoOutput:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the folder to process 0."""


def _raised_by_a_reward(error: BaseException | None) -> BaseException | None:
    """Return what a user's reward or environment raised, if that is the cause."""
    while error is not None and not isinstance(error, RewardError | EnvError):
        error = error.__cause__
    return None if error is None else error.__cause__


def _error_text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, UserError | StageError):
        raised = _raised_by_a_reward(error)
        return "".join([*(traceback.format_exception(raised) if raised else ()), f"error: {error}"])
    return "".join(traceback.format_exception(error)).rstrip()
