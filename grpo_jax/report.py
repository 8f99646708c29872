"""`python -m grpo_jax.report RUN [--out FILE]`: write a run's page again."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from grpo_jax.errors import UserError, command, exit_process, run_parser, short_name


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    description = "Write report.html of a finished or unfinished run again."
    parser = run_parser("report", description, reads_run=False)
    parser.add_argument("run", metavar="RUN", help="Run directory of a training run.")
    parser.add_argument("--out", metavar="FILE", help="File to write (default: RUN/report.html).")
    return parser


def _report(options: argparse.Namespace) -> None:
    from grpo_jax.config.command_line import load_config
    from grpo_jax.reports.page import write_report
    from grpo_jax.runs.directory import RunDirectory, read_metrics
    from grpo_jax.tasks.task import Display

    run, name = RunDirectory(options.run), short_name(options.run)
    if not os.path.isfile(run.config):
        raise UserError(f"{name}: no config.yaml there; give the run directory of a training run")
    if not read_metrics(run.metrics):
        raise UserError(f"{name}: no metrics there yet (metrics.jsonl); it has not trained an iteration")
    out = Path(options.out or run.report)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UserError(f"--out: expected a file in a folder that exists, got {short_name(out)}")
    try:
        display = load_config(run.config).task.display
    except UserError as error:  # the task no longer exists
        print(f"warning: {run.path.name} is shown without its task's own charts: {error}")
        display = Display()
    write_report(run, display, path=out)
    print(f"report: {out}")


main = command(make_parser, _report)

if __name__ == "__main__":
    exit_process(main())
