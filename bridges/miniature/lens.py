"""The hidden lens of the miniature world: a picture does not show what its words said, until one looks.

A lens is drawn from a picture's seed: the same for every picture of that seed, unknown from the words, plain in the
picture. It turns the colours round two wheels of four by 0 to 3 places, and in half of all cases mirrors left and
right. Whatever colour is said, any of four comes out, equally often: a guess is right in a quarter of cases. Words
and picture together reveal the lens, and with it the words that undo it. In half of the turns these are neither the
words that were said nor those of what is seen, so that neither repeating nor describing is enough.

A turn is the smoothest map of colours that takes each word's colour to the other word's (a polyharmonic spline):
edges and blur pass through it as they are. Pictures may be NumPy's or torch's, on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from bridges.miniature import world

if TYPE_CHECKING:
    import torch

Images = TypeVar("Images", np.ndarray, "torch.Tensor")

WHEELS = (("red", "blue", "white", "green"), ("yellow", "black", "purple", "cyan"))
"""A lens takes each colour some places further on its wheel."""

_STREAM = 7_021  # what this seed is for: the noise of the same picture has the same seed
_MIRRORED = {"left": "right", "right": "left"}


class Lens(NamedTuple):
    """A lens: places, 0 to 3, that colours turn on their wheels, and whether left and right change places."""

    turn: int = 0
    mirrored: bool = False


def lens_of(seed: int) -> Lens:
    """The lens of all pictures drawn from a seed; every one of the eight is equally likely."""
    state = np.random.SeedSequence([_STREAM, seed % 2**32, seed // 2**32]).generate_state(1)[0]
    return Lens(int(state % 4), bool(state // 4 % 2))


def turned(colour: str, places: int) -> str:
    """The colour some places further on its wheel."""
    for wheel in WHEELS:
        if colour in wheel:
            return wheel[(wheel.index(colour) + places) % len(wheel)]
    raise ValueError(f"colour must be one of {sorted(sum(WHEELS, ()))}, got {colour!r}")


def seen(scene: world.Scene, lens: Lens) -> world.Scene:
    """The scene that a lens shows."""
    position = _MIRRORED.get(scene.position, scene.position) if lens.mirrored else scene.position
    colours = {name: turned(getattr(scene, name), lens.turn) for name in ("colour", "background")}
    return replace(scene, position=position, **colours)


def undone(scene: world.Scene, lens: Lens) -> world.Scene:
    """The scene that looks like this one through a lens."""
    return seen(scene, Lens(-lens.turn, lens.mirrored))


def oracle_rewrite(requested: Mapping[str, str], lens: Lens) -> str:
    """The best words for a request, given the lens."""
    return world.canonical_caption(undone(world.complete(dict(requested)), lens))


def look(images: Images, lenses: Sequence[Lens]) -> Images:
    """Return new pictures, float [n, 3, H, W] in [0, 1] of NumPy or torch, seen through n lenses."""
    if len(images) != len(lenses):
        raise ValueError(f"lenses must be one for each of {len(images)} images, got {len(lenses)}")
    images = images + 0
    for turn in {lens.turn for lens in lenses} - {0}:
        rows = [i for i, lens in enumerate(lenses) if lens.turn == turn]
        images[rows] = _turned_pixels(images[rows], turn)
    rows = [i for i, lens in enumerate(lenses) if lens.mirrored]
    if rows:
        images[rows] = images[rows][..., list(range(images.shape[-1]))[::-1]]
    return images


def _turned_pixels(images: Images, turn: int) -> Images:
    """Map every pixel's colour of pictures [n, 3, H, W] by the spline of a turn."""
    constant = getattr(images, "new_tensor", functools.partial(np.asarray, dtype=images.dtype))
    places, weights = (constant(array) for array in _spline(turn))
    n, _, height, width = images.shape
    pixels = images.reshape(n, 3, 1, height * width)
    distance = ((pixels - places.T[None, :, :, None]) ** 2).sum(1) ** 0.5  # [n, 8, pixels]
    moved = weights[:8].T @ distance + weights[8:11].T @ pixels[:, :, 0] + weights[11][:, None]
    return moved.reshape(n, 3, height, width).clip(0.0, 1.0)


@functools.cache
def _spline(turn: int) -> tuple[np.ndarray, np.ndarray]:
    """The palette [8, 3], and the weights [12, 3] of distances to it (8), of the colour itself (3), and of one."""
    names = list(world.PALETTE)
    places = np.array([world.PALETTE[name] for name in names])
    goals = np.array([world.PALETTE[turned(name, turn)] for name in names])
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1)
    flat = np.concatenate([places, np.ones((8, 1))], axis=1)
    system = np.block([[distance, flat], [flat.T, np.zeros((4, 4))]])
    return places, np.linalg.solve(system, np.concatenate([goals, np.zeros((4, 3))]))
