"""Frozen weights in few bits: their error, and the same rounded weights in all computations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("qwix", reason="needs the package qwix (pip install qwix)")
from support import tiny_update
from support.tiny_decoders import merged_params

from grpo_jax.core.logprobs import token_logprobs
from grpo_jax.models.lora import TILE, LoraConfig, count_weights, quantise
from grpo_jax.models.policy import Policy

LORA = LoraConfig(2, 4.0, ("q_proj", "down_proj"))


@pytest.fixture(scope="module")
def variables():
    start = tiny_update.make_variables(lora=LORA)
    layers = jax.tree.map(lambda leaf: 5 * np.asarray(leaf), start["params"]["layers"])  # so that layers matter
    lora = jax.tree.map(lambda leaf: np.asarray(leaf) + np.float32(0.05), start["lora"])
    return jax.device_put({"params": start["params"] | {"layers": layers}, "lora": lora})


def rounded(kernel):
    """A QArray as it is defined, in NumPy: integers times the scale of their group of inputs."""
    integers, scales = np.asarray(kernel.qvalue, np.float32), np.asarray(kernel.scale)
    return integers * np.repeat(scales, integers.shape[1] // scales.shape[1], axis=1)


def plain(params):
    """The rounded weights as ordinary ones."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(rounded(leaf)) if hasattr(leaf, "qvalue") else leaf,
        params,
        is_leaf=lambda leaf: hasattr(leaf, "qvalue"),
    )


@pytest.mark.parametrize(("kind", "largest", "width"), [("int8", 127, 128), ("int4", 7, 128), ("int4", 7, 48)])
def test_no_weight_is_further_away_than_half_a_step(kind, largest, width):
    kernel = np.random.default_rng(0).normal(size=(2, width, 5)).astype(np.float32) * np.array([1e-3, 1, 1, 1, 30])
    stored = quantise({"layers": {"q_proj": {"kernel": kernel.astype(np.float32)}}}, kind)["layers"]["q_proj"]["kernel"]
    tile = TILE if kind == "int4" and width % TILE == 0 else width
    assert stored.qvalue.dtype == jnp.dtype(kind) and stored.scale.shape == (2, width // tile, 5)
    groups = np.abs(kernel.reshape(2, width // tile, tile, 5)).max(axis=2, keepdims=True)
    wrong = np.abs(rounded(stored) - kernel).reshape(2, width // tile, tile, 5)
    assert (wrong <= groups / largest / 2 * 1.001).all()
    assert wrong.max() > 0


def test_only_the_kernels_of_layers_are_stored_in_few_bits(variables):
    params = variables["params"]
    small = quantise(params, "int8")
    assert count_weights(small) == sum(leaf.size for leaf in jax.tree.leaves(params))
    for name, own in small["layers"].items():
        for part, leaf in own.items():
            assert hasattr(leaf, "qvalue") == (part == "kernel"), (name, part)
    np.testing.assert_array_equal(small["embed_tokens"], params["embed_tokens"])


@pytest.fixture(scope="module")
def step():
    """Loss and gradients of the adapters, compiled once for ordinary weights and once for each kind."""
    batch = tiny_update.make_batch()
    policy = Policy(tiny_update.CONFIG, lora=LORA, remat="none")

    def loss(lora, params):
        both = {"params": params, "lora": lora}
        hidden = policy.forward_group(both, batch.prompt_tokens, batch.prompt_mask, batch.tokens, batch.mask)
        logprobs, _ = token_logprobs(hidden, policy.head(both), batch.tokens, temperature=1.0)
        return jnp.mean(logprobs * batch.mask)

    return jax.jit(jax.value_and_grad(loss))


def test_the_update_computes_from_the_rounded_weights(variables, step):
    """The oracle: ordinary float weights that hold the rounded values. Adapters and their gradients stay float32."""
    small = quantise(variables["params"], "int4")
    value, grads = step(variables["lora"], small)
    expected, expected_grads = step(variables["lora"], plain(small))
    assert value == pytest.approx(float(expected), abs=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected_grads)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads)) > 1e-3
    exact, _ = step(variables["lora"], variables["params"])
    assert 1e-6 < abs(float(exact - value)) < 0.5
    merged = merged_params({"params": small, "lora": variables["lora"]}, LORA)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(merged))
    want = merged_params({"params": plain(small), "lora": variables["lora"]}, LORA)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged, want)
