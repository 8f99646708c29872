"""What a run tells: lines and a progress bar on the terminal, the log, the metrics, the report."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from grpo_jax.reports.charts import is_ranking
from grpo_jax.reports.writers import MetricWriter, open_writers
from grpo_jax.runs.directory import AppendedFile, GalleryEntry, RunDirectory

__all__ = [
    "Console",
    "GalleryEntry",
    "Progress",
    "RunDirectory",
    "RunOutput",
    "epoch_line",
    "result_lines",
    "status",
    "versions",
    "write_run_report",
]

_PACKAGES = (
    "grpo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "torch",
    "diffusers", "open_clip_torch", "gymnax",
)  # fmt: skip

_SHOWN = (
    ("episode_return", "return"), ("evaluation/episode_return", "evaluated"), ("solved", "solved"),
    ("loss", "loss"), ("dead_groups/total", "dead"), ("kl", "kl"), ("entropy", "entropy"),
    ("watch/pixel_accuracy/mean", "pixels"), ("watch/ndcg@10/mean", "ndcg@10"),
)  # fmt: skip


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
        self._log = None if log is None else AppendedFile(log)

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
    """The figures of a metrics row in one line: rewards with deviation, loss, KL, tokens or steps per second."""
    total = metrics.get("reward/total/mean")
    parts: list[str] = []
    if total is not None:
        parts.append(f"reward {total:.3f} ±{metrics.get('reward/total/std', float('nan')):.3f}")
    singles = [name for name in metrics if name.startswith("reward/") and name.endswith("/mean")]
    singles.remove("reward/total/mean") if total is not None else None
    if len(singles) > 1 or total is None:
        parts += [f"{name.split('/', 1)[1].removesuffix('/mean')} {metrics[name]:.3f}" for name in singles]
    parts += [f"{label} {metrics[name]:.3g}" for name, label in _SHOWN if metrics.get(name) is not None]
    if metrics.get("epoch") is not None and total is not None:
        parts.insert(0, f"epoch {metrics['epoch']:.2f}")
    if metrics.get("tokens_per_second") is not None:
        parts.append(f"{metrics['tokens_per_second']:.0f} tok/s")
    if metrics.get("environment_steps_per_second") is not None:
        parts.append(f"{metrics['environment_steps_per_second']:.0f} steps/s")
    return "  ".join(parts)


class RunOutput:
    """Everything a training run writes but its checkpoints: folder, terminal, log, metrics, completions."""

    def __init__(
        self,
        config: Any,
        *,
        stream: TextIO | None = None,
        folders: Sequence[str] = ("completions", "images"),
    ):
        """Makes or opens the run directory and writes config.yaml.

        Args:
          config: a dataclass with `run_dir`, `resume` and `report_to`.
          stream: in place of standard output.
          folders: made in the run directory.

        Raises:
          UserError: the run directory cannot be used.
        """
        import yaml

        self._config = config
        self.directory = RunDirectory.open(config.run_dir, resume=config.resume, folders=folders)
        if not config.resume:
            text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
            self.directory.write_config(text)
        self.console = Console(self.directory.log, stream=stream)
        self.say, self.part, self.note = self.console.say, self.console.part, self.console.note
        self._writers: list[MetricWriter] = []
        self._progress: Progress | None = None
        self._open_bar = ExitStack()

    def truncate(self, step: int) -> None:
        """Cuts off what was written after a step (0 for a new run) and opens the metric writers.

        Raises:
          UserError: a writer that was asked for is missing or cannot write.
        """
        self._writers, notes = open_writers(
            self.directory,
            self._config.report_to,
            resume_step=step if self._config.resume else None,
            config=dataclasses.asdict(self._config),
        )
        for note in notes:
            self.note(note)

    def start(self, total: int, done: int = 0) -> None:
        """Starts the progress bar of `total` iterations, `done` of them before a resume."""
        self._progress = self._open_bar.enter_context(self.console.progress(total, done=done))

    def iteration(self, row: Mapping[str, Any], parts: Any, result: Any) -> None:
        """Writes and shows one iteration.

        Args:
          row: its metrics, with "step".
          parts: the run's parts; `environment` names the rewards.
          result: an `Iteration`: its rollout and advantages.
        """
        self.directory.write_completions(int(row["step"]), _completion_columns(parts.environment, result))
        self.row(row)

    def epoch(self, epoch: float) -> None:
        """Sums up an epoch in a line when it is over; nothing for epochs of fewer iterations than ten."""
        from grpo_jax.reports.writers import read_metrics

        if epoch != int(epoch):
            return
        rows = [row for row in read_metrics(self.directory.metrics) if epoch - 1 < row["epoch"] <= epoch]
        if len(rows) >= 10:
            self.say(epoch_line(int(epoch), rows))

    def row(self, row: Mapping[str, Any]) -> None:
        """Writes and shows the metrics of one iteration, with "step"."""
        step = int(row["step"])
        for writer in self._writers:
            writer.write(step, row)
        if self._progress is not None:
            self._progress.update(step, row)

    def result(self, summary: Mapping[str, Any], lines: Sequence[str] = (), tables: Sequence[Any] = ()) -> None:
        """Prints the end of a run: measures before, after and at best, the improvement, `lines`, the report's place.

        Metric writers that have a place for them get the summary and the `report_page.Table`s.
        """
        self._end_bar()
        for writer in self._writers:
            writer.finish(summary, tables)
        self.say()
        for line in [*result_lines(summary), *lines]:
            self.say(line)
        self.say(f"report: {self.directory.report}", style="bold green")

    def close(self) -> None:
        """Closes bar, writers and log."""
        self._end_bar()
        for writer in self._writers:
            writer.close()
        self._writers = []
        self.console.close()

    def __enter__(self) -> "RunOutput":
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes; takes the run directory back where a start failed before it had saved anything."""
        self.close()
        if kind is not None and not self.directory.holds_checkpoint():
            self.directory.take_back()

    def _end_bar(self):
        self._open_bar.close()
        self._progress = None


