"""Terminal and train.log: lines, and a live progress bar."""

import io
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, TextIO, cast

from grpo_jax.config.files import Values
from grpo_jax.reports.charts import COMMON
from grpo_jax.runs.directory import AppendedFile
from grpo_jax.tasks.task import Display

Update = Callable[[int, Mapping[str, float]], None]
"""(step, metrics) → shown in the live line."""


class LastingStream(io.TextIOBase):
    """Stream to a terminal that may go away (closed, broken pipe, full disk): then only its text is lost."""

    def __init__(self, stream: TextIO | None = None):
        """Write to a stream; None for the current standard output."""
        self._stream = stream
        self.lost = False

    @property
    def encoding(self) -> str:
        """Return the stream's encoding."""
        return getattr(self._stream or sys.stdout, "encoding", None) or "utf-8"

    def _try(self, name: str, *arguments: str) -> object:
        if self.lost:
            return None
        try:
            return getattr(self._stream or sys.stdout, name)(*arguments)
        except (OSError, ValueError, AttributeError):  # ValueError: closed; AttributeError: no stream
            self.lost = True
            return None

    def write(self, text: str) -> int:
        """Write, if still possible, with escapes for characters that the stream's encoding lacks."""
        self._try("write", text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush, if still possible."""
        self._try("flush")

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return bool(self._try("isatty"))


class Console:
    """Lines to the terminal and to train.log."""

    def __init__(self, log: str | Path, *, stream: TextIO | None = None):
        """Open the log for appending; `stream` replaces standard output."""
        from rich.console import Console as Terminal

        self._stream = LastingStream(stream)
        self._noted = False
        file = cast(IO[str], self._stream)
        self._terminal = Terminal(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._log = AppendedFile(log)

    def info(self, text: str = "", detail: str | None = None, *, style: str | None = None) -> None:
        """Print a line; with a detail, a startup line: `policy     Qwen2, 1.1M parameters, float32, cpu`."""
        from rich.text import Text

        if detail is None:
            self._terminal.print(text, style=style)
        else:
            self._terminal.print(Text.assemble((f"{text:<10}", "bold cyan"), " ", detail))
            text = f"{text:<10} {detail}"
        self.record(text)

    def warning(self, text: str) -> None:
        """Print a warning."""
        self.info(f"warning: {text}", style="yellow")

    def record(self, text: str) -> None:
        """Write a line only to the log."""
        if self._stream.lost and not self._noted:
            self._noted = True
            self._log.write("warning: the terminal is gone; the run continues\n")
        self._log.write(text + "\n")

    @contextmanager
    def live(self, total: int, display: Display, *, done: int = 0) -> Iterator[Update]:
        """Show a one-line progress bar; metrics use the space beside bar, count and time.

        `done` steps preceded a resume. Without a terminal, about twenty lines are printed in total. Yields a function
        that shows a finished step, counted from 1, with its metrics.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        # Crop instead of wrapping: the next refresh would not remove wrapped lines.
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        figures = TextColumn("{task.fields[status]}", markup=False, table_column=rest)
        columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("eta"), TimeRemainingColumn(), figures)
        visible = self._terminal.is_terminal
        # The pace is that of all steps but the first, which compiles.
        options = {"transient": False, "expand": True, "speed_estimate_period": math.inf}
        with Bar(*columns, console=self._terminal, disable=not visible, **options) as bar:
            task = bar.add_task("training", total=total, completed=done, status="compiling …")
            every = max(1, total // 20)

            def update(step: int, metrics: Mapping[str, float]) -> None:
                text = status(metrics, display)
                bar.update(task, completed=step, status=text)
                if step % every == 0 or step == total or step == done + 1:
                    seconds = bar.tasks[0].time_remaining
                    line = f"step {step}/{total}  {text}"
                    line += "" if seconds is None else f"  eta {timedelta(seconds=seconds)}"
                    if not visible:
                        self._terminal.print(line)
                    self.record(line)

            yield update

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def status(metrics: Mapping[str, float], display: Display = Display()) -> str:
    """Format a metrics row in one line: rewards with deviation, loss, KL, the task's own, pace."""
    parts = [f"epoch {metrics['epoch']:.2f}"] if "epoch" in metrics else []
    parts.append(f"reward {metrics['reward/total/mean']:.3f} ±{metrics['reward/total/std']:.3f}")
    matches = [re.fullmatch("reward/(.*)/mean", name, re.DOTALL) for name in metrics if name != "reward/total/mean"]
    singles = [f"{match[1]} {metrics[match[0]]:.3f}" for match in matches if match]
    parts += singles if len(singles) > 1 else []
    shown = [(name, label) for name, label in display.live + COMMON.live if metrics.get(name) is not None]
    # Without a reference, the KL in rows is 0: hide it.
    parts += [f"{label} {metrics[name]:.3g}" for name, label in shown if name != "kl" or metrics[name]]
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:.0f} tok/s")
    return "  ".join(parts)


def result_lines(summary: Values, display: Display = Display()) -> list[str]:
    """Return a summary's table, and its improvement in one line."""

    def cell(name, value):
        finite = isinstance(value, int | float) and math.isfinite(value)
        return f"{value:>9.{display.digits_of(name)}f}" if finite else f"{'–':>9}"

    measures = summary["evaluation"]
    if not measures:
        return ["no prompts were held out: nothing was measured before and after training"]
    width = max([*map(len, measures), 16])
    lines = [f"{'held-out prompts':<{width}} {'before':>9} {'after':>9} {'oracle':>9}"]
    for name, values in measures.items():
        lines.append(f"{name:<{width}} " + " ".join(cell(name, values.get(k)) for k in ("before", "after", "oracle")))
    if summary.get("improvement") is not None:
        baseline, reward = summary["baseline_reward"], summary["reward"]
        relative = summary.get("relative_improvement")
        share = "" if relative is None else f", {relative:+.0%}"
        lines.append(
            f"baseline reward {baseline:.3f}, reward after training {reward:.3f}:"
            f" improvement {summary['improvement']:+.3f}{share}"
        )
    return [*lines, *suspicions(summary)]


def suspicions(summary: Values) -> list[str]:
    """Return a line for each eval reward that fell while the reward rose, and for completions without an end."""
    truncated, lines = summary.get("truncated_iterations", 0), []
    if truncated and truncated >= min(summary["iterations"], 5):
        lines.append(f"truncated: every completion of the last {truncated} iterations reached sampling.max_new_tokens")
    for name in summary.get("suspect", []):
        values = summary["evaluation"].get(name, {})
        before, after = (math.nan if (value := values.get(when)) is None else value for when in ("before", "after"))
        lines.append(
            f"suspect: {name} fell from {before:.3g} to {after:.3g} while the reward rose: the policy may hack the "
            "reward; read its completions"
        )
    return lines
