"""The two attention kernels and cuDNN's attention in bfloat16, against products of the same numbers in float32.

Differences are norms of differences over norms. A cache slot that is not to be read or written holds numbers that would
show. Without a card the kernels are interpreted, at tiny sizes.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import timing
from outcome import Figures, Measurements, compared

from grpo_jax.models.attention import Context, LayerInput, Tokens, attend_streams
from grpo_jax.models.kernels import causal_rows

ROUNDED = 0.02  # bfloat16's products land between 1e-3 and 1e-2
DECODE = {  # prompts, group, key heads, queries of each, size of a head, prompt, room in the cache, tokens in it
    "0.5B, 64 completions, first token": (8, 8, 2, 7, 64, 64, 64, 0),
    "0.5B, 64 completions, slot 63 of 128": (8, 8, 2, 7, 64, 64, 128, 63),
    "0.5B, odd sizes": (3, 5, 2, 7, 64, 40, 24, 17),
    "1.5B": (8, 8, 2, 6, 128, 128, 128, 100),
    "7B": (8, 8, 4, 7, 128, 256, 256, 200),
}
FLASH = {  # rows, length, key heads, queries of each, size of a head
    "0.5B": (16, 256, 2, 7, 64),
    "1.5B": (16, 256, 2, 6, 128),
    "0.5B, no multiple of a block": (4, 201, 2, 7, 64),
}
TINY_DECODE, TINY_FLASH = {"tiny": (2, 2, 2, 7, 64, 40, 24, 17)}, {"tiny": (2, 140, 1, 2, 16)}


def measurements(tiny: bool) -> Measurements:
    """All kinds by size; cuDNN has no interpreter."""
    rows: dict[str, Any] = {}
    for name, sizes in (TINY_DECODE if tiny else DECODE).items():
        rows[f"decode kernel, {name}, against float32"] = functools.partial(decode, *sizes)
    for name, sizes in (TINY_FLASH if tiny else FLASH).items():
        rows[f"flash kernel, {name}, against float32"] = functools.partial(flash, *sizes, "cuda")
        if not tiny:
            rows[f"cuDNN's attention, {name}, against float32"] = functools.partial(flash, *sizes, "cudnn")
    return rows


def interpreted() -> ExitStack:
    """Enter a context that runs Pallas kernels without a card; nothing on a card."""
    stack = ExitStack()
    if jax.default_backend() != "gpu":
        from jax.experimental import pallas
        from jax.experimental.pallas.ops.gpu import attention

        for module, name in ((pallas, "pallas_call"), (attention, "mha")):
            stack.enter_context(
                mock.patch.object(module, name, functools.partial(getattr(module, name), interpret=True))
            )
    return stack


def far(some: Any, others: Any) -> float:
    """Norm of the difference over the norm; NaN if a value is not finite."""
    a, b = (np.asarray(x.astype(jnp.float32), np.float64) for x in (some, others))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b)) if np.isfinite(a).all() else float("nan")


def decode(prompts: int, group: int, heads: int, shared: int, size: int, length: int, room: int, slot: int) -> Figures:
    """Attention of one new token of each completion, and the cache behind it; microseconds of kernel and products."""
    keys = iter(jax.random.split(jax.random.key(slot), 9))

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape).astype(jnp.bfloat16)

    token = [draw(prompts, group, heads, *shape) for shape in [(shared, size), (size,), (size,)]]
    cache = draw(prompts, heads, group, size, room), draw(prompts, heads, group, room, size)
    prefix = draw(prompts, heads, size, length), draw(prompts, heads, length, size)
    lengths = jnp.arange(prompts)[:, None] % length + 1
    mask, slots = jnp.arange(length) >= length - lengths, jnp.arange(room)

    def step(dtype: Any, kind: str) -> Any:
        def cast(tree: Any) -> Any:
            return jax.tree.map(lambda x: x.astype(dtype), tree)

        def run(token: Any, prefix: Any, cache: Any, slot: jax.Array) -> Any:
            context = Context(
                positions=jnp.broadcast_to(lengths + slot, (prompts, group)),
                prompt=Tokens(jnp.cumsum(mask, axis=1) - 1, mask),
                completion=Tokens(lengths + slot, jnp.ones((prompts, 1), bool)),
                cached=Tokens(lengths + slots, (slots <= slot)[None]),
                slot=slot,
            )
            layer = LayerInput(prefix=cast(prefix), cache=cast(cache))
            return attend_streams(*cast(token), layer_input=layer, context=context, attention=kind)

        return jax.jit(run)

    given = token, prefix, cache, jnp.int32(slot)
    with interpreted():
        kernel, products = step(jnp.bfloat16, "cuda"), step(jnp.bfloat16, "blocks")
        mixed, written = kernel(*given)
        with jax.default_matmul_precision("highest"):
            expected, wanted = step(jnp.float32, "blocks")(*given)
        exact = all(bool((a.astype(jnp.float32) == b).all()) for a, b in zip(written, wanted, strict=True))
        micro = {name: 1e6 * timing.seconds(call, *given) for name, call in (("us", kernel), ("products_us", products))}
    found = compared(far(mixed, expected), ROUNDED, cache_exact=exact, **micro)
    return found | {"agrees": found["agrees"] and exact}


def flash(rows: int, length: int, heads: int, shared: int, size: int, kind: str) -> Figures:
    """Attention of whole rows and its gradients, by a kernel of JAX or by cuDNN; microseconds of both ways."""
    keys = iter(jax.random.split(jax.random.key(size), 4))
    query = jax.random.normal(next(keys), (rows, length, heads, shared, size)).astype(jnp.bfloat16)
    key, value = (jax.random.normal(next(keys), (rows, length, heads, size)).astype(jnp.bfloat16) for _ in range(2))
    weights = jax.random.normal(next(keys), query.shape)
    mask = jnp.arange(length) >= (jnp.arange(rows) * 7 % (length // 2))[:, None]

    def products(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        scores = jnp.einsum("bskre,btke->bkrst", query, key) * size**-0.5
        order = jnp.arange(length)
        read = (order[:, None] >= order) & (mask[:, :, None] == mask[:, None])
        chosen = jax.nn.softmax(jnp.where(read[:, None, None], scores, -1e30), axis=-1)
        return jnp.einsum("bkrst,btke->bskre", chosen, value)

    def total(attend: Any) -> Any:
        def run(query: jax.Array, key: jax.Array, value: jax.Array, weights: jax.Array) -> Any:
            mixed = attend(query, key, value).astype(jnp.float32) * mask[:, :, None, None, None]
            return (mixed * weights).sum(), mixed

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))

    kernel = total(lambda *given: causal_rows(*given, mask, kind))
    with interpreted():
        (_, mixed), slopes = kernel(query, key, value, weights)
        taken = timing.seconds(kernel, query, key, value, weights)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in (query, key, value)]
        (_, expected), wanted = total(products)(*wide, weights)
    apart = [far(mixed, expected), *(far(a, b) for a, b in zip(slopes, wanted, strict=True))]
    return compared(np.max(apart), ROUNDED, forward=apart[0], both_ways_us=1e6 * taken)