def epoch_line(epoch: int, rows: Sequence[Mapping[str, float]]) -> str:
    """An epoch's iterations in one line: rewards at its start, on average and at its end, loss, dead groups, time."""

    def mean(name: str, part: Sequence[Mapping[str, float]] = rows) -> float:
        values = [row[name] for row in part if isinstance(row.get(name), int | float)]
        return float(np.mean(values)) if values else float("nan")

    tenth = max(1, len(rows) // 10)
    first, last = mean("reward/total/mean", rows[:tenth]), mean("reward/total/mean", rows[-tenth:])
    seconds = timedelta(seconds=round(sum(row.get("seconds/total", 0.0) for row in rows)))
    return (
        f"epoch {epoch}: {len(rows)} iterations in {seconds}  reward {mean('reward/total/mean'):.3f} "
        f"({first:.3f} → {last:.3f})  loss {mean('loss'):.3g}  dead groups {mean('dead_groups/total'):.0%}"
    )


def result_lines(summary: Mapping[str, Any]) -> list[str]:
    """The table of a summary, and its improvement in one line."""

    def cell(name, value):
        digits = 4 if is_ranking(name) else 3  # on real catalogues they are small
        return f"{value:>9.{digits}f}" if isinstance(value, int | float) else f"{'–':>9}"

    measures = summary["evaluation"]
    if not measures:
        return ["no prompts were held out: nothing was measured before and after training"]
    width = max([*map(len, measures), 16])
    lines = [f"{summary.get('measured_on', 'held-out prompts'):<{width}} {'before':>9} {'after':>9} {'oracle':>9}"]
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
    return lines


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes, where installed."""
    import platform
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_run_report(
    directory: RunDirectory,
    *,
    summary: Mapping[str, Any],
    gallery: Sequence[Mapping[str, Any]] = (),
    added_words: Sequence[tuple[str, float]] = (),
    table: Sequence[Mapping[str, Any]] = (),
    table_title: str = "Held-out prompts after training",
    first_tables: Sequence[Any] = (),
    config_text: str = "",
) -> None:
    """Writes images/ and report.html of a finished run.

    Args:
      directory: of the run; its metrics.jsonl gives the curves.
      summary: what summary.json holds.
      gallery: fields of `GalleryEntry`.
      added_words: (word, share of rewrites that add it to their prompt), most frequent first.
      table: one row per held-out prompt.
      table_title: its heading.
      first_tables: `report_page.Table`s that stand before it.
      config_text: the configuration as YAML.
    """
    from grpo_jax.reports.page import Table, write_report
    from grpo_jax.reports.writers import read_metrics

    entries = [GalleryEntry(**entry) for entry in gallery]
    directory.write_images(entries)
    tables = list(first_tables)
    if table:
        columns = tuple(table[0])
        tables.append(Table(table_title, columns, [[row[c] for c in columns] for row in table]))
    if added_words:
        note = "Words that rewrites have and prompts lack. A word that appears everywhere may be gaming a judge."
        columns, rows = ("word", "share of rewrites"), [list(pair) for pair in added_words]
        tables.append(Table("Most added words", columns, rows, note))
    write_report(
        directory.report,
        title=directory.path.name,
        summary=summary,
        metrics_rows=read_metrics(directory.metrics),
        gallery=entries,
        tables=tables,
        config_text=config_text,
    )


def _completion_columns(environment, result) -> dict[str, Any]:
    """One entry per completion, groups one after another."""
    rollout = result.rollout
    group = len(rollout.completions[0])
    columns = {
        "prompt": [row.prompt for row in rollout.rows for _ in range(group)],
        "completion": [text for texts in rollout.completions for text in texts],
        "text": [text for texts in rollout.texts for text in texts],
    }
    judged = (("reward", environment.reward_names, rollout.judgement.rewards),
              ("watch", environment.watch_names, rollout.judgement.watched))  # fmt: skip
    for kind, names, values in judged:
        columns |= {f"{kind}/{name}": np.ravel(values[..., n]) for n, name in enumerate(names)}
    return columns | {
        "advantage": np.ravel(result.advantages),
        "length": np.ravel(np.asarray(rollout.samples.mask).sum(-1)),
        "truncated": np.ravel(np.asarray(rollout.samples.truncated)),
        "usable": np.ravel(rollout.usable),
    }
