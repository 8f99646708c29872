"""The iteration benchmark: its tables and ratios."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import grpo_iteration  # noqa: E402


def row(sampling: float, logprobs: float, update: float, tokens: int = 100) -> dict:
    total = sampling + logprobs + update
    return {"sampling": sampling, "logprobs": logprobs, "update": update, "total": total, "tokens": tokens}


def report(*rows: dict, peak: float = 100.0) -> dict:
    return {"iterations": list(rows), "peak_mib": peak, "versions": {}}


def test_ratios_take_the_best_of_each_library_for_time_and_for_memory():
    runs = {
        "ours": [report(row(0, 0, 0), row(1, 1, 0), peak=100)],
        "ours/layer": [report(row(0, 0, 0), row(1, 1, 2), peak=50)],
        "trl/plain": [report(row(0, 0, 0), row(2, 2, 4), peak=400)],
        "trl/checkpointing": [report(row(0, 0, 0), row(2, 2, 6), peak=200)],
        "other": [{"error": "no such module"}],
    }
    rows = {name: grpo_iteration.summary(reports) for name, reports in runs.items()}
    ratios = grpo_iteration.ratios(runs)
    assert ratios == {"time/trl": [0.25], "memory/trl": [0.25]}
    assert grpo_iteration.slower_variants(runs, "trl") == {"trl/checkpointing"}
    assert grpo_iteration.slower_variants(runs, "ours") == {"ours/layer"}
    assert grpo_iteration.slower_variants(runs, "other") == set()

    lines = grpo_iteration.table([{"case": "tiny", "threads": 1, "libraries": rows, "ratios": ratios}]).splitlines()
    assert "| tiny | 1 | other | 1 process(es) failed | | | | | | |" in lines
    assert "| tiny | 1 | ours | 1.00 | 1.00 | 0.00 | 2.00 | 250.0 | 0.0 | 100 |" in lines
    assert lines[-1] == "| tiny | 1 | 0.25 | 0.25 |"
