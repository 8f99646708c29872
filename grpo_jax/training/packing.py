"""Completions of unequal length without their padding: a batch is cut to its longest, and short ones share a row.

The update works on rows of W tokens. Where a group's completions are short, several of them stand one behind the other
in a row; attention keeps them apart (`forward_group`'s `steps`), so that every log-probability and every gradient is
the one of completions in rows of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SMALLEST = 16
"""Lengths are rounded up to multiples of this at least."""

_WORTH = 0.85  # rows are shared where they are at most this share of the completions


Array = jax.Array | np.ndarray  # on the policy's devices, or still on the host


class Packing(NamedTuple):
    """Where the tokens of P groups of G completions [T] stand in R rows of W for each prompt.

    Attributes:
        source: i32 [P, R, W], which token g·T + t of its group a place holds; -1 for none.
        start: i32 [P, G], the place r·W + w of each completion's first token.
    """

    source: Array
    start: Array


def _rounded(number: int, limit: int, smallest: int = 1) -> int:
    """Up to a quarter, half, three quarters or all of `limit`: few sizes, for each new one compiles the update anew."""
    step = max(smallest, -(-limit // 4))
    return min(limit, -(-number // step) * step)


def trimmed(array: Array, mask: Array, *, left: bool = False, worth: float = 0) -> Array:
    """The last axis [.., T] cut to the longest row of a mask [.., T], rounded up to quarters of T.

    Args:
        array: `[.., T]`.
        mask: bool `[.., T]`; what is cut off is False.
        left: Rows are padded on the left rather than on the right.
        worth: Fewer columns than this are left where they are: a program less compiles.
    """
    width = mask.shape[-1]
    longest = _rounded(max(int(mask.sum(-1).max()), 1), width, SMALLEST)
    longest = longest if width - longest >= worth else width
    return array[..., width - longest :] if left else array[..., :longest]


def pack(mask: np.ndarray, *, shortest: int = 32) -> Packing | None:
    """Shares rows between the completions of each group, longest first, each into the first row with room for it.

    Args:
        mask: bool [P, G, T], true for the first tokens of each completion. One without tokens takes no place.
        shortest: Least T for which shared rows are worth a program compiled for them.

    Returns:
        Arrays on the host, or None where rows of their own are short or hold little padding. R is the same for all
        prompts.

    Raises:
        ValueError: A mask is no prefix of its row.
    """
    mask = np.asarray(mask)
    if (mask[..., 1:] & ~mask[..., :-1]).any():
        raise ValueError("mask must be true for the first tokens of each completion and false after them")
    prompts, group, width = mask.shape
    if width < shortest:
        return None
    lengths = mask.sum(-1)
    places = [_places(row, width) for row in lengths]
    rows = _rounded(max(1, *(used for _, used in places)), group)
    if rows > _WORTH * group:
        return None
    start = np.stack([place for place, _ in places]).astype(np.int32)
    source = np.full((prompts, rows * width), -1, np.int32)
    p, g, t = np.nonzero(mask)
    source[p, start[p, g] + t] = g * width + t
    return Packing(source.reshape(prompts, rows, width), start)


def _places(lengths: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """Place of the first token of each completion of one group, and how many rows that takes."""
    start, room = np.zeros(len(lengths), int), []
    for g in np.argsort(-lengths, kind="stable"):
        if lengths[g] == 0:
            continue
        row = next((r for r, left in enumerate(room) if left >= lengths[g]), len(room))
        if row == len(room):
            room.append(width)
        start[g] = row * width + width - room[row]
        room[row] -= lengths[g]
    return start, len(room)


def packed(tokens: jax.Array, packing: Packing) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [P, G, T] in shared rows: tokens, mask and steps (t of each token), all [P, R, W]."""
    source = jnp.asarray(packing.source)
    flat = tokens.reshape(tokens.shape[0], -1)
    gathered = jnp.take_along_axis(flat, jnp.maximum(source, 0).reshape(source.shape[0], -1), axis=1)
    mask = source >= 0
    return gathered.reshape(source.shape), mask, jnp.where(mask, source % tokens.shape[-1], 0)


def unpacked(values: jax.Array, mask: jax.Array, packing: Packing) -> jax.Array:
    """Values [P, R, W] of shared rows as those of each completion [P, G, T]; 0 where the mask [P, G, T] is false."""
    steps = jnp.arange(mask.shape[-1], dtype=jnp.int32)
    place = jnp.where(mask, packing.start[..., None] + steps, 0).reshape(mask.shape[0], -1)
    gathered = jnp.take_along_axis(values.reshape(values.shape[0], -1), place, axis=1)
    return jnp.where(mask, gathered.reshape(mask.shape), 0)
