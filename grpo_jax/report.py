"""`python -m grpo_jax.report RUN [--out FILE]`: writes a run's page again."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_jax.errors import UserError, command, exit_process, run_parser, short_name

if TYPE_CHECKING:
    from grpo_jax.runs.directory import RunDirectory
    from grpo_jax.tasks.task import Display


def make_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    description = "Writes report.html of a run again, finished or not."
    parser = run_parser("report", description, reads_run=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Run directory of a training run.")
    parser.add_argument("--out", metavar="FILE", help="Where to (default: RUN/report.html).")
    return parser


def _report(options: argparse.Namespace) -> None:
    from grpo_jax.reports.report import write_report

    if len(options.runs) > 1:
        raise UserError("expected one run; TensorBoard (tensorboard --logdir FOLDER) and W&B compare several")
    run = _run(options.runs[0])
    out = Path(options.out or run.report)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UserError(f"--out: expected a file in a folder that exists, got {short_name(out)}")
    write_report(out, run, _display(run))
    print(f"report: {out}")


def _run(path: str) -> RunDirectory:
    from grpo_jax.runs.directory import RunDirectory, read_metrics

    run = RunDirectory(path)
    if not os.path.isfile(run.config):
        raise UserError(f"{short_name(path)}: no config.yaml there; give the run directory of a training run")
    if not read_metrics(run.metrics):
        raise UserError(f"{short_name(path)}: no metrics there yet (metrics.jsonl); it has not trained an iteration")
    return run


def _display(run: RunDirectory) -> Display:
    """Return the display of the run's task; the plain one, with a note, where the task is not found any more."""
    from grpo_jax.config.command_line import load_config
    from grpo_jax.tasks.task import Display

    try:
        return load_config(run.config).task.display
    except UserError as error:
        print(f"warning: {run.path.name} is shown without its task's own charts: {error}")
        return Display()


main = command(make_parser, _report)

if __name__ == "__main__":
    exit_process(main())
