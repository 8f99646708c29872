"""Attention of one new token by the kernel for GPUs, interpreted on a CPU, against products and a softmax."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from support.tiny_decoders import LLAMA

from grpo_jax.models import policy as policies
from grpo_jax.models.attention import Context, LayerInput, Tokens, attend_streams
from grpo_jax.models.cache import Rows
from grpo_jax.models.decoder import init_variables
from grpo_jax.models.policy import Policy
from grpo_jax.sampling.sampler import SamplingParams, make_sampler

WIDE = replace(LLAMA, windows=(), head_dim=64)
TOLERANCE = {"float32": 1e-6, "bfloat16": 0.01}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("prompts", "group", "heads", "shared", "size", "length", "room", "slot"),
    [
        (2, 3, 2, 7, 64, 72, 80, 70),
        (2, 1, 1, 1, 128, 8, 16, 0),
        (3, 2, 2, 16, 64, 130, 64, 63),
        (1, 2, 1, 17, 64, 64, 128, 64),
    ],
)
def test_a_tokens_attention_is_that_of_products(prompts, group, heads, shared, size, length, room, slot, dtype):
    """Prompts of different lengths; slots that are not written hold anything, and the new token is written exactly."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    token = [draw(prompts, group, heads, *shape) for shape in [(shared, size), (size,), (size,)]]
    cache = draw(prompts, heads, group, size, room), draw(prompts, heads, group, room, size)
    layer = LayerInput(prefix=(draw(prompts, heads, size, length), draw(prompts, heads, length, size)), cache=cache)
    lengths = jnp.asarray(rng.integers(1, length + 1, (prompts, 1)))
    mask, slots = jnp.arange(length) >= length - lengths, jnp.arange(room)
    context = Context(
        positions=jnp.broadcast_to(lengths + slot, (prompts, group)),
        prompt=Tokens(jnp.cumsum(mask, axis=1) - 1, mask),
        completion=Tokens(lengths + slot, jnp.ones((prompts, 1), bool)),
        cached=Tokens(lengths + slots, (slots <= slot)[None]),
        slot=jnp.int32(slot),
    )
    (mixed, new), (expected, written) = [
        jax.jit(partial(attend_streams, layer_input=layer, context=context, attention=kind))(*token)
        for kind in ("cuda", "blocks")
    ]
    atol = TOLERANCE[dtype]
    np.testing.assert_allclose(mixed.astype("float32"), expected.astype("float32"), atol=atol, rtol=atol)
    jax.tree.map(np.testing.assert_array_equal, new, written)


def decoded(policy, variables, config):
    """States of four steps behind two prompts of different lengths."""
    rng = np.random.default_rng(3)
    prompts, tokens = (jnp.asarray(rng.integers(1, config.vocab_size, shape)) for shape in [(2, 5), (2, 3, 4)])
    prefix = policy.prefill(variables, prompts, np.arange(5) >= np.array([[2], [0]]))
    cache, steps = policy.init_cache(2, 3, 4), []
    for step in range(4):
        hidden, cache = policy.decode_step(policy.unstack(variables), prefix, tokens[:, :, step], cache)
        steps.append(hidden.astype("float32"))
    return jnp.stack(steps)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_policy_decodes_as_with_products(kv_heads):
    config = replace(WIDE, num_kv_heads=kv_heads, num_heads=4)
    variables = init_variables(config, jax.random.key(0))
    kinds = [{"platform": "cuda"}, {"platform": "cuda", "attn_implementation": "eager"}, {"platform": "cpu"}]
    kernel, *products = (decoded(Policy(config, compute_dtype="bfloat16", **k), variables, config) for k in kinds)
    for expected in products:
        np.testing.assert_allclose(kernel, expected, atol=0.1)


def test_a_sampler_writes_the_same_texts(monkeypatch):
    """In float32, which only this test gives to the kernel: the same tokens with the same log-probabilities."""
    variables = init_variables(WIDE, jax.random.key(0))
    prompts = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
    mask = np.arange(6) >= np.array([[0], [4]])
    keys = jax.random.split(jax.random.key(1), 2)

    def sampled(policy):
        return make_sampler(policy, SamplingParams(3, 70), eos_ids=(0,), pad_id=0)(variables, prompts, mask, keys)

    products = sampled(Policy(WIDE))
    monkeypatch.setattr(policies, "choose_attention", lambda *_, **__: "cuda")
    kernel = sampled(Policy(WIDE))
    np.testing.assert_array_equal(kernel.tokens, products.tokens)
    np.testing.assert_allclose(kernel.logprobs, products.logprobs, atol=1e-4)


def has_kernel(config=WIDE, group=2, rows=False, cached=None, **options):
    policy = Policy(config, **{"compute_dtype": "bfloat16", "platform": "cuda", **options})
    variables = init_variables(config, jax.random.key(0))
    ones = jnp.ones((1, 8), jnp.int32)

    def step(variables):
        prefix = policy.prefill(variables, ones, ones)
        cache = policy.init_cache(1, group, 8, cached)
        if rows:
            cache = cache._replace(rows=Rows(jnp.zeros((1, group, 8), bool), jnp.full((1, group), 8)))
        return policy.decode_step(policy.unstack(variables), prefix, ones[:, :group], cache)

    return "decode_attention" in str(jax.make_jaxpr(step)(variables))


def test_the_kernel_is_for_plain_decoding_in_bfloat16_on_cuda():
    assert has_kernel()
    assert has_kernel(group=1)
    assert not has_kernel(platform="cpu")
    assert not has_kernel(platform="tpu")
    assert not has_kernel(attn_implementation="eager")
    assert not has_kernel(compute_dtype="float32")
    assert not has_kernel(rows=True)
    assert not has_kernel(cached="float32")
    for others in ({"head_dim": 32}, {"windows": LLAMA.windows}, {"attention_scale": 0.1}, {"attention_softcap": 5.0}):
        assert not has_kernel(replace(WIDE, **others))
