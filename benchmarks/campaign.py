"""The fault campaign: runs are killed, disks are full, judges and files are broken, and everything must be as promised.

    python benchmarks/campaign.py                                        # the whole: hours on two cores
    python benchmarks/campaign.py --seed 7 --kinds kills:20 disk:5       # a part of it

Handled means: at worst one clear line and exit code 2; no traceback, no hang, nothing lost that was saved. Equal means:
the run that went on came to the same metrics, completions, checkpoints and weights, bit for bit, as one without a
fault. Prints a table and what was not as promised; with --out writes every case as JSON. The exit code is 1 if
anything was not. What the faults are is in tests/faults, a module for each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHOLE = (
    *("kills:140", "disk:14", "judges:258", "corruption:2000"),
    *("fuzz.config:20000", "fuzz.prompts:26000", "fuzz.folders:4000"),
)
WHAT = {
    "kills": "killed or stopped at random moments of every phase, and resumed",
    "disk": "files that may not grow beyond a size",
    "judges": "judges' faults, in stop and missing mode",
    "corruption": "files of checkpoints flipped, cut, emptied, deleted, grown",
    "fuzz.config": "mutated configs and command lines",
    "fuzz.prompts": "mutated prompt files",
    "fuzz.folders": "mutated model and tokenizer folders",
}


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(WHOLE), metavar="KIND:COUNT", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that share a kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for every case")
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="grpo_jax_faults_") as folder:
        for wanted in options.kinds:
            kind, _, count = wanted.partition(":")
            if kind not in WHAT or not count.isdigit():
                parser.error(f"--kinds: expected KIND:COUNT with one of {', '.join(WHAT)}, got {wanted!r}")
            outcomes += tried(Path(folder), kind, int(count), options.seed, options.workers)
            print(table([kind], outcomes), flush=True)
            if options.out:
                options.out.write_text(json.dumps({"machine": machine(), "outcomes": outcomes}, indent=1) + "\n")
    broken = [outcome for outcome in outcomes if not outcome["handled"] or outcome["equal"] is False]
    for outcome in broken:
        print(f"\nNOT AS PROMISED, {outcome['kind']}, seed {outcome['seed']}: {outcome['case']}\n  {outcome['note']}")
    print("\n" + table([wanted.partition(":")[0] for wanted in options.kinds], outcomes))
    return 1 if broken else 0


def tried(folder: Path, kind: str, count: int, seed: int, workers: int) -> list[dict[str, Any]]:
    """The outcomes of one kind, shared out over processes with seeds that follow one another."""
    shares = 1 if kind == "judges" else min(workers, count)  # one list of cases: two workers would do it twice
    counts = [count // shares + (number < count % shares) for number in range(shares)]
    with ThreadPoolExecutor(shares) as pool:
        parts = pool.map(lambda number: _part(folder / str(number), kind, counts[number], seed + number), range(shares))
        return [outcome for part in parts for outcome in part]


def _part(folder: Path, kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),  # the runs' programs are the same
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    arguments = [sys.executable, "-m", "faults", str(folder), str(seed), f"{kind}:{count}"]
    started = time.monotonic()
    done = subprocess.run(arguments, env=environment, cwd=ROOT / "tests", capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind": ')]
    if done.returncode != 0:
        why = " | ".join(done.stderr.strip().splitlines()[-3:])
        found.append({"kind": kind, "seed": seed, "case": "the campaign itself", "handled": False, "equal": None,
                      "note": why, "seconds": time.monotonic() - started})  # fmt: skip
    return found


def table(kinds: list[str], outcomes: list[dict[str, Any]]) -> str:
    """Markdown: a row for each kind."""
    lines = ["| kind | what | tried | handled | compared | equal | seconds |", "|---|---|---|---|---|---|---|"]
    for kind in kinds:
        own = [outcome for outcome in outcomes if outcome["kind"] == kind]
        compared = [outcome for outcome in own if outcome["equal"] is not None]
        cells = (
            *(kind, WHAT[kind], len(own), sum(outcome["handled"] for outcome in own), len(compared)),
            *(sum(outcome["equal"] for outcome in compared), round(sum(outcome["seconds"] for outcome in own))),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What it ran on."""
    from importlib import metadata

    packages = ("jax", "orbax-checkpoint", "torch", "transformers")
    versions = {name: metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"), **versions}


if __name__ == "__main__":
    sys.exit(main())
