"""Attention of many queries, in blocks and by the kernels of GPUs and TPUs, against scores and a softmax."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import attention as gpu_attention
from support.tiny_decoders import LLAMA, drawn

from grpo_jax.models import attention, kernels
from grpo_jax.models.attention import choose_attention, platform_of
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.kernels import causal_rows
from grpo_jax.models.policy import Policy
from grpo_jax.models.positions import group_context, packed_context, prompt_context

PLAIN = replace(LLAMA, windows=(None,), num_layers=1, head_dim=16)
INTERPRETED = {"cuda": nullcontext, "tpu": pltpu.force_tpu_interpret_mode, "cudnn": nullcontext}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Interpret kernels; XLA's attention takes the place of cuDNN's, whose result on padding is undefined."""
    monkeypatch.setattr(gpu_attention, "mha", partial(gpu_attention.mha, interpret=True))
    by_xla = jax.nn.dot_product_attention

    def attend(*arrays, implementation, **options):
        assert implementation == "cudnn" and arrays[0].shape[1] % 2 == 0
        real = jnp.arange(arrays[0].shape[1]) < options["query_seq_lengths"][:, None]
        return jnp.where(real[..., None, None], by_xla(*arrays, **options), jnp.nan)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)


def softmax_rows(query, key, value, mask):
    length, size = query.shape[1], query.shape[-1]
    scores = jnp.einsum("bskre,btke->bkrst", query, key) * size**-0.5
    order = np.arange(length)
    read = (order[:, None] >= order) & (mask[:, :, None] == mask[:, None])
    weights = jax.nn.softmax(jnp.where(read[:, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("bkrst,btke->bskre", weights, value)


@pytest.mark.parametrize(
    ("platform", "length", "padding"), [("cuda", 130, [13]), ("tpu", 20, [13]), ("cudnn", 21, [13, 0, 20])]
)
def test_rows_and_their_gradients_are_those_of_a_softmax(platform, length, padding):
    """Two query heads for each key head, rows that no block divides, padding on the left."""
    rng = np.random.default_rng(0)
    rows = len(padding)
    shapes = (rows, length, 1, 2, 8), (rows, length, 1, 8), (rows, length, 1, 8)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    mask = np.arange(length) >= np.array(padding)[:, None]

    def outcome(attend):
        def total(arrays):
            return jnp.sum(jnp.sin(attend(*arrays, mask)) * mask[:, :, None, None, None])

        return jax.jit(jax.value_and_grad(total))(arrays)

    with INTERPRETED[platform]():
        kernel = outcome(partial(causal_rows, platform=platform))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-4), kernel, outcome(softmax_rows))


@pytest.fixture
def calls(monkeypatch):
    made = []

    def counted(query, *rest):
        made.append(query.shape[:2])
        return causal_rows(query, *rest)

    monkeypatch.setattr(kernels, "causal_rows", counted)
    return made


@pytest.mark.parametrize(
    ("kind", "length", "steps", "rows"),
    [
        ("cuda", 6, 130, [(2, 136)]),
        ("cudnn", 6, 130, [(2, 136)]),
        pytest.param("cuda", 140, 130, [(1, 140)], marks=pytest.mark.wide),
    ],
)
def test_prompts_and_completions_are_rows_of_a_kernel(kind, length, steps, rows, calls):
    """States and gradients are those of products. Prompts longer than their completions run alone."""
    config = PLAIN
    variables = drawn(config)
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

    kernel = outcome(kind)
    assert list(dict.fromkeys(calls)) == rows
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-3), kernel, outcome("blocks"))


def test_a_window_few_tokens_and_packed_rows_are_left_to_products(calls):
    context, few = (prompt_context(LLAMA, jnp.ones((1, count), bool)) for count in (140, 20))
    prompts = prompt_context(PLAIN, jnp.ones((1, 4), bool))
    packed = packed_context(prompts, jnp.tile(jnp.arange(65), 2)[None, None], jnp.ones((1, 1, 130), bool))
    for model, of_row, count in ((LLAMA, context.context, 140), (PLAIN, few.context, 20), (PLAIN, packed, 134)):
        decoder = Decoder(model, attention="cuda")
        jax.eval_shape(decoder.apply, drawn(model), jnp.ones((1, count), jnp.int32), of_row)
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
        ("cuda", "bfloat16", "cudnn", False, "cudnn"),
        ("cuda", "float32", "cudnn", False, "blocks"),
        ("cuda", "bfloat16", "cudnn", True, "blocks"),
        ("tpu", "bfloat16", "cudnn", False, "tpu"),
        ("cpu", "bfloat16", "cudnn", False, "rows"),
    ],
)
def test_kernels_are_for_bfloat16_on_one_device(platform, dtype, implementation, over_mesh, chosen):
    assert choose_attention(platform, jnp.dtype(dtype), implementation, over_mesh=over_mesh) == chosen


