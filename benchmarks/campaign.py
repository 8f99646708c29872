"""The fault campaign: kill runs, damage checkpoints, mutate inputs, and check the promised outcome.

    python benchmarks/campaign.py                                        # the whole
    python benchmarks/campaign.py --seed 7 --kinds kills:5               # a part of it
    python benchmarks/campaign.py --kinds kills:1:text               # of one kind of run

A handled fault gives at worst one clear line and exit code 2, without a traceback, a hang, or a loss of saved data. In
an equal run, metrics, completions, checkpoints and weights after the resume equal those of a run without a fault, bit
for bit. Prints a table and the failures; --out writes every case as JSON. The exit code is 1 after any failure.
tests/faults has a module for each kind of fault.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHOLE = ("kills:20", "corruption:60", "fuzz.config:400", "fuzz.prompts:500", "fuzz.folders:100")
FORKING = ("kills", "corruption")  # before the others start a device of JAX


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=WHOLE, metavar="KIND:COUNT[:NAME,…]", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for every case")
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="grpo_jax_faults_") as folder:
        os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/programs"  # the runs' programs are the same
        sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
        for wanted in sorted(options.kinds, key=lambda wanted: wanted.partition(":")[0] not in FORKING):
            kind, count, *names = wanted.split(":")
            campaign = importlib.import_module(f"faults.{kind}").campaign
            more = {"names": tuple(names[0].split(","))} if names else {}
            began = time.monotonic()
            cases = [outcome._asdict() for outcome in campaign(Path(folder), options.seed, int(count), **more)]
            outcomes += [{"kind": kind, "seed": options.seed, **case} for case in cases]
            print(row(kind, cases, time.monotonic() - began), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "outcomes": outcomes}, indent=1) + "\n")
    broken = [outcome for outcome in outcomes if not outcome["handled"] or outcome["equal"] is False]
    for outcome in broken:
        print(f"\nNOT AS PROMISED, {outcome['kind']}, seed {outcome['seed']}: {outcome['case']}\n  {outcome['note']}")
    return 1 if broken else 0


def row(kind: str, cases: list[dict[str, Any]], seconds: float) -> str:
    """Return a row of a table."""
    handled = sum(case["handled"] for case in cases)
    compared = [case["equal"] for case in cases if case["equal"] is not None]
    equal = f"{sum(compared)} of {len(compared)} equal"
    return f"| {kind} | {len(cases)} tried | {handled} handled | {equal} | {seconds:.0f} s |"


if __name__ == "__main__":
    sys.exit(main())
