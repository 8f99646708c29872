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
        lengths: i32 [P], real tokens of each prompt.
        advance: i32 [P], the position of its completions' first token: as many, or less where pictures are among
            them, whose tokens share positions.
    """

    hidden: jax.Array
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    mask: jax.Array
    positions: jax.Array
    lengths: jax.Array
    advance: jax.Array


class Places(NamedTuple):
    """Some of a batch's prompts, or some of its completions.

    Attributes:
        prompts: i32 [N].
        members: i32 [N], which completion of each prompt; None for the whole groups.
    """

    prompts: jax.Array
    members: jax.Array | None = None

    def take(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Of an array [P, ..] with the groups on an axis: [N, ..], of single completions with a group of one."""
        return x[self.prompts] if self.members is None else jnp.expand_dims(x[self._index(axis)], axis)

    def put(self, x: jax.Array, part: jax.Array, axis: int = 1) -> jax.Array:
        """The array with what was taken, and has changed, in its place."""
        if self.members is None:
            return x.at[self.prompts].set(part)
        return x.at[self._index(axis)].set(jnp.squeeze(part, axis))

    def _index(self, axis: int):
        return (self.prompts, *[slice(None)] * (axis - 1), self.members)


class Rows(NamedTuple):
    """What a cache holds of completions that go on at different lengths, after an environment has answered.

    Attributes:
        mask: bool [P, G, T], slots that hold a token; what is between them is not read.
        advance: i32 [P, G], the position of each completion's next token.
    """

    mask: jax.Array
    advance: jax.Array


class Cache(NamedTuple):
    """Keys and values of completions as far as they are written.

    Attributes:
        keys: of each layer [P, K, G, E, T], rotated; slots from ``length`` on are not read.
        values: of each layer [P, K, G, T, E].
        length: i32 scalar, slots written, the same for all completions.
        rows: what differs between completions; None while all of them fill slot after slot.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    rows: Rows | None = None


def init_cache(layers: int, shape: tuple[int, int, int, int, int], dtype: jax.typing.DTypeLike) -> Cache:
    """An empty cache for completions of shape [P, K, G, T, E]."""
    *heads, length, size = shape
    keys = tuple(jnp.zeros((*heads, size, length), dtype) for _ in range(layers))
    values = tuple(jnp.zeros(shape, dtype) for _ in range(layers))
    return Cache(keys, values, jnp.zeros((), jnp.int32))


def write(
    cache: tuple[jax.Array, jax.Array], slot: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Write keys [P, K, G, E, A] and values [P, K, G, A, E] into a layer's cache from a slot on; in place under jit.

    Writing past the end overwrites the last slot: callers make room for every token they decode.
    """
    return (
        jax.lax.dynamic_update_slice_in_dim(cache[0], keys.astype(cache[0].dtype), slot, axis=4),
        jax.lax.dynamic_update_slice_in_dim(cache[1], values.astype(cache[1].dtype), slot, axis=3),
    )


def take(cache: Cache, places: Places) -> Cache:
    """What a cache holds of some prompts or completions."""
    keys, values = ([places.take(x, 2) for x in part] for part in (cache.keys, cache.values))
    return cache._replace(keys=tuple(keys), values=tuple(values), rows=jax.tree.map(places.take, cache.rows))


def put(cache: Cache, places: Places, part: Cache) -> Cache:
    """A cache with what `take` took of it, as it has become since."""
    pairs = (zip(x, y, strict=True) for x, y in ((cache.keys, part.keys), (cache.values, part.values)))
    keys, values = (tuple(places.put(x, y, 2) for x, y in both) for both in pairs)
    return Cache(keys, values, part.length, jax.tree.map(places.put, cache.rows, part.rows))