@pytest.mark.parametrize(
    ("platform", "capability", "name"),
    [("cpu", None, "cpu"), ("tpu", None, "tpu"), ("gpu", "9.0", "cuda"), ("gpu", "8.0", "cuda"), ("gpu", "7.5", "gpu")],
)
def test_the_platform_of_a_device(platform, capability, name):
    assert platform_of(SimpleNamespace(platform=platform, compute_capability=capability or "8.0")) == name


def test_a_gpu_decodes_from_matrices_in_the_type_of_the_computation():
    variables = drawn(PLAIN)
    layer = Policy(PLAIN, compute_dtype="bfloat16", platform="cuda").unstack(variables)["params"]["layers_0"]
    types = {leaf.ndim: leaf.dtype for leaf in jax.tree.leaves(layer)}
    assert types == {2: jnp.bfloat16, 1: jnp.float32}


@pytest.mark.parametrize(
    ("steps", "apart", "by_row"),
    [
        pytest.param(127, False, True, marks=pytest.mark.wide),
        pytest.param(301, False, False, marks=pytest.mark.wide),
        (301, True, True),
    ],
)
def test_many_queries_take_turns_and_read_the_same(steps, apart, by_row, monkeypatch):
    """Against one softmax over all keys, with gradients: masks of segments, a shared prefix, a scale and a softcap."""
    rng = np.random.default_rng(steps)
    prompts, heads, group, shared, width, length = 2, 2, 3, 2, 4, 5
    shapes = (shared, steps, width), (width, steps), (steps, width)
    query, keys, values = (rng.normal(size=(prompts, heads, group, *shape)).astype(np.float32) for shape in shapes)
    prefix = tuple(rng.normal(size=(prompts, heads, *s)).astype(np.float32) for s in ((width, length), (length, width)))
    rows = (prompts, group) if apart else (prompts,)
    segment = np.sort(rng.integers(0, 3, (*rows, steps)), axis=-1)
    places = np.broadcast_to(length + np.arange(steps), segment.shape)
    queries = attention.Tokens(places, np.ones(places.shape, bool), segment)
    known = attention.Tokens(np.tile(np.arange(length), (prompts, 1)), rng.random((prompts, length)) < 0.8)

    def weighted(query, keys, values, prefix):
        memories = [attention.KeyValues(*prefix, known), attention.KeyValues(keys, values, queries, own=True)]
        mixed = attention.attend(query, queries, memories, window=100, scale=0.7, softcap=3.0, by_row=by_row)
        return jnp.sum(jnp.sin(mixed)), mixed

    def outcome(many):
        monkeypatch.setattr(attention, "_MANY_OF_A_ROW" if by_row else "_MANY", many)
        return jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2, 3), has_aux=True))(query, keys, values, prefix)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), outcome(1), outcome(steps + 1))


@pytest.mark.parametrize("by_row", [False, True])
def test_scores_of_many_queries_are_never_held_at_once(by_row):
    """The gradient of 1,024 queries in eight heads takes less than the scores of half of them would, 4 bytes each; nor
    is there a mask of all queries and keys."""
    steps = 1024

    def total(query, keys, values, segment):
        tokens = attention.Tokens(jnp.arange(steps)[None], jnp.ones((1, steps), bool), segment)
        memory = attention.KeyValues(keys, values, tokens, own=True)
        return jnp.sum(attention.attend(query, tokens, [memory], by_row=by_row) ** 2)

    shapes = [(1, 4, 1, 2, steps, 8), (1, 4, 1, 8, steps), (1, 4, 1, steps, 8)]
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    segment = jax.ShapeDtypeStruct((1, steps), jnp.int32)
    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*given, segment).compile()
    assert not re.findall(r"\[(?:\d+,)*1024,1024\]", compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 1024 * 1024 * 4
