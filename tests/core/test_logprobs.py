"""Chunked log-probabilities against the plain formula, and their memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core.logprobs import token_logprobs

pytestmark = pytest.mark.usefixtures("strict")

VOCABULARY, WIDTH = 11, 6
ALLOWED = np.arange(VOCABULARY) % 4 != 3


def inputs(seed=0, shape=(2, 3, 5), dtype=np.float32, allowed=None):
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(*shape, WIDTH)).astype(dtype)
    head = random.normal(size=(VOCABULARY, WIDTH)).astype(dtype)
    choices = np.arange(VOCABULARY) if allowed is None else np.flatnonzero(allowed)
    return hidden, head, random.choice(choices, size=shape).astype(np.int32)


def plain(hidden, head, tokens, temperature=1.0, allowed=None, softcap=None):
    """The same with all logits at once, by automatic differentiation."""
    logits = jnp.einsum("...d,vd->...v", hidden, head)
    logits = (logits if softcap is None else softcap * jnp.tanh(logits / softcap)) / temperature
    logs = jax.nn.log_softmax(logits if allowed is None else jnp.where(allowed, logits, -1e30))
    chosen = jnp.take_along_axis(logs, tokens[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(logs) * logs, axis=-1)


def mixed(function, hidden, head, tokens, **options):
    """A scalar that pulls on every logprob and every entropy differently."""
    logprobs, entropy = function(hidden, head, tokens, **options)
    pulls = jnp.cos(jnp.arange(tokens.size, dtype=logprobs.dtype)).reshape(tokens.shape)
    return jnp.sum(pulls * logprobs) + jnp.sum(jnp.sin(entropy))


@pytest.mark.parametrize(
    ("temperature", "softcap", "allowed"), [(1.0, None, None), (1.3, 2.0, ALLOWED)], ids=["plain", "all"]
)
def test_values_and_gradients_are_those_of_the_plain_formula(temperature, softcap, allowed, x64):
    hidden, head, tokens = inputs(1, dtype=np.float64, allowed=allowed)
    options = {"temperature": temperature, "allowed": allowed, "softcap": softcap}
    whole = functools.partial(plain, tokens=tokens, **options)
    wanted, expected = jax.jit(
        lambda h, w: (whole(h, w), jax.grad(functools.partial(mixed, plain), (0, 1))(h, w, tokens, **options))
    )(hidden, head)
    given = {"temperature": temperature, "allowed_tokens": allowed, "softcap": softcap}
    values = jax.jit(lambda h, w: token_logprobs(h, w, tokens, **given))(hidden, head)
    for got, want in zip(values, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10)
    for chunk in (7, 1024):
        got = jax.jit(
            jax.grad(lambda h, w, c=chunk: mixed(token_logprobs, h, w, tokens, **given, chunk_size=c), (0, 1))
        )(hidden, head)
        for part, plain_part in zip(got, expected, strict=True):
            assert part.dtype == jnp.float64
            np.testing.assert_allclose(part, plain_part, rtol=1e-10, atol=1e-12)


def test_temperature_zero_counts_as_one():
    data = inputs(3)
    for got, expected in zip(
        token_logprobs(*data, temperature=0.0), token_logprobs(*data, temperature=1.0), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_only_allowed_tokens_have_probability():
    hidden, head, _ = inputs(4, (1, 1))
    every = np.arange(VOCABULARY, dtype=np.int32)[None]
    hidden = np.repeat(hidden, VOCABULARY, axis=1)
    logprobs, entropy = token_logprobs(hidden, head, every, allowed_tokens=ALLOWED)
    assert np.isneginf(np.asarray(logprobs)[0, ~ALLOWED]).all()
    np.testing.assert_allclose(np.exp(logprobs).sum(), 1, rtol=1e-5)
    assert np.isfinite(entropy).all()


def test_a_masked_state_has_no_influence_whatever_it_holds():
    """0 · NaN is NaN: one bad state in the padding would spoil the head's whole gradient."""
    hidden, head, tokens = inputs(5)
    mask = np.random.default_rng(0).random(tokens.shape) < 0.5
    dirty = np.where(mask[..., None], hidden, np.float32(np.nan))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def slopes(hidden, head):
        logprobs, entropy = token_logprobs(hidden, head, tokens, chunk_size=4)
        return jnp.sum(jnp.where(mask, logprobs * 2 + entropy, 0))

    for got, expected in zip(slopes(dirty, head), slopes(hidden, head), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_low_precision_is_accumulated_in_float32():
    """Rounding of the inputs apart, log-probabilities are as good as float32's; gradients come in their types."""
    hidden, head, tokens = inputs(6)
    low = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    rounded = tuple(x.astype(jnp.float32) for x in low)
    for got, expected in zip(token_logprobs(*low, tokens), token_logprobs(*rounded, tokens), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    slopes = jax.jit(jax.grad(lambda h, w: mixed(token_logprobs, h, w, tokens, chunk_size=4), (0, 1)))
    for got, expected in zip(slopes(*low), slopes(*rounded), strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0.03, atol=0.03)


def test_large_logits_are_safe():
    hidden, head, tokens = inputs(8)
    logprobs, entropy = token_logprobs(hidden * np.float32(1e4), head, tokens)
    assert np.isfinite(logprobs).all()
    np.testing.assert_allclose(entropy, 0, atol=0.05)
    slope = jax.jit(jax.grad(lambda h: mixed(token_logprobs, h, head, tokens)))(hidden * np.float32(1e4))
    assert np.isfinite(slope).all()


def temporaries(length, trained, vocabulary=2048, width=16, chunk=64):
    """Bytes of temporary memory of a compiled gradient."""

    def loss(hidden, head, tokens):
        logprobs, entropy = token_logprobs(hidden, head, tokens, chunk_size=chunk)
        return jnp.sum(logprobs) + jnp.sum(entropy)

    shapes = (
        jax.ShapeDtypeStruct((1, length, width), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
        jax.ShapeDtypeStruct((1, length), jnp.int32),
    )
    compiled = jax.jit(jax.grad(loss, trained)).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    short, long = temporaries(256, (0, 1)), temporaries(4096, (0, 1))
    all_logits = 4096 * 2048 * 4
    chunk_of_logits = 64 * 2048 * 4
    assert long < all_logits / 8
    assert long - short < chunk_of_logits  # what grows is a few numbers per token


def test_a_frozen_head_costs_no_gradient():
    """With LoRA the head is not trained: neither its [V, D] accumulator nor its product may remain."""
    saved = temporaries(256, (0, 1), width=256) - temporaries(256, (0,), width=256)
    assert saved >= 0.9 * 2048 * 256 * 4
