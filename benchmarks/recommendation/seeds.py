"""What runs of one recommendation config measured, a column for each seed: Markdown on stdout, all of it in a JSON.

    python benchmarks/recommendation/seeds.py RUN RUN RUN [--measure NDCG@10] [--json FILE] [--group "target > 50"]

Reads `summary.json` of each run directory and measures nothing itself: every method with its mean and 95 % interval,
the paired differences (of all users), and what is recommended. The JSON has `KEPT` of every method on every group of
users, and the seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

KEPT = ("HR@10", "NDCG@10", "MRR")


def read_run(folder: Path) -> dict[str, Any]:
    """The entries of a run's summary.json that are compared.

    Raises:
        SystemExit: With one line, if the folder is no run of a recommendation that ended.
    """
    path = folder / "summary.json"
    if not path.is_file():
        raise SystemExit(f"{folder}: expected a run that ended, whose summary.json is there")
    summary = json.loads(path.read_text())
    if "table" not in summary:
        raise SystemExit(f"{path}: expected a recommendation's, with a table of its methods")
    seed = yaml.safe_load((folder / "config.yaml").read_text())["seed"]
    rows = {entry: [shortened(row) for row in summary.get(entry, [])] for entry in ("table", "differences")}
    return {"seed": seed, "seconds": summary["seconds"], **rows, "recommended": summary.get("recommended", [])}


def shortened(row: Mapping[str, Any]) -> dict[str, Any]:
    """A method on a group of users with the measures that are kept, to six digits."""
    told = {name: row[name] for name in ("method", "group", "users")}
    kept = {name: [round(value, 6) for value in row[name].values()] for name in KEPT if name in row}
    return told | kept


def columns(runs: Sequence[Mapping[str, Any]], entry: str, group: str, measure: str, *, signed: bool = False) -> str:
    """Markdown of one entry: a line for each method, `mean [low, high]` of each run."""
    told = []
    for run in runs:
        rows = (row for row in run[entry] if row["group"] == group and measure in row)
        told.append({row["method"]: shown(row[measure], signed=signed) for row in rows})
    return beside(f"{measure}, {group}", runs, told)


def spreads(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of what is recommended: coverage and Gini coefficient of each method and run."""
    told = []
    for run in runs:
        rows = (list(row.values()) for row in run["recommended"])
        told.append({method: ", ".join(f"{value:.2f}" for value in values) for method, *values in rows})
    return beside("coverage@10, Gini@10", runs, told)


def beside(title: str, runs: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, str]]) -> str:
    """A line for each method that a run tells of, a column for each run."""
    lines = [[method, *(one.get(method, "") for one in told)] for method in dict.fromkeys(chain(*told))]
    return markdown([title, *(f"seed {run['seed']}" for run in runs)], lines)


def shown(interval: Sequence[float], *, signed: bool = False) -> str:
    """`.0525 [.0499, .0550]`, with signs `+.0038 [+.0028, +.0049]`."""
    mean, low, high = (f"{value:{'+' if signed else ''}.4f}".replace("0.", ".", 1) for value in interval)
    return f"{mean} [{low}, {high}]"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories of one config")
    parser.add_argument("--measure", choices=KEPT, default="NDCG@10", help="(default: %(default)s)")
    parser.add_argument("--group", action="append", help="of users, as the run's table has them; may be given again")
    parser.add_argument("--json", type=Path, help="write what was read there")
    options = parser.parse_args(arguments)
    runs = [read_run(folder) for folder in options.runs]
    for group in options.group or ["all"]:
        print(columns(runs, "table", group, options.measure), end="\n\n")
    print(columns(runs, "differences", "all", options.measure, signed=True), end="\n\n")
    print(spreads(runs))
    if options.json:
        options.json.write_text(json.dumps(runs) + "\n")


if __name__ == "__main__":
    main()
