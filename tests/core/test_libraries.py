"""Against rlax and optax (returns, GAE, PPO's losses, the KL penalty), SciPy and scikit-learn (statistics); float64."""

import importlib.util

import pytest
from oracles.oracle import run

TOLERANCE = 1e-10


def cases_of(module, package):
    """The cases that a library answers; one that is skipped where it is not installed."""
    if importlib.util.find_spec(package) is None:
        skip = pytest.mark.skip(reason=f"{package} is an oracle of this file: pip install -e '.[oracles]'")
        return [pytest.param(None, marks=skip, id=package)]
    return [pytest.param(case, id=case.id) for case in importlib.import_module(module).CASES]


@pytest.mark.parametrize(
    "case", [*cases_of("oracles.oracle_rlax", "rlax"), *cases_of("oracles.oracle_scipy", "sklearn")]
)
def test_agrees(case):
    value, gradient = run(case, 0)
    assert value < TOLERANCE
    assert gradient is None or gradient < TOLERANCE
