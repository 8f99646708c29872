"""Pictures of rows that come and go together: packed within the sizes of a data set, joined, and cut apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.vision.config import VisionConfig
from grpo_jax.models.vision.patches import Picture, bucket_patches, bucketed, pack_pictures, pack_windows
from grpo_jax.models.vision.pictures import Pictures, PictureStates


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
