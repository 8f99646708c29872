"""Statistics and diagnostics against SciPy, scikit-learn and NumPy, in float64."""

import pytest

pytest.importorskip("sklearn", reason="scikit-learn is an oracle of this file: pip install -e '.[oracles]'")

from oracles.oracle import run
from oracles.oracle_scipy import CASES

TOLERANCE = 1e-10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_agrees(case):
    for seed in range(4):
        value, _ = run(case, seed)
        assert value < TOLERANCE
