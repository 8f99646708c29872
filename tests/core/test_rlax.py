"""Returns, GAE, PPO's losses and the KL penalty against rlax and optax, values and gradients in float64."""

import pytest

pytest.importorskip("rlax", reason="rlax is the oracle of this file: pip install -e '.[oracles]'")

from oracles.oracle import run
from oracles.oracle_rlax import CASES

TOLERANCE = 1e-10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_agrees_with_rlax(case):
    for seed in range(4):
        value, gradient = run(case, seed)
        assert value < TOLERANCE
        assert gradient is None or gradient < TOLERANCE
