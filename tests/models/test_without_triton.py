"""A jax without Pallas on Triton, which jax deprecates: GPUs compute attention by XLA's products, and a run says so."""

import sys
from importlib import import_module

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas

from grpo_jax import models
from grpo_jax.config.command_line import load_config
from grpo_jax.models import policy as policies
from grpo_jax.models.attention import choose_attention, has_triton
from grpo_jax.runs.policy import load_run_policy


@pytest.fixture
def hidden(monkeypatch):
    """Hide the module, imported or not."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr(pallas, "triton", raising=False)
    monkeypatch.delitem(sys.modules, "grpo_jax.models.kernels", raising=False)
    monkeypatch.delattr(models, "kernels", raising=False)
    has_triton.cache_clear()
    yield
    has_triton.cache_clear()


def test_gpus_take_products_and_tpus_their_kernels(hidden):
    def chosen(platform):
        return choose_attention(platform, jnp.bfloat16, "auto", over_mesh=False)

    assert (chosen("cuda"), chosen("tpu")) == ("blocks", "tpu")
    assert import_module("grpo_jax.models.kernels").causal_rows


def test_a_run_says_so_in_one_line(hidden, place, monkeypatch):
    def lines():
        monkeypatch.setattr(policies, "platform_of", lambda _: "cuda")
        logged = []
        load_run_policy(load_config(place.config), jax.devices()[:1], lambda *line: logged.append(line[1]))
        return [line for line in logged if "Triton" in line]

    assert len(lines()) == 1
    monkeypatch.undo()
    has_triton.cache_clear()
    assert lines() == []
