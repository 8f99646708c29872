"""The miniature world: pictures of one coloured shape, requests for them, and a pixel checker.

Everything is NumPy. A picture is 32×32 and has six attributes (shape, colour, size, position, background, sharpness).
Requests are casual: other words than the renderer's, loose order, missing attributes (`scripts/miniature/speech.py`).
The checker reads the attributes from pixels by finding the nearest ideal picture. It has no network, so training cannot
exploit it.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

SIZE = 32  # height and width of a picture in pixels

ATTRIBUTES = ("shape", "colour", "size", "position", "background", "sharpness")
PALETTE = {
    "red": (0.86, 0.12, 0.14),
    "green": (0.10, 0.58, 0.20),
    "blue": (0.13, 0.25, 0.88),
    "yellow": (0.97, 0.86, 0.15),
    "purple": (0.56, 0.16, 0.66),
    "cyan": (0.25, 0.82, 0.88),
    "white": (0.97, 0.97, 0.97),
    "black": (0.05, 0.05, 0.06),
}
VALUES: dict[str, tuple[str, ...]] = {
    "shape": ("circle", "square", "triangle", "star", "cross", "ring"),
    "colour": tuple(PALETTE),
    "size": ("small", "medium", "large"),
    "position": ("center", "top", "bottom", "left", "right"),
    "background": tuple(PALETTE),
    "sharpness": ("sharp", "blurry"),
}


_RADII = np.array([5.0, 7.2, 10.0])
_OFFSETS = np.array([[0.0, 0.0], [0.0, -5.5], [0.0, 5.5], [-5.5, 0.0], [5.5, 0.0]])  # x, y
COLOURS = np.array(list(PALETTE.values()))
_BLUR_SIGMA = 1.5
_EXPLAINED = 0.5  # a picture is unreadable if the nearest ideal explains less of it than this


def _signed_distance(shape: str, x: np.ndarray, y: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Return the distance in pixels to the outline, negative inside; x is right and y is down from the centre."""
    if shape == "circle":
        return np.hypot(x, y) - r
    if shape == "ring":
        return np.abs(np.hypot(x, y) - 0.78 * r) - 0.24 * r
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.86 * r
    if shape == "cross":
        long, short = 1.02 * r, 0.32 * r
        upright = np.maximum(np.abs(x) - short, np.abs(y) - long)
        return np.minimum(upright, np.maximum(np.abs(x) - long, np.abs(y) - short))
    if shape == "triangle":
        side = np.abs(x) * np.cos(np.pi / 6) - (y - 0.2 * r) * np.sin(np.pi / 6)
        return np.maximum(side - 0.6 * r, y - 0.8 * r)
    turn = 2 * np.pi / 5  # a star is one edge, repeated for each of its ten half-points
    angle = np.abs((np.arctan2(x, -y) + turn / 2) % turn - turn / 2)
    px, py = np.hypot(x, y) * np.cos(angle), np.hypot(x, y) * np.sin(angle)
    tip, ix, iy = 1.12 * r, 0.45 * r * np.cos(turn / 2), 0.45 * r * np.sin(turn / 2)
    return ((px - tip) * iy + py * (tip - ix)) / np.hypot(iy, tip - ix)


@functools.cache
def _blur_matrix() -> np.ndarray:
    """Return the matrix of Gaussian smoothing along one axis with repeated edges, [32, 32]."""
    axis = np.arange(SIZE)
    wide = np.arange(-8, SIZE + 8)
    weights = np.exp(-0.5 * ((axis[:, None] - wide[None]) / _BLUR_SIGMA) ** 2)
    matrix = np.zeros((SIZE, SIZE))
    np.add.at(matrix.T, np.clip(wide, 0, SIZE - 1), weights.T)
    return matrix / matrix.sum(axis=1, keepdims=True)


