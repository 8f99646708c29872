"""How the cost of a GRPO iteration grows with its sizes, in grpo_jax and in TRL, beside its arithmetic.

    python benchmarks/cost/growth.py [--curves G T L V] [--libraries ours trl] [--threads 1] [--out growth.json]
    python benchmarks/cost/growth.py --curves G --sizes 2 8 --libraries ours --out /tmp/growth.json

Each curve lets one size of a small case grow and holds the others: completions per prompt (G), new tokens (T), prompt
tokens (L), entries of the vocabulary (V). Workers are those of benchmarks/grpo_iteration.py, one process for each
library and size: one iteration that compiles, then `iterations` more, of which the median counts; the curve's largest
size has one. TRL runs without gradient checkpointing, its faster way. What fails, or is killed where memory does not
suffice, is told and left out.

Prints a table for each curve: seconds, and for each unit of what grows. Then exponents, for each phase and the whole:
the slope of log seconds over log size, between the last two sizes and by least squares over all. Beside them stands
that of the arithmetic, the FLOPs that benchmarks/floor.py counts for the same cases: each prompt once for its group,
attention's triangle. A measured exponent that is no larger grows no faster than its arithmetic; at small sizes it is
smaller, for what every call costs does not grow.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import floor
import grpo_iteration
import iteration_work as work

VARIANTS = {"ours": "", "trl": "plain"}
NAMES = {"ours": "ours", "trl": "TRL"}
PARTS = (*work.PHASES, "total")
BASE = work.Case("growth", 2, 4, 64, 64, hidden=64, layers=2, heads=2, kv_heads=1, mlp=176, vocabulary=512)


@dataclass(frozen=True)
class Curve:
    """One size that grows: the field of the case, its values, and what a case has of it."""

    field: str
    sizes: tuple[int, ...]
    unit: str
    units: Callable[[work.Case], int]

    def case(self, size: int) -> work.Case:
        return replace(BASE, name=f"{self.field}-{size}", **{self.field: size})


CURVES = {
    "G": Curve("group", (2, 8, 32, 64), "completion", lambda case: case.prompts * case.group),
    "T": Curve(
        "new_tokens", (64, 256, 1024, 2048), "new token", lambda case: case.prompts * case.group * case.new_tokens
    ),
    "L": Curve("prompt_tokens", (64, 256, 1024, 4096), "prompt token", lambda case: case.prompts * case.prompt_tokens),
    "V": Curve("vocabulary", (4096, 16384, 65536, 151936), "entry", lambda case: case.vocabulary),
}


def arithmetic(case: work.Case) -> dict[str, float]:
    """FLOPs of each phase and of the iteration, as benchmarks/floor.py counts them."""
    flops = {phase: count(case).flops for phase, count in floor.COUNTS.items()}
    return {**flops, "total": sum(flops.values())}


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The power of the size that values grow with: the slope of their logarithms, by least squares."""
    return statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in values]).slope


def measure(case: work.Case, library: str, iterations: int, threads: int, root: Path) -> dict[str, Any]:
    """Medians by phase and peak memory of a library's worker; "error" where it failed."""
    folder = grpo_iteration.make_folder(case, root)
    out = root / f"{case.name}-{library}.json"
    given = work.Assignment(case, folder, iterations + 1, threads, VARIANTS[library], "wall", out)
    report = grpo_iteration.run_worker(library, given, sys.executable)
    if "error" in report:
        return {"error": report["error"]}
    kept = {name: report[name] for name in ("peak_mib", "versions", "iterations")}
    return {**work.median_row(report["iterations"][1:]), **kept}


def points(results: list[dict], curve: str, library: str) -> list[dict]:
    """The results of a curve that a library has, smallest first."""
    rows = [row for row in results if row["curve"] == curve and "total" in row.get(library, {})]
    return sorted(rows, key=lambda row: row["size"])


