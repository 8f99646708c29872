"""Against rlax and optax (returns, GAE, PPO's losses, the KL penalty), SciPy and scikit-learn (statistics); float64."""

import importlib
from importlib.util import find_spec

import pytest
from oracles.oracle import run

TOLERANCE = 1e-10


@pytest.mark.parametrize(("oracle", "package"), [("rlax", "rlax"), ("scipy", "sklearn")])
def test_agrees(oracle, package):
    """All cases of an oracle, which the collecting workers need not import."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is an oracle of this file: pip install -e '.[oracles]'")
    for case in importlib.import_module(f"oracles.oracle_{oracle}").CASES:
        value, gradient = run(case, 0)
        assert value < TOLERANCE, case.id
        assert gradient is None or gradient < TOLERANCE, case.id
