"""The script that measures sampling ahead: its cases are runs at the lag they name."""

import importlib.util
import json
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("lag", Path(__file__).parents[2] / "benchmarks" / "scaling" / "lag.py")
lag = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(lag)


@pytest.mark.slow
@pytest.mark.wide
def test_a_case_is_a_run_that_samples_ahead_in_chunks(tmp_path):
    found = lag.measure(tmp_path, 1, 2, 4, unit=0.01, iterations=5)
    assert (found["lag"], found["chunks"], found["floor"]) == (1, 2, 0.0125) and 0 < found["seconds"] <= found[
        "slowest"
    ]
    assert found["predicted"] > found["floor"]  # the waiting, and the real work
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    assert [json.loads(line)["staleness"] for line in metrics.read_text().splitlines()] == [0, 1, 1, 1, 1]
