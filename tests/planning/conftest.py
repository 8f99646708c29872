"""Fixtures of the tests of plans."""

import jax
import pytest

from grpo_jax.planning import GIB
from grpo_jax.planning import memory as plan
from grpo_jax.planning.programs import Report, Work


@pytest.fixture
def not_compiled(monkeypatch):
    """Every program takes 3 GiB here, and no compiler of absent GPUs is installed."""
    monkeypatch.setattr(plan, "has_compiler", lambda platform: False)
    monkeypatch.setattr(plan, "report_program", lambda *_: Report(GIB, 3 * GIB, 0, Work(1e12, 1e9)))


@pytest.fixture(scope="module", autouse=True)
def devices_have_started():
    """Planning for other devices would ask JAX for more of them, in this process too."""
    jax.devices()
