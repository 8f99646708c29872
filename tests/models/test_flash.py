"""Attention by the kernels of GPUs and TPUs, interpreted on a CPU, against scores and a softmax."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from support.tiny_decoders import LLAMA

from grpo_jax.models import attention, flash
from grpo_jax.models.attention import choose_attention
from grpo_jax.models.contexts import group_context, packed_context, prompt_context
from grpo_jax.models.decoder import Decoder, init_variables
from grpo_jax.models.policy import make_policy

PLAIN = replace(LLAMA, windows=(None,), num_layers=1, head_dim=16)
INTERPRETED = {"cuda": nullcontext, "tpu": pltpu.force_tpu_interpret_mode}


def softmax_rows(query, key, value, mask):
    length, size = query.shape[1], query.shape[-1]
    scores = jnp.einsum("bskre,btke->bkrst", query, key) * size**-0.5
    order = np.arange(length)
    read = (order[:, None] >= order) & (mask[:, :, None] == mask[:, None])
    weights = jax.nn.softmax(jnp.where(read[:, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("bkrst,btke->bskre", weights, value)


@pytest.mark.parametrize(("platform", "length"), [("cuda", 130), ("tpu", 20)])
def test_rows_and_their_gradients_are_those_of_a_softmax(platform, length):
    """Two query heads for each key head, rows that no block divides, padding on the left."""
    rng = np.random.default_rng(0)
    shapes = (1, length, 1, 2, 8), (1, length, 1, 8), (1, length, 1, 8)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    mask = np.arange(length) >= np.array([[13]])

    def outcome(attend):
        def total(arrays):
            return jnp.sum(jnp.sin(attend(*arrays, mask)) * mask[:, :, None, None, None])

        return jax.jit(jax.value_and_grad(total))(arrays)

    with INTERPRETED[platform]():
        kernel = outcome(partial(flash.causal_rows, platform=platform, interpret=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-4), kernel, outcome(softmax_rows))


@pytest.fixture
def calls(monkeypatch):
    made = []

    def interpreted(query, *rest):
        made.append(query.shape[:2])
        return flash.causal_rows(query, *rest, interpret=True)

    monkeypatch.setattr(attention, "causal_rows", interpreted)
    return made


@pytest.mark.parametrize(("length", "steps", "rows"), [(6, 130, [(2, 136)]), (140, 130, [(1, 140)]), (6, 20, [])])
def test_prompts_and_completions_are_rows_of_a_kernel(length, steps, rows, calls):
    """States and gradients are those of products. Prompts longer than their completions run alone, few tokens never."""
    config = PLAIN
    variables = init_variables(config, jax.random.key(0))
    rng = np.random.default_rng(1)
    mask = np.arange(length) >= np.array([[3]])
    tokens = rng.integers(1, config.vocab_size, (1, 2, steps))
    context = group_context(config, prompt_context(config, jnp.asarray(mask)), tokens, tokens > 0)
    row = np.concatenate([rng.integers(1, config.vocab_size, mask.shape), tokens.reshape(1, -1)], axis=1)
    real = np.pad(mask, ((0, 0), (0, 2 * steps)), constant_values=True)[..., None]

    def outcome(kind):
        decoder = Decoder(config, attention=kind)

        def total(variables):
            states = decoder.apply(variables, jnp.asarray(row), context)[0]
            return jnp.sum(jnp.sin(states) * real)

        return jax.jit(jax.value_and_grad(total))(variables)

    kernel = outcome("cuda")
    assert list(dict.fromkeys(calls)) == rows
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-3), kernel, outcome("blocks"))


def test_a_window_and_packed_rows_are_left_to_products(calls):
    context = prompt_context(LLAMA, jnp.ones((1, 140), bool))
    prompts = prompt_context(PLAIN, jnp.ones((1, 4), bool))
    packed = packed_context(prompts, jnp.tile(jnp.arange(65), 2)[None, None], jnp.ones((1, 1, 130), bool))
    for model, of_row, count in ((LLAMA, context.context, 140), (PLAIN, packed, 134)):
        decoder = Decoder(model, attention="cuda")
        jax.eval_shape(decoder.apply, init_variables(model, jax.random.key(0)), jnp.ones((1, count), jnp.int32), of_row)
    assert calls == []


@pytest.mark.parametrize(
    ("platform", "dtype", "implementation", "over_mesh", "chosen"),
    [
        ("cpu", "float32", "auto", False, "rows"),
        ("cpu", "bfloat16", "auto", True, "blocks"),
        ("cuda", "bfloat16", "auto", False, "cuda"),
        ("tpu", "bfloat16", "auto", False, "tpu"),
        ("cuda", "bfloat16", "eager", False, "blocks"),
        ("cuda", "bfloat16", "auto", True, "blocks"),
        ("cuda", "float16", "auto", False, "blocks"),
        ("tpu", "float32", "auto", False, "blocks"),
    ],
)
def test_kernels_are_for_bfloat16_on_one_device(platform, dtype, implementation, over_mesh, chosen):
    assert choose_attention(platform, jnp.dtype(dtype), implementation, over_mesh=over_mesh) == chosen


def test_another_implementation_is_refused():
    with pytest.raises(ValueError, match=r"attn_implementation must be one of \('auto', 'eager'\), got 'flash'"):
        make_policy(LLAMA, attn_implementation="flash")
