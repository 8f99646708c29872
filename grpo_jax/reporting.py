"""What a run tells: lines and a progress bar on the terminal, the log, the metrics, the report."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from grpo_jax.metric_writers import MetricWriter, open_writers
from grpo_jax.run_directory import GalleryEntry, RunDirectory, disk_errors

__all__ = ["Console", "GalleryEntry", "Progress", "RunDirectory", "RunOutput", "status"]

_SHOWN = (("loss", "loss"), ("kl", "kl"), ("entropy", "entropy"), ("watch/pixel_accuracy/mean", "pixels"))


class Console:
    """Lines to the terminal and to train.log."""

    def __init__(self, log: str | Path | None = None, *, stream: TextIO | None = None):
        """Opens the log to append.

        Args:
          log: path of train.log; None writes none.
          stream: in place of standard output.
        """
        from rich.console import Console as Terminal

        self._terminal = Terminal(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._path = log
        self._log = None
        if log is not None:
            with disk_errors(log):
                self._log = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 closed by close()

    @property
    def is_terminal(self) -> bool:
        """Whether someone may be watching: bars are drawn, else lines are printed now and then."""
        return self._terminal.is_terminal

    def say(self, text: str = "", *, style: str | None = None) -> None:
        """Prints a line."""
        self._terminal.print(text, style=style)
        self.record(text)

    def part(self, name: str, detail: str) -> None:
        """One opening line: `policy     Qwen2, 1.1M parameters, float32, cpu`."""
        from rich.text import Text

        self._terminal.print(Text.assemble((f"{name:<10}", "bold cyan"), " ", detail))
        self.record(f"{name:<10} {detail}")

    def note(self, text: str) -> None:
        """Prints a line that tells of something left out or done otherwise."""
        self.say(f"note: {text}", style="yellow")

    def record(self, text: str) -> None:
        """Writes a line to the log alone."""
        if self._log is not None:
            with disk_errors(self._path):
                self._log.write(text + "\n")

    @contextmanager
    def progress(self, total: int, *, done: int = 0, every: int | None = None) -> Iterator["Progress"]:
        """A bar over the steps of a run.

        Args:
          total: steps in all.
          done: steps done before a resume.
          every: steps between lines where there is no terminal; None makes about twenty.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
        )
        shown = self.is_terminal
        with Bar(*columns, console=self._terminal, disable=not shown, transient=False) as bar:
            task = bar.add_task("training", total=total, completed=done, status="compiling …")
            every = max(1, total // 20) if every is None else every

            def advance(step: int, text: str) -> None:
                bar.update(task, completed=step, status=text)
                line = f"step {step}/{total}  {text}"
                due = step % every == 0 or step == total or step == done + 1
                if due and not shown:
                    self._terminal.print(line)
                if due:
                    self.record(line)

            yield Progress(advance, total, done)

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            with disk_errors(self._path):
                self._log.close()


class Progress:
    """Live figures of a run; made by `Console.progress`."""

    def __init__(self, advance, total: int, done: int):
        """Starts the clock of the remaining time at the end of the first step, which compiles."""
        self._advance, self._total = advance, total
        self._first: tuple[int, float] | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step (counted from 1)."""
        now = time.monotonic()
        text = status(metrics)
        if self._first is None:
            self._first = (step, now)
        elif step > self._first[0]:
            pace = (now - self._first[1]) / (step - self._first[0])
            text += f"  eta {timedelta(seconds=round(pace * (self._total - step)))}"
        self._advance(step, text)


def status(metrics: Mapping[str, float]) -> str:
    """The figures of a metrics row in one line: rewards with deviation, loss, KL, tokens per second."""
    total = metrics.get("reward/total/mean")
    parts = []
    if total is not None:
        parts.append(f"reward {total:.3f} ±{metrics.get('reward/total/std', float('nan')):.3f}")
    singles = [name for name in metrics if name.startswith("reward/") and name.endswith("/mean")]
    singles.remove("reward/total/mean") if total is not None else None
    if len(singles) > 1 or total is None:
        parts += [f"{name.split('/', 1)[1].removesuffix('/mean')} {metrics[name]:.3f}" for name in singles]
    parts += [f"{label} {metrics[name]:.3g}" for name, label in _SHOWN if metrics.get(name) is not None]
    if metrics.get("tokens_per_second") is not None:
        parts.append(f"{metrics['tokens_per_second']:.0f} tok/s")
    return "  ".join(parts)


class RunOutput:
    """Everything a training run writes but its checkpoints: folder, terminal, log, metrics, report."""

    def __init__(self, config: Any, *, stream: TextIO | None = None):
        """Makes or opens the run directory and writes config.yaml.

        Args:
          config: a dataclass with `run_dir`, `resume` and `report_to`.
          stream: in place of standard output.

        Raises:
          UserError: the run directory cannot be used.
        """
        import yaml

        self._config = config
        self.config_text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
        self.directory = RunDirectory.open(config.run_dir, resume=config.resume)
        self.directory.write_config(self.config_text)
        self.console = Console(self.directory.log, stream=stream)
        self.say, self.part, self.note = self.console.say, self.console.part, self.console.note
        self._writers: list[MetricWriter] = []

    def start(self, resume_step: int | None = None) -> None:
        """Opens the metric writers; with `resume_step`, everything written after that step is cut off.

        A resumed run that was killed before its first checkpoint gives 0.
        """
        self._writers, notes = open_writers(
            self.directory,
            self._config.report_to,
            resume_step=resume_step,
            config=dataclasses.asdict(self._config),
        )
        for note in notes:
            self.note(note)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one row of numbers to every writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def completions(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Writes the completions of one iteration."""
        self.directory.write_completions(step, columns)

    def finish(
        self, *, title: str, summary: Mapping[str, Any], gallery: Sequence[GalleryEntry] = (), tables=()
    ) -> None:
        """Writes summary.json, images/ and report.html."""
        from grpo_jax.metric_writers import read_metrics
        from grpo_jax.report_page import write_report

        self.directory.write_summary(summary)
        self.directory.write_images(gallery)
        write_report(
            self.directory.report,
            title=title,
            summary=summary,
            metrics_rows=read_metrics(self.directory.metrics),
            gallery=gallery,
            tables=tables,
            config_text=self.config_text,
        )

    def close(self) -> None:
        """Closes writers and log."""
        for writer in self._writers:
            writer.close()
        self._writers = []
        self.console.close()

    def __enter__(self) -> "RunOutput":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()
