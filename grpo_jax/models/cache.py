"""Keys and values that outlive a forward pass: the prompts' (written once) and the completions' own.

Each layer has arrays of its own, and keys lie with time last, values with it before the head: both products of
attention then read them as they are, and a token is written in place. Stacked layers would be copied out one by one
for every token; keys in the values' order take two and a half times as long to read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Prefix(NamedTuple):
    """Prompts after their forward pass; shared by all completions of a prompt."""

    hidden: jax.Array  # [P, D], last state of each prompt; it predicts the first completion token
    keys: tuple[jax.Array, ...]  # of each layer [P, K, E, L], rotated
    values: tuple[jax.Array, ...]  # of each layer [P, K, L, E]
    mask: jax.Array  # bool [P, L], False on padding
    positions: jax.Array  # i32 [P, L], counted from each prompt's first real token
    lengths: jax.Array  # i32 [P], real tokens of each prompt
    # i32 [P], the position of its completions' first token: as many, or less where pictures' tokens share positions
    advance: jax.Array


class Rows(NamedTuple):
    """State of completions that go on at different lengths, after an environment has answered."""

    mask: jax.Array  # bool [P, G, T], slots that hold a token; slots between them are not read
    advance: jax.Array  # i32 [P, G], the position of each completion's next token


class Cache(NamedTuple):
    """Keys and values of completions as far as they are written."""

    keys: tuple[jax.Array, ...]  # of each layer [P, K, G, E, T], rotated; slots from ``length`` on are not read
    values: tuple[jax.Array, ...]  # of each layer [P, K, G, T, E]
    length: jax.Array  # i32 scalar, slots written, the same for all completions
    rows: Rows | None = None  # differences between completions; None while all of them fill slot after slot


def empty_cache(layers: int, shape: tuple[int, int, int, int, int], dtype: jax.typing.DTypeLike) -> Cache:
    """Return an empty cache for completions of shape [P, K, G, T, E]."""
    *rows, length, size = shape
    keys = tuple(jnp.zeros((*rows, size, length), dtype) for _ in range(layers))
    values = tuple(jnp.zeros((*rows, length, size), dtype) for _ in range(layers))
    return Cache(keys, values, jnp.zeros((), jnp.int32))


def write(
    cache: tuple[jax.Array, jax.Array], slot: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Write keys [P, K, G, E, A] and values [P, K, G, A, E] into a layer's cache from a slot on; in place under jit.

    XLA drops axes of one from its products (one prompt, one head, groups of one). A cache that is written or carried
    with such an axis and read without it is copied for every token: it is written without, and a loop that decodes
    has to carry it without, as the sampler's does.

    Writing past the end overwrites the last slot: callers make room for every token they decode.
    """
    ones = tuple(axis for axis in range(3) if keys.shape[axis] == 1)

    def placed(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        old, new = old.squeeze(ones), new.astype(old.dtype).squeeze(ones)
        return jnp.expand_dims(jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis), ones)

    return placed(cache[0], keys, -1), placed(cache[1], values, -2)


def of_paths(cache: Cache, parents: jax.Array | np.ndarray) -> Cache:
    """The keys and values of other completions: of `parents` [P, G], or [G] where they are alike for all prompts."""
    axes = (0, 0 if parents.ndim == 2 else None)
    take = jax.vmap(lambda rows, chosen: jnp.take(rows, chosen, axis=-3), axes)
    keys, values = (tuple(take(part, parents) for part in parts) for parts in (cache.keys, cache.values))
    return cache._replace(keys=keys, values=values)
