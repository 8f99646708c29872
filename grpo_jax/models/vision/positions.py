"""Where pictures stand in a text: the state of each placeholder token, and three-dimensional positions.

A text token is one place further than what is before it. A picture of h x w merged tokens stands at one place in time;
its rows and columns count from there, and what follows goes on behind the longer side (Wang et al. 2024, M-RoPE,
arXiv:2409.12191).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Places(NamedTuple):
    """Tokens [.., S] of rows with pictures.

    Attributes:
        index: i32 [.., S], which of a row's I·M picture states a token stands for; -1 for text.
        positions: i32 [.., S, 3], of time, row and column, counted from the row's first token.
        advance: i32 [..], the position behind the row's last token.
    """

    index: jax.Array
    positions: jax.Array
    advance: jax.Array


def find_places(tokens: jax.Array, mask: jax.Array, grid: jax.Array, *, image_token: int, capacity: int) -> Places:
    """Finds the pictures of each row by their placeholder tokens, in order.

    Args:
        tokens: i32 [.., S].
        mask: bool [.., S], False on padding.
        grid: i32 [.., I, 2], rows and columns of merged tokens of each picture; (0, 0) where there is none. A row has
            as many placeholders as its pictures have merged tokens.
        image_token: the placeholder.
        capacity: M, states that are kept for each picture.
    """
    pictured = (tokens == image_token) & mask
    number = jnp.cumsum(pictured, axis=-1, dtype=jnp.int32) - 1
    sizes = grid[..., 0] * grid[..., 1]
    ends = jnp.cumsum(sizes, axis=-1)
    picture = jnp.sum(number[..., None] >= ends[..., None, :], axis=-1)
    picture = jnp.clip(picture, 0, grid.shape[-2] - 1)

    def of_picture(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, picture, axis=-1)

    offset = number - of_picture(ends - sizes)
    height, width = (jnp.maximum(of_picture(grid[..., axis]), 1) for axis in (0, 1))
    row, column = offset // width, offset % width
    last = offset == height * width - 1
    steps = jnp.where(pictured, jnp.where(last, jnp.maximum(height, width), 0), 1) * mask
    passed = jnp.cumsum(steps, axis=-1, dtype=jnp.int32)
    start = passed - steps
    inside = jnp.stack([jnp.zeros_like(row), row, column], axis=-1)
    positions = start[..., None] + jnp.where(pictured[..., None], inside, 0)
    return Places(jnp.where(pictured, picture * capacity + offset, -1), positions, passed[..., -1])
