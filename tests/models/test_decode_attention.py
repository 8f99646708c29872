"""Attention of one new token by the kernel for GPUs, interpreted on a CPU, against products and a softmax."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from support.tiny_decoders import LLAMA, drawn

from grpo_jax.models import policy as policies
from grpo_jax.models.attention import Context, LayerInput, RowState, Tokens, attend_streams
from grpo_jax.models.policy import Policy
from grpo_jax.sampling.sampler import SamplingParams, make_sampler

WIDE = replace(LLAMA, windows=(), head_dim=64)
ONE = replace(WIDE, num_layers=1)
TOLERANCE = {"float32": 1e-6, "bfloat16": 0.01}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))


@pytest.mark.parametrize(
    ("prompts", "group", "heads", "shared", "size", "length", "room", "slot", "dtype"),
    [
        (2, 3, 2, 7, 64, 72, 80, 70, "float32"),
        (2, 1, 1, 1, 128, 8, 16, 0, "bfloat16"),
        pytest.param(3, 2, 2, 16, 64, 130, 64, 63, "bfloat16", marks=pytest.mark.wide),
        pytest.param(1, 2, 1, 17, 64, 64, 128, 64, "float32", marks=pytest.mark.wide),
    ],
)
def test_a_tokens_attention_is_that_of_products(prompts, group, heads, shared, size, length, room, slot, dtype):
    """Prompts of different lengths; slots that are not written hold anything, and the new token is written exactly."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jax.device_put(rng.normal(size=shape).astype(jnp.dtype(dtype)))

    token = [draw(prompts, group, heads, *shape) for shape in [(shared, size), (size,), (size,)]]
    cache = draw(prompts, heads, group, size, room), draw(prompts, heads, group, room, size)
    layer = LayerInput(prefix=(draw(prompts, heads, size, length), draw(prompts, heads, length, size)), cache=cache)
    lengths = rng.integers(1, length + 1, (prompts, 1), np.int32)
    mask, slots = np.arange(length) >= length - lengths, np.arange(room, dtype=np.int32)
    context = Context(
        positions=np.broadcast_to(lengths + np.int32(slot), (prompts, group)),
        prompt=Tokens(np.cumsum(mask, axis=1, dtype=np.int32) - 1, mask),
        completion=Tokens(lengths + np.int32(slot), np.ones((prompts, 1), bool)),
        cached=Tokens(lengths + slots, (slots <= slot)[None]),
        slot=np.int32(slot),
    )
    (mixed, new), (expected, written) = [
        jax.jit(partial(attend_streams, layer_input=layer, context=context, attention=kind))(*token)
        for kind in ("cuda", "blocks")
    ]
    atol = TOLERANCE[dtype]
    np.testing.assert_allclose(mixed.astype("float32"), expected.astype("float32"), atol=atol, rtol=atol)
    jax.tree.map(np.testing.assert_array_equal, new, written)


@pytest.mark.wide  # interpreted, a dozen seconds; each step is that of the test above
def test_a_sampler_writes_the_same_texts(monkeypatch):
    """In float32, which only this test gives to the kernel: the same tokens with the same log-probabilities."""
    variables = drawn(WIDE)
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


def has_kernel(config=ONE, rows=False, cached=None, **options):
    policy = Policy(config, **{"compute_dtype": "bfloat16", "platform": "cuda", **options})
    ones = jnp.ones((1, 8), jnp.int32)

    def step(variables):
        prefix = policy.prefill(variables, ones, ones)
        cache = policy.init_cache(1, 2, 8, cached)
        if rows:
            cache = cache._replace(rows=RowState(jnp.zeros((1, 2, 8), bool), jnp.full((1, 2), 8)))
        return policy.decode_step(policy.unstack(variables), prefix, ones[:, :2], cache)

    return "decode_attention" in str(jax.make_jaxpr(step)(drawn(config)))


def test_the_kernel_is_for_plain_decoding_in_bfloat16_on_cuda():
    assert has_kernel()
    others = dict(platform="tpu"), dict(attn_implementation="eager"), dict(compute_dtype="float32"), dict(rows=True)
    for options in (*others, dict(cached="float32")):
        assert not has_kernel(**options)
    for fields in ({"head_dim": 32}, {"windows": (4,)}, {"attention_softcap": 5.0}):
        assert not has_kernel(replace(ONE, **fields))
