"""Pictures of different sizes in arrays of few shapes: packing, joining and splitting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.vision.config import VisionConfig


class Pictures(NamedTuple):
    """Inputs of a vision tower: [..] rows with up to I pictures each, in the order of their prompts.

    The leading axes are [P] for prompts, [P, G] for observations. Pictures differ in size: S is the largest of the
    bucket, and the padding after a picture's patches is 0.
    """

    # f32 [.., I, S, C], normalised pixel values in the processor's order (merged block after merged block, its
    # patches row by row), C = channels · frames · p · p
    patches: jax.Array
    grid: jax.Array  # i32 [.., I, 2], rows and columns of patches; (0, 0) for no picture
    windows: jax.Array | None = None  # i32 [.., I, W, B], merged tokens of each attention window (-1: none), if any


class PictureStates(NamedTuple):
    """A vision tower's output for `Pictures`: one state for each placeholder token."""

    states: jax.Array  # [.., I, M, D], M = S / merge²; row by row of merged tokens
    grid: jax.Array  # i32 [.., I, 2], rows and columns of merged tokens; (0, 0) for no picture
    deepstack: tuple[jax.Array, ...] = ()  # [.., I, M, D] for each of the first decoder layers (Qwen3-VL)


def windows_of(grid: tuple[int, int], config: VisionConfig) -> np.ndarray:
    """Return the windows of a picture's grid from the upper left, i32 [windows, B]: merged tokens by row, then -1."""
    assert config.window is not None
    height, width, side = grid[0] // config.merge, grid[1] // config.merge, config.window
    tokens = np.full((-(-height // side) * side, -(-width // side) * side), -1, np.int32)
    tokens[:height, :width] = np.arange(height * width, dtype=np.int32).reshape(height, width)
    cut = tokens.reshape(tokens.shape[0] // side, side, tokens.shape[1] // side, side)
    return cut.transpose(0, 2, 1, 3).reshape(-1, side * side)


class Picture(NamedTuple):
    """One prepared picture: patches f32 [h·w, C] in the processor's order, and its grid (h, w) of patches."""

    patches: np.ndarray
    grid: tuple[int, int]


def bucketed(count: int) -> int:
    """Round up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, …, at most 1.5 times as much."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def bucket_patches(patches: int, config: VisionConfig) -> int:
    """Return S of the bucket for pictures of up to this many patches."""
    return bucketed(-(-patches // config.merged)) * config.merged


def pack_rows(
    rows: Sequence[Sequence[Picture]], config: VisionConfig, *, slots: int = 2**31, patches: int = 2**31
) -> Pictures:
    """Pack pictures of several rows, up to I in each, into host arrays [rows, I, ..] of few shapes.

    Rows without pictures get empty slots, so that all batches of a data set have the same structure. `slots` and
    `patches` are the data set's maximum pictures per row and patches per picture, and limit the arrays.
    """
    most_slots = max(1, *(len(row) for row in rows))
    most_patches = max([config.merged, *(len(picture.patches) for row in rows for picture in row)])
    slots = max(most_slots, min(bucketed(most_slots), slots))
    patches = max(most_patches, min(bucket_patches(most_patches, config), patches))
    return pack_pictures(rows, config, slots=slots, patches=patches)


def pack_pictures(rows: Sequence[Sequence[Picture]], config: VisionConfig, *, slots: int, patches: int) -> Pictures:
    """Pack pictures of several rows into host arrays of I slots and S patches."""
    packed = np.zeros((len(rows), slots, patches, config.pixels), np.float32)
    grids = np.zeros((len(rows), slots, 2), np.int32)
    for i, row in enumerate(rows):
        for j, picture in enumerate(row):
            packed[i, j, : len(picture.patches)] = np.asarray(picture.patches)
            grids[i, j] = picture.grid
    return Pictures(packed, grids, pack_windows(grids, patches, config))


def same_size(patches: jax.Array, grid: tuple[int, int], config: VisionConfig) -> Pictures:
    """Pad pictures [.., I, h·w, C] of one grid, on their device, to their bucket."""
    lead, count = patches.shape[:-2], patches.shape[-2]
    size = bucket_patches(count, config)
    if size > count:
        patches = jnp.pad(patches, [(0, 0)] * len(lead) + [(0, size - count), (0, 0)])
    grids = np.broadcast_to(np.array(grid, np.int32), (*lead, 2))
    return Pictures(patches, grids, pack_windows(grids, size, config))


def pack_windows(grids: np.ndarray, patches: int, config: VisionConfig) -> np.ndarray | None:
    """Return the attention windows of pictures with grids [.., I, 2] and S patches: i32 [.., I, W, B], or None."""
    if config.window is None:
        return None
    flat = [tuple(map(int, grid)) for grid in np.asarray(grids).reshape(-1, 2)]
    windows = {grid: windows_of(grid, config) for grid in set(flat)}
    size = config.window**2
    whole = -(-patches // config.merged // size)
    count = bucketed(max(whole, *map(len, windows.values())))
    packed = np.full((len(flat), count, size), -1, np.int32)
    for row, grid in zip(packed, flat, strict=True):
        row[: len(windows[grid])] = windows[grid]
    return packed.reshape(*np.shape(grids)[:-1], count, size)


_Shown = TypeVar("_Shown", bound=Pictures | PictureStates)


def joined_some(parts: Sequence[_Shown | None], counts: Sequence[int]) -> _Shown | None:
    """Concatenate `Pictures` or `PictureStates` of several chunks, padded to one size; None if none has any.

    The `counts` rows of a chunk without pictures get empty slots.
    """
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None

    def empty(count: int) -> _Shown:
        return jax.tree.map(lambda x, fill: np.full((count, *x.shape[1:]), fill, x.dtype), some, _fills(some))

    return _concatenate([empty(n) if part is None else part for part, n in zip(parts, counts, strict=True)], 0)


def chained(parts: Sequence[_Shown | None]) -> _Shown | None:
    """Concatenate pictures [P, G, I, ..] of the same completions along I; None if there are none."""
    some = [part for part in parts if part is not None]
    return _concatenate(some, 2) if some else None


def place_pictures(pictures: Pictures, owners: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> Pictures:
    """Assign pictures [N, 1, ..] to completions of `shape` (P, G): [P, G, I, ..], padded with empty slots.

    `owners` are (p, g) of each picture, in the order of a completion's pictures.
    """
    index = np.full((*shape, max(Counter(owners).values())), len(owners))
    slots: Counter[tuple[int, int]] = Counter()
    for number, owner in enumerate(owners):
        index[(*owner, slots[owner])] = number
        slots[owner] += 1

    def spread(array: jax.Array | np.ndarray, fill: int) -> jax.Array | np.ndarray:
        library = np if isinstance(array, np.ndarray) else jnp
        rows = library.concatenate([array[:, 0], library.full((1, *array.shape[2:]), fill, array.dtype)])
        return rows[index]

    return jax.tree.map(spread, pictures, _fills(pictures))


def _fills(pictures: _Shown) -> _Shown:
    fills = jax.tree.map(lambda _: 0, pictures)
    return fills if getattr(fills, "windows", None) is None else fills._replace(windows=-1)


def _concatenate(parts: Sequence[_Shown], axis: int) -> _Shown:
    def concatenate(fill: int, *arrays: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        library = np if all(isinstance(array, np.ndarray) for array in arrays) else jnp
        shape = np.max([array.shape for array in arrays], axis=0)
        padded = []
        for array in arrays:
            missing = [(0, int(whole - size)) for whole, size in zip(shape, array.shape, strict=True)]
            missing[axis] = (0, 0)
            padded.append(library.pad(array, missing, constant_values=fill))
        return library.concatenate(padded, axis=axis)

    return parts[0] if len(parts) == 1 else jax.tree.map(concatenate, _fills(parts[0]), *parts)
