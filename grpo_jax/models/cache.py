"""Keys and values that outlive a forward pass: the prompts' (written once) and the completions' own.

Head axes come before time so that attention is a batched matrix product without transposition.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Prefix(NamedTuple):
    """Prompts after their forward pass; shared by all completions of a prompt.

    Attributes:
        hidden: last state of each prompt, [P, D]; it predicts the first completion token.
        keys: [layers, P, K, L, E], rotated.
        values: [layers, P, K, L, E].
        mask: bool [P, L], False on padding.
        positions: i32 [P, L], counted from each prompt's first real token.
        lengths: i32 [P], real tokens of each prompt; the position of its completions' first token.
    """

    hidden: jax.Array
    keys: jax.Array
    values: jax.Array
    mask: jax.Array
    positions: jax.Array
    lengths: jax.Array


class Cache(NamedTuple):
    """Keys and values of completions as far as they are written.

    Attributes:
        keys: [layers, P, K, G, T, E], rotated; slots from ``length`` on are not read.
        values: [layers, P, K, G, T, E].
        length: i32 scalar, tokens written, the same for all completions.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array


def init_cache(shape: tuple[int, int, int, int, int, int], dtype: jax.typing.DTypeLike) -> Cache:
    """An empty cache of shape [layers, P, K, G, T, E]."""
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))


def append(cache: Cache, keys: jax.Array, values: jax.Array) -> Cache:
    """Write one token's keys and values [layers, P, K, G, 1, E] behind the last; in place under jit.

    Writing past the end overwrites the last slot: callers make room for every token they decode.
    """
    zero = jnp.zeros((), jnp.int32)
    start = (zero, zero, zero, zero, cache.length, zero)
    return Cache(
        jax.lax.dynamic_update_slice(cache.keys, keys.astype(cache.keys.dtype), start),
        jax.lax.dynamic_update_slice(cache.values, values.astype(cache.values.dtype), start),
        cache.length + 1,
    )
