"""The miniature's harder world: one to four shapes on white, in GenEval's six kinds of requests.

Everything is NumPy and SciPy; shapes, colours and 32×32 pixels are those of `world`. A scene is a layout and its
shapes. A layout is a number of equal shapes, or the position of one shape beside another. A casual request names an
object, two objects, a number, a colour, a position or a colour for each object (Ghosh et al. 2023, arXiv:2310.11513).
It leaves the rest unsaid (`scripts/miniature/speech_scenes.py`). The checker finds connected components without a
network, so training cannot exploit it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

from bridges.miniature import world
from bridges.miniature.world import SIZE

SHAPES = world.VALUES["shape"]
COLOURS = tuple(name for name in world.PALETTE if name not in ("white", "black"))
NUMBERS = ("one", "two", "three", "four")
PLACES = ("left", "right", "above", "below")
LAYOUTS = (*NUMBERS, *PLACES)
KINDS = ("object", "two_objects", "counting", "colour", "position", "binding")

SCALE = 1.12  # of the first world's small shapes
COLOUR_VALUES = np.array([world.PALETTE[name] for name in COLOURS])
_INK, _SMALLEST = 0.35, 8  # distance from white that counts as drawn, and pixels of the smallest object
_EXPLAINED = 0.5  # if the nearest shape explains less of an object than this, it has no shape


class Found(NamedTuple):
    """An object found by the checker: its shape ("" for none), and its position in pixels from the corner."""

    shape: str
    colour: str
    x: float
    y: float


def coverage(shape: np.ndarray, centre: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the fraction of each pixel covered by sharp shapes [n], [n, 32, 32]."""
    rows = np.zeros((len(shape), len(world.ATTRIBUTES)), int)
    rows[:, 0] = shape
    return world.coverage(rows, centre, scale)


_MASKS = coverage(np.arange(len(SHAPES)), np.zeros((len(SHAPES), 2)), np.full(len(SHAPES), SCALE))
_OFFSETS = np.array([ndimage.center_of_mass(mask)[::-1] for mask in _MASKS]) - (SIZE - 1) / 2
"""Offset from each shape's centre to the middle of its pixels, [6, 2]."""


def read(image: np.ndarray) -> list[Found]:
    """Find the objects of a picture [3, 32, 32] in [0, 1] from its pixels.

    An object is a connected region that is not white. Its colour is the nearest to the median of its inner pixels. Its
    shape, drawn at the region's middle, has the smallest squared distance to it.
    """
    image = np.asarray(image, np.float64)
    difference = image - world.PALETTE["white"][0]
    labels, count = ndimage.label((difference**2).sum(0) > _INK**2)
    found = []
    for label in range(1, count + 1):
        region = labels == label
        if region.sum() < _SMALLEST:
            continue
        ink = np.sqrt((difference**2).sum(0)[region])
        inner = image[:, region][:, ink >= np.median(ink)]
        colour = int(((np.median(inner, axis=1) - COLOUR_VALUES) ** 2).sum(1).argmin())
        contrast = COLOUR_VALUES[colour] - world.PALETTE["white"][0]
        around = ndimage.binary_dilation(region, np.ones((3, 3)))
        alpha = np.where(around, np.einsum("c,chw->hw", contrast, difference) / (contrast @ contrast), 0.0)
        alpha = np.clip(alpha, 0.0, 1.0)
        y, x = ndimage.center_of_mass(alpha)
        centres = np.array([x, y]) - (SIZE - 1) / 2 - _OFFSETS
        masks = coverage(np.arange(len(SHAPES)), centres, np.full(len(SHAPES), SCALE))
        missed = ((masks - alpha) ** 2).sum((1, 2))
        best = int(missed.argmin())
        shape = SHAPES[best] if missed[best] < (1 - _EXPLAINED) * (alpha**2).sum() else ""
        found.append(Found(shape, COLOURS[colour], x, y))
    return found


def shows(found: Sequence[Found], requested: Mapping[str, Any]) -> bool:
    """Return whether the found objects are exactly the requested ones, in their positions."""
    wanted, place = requested["objects"], requested["place"]
    if len(found) != len(wanted):
        return False

    def is_it(order: Sequence[Found]) -> bool:
        pairs = zip(order, wanted, strict=True)
        named = all(one.shape == shape and colour in (None, one.colour) for one, (shape, colour) in pairs)
        return named and (place is None or _stands(order[0], order[1], place))

    return any(map(is_it, itertools.permutations(found)))


def _stands(one: Found, other: Found, place: str) -> bool:
    """Return whether ``one`` is mainly left, right, above or below of ``other``."""
    right, down = one.x - other.x, one.y - other.y
    along, across = (right, down) if place in ("left", "right") else (down, right)
    return (along if place in ("right", "below") else -along) > abs(across)


def pixel_accuracy(images: np.ndarray, requested: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return 1 for each picture [n, 3, 32, 32] that shows exactly the requested objects, else 0: f64[n]."""
    return np.array([shows(read(image), wanted) for image, wanted in zip(images, requested, strict=True)], float)
