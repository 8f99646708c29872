"""Losses, gradients and advantages against TRL's own code, in float64."""

import pytest

pytest.importorskip("trl", reason="TRL is the oracle of this file: pip install -e '.[diffusion,oracles]'")

from oracle import run
from oracle_trl_cases import CASES
from oracle_trl_selection import CASES as SELECTION

TOLERANCE = 1e-6


@pytest.mark.parametrize("case", CASES + SELECTION, ids=lambda case: case.id)
def test_agrees_with_trl(case):
    for seed in range(2):
        value, gradient = run(case, seed)
        assert value < TOLERANCE
        assert gradient is None or gradient < TOLERANCE
