"""The hidden lens of the miniature: a picture does not show what its words said, until one looks.

A lens is drawn from a picture's seed: the same for every picture of that seed, unknown from the words, plain in the
picture. It turns the colours round two wheels by some places, and in half of all cases mirrors left and right. Whatever
colour is said, any of its wheel comes out, equally often: a guess is right in a quarter of cases. Words and picture
together reveal the lens, and with it the words that undo it. In half of the turns these are neither the words that were
said nor those of what is seen, so that neither repeating nor describing is enough.

A turn is the smoothest map of colours that takes each word's colour to the other word's (a polyharmonic spline): edges
and blur pass through it as they are. Pictures may be NumPy's or torch's, on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from bridges.miniature import world

if TYPE_CHECKING:
    import torch

Images = TypeVar("Images", np.ndarray, "torch.Tensor")
WHEELS = (("red", "blue", "white", "green"), ("yellow", "black", "purple", "cyan"))
"""Wheels of equal length. A lens takes each colour some places further on its wheel."""

_STREAM = 7_021  # what this seed is for: the noise of the same picture has the same seed
_MIRRORED = {"left": "right", "right": "left"}


class Lens(NamedTuple):
    """A lens: places that colours turn on their wheels, and whether left and right change places."""

    turn: int = 0
    mirrored: bool = False


def lens_of(seed: int) -> Lens:
    """The lens of all pictures drawn from a seed; every turn, mirrored or not, is equally likely."""
    state = np.random.SeedSequence([_STREAM, seed % 2**32, seed // 2**32]).generate_state(1)[0]
    places = len(WHEELS[0])
    return Lens(int(state % places), bool(state // places % 2))


def seen(words: str, lens: Lens) -> str:
    """The words of what a lens shows of these words' picture."""
    return " ".join(_seen(word, lens) for word in words.split())


def _seen(word: str, lens: Lens) -> str:
    for wheel in WHEELS:
        if word in wheel:
            return wheel[(wheel.index(word) + lens.turn) % len(wheel)]
    return _MIRRORED.get(word, word) if lens.mirrored else word


def undone(words: str, lens: Lens) -> str:
    """The words whose picture looks through a lens as these say: the best, where these would be without it."""
    return seen(words, lens._replace(turn=-lens.turn))


def look(images: Images, lenses: Sequence[Lens]) -> Images:
    """Return new pictures, float [n, 3, H, W] in [0, 1] of NumPy or torch, seen through n lenses."""
    images = images + 0
    for turn in {lens.turn for lens in lenses if lens.turn}:
        rows = [i for i, lens in enumerate(lenses) if lens.turn == turn]
        images[rows] = _turned_pixels(images[rows], Lens(turn))
    rows = [i for i, lens in enumerate(lenses) if lens.mirrored]
    if rows:
        images[rows] = images[rows][..., list(range(images.shape[-1]))[::-1]]
    return images


def _turned_pixels(images: Images, lens: Lens) -> Images:
    """Map every pixel's colour of pictures [n, 3, H, W] by the spline of a lens."""
    constant = getattr(images, "new_tensor", functools.partial(np.asarray, dtype=images.dtype))
    places, weights = (constant(array) for array in _spline(lens))
    n, _, height, width = images.shape
    pixels = images.reshape(n, 3, 1, height * width)
    distance = ((pixels - places.T[None, :, :, None]) ** 2).sum(1) ** 0.5  # [n, 8, pixels]
    moved = weights[:8].T @ distance + weights[8:11].T @ pixels[:, :, 0] + weights[11][:, None]
    return moved.reshape(n, 3, height, width).clip(0.0, 1.0)


@functools.cache
def _spline(lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    """The palette [8, 3], and the weights [12, 3] of distances to it (8), of the colour itself (3), and of one."""
    names = list(world.PALETTE)
    places = np.array([world.PALETTE[name] for name in names])
    goals = np.array([world.PALETTE[_seen(name, lens)] for name in names])
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1)
    flat = np.concatenate([places, np.ones((8, 1))], axis=1)
    system = np.block([[distance, flat], [flat.T, np.zeros((4, 4))]])
    return places, np.linalg.solve(system, np.concatenate([goals, np.zeros((4, 3))]))
