"""Pictures of different sizes in arrays of few shapes: packed, joined, and cut apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.vision.config import VisionConfig


class Pictures(NamedTuple):
    """Pictures as a tower takes them: [..] rows with up to I pictures each, in the order of their prompts.

    The leading axes are [P] for prompts, [P, G] for what an environment answered to completions. Pictures differ in
    size: S is the largest of the bucket, and what lies behind a picture's own patches is 0.

    Attributes:
        patches: f32 [.., I, S, C], normalised pixel values in the processor's order (merged block after merged block,
            its patches row by row), C = channels · frames · p · p.
        grid: i32 [.., I, 2], rows and columns of patches; (0, 0) where there is no picture.
        windows: i32 [.., I, W, B], the merged tokens of each attention window (-1: none), or None where a tower's
            attention has no windows.
    """

    patches: jax.Array
    grid: jax.Array
    windows: jax.Array | None = None


class PictureStates(NamedTuple):
    """What a tower made of `Pictures`: one state for each placeholder token of a text.

    Attributes:
        states: [.., I, M, D], M = S / merge²; row by row of merged tokens.
        grid: i32 [.., I, 2], rows and columns of merged tokens; (0, 0) where there is no picture.
        deepstack: states [.., I, M, D] that are added after the first decoder layers, one array per layer (Qwen3-VL).
    """

    states: jax.Array
    grid: jax.Array
    deepstack: tuple[jax.Array, ...] = ()


def windows_of(grid: tuple[int, int], config: VisionConfig) -> np.ndarray:
    """The windows of one picture, i32 [windows, B]: the merged tokens of each, row by row, then -1.

    Windows begin at the upper left; those at the lower and right edge may be cut.

    Args:
        grid: rows and columns of patches.
        config: with windows; B = window².
    """
    assert config.window is not None
    height, width, side = grid[0] // config.merge, grid[1] // config.merge, config.window
    tokens = np.full((-(-height // side) * side, -(-width // side) * side), -1, np.int32)
    tokens[:height, :width] = np.arange(height * width, dtype=np.int32).reshape(height, width)
    cut = tokens.reshape(tokens.shape[0] // side, side, tokens.shape[1] // side, side)
    return cut.transpose(0, 2, 1, 3).reshape(-1, side * side)


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


def pack_rows(rows: Sequence[Sequence[Picture]], config: VisionConfig, *, slots: int, patches: int) -> Pictures:
    """Pictures of some of a data set's rows, as `pack_pictures`: of few shapes, none larger than the largest there is.

    Rows without any get places without a picture, so that each part of a data set is of one kind.

    Args:
        rows: each row's pictures, in the order of its text.
        config: of the tower that will see them.
        slots: the most pictures of a row.
        patches: the most patches of a picture.
    """
    own_slots = max(1, *(len(row) for row in rows))
    own_patches = max([config.merged, *(len(picture.patches) for row in rows for picture in row)])
    slots = max(own_slots, min(bucketed(own_slots), slots))
    patches = max(own_patches, min(bucket_patches(own_patches, config), patches))
    packed = pack_pictures(rows, config, slots=slots, patches=patches)
    if packed is not None:
        return packed
    grid = np.zeros((len(rows), slots, 2), np.int32)
    nothing = np.zeros((len(rows), slots, patches, config.pixels), np.float32)
    return Pictures(nothing, grid, pack_windows(grid, patches, config))  # pyright: ignore[reportArgumentType]


def joined(parts: Sequence[Any]) -> Any:
    """`Pictures` or `PictureStates` of several chunks of rows as those of all; None where none has any.

    The chunks may differ in their sizes: what is missing is filled up as `pack_pictures` does.

    Raises:
        ValueError: some have pictures and some have none.
    """
    if all(part is None for part in parts):
        return None
    if any(part is None for part in parts):
        raise ValueError("parts: expected pictures in all or in none")
    if len(parts) == 1:
        return parts[0]
    return _along(parts, 0)


def joined_some(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """As `joined`, where some chunks may have none: their rows get places without a picture.

    Args:
        parts: of each chunk, [p, ..] or None.
        counts: p of each.
    """
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None

    def nothing(count: int) -> Any:
        empty = jax.tree.map(lambda array: np.zeros((count, *array.shape[1:]), array.dtype), some)
        windows = getattr(empty, "windows", None)
        return empty if windows is None else empty._replace(windows=np.full_like(windows, -1))

    return joined([nothing(count) if part is None else part for part, count in zip(parts, counts, strict=True)])


def chained(parts: Sequence[Any]) -> Any:
    """Pictures [P, G, I, ..] of the same completions one behind the other; None where there are none."""
    some = [part for part in parts if part is not None]
    return _along(some, 2) if len(some) > 1 else next(iter(some), None)


def _along(parts: Sequence[Any], axis: int) -> Any:
    if isinstance(parts[0], Pictures):
        windows = None if parts[0].windows is None else _together([part.windows for part in parts], axis, -1)
        patches, grid = (_together([part[i] for part in parts], axis) for i in (0, 1))
        return Pictures(patches, grid, windows)
    return PictureStates(
        _together([part.states for part in parts], axis),
        _together([part.grid for part in parts], axis),
        tuple(_together(list(layers), axis) for layers in zip(*(part.deepstack for part in parts), strict=True)),
    )


def _together(arrays: Sequence[Any], axis: int, fill: int = 0) -> Any:
    """Arrays as one along an axis, the smaller ones filled up along the others."""
    library = np if all(isinstance(array, np.ndarray) for array in arrays) else jnp
    room = np.max([array.shape for array in arrays], axis=0)

    def padded(array: Any) -> Any:
        missing = [(0, int(whole - own)) for whole, own in zip(room, array.shape, strict=True)]
        missing[axis] = (0, 0)
        return library.pad(array, missing, constant_values=fill) if any(after for _, after in missing) else array

    return library.concatenate([padded(array) for array in arrays], axis=axis)


def placed(pictures: Pictures, owners: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> Pictures:
    """Pictures [N, 1, ..] as those of completions, [P, G, I, ..]; no picture where a completion has fewer than others.

    Args:
        pictures: as they were prepared.
        owners: (p, g) of each, in the order in which a completion sees its own.
        shape: (P, G).
    """
    index = np.full((*shape, max(Counter(owners).values())), len(owners))
    seen: Counter[tuple[int, int]] = Counter()
    for number, owner in enumerate(owners):
        index[(*owner, seen[owner])] = number
        seen[owner] += 1

    def spread(array: Any, fill: int = 0) -> Any:
        library = np if isinstance(array, np.ndarray) else jnp
        rows = library.concatenate([array[:, 0], library.full((1, *array.shape[2:]), fill, array.dtype)])
        return rows[index]

    windows = None if pictures.windows is None else spread(pictures.windows, -1)
    return Pictures(spread(pictures.patches), spread(pictures.grid), windows)


def taken(pictures: Any, places: Any) -> Any:
    """Some rows of `Pictures` or `PictureStates`, by a slice or by indices; None stays None."""
    return None if pictures is None else jax.tree.map(lambda array: array[places], pictures)