def exponents(results: list[dict], curve: str, source: str) -> dict[str, dict[str, float]]:
    """Of each phase and the whole: {"last": between the last two sizes, "all": over all}; {} of fewer than two."""
    rows = points(results, curve, source)
    if len(rows) < 2:
        return {}
    sizes = [row["size"] for row in rows]
    found = {}
    for part in PARTS:
        values = [row[source][part] for row in rows]
        found[part] = {"last": exponent(sizes[-2:], values[-2:]), "all": exponent(sizes, values)}
    return found


def curve_table(results: list[dict], name: str, libraries: Sequence[str]) -> str:
    """Seconds of an iteration at each size, their ratio, and microseconds for each unit."""
    curve = CURVES[name]
    each = [f"{NAMES[library]} µs per {curve.unit}" for library in libraries]
    both = len(libraries) == 2
    columns = [name, *(f"{NAMES[library]} s" for library in libraries), *["ratio"] * both, *each, "GFLOP"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in (row for row in results if row["curve"] == name):
        seconds = [row[library].get("total", math.nan) for library in libraries]
        units = curve.units(curve.case(row["size"]))
        figures = [*seconds, *[seconds[0] / seconds[-1]] * both, *(1e6 * value / units for value in seconds)]
        cells = [told(value) for value in (*figures, row["arithmetic"]["total"] / 1e9)]
        lines.append(f"| {row['size']} | {' | '.join(cells)} |")
    failed = [
        f"{NAMES[library]} failed at {name} = {row['size']}: {row[library]['error'].splitlines()[0]}"
        for row in results
        for library in libraries
        if row["curve"] == name and "error" in row[library]
    ]
    return "\n".join(lines + [""] * bool(failed) + failed)


def exponents_table(results: list[dict], curves: Sequence[str], libraries: Sequence[str]) -> str:
    """Exponents between the last two sizes, and in parentheses over all."""
    columns = ["curve", "phase", *(NAMES[library] for library in libraries), "arithmetic"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name in curves:
        every = [exponents(results, name, source) for source in (*libraries, "arithmetic")]
        for part in PARTS:
            cells = [f"{one[part]['last']:.2f} ({one[part]['all']:.2f})" if one else "–" for one in every]
            lines.append(f"| {name} | {'iteration' if part == 'total' else part} | {' | '.join(cells)} |")
    return "\n".join(lines)


def told(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", nargs="+", choices=list(CURVES), default=list(CURVES))
    parser.add_argument("--sizes", nargs="+", type=int, help="in place of the curve's own; of one curve")
    parser.add_argument("--libraries", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=2, help="timed ones, of all sizes but a curve's largest")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("growth.json"))
    chosen = parser.parse_args(arguments)
    if chosen.sizes and len(chosen.curves) > 1:
        parser.error(f"--sizes: expected with one of --curves, got {chosen.curves}")
    chosen.libraries = [name for name in VARIANTS if name in chosen.libraries]
    return chosen


def main() -> int:
    chosen = options()
    results: list[dict] = []
    outcome = {"machine": grpo_iteration.machine(), "threads": chosen.threads, "results": results}
    with tempfile.TemporaryDirectory() as root:
        for name in chosen.curves:
            curve = CURVES[name]
            sizes = sorted(chosen.sizes or curve.sizes)
            for size in sizes:
                case = curve.case(size)
                row: dict[str, Any] = {"curve": name, "size": size, "arithmetic": arithmetic(case)}
                results.append(row)
                iterations = 1 if size == sizes[-1] else chosen.iterations
                for library in chosen.libraries:
                    row[library] = found = measure(case, library, iterations, chosen.threads, Path(root))
                    said = found.get("error") or f"{found['total']:.3g} s, {found['peak_mib']:.0f} MiB"
                    print(f"{name} = {size}, {NAMES[library]}: {said}", file=sys.stderr, flush=True)
            sources = (*chosen.libraries, "arithmetic")
            outcome.setdefault("exponents", {})[name] = {one: exponents(results, name, one) for one in sources}
            chosen.out.write_text(json.dumps(outcome, indent=1) + "\n")
            print(curve_table(results, name, chosen.libraries) + "\n")
    print(exponents_table(results, chosen.curves, chosen.libraries))
    return int(any("error" in row[library] for row in results for library in chosen.libraries))


if __name__ == "__main__":
    raise SystemExit(main())
