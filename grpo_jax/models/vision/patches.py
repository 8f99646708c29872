"""Pictures of different sizes in arrays of few shapes, so that few programs are compiled."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.pictures import Pictures
from grpo_jax.models.vision.qwen2_5_vl import windows_of


class Picture(NamedTuple):
    """One picture as a processor prepares it.

    Attributes:
        patches: f32 [h·w, C], in the processor's order (see `Pictures`).
        grid: (h, w), rows and columns of patches.
    """

    patches: np.ndarray
    grid: tuple[int, int]


def bucketed(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, …: at most half as much again."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def bucket_patches(patches: int, config: VisionConfig) -> int:
    """S of the bucket for pictures of up to this many patches."""
    return bucketed(-(-patches // config.merged)) * config.merged


def placeholders(grid: tuple[int, int], config: VisionConfig) -> int:
    """How many placeholder tokens stand for a picture of this grid."""
    return grid[0] // config.merge * (grid[1] // config.merge)


def pack_pictures(
    rows: Sequence[Sequence[Picture]],
    config: VisionConfig,
    *,
    slots: int | None = None,
    patches: int | None = None,
) -> Pictures | None:
    """Pictures of several rows, up to I in each, as host arrays [rows, I, ..] of a bucket's shape.

    Args:
        rows: each row's pictures, in the order of its text.
        config: of the tower that will see them.
        slots: I; None for a bucket of the largest number in a row.
        patches: S; None for a bucket of the largest picture.

    Returns:
        None where no row has a picture.

    Raises:
        ValueError: a picture's patches do not fit its grid or the tower, or there are more than the shape holds.
    """
    everything = [picture for row in rows for picture in row]
    if not everything:
        return None
    for picture in everything:
        _check(picture, config)
    slots = slots or bucketed(max(map(len, rows)))
    patches = patches or bucket_patches(max(len(picture.patches) for picture in everything), config)
    packed = np.zeros((len(rows), slots, patches, config.pixels), np.float32)
    grids = np.zeros((len(rows), slots, 2), np.int32)
    if max(map(len, rows)) > slots or max(len(picture.patches) for picture in everything) > patches:
        raise ValueError(f"pictures: {slots} of {patches} patches in a row were asked for, and there are more")
    for i, row in enumerate(rows):
        for j, picture in enumerate(row):
            packed[i, j, : len(picture.patches)] = np.asarray(picture.patches)
            grids[i, j] = picture.grid
    return Pictures(packed, grids, pack_windows(grids, patches, config))


def same_size(patches: jax.Array, grid: tuple[int, int], config: VisionConfig) -> Pictures:
    """Pictures [.., I, h·w, C] of one grid, on the device where they are, filled up to their bucket.

    Raises:
        ValueError: as `pack_pictures`.
    """
    lead, count = patches.shape[:-2], patches.shape[-2]
    _check(Picture(jax.ShapeDtypeStruct(patches.shape[-2:], patches.dtype), grid), config)
    size = bucket_patches(count, config)
    if size > count:
        patches = jnp.pad(patches, [(0, 0)] * len(lead) + [(0, size - count), (0, 0)])
    grids = np.broadcast_to(np.array(grid, np.int32), (*lead, 2))
    return Pictures(patches, grids, pack_windows(grids, size, config))


def pack_windows(grids: np.ndarray, patches: int, config: VisionConfig) -> np.ndarray | None:
    """The attention windows of pictures with grids [.., I, 2] in a bucket of S patches: i32 [.., I, W, B], or None."""
    if config.window is None:
        return None
    flat = np.asarray(grids).reshape(-1, 2)
    known = {grid: windows_of(grid, config) for grid in {tuple(map(int, grid)) for grid in flat}}
    size = config.window**2
    whole = -(-patches // config.merged // size)
    count = bucketed(max(whole, *(len(windows) for windows in known.values())))
    packed = np.full((len(flat), count, size), -1, np.int32)
    for row, grid in zip(packed, flat, strict=True):
        windows = known[tuple(map(int, grid))]
        row[: len(windows)] = windows
    return packed.reshape(*np.shape(grids)[:-1], count, size)


def _check(picture: Picture, config: VisionConfig) -> None:
    height, width = picture.grid
    if min(height, width) < 1 or height % config.merge or width % config.merge:
        raise ValueError(f"grid: expected multiples of {config.merge} patches, got {tuple(picture.grid)}")
    if tuple(picture.patches.shape) != (height * width, config.pixels):
        raise ValueError(
            f"patches: expected [{height * width}, {config.pixels}] for a grid of {height} x {width}, "
            f"got {list(picture.patches.shape)}"
        )
