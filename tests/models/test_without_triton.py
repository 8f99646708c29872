"""Attention that a run cannot have, as a line of its log says: jax deprecates Pallas on Triton, cuDNN is for GPUs."""

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


def test_a_run_without_a_gpu_says_that_cudnn_is_for_one(place, monkeypatch):
    def lines(platform, dtype):
        monkeypatch.setattr(policies, "platform_of", lambda _: platform)
        config, logged = load_config(place.config), []
        config = config.replace(policy=config.policy.replace(attn_implementation="cudnn", compute_dtype=dtype))
        load_run_policy(config, jax.devices()[:1], lambda *line: logged.append(line[1]))
        return [line for line in logged if "cudnn" in line]

    assert len(lines("cpu", "bfloat16")) == len(lines("cuda", "float32")) == 1
    assert lines("cuda", "bfloat16") == []
