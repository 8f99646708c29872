"""What tests of plans have in common."""

import jax
import pytest

from grpo_jax.planning import policy as plan
from grpo_jax.training import memory as training_memory
from grpo_jax.training.memory import GIB


@pytest.fixture
def not_compiled(monkeypatch):
    """Every program takes 3 GiB."""
    for module in (plan, training_memory):
        monkeypatch.setattr(module, "temporary_bytes", lambda *_: 3 * GIB)


@pytest.fixture(scope="module", autouse=True)
def devices_have_started():
    """Planning for other devices would ask JAX for more of them, in this process too."""
    jax.devices()
