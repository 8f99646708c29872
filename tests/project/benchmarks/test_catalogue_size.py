"""The script that measures what a large catalogue costs, on a small one: every method, and the same ranks."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "benchmarks" / "recommendation" / "catalogue_size.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("catalogue_size", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_method_is_measured_and_sparse_ranks_are_those_of_whole_arrays(script):
    rows = [method(name, 300, 40) for name, method in script.METHODS.items()]
    assert [row["method"] for row in rows] == list(script.METHODS) and all(row["memory_mib"] >= 0 for row in rows)
    assert [row["equal"] for row in rows if "equal" in row] == [True]
    assert len(script.table(rows).splitlines()) == len(rows) + 1