def coverage(rows: np.ndarray, centre: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return each pixel's fraction covered by the shape, [n, 32, 32], for scenes [n, 6] moved by `centre` [n, 2]."""
    axis = np.arange(SIZE) - (SIZE - 1) / 2
    middle = _OFFSETS[rows[:, 3]] + centre
    radius = (_RADII[rows[:, 2]] * scale)[:, None, None]
    x, y = axis[None, None, :] - middle[:, 0, None, None], axis[None, :, None] - middle[:, 1, None, None]
    distance = np.empty((len(rows), SIZE, SIZE))
    for i, shape in enumerate(VALUES["shape"]):
        of = rows[:, 0] == i
        if of.any():
            distance[of] = _signed_distance(shape, *np.broadcast_arrays(x[of], y[of]), radius[of])
    alpha = np.clip(0.5 - distance, 0.0, 1.0)
    blurry = rows[:, 5] == 1
    if blurry.any():
        alpha[blurry] = _blur_matrix() @ alpha[blurry] @ _blur_matrix().T
    return alpha


@functools.cache
def _templates() -> tuple[np.ndarray, np.ndarray]:
    """Return ideal coverages [M, 1024] of every shape, size, position and sharpness, with their scenes [M, 6]."""
    grid = np.array(np.meshgrid(range(6), [0], range(3), range(5), [1], range(2), indexing="ij")).reshape(6, -1).T
    shifts = np.array([(0, 0), (0.4, 0), (-0.4, 0), (0, 0.4), (0, -0.4)])
    rows = np.repeat(grid, len(shifts), axis=0)
    masks = coverage(rows, np.tile(shifts, (len(grid), 1)), np.ones(len(rows)))
    return masks.reshape(len(rows), -1), rows


def read(images: np.ndarray) -> np.ndarray:
    """Read the attributes of pictures [n, 3, 32, 32] in [0, 1]: i64[n, 6], positions in `VALUES`; -1 where unreadable.

    The border's median colour is the background. The result is the ideal picture on it (of any shape, size, position,
    sharpness and colour) with the smallest squared distance. If even the nearest ideal explains less than half of a
    picture, only its background is read.
    """
    images = np.asarray(images, np.float64)
    masks, rows = _templates()
    n = len(images)
    border = np.concatenate([images[:, :, 0], images[:, :, -1], images[:, :, :, 0], images[:, :, :, -1]], axis=2)
    back = np.median(border, axis=2)
    background = np.argmin(((back[:, None] - COLOURS) ** 2).sum(-1), axis=1)
    difference = (images - back[:, :, None, None]).reshape(n, 3, -1)
    contrast = COLOURS[None] - back[:, None]  # [n, 8, 3]
    # [n, 8, M]. One product over all pictures: NumPy's threads spin between many small ones.
    overlap = contrast @ (difference.reshape(3 * n, -1) @ masks.T).reshape(n, 3, -1)
    cost = (contrast**2).sum(-1)[..., None] * (masks**2).sum(-1) - 2 * overlap
    cost[np.arange(n), background] = np.inf
    best = cost.reshape(n, -1).argmin(axis=1)
    colour, template = np.divmod(best, len(masks))
    attributes = rows[template].copy()
    attributes[:, 1] = colour
    attributes[:, 4] = background
    explained = -cost.reshape(n, -1)[np.arange(n), best]
    unreadable = explained < _EXPLAINED * np.maximum((difference**2).sum((1, 2)), 1e-6)
    attributes[np.ix_(unreadable, [0, 1, 2, 3, 5])] = -1
    return attributes


def pixel_accuracy(images: np.ndarray, requested: list[dict[str, str]]) -> np.ndarray:
    """Return the share of each picture's requested attributes that the checker finds: f64[n]."""
    _, first, places = np.unique([image.tobytes() for image in images], return_index=True, return_inverse=True)
    attributes = read(images[first])[places]  # equal pictures are read once
    score = np.zeros(len(attributes))
    for row, wanted in enumerate(requested):
        words = {name: word for name, word in wanted.items() if word is not None}
        hits = [attributes[row, ATTRIBUTES.index(name)] == VALUES[name].index(word) for name, word in words.items()]
        score[row] = np.mean(hits)
    return score


ERRING_KINDS = ("counting", "colour")
"""Kinds of the scenes' requests that the renderer `miniature_erring` often draws wrong."""


@functools.cache
def shipped_prompts(name: str) -> list[dict]:
    """Return all rows of a world's file, which `scripts/miniature/speech.py` writes."""
    file = resources.files("bridges.miniature").joinpath(f"{name}_prompts.jsonl.gz")
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def prompts(name: str, split: str, count: int) -> list[dict]:
    """Return at most `count` rows of a split ("train", "validation", "test") of the "world" or of its harder "scenes".

    Rows are ``{"prompt": text, "requested": argument of pixel_accuracy, "oracle": text}``, of scenes with "kind". No
    (shape, colour) pair of the world occurs in two splits. The scenes cycle through their six kinds; a text may repeat,
    with the same request, since a kind has a limited number of texts. "erring" is the scenes of `ERRING_KINDS`.
    """
    rows = [row for row in shipped_prompts("scenes" if name == "erring" else name) if row["split"] == split]
    rows = [row for row in rows if name != "erring" or row["kind"] in ERRING_KINDS]
    return [{name: value for name, value in row.items() if name != "split"} for row in rows[:count]]


# The hidden lens is drawn from a picture's seed: unknown from the words, plain in the picture. It turns the colours
# round two wheels by some places, and in half of all cases mirrors left and right. Words and picture together reveal
# it, and the words that undo it: in half of the turns neither the words that were said nor those of what is seen.
#
# A turn is the smoothest map of colours that takes each word's colour to the other word's (a polyharmonic spline):
# edges and blur pass through it as they are. Pictures may be NumPy's or torch's, on any device.

Images = TypeVar("Images", np.ndarray, "torch.Tensor")
WHEELS = (("red", "blue", "white", "green"), ("yellow", "black", "purple", "cyan"))
"""Wheels of equal length. A lens takes each colour some places further on its wheel."""

_STREAM = 7_021  # separates the lens from the picture's noise, which has the same seed
_MIRRORED = {"left": "right", "right": "left"}


class Lens(NamedTuple):
    """A lens: the number of places that colours turn on their wheels, and whether left and right are swapped."""

    turn: int = 0
    mirrored: bool = False


def lens_of(seed: int) -> Lens:
    """Return the lens of all pictures with a seed; every turn, mirrored or not, is equally likely."""
    state = np.random.SeedSequence([_STREAM, seed % 2**32, seed // 2**32]).generate_state(1)[0]
    places = len(WHEELS[0])
    return Lens(int(state % places), bool(state // places % 2))


def seen(words: str, lens: Lens) -> str:
    """Return the words that describe these words' picture through a lens."""
    return " ".join(_seen(word, lens) for word in words.split())


def _seen(word: str, lens: Lens) -> str:
    for wheel in WHEELS:
        if word in wheel:
            return wheel[(wheel.index(word) + lens.turn) % len(wheel)]
    return _MIRRORED.get(word, word) if lens.mirrored else word


def undone(words: str, lens: Lens) -> str:
    """Return the words whose picture matches these words through a lens: the inverse of `seen`."""
    return seen(words, lens._replace(turn=-lens.turn))


def look(images: Images, lenses: Sequence[Lens]) -> Images:
    """Return new pictures, float [n, 3, H, W] in [0, 1] of NumPy or torch, seen through n lenses."""
    images = images + 0
    for turn in {lens.turn for lens in lenses if lens.turn}:
        rows = [i for i, lens in enumerate(lenses) if lens.turn == turn]
        images[rows] = _turned_pixels(images[rows], Lens(turn))
    if rows := [i for i, lens in enumerate(lenses) if lens.mirrored]:
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
    """Return the palette [8, 3], and weights [12, 3] of the distances to it (8), the colour itself (3), and 1."""
    names = list(PALETTE)
    places = np.array([PALETTE[name] for name in names])
    goals = np.array([PALETTE[_seen(name, lens)] for name in names])
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1)
    flat = np.concatenate([places, np.ones((8, 1))], axis=1)
    system = np.block([[distance, flat], [flat.T, np.zeros((4, 4))]])
    return places, np.linalg.solve(system, np.concatenate([goals, np.zeros((4, 3))]))
