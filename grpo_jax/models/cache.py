"""Keys and values that outlive a forward pass: the prompts' (written once) and the completions' own.

Each layer has arrays of its own, and keys lie with time last, values with it before the head: both products of
attention then read them as they are, and a token is written in place. Stacked layers would be copied out one by one
for every token; keys in the values' order take two and a half times as long to read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Prefix(NamedTuple):
    """Prompts after their forward pass; shared by all completions of a prompt.

    Attributes:
        hidden: last state of each prompt, [P, D]; it predicts the first completion token.
        keys: of each layer [P, K, E, L], rotated.
        values: of each layer [P, K, L, E].
        mask: bool [P, L], False on padding.
        positions: i32 [P, L], counted from each prompt's first real token.
        lengths: i32 [P], real tokens of each prompt; the position of its completions' first token.
    """

    hidden: jax.Array
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    mask: jax.Array
    positions: jax.Array
    lengths: jax.Array


class Cache(NamedTuple):
    """Keys and values of completions as far as they are written.

    Attributes:
        keys: of each layer [P, K, G, E, T], rotated; slots from ``length`` on are not read.
        values: of each layer [P, K, G, T, E].
        length: i32 scalar, tokens written, the same for all completions.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array


def init_cache(layers: int, shape: tuple[int, int, int, int, int], dtype: jax.typing.DTypeLike) -> Cache:
    """An empty cache for completions of shape [P, K, G, T, E]."""
    *heads, length, size = shape
    keys = tuple(jnp.zeros((*heads, size, length), dtype) for _ in range(layers))
    values = tuple(jnp.zeros(shape, dtype) for _ in range(layers))
    return Cache(keys, values, jnp.zeros((), jnp.int32))


def write(
    cache: tuple[jax.Array, jax.Array], slot: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Write one token's keys [P, K, G, E, 1] and values [P, K, G, 1, E] into a layer's cache; in place under jit.

    Writing past the end overwrites the last slot: callers make room for every token they decode.
    """
    return (
        jax.lax.dynamic_update_slice_in_dim(cache[0], keys.astype(cache[0].dtype), slot, axis=4),
        jax.lax.dynamic_update_slice_in_dim(cache[1], values.astype(cache[1].dtype), slot, axis=3),
    )
