"""True pictures of the miniature's two worlds: training data of its networks, and test data of the checkers."""

from __future__ import annotations

from typing import Any

import numpy as np

from bridges.miniature import scenes, world
from scripts.miniature import speech

_FAR = 8.0
_CENTRES = {
    "one": ((0, 0),),
    "two": ((-_FAR, 0), (_FAR, 0)),
    "three": ((0, -_FAR), (-_FAR, _FAR), (_FAR, _FAR)),
    "four": ((-_FAR, -_FAR), (_FAR, -_FAR), (-_FAR, _FAR), (_FAR, _FAR)),
    "left": ((-_FAR, 0), (_FAR, 0)),
    "right": ((_FAR, 0), (-_FAR, 0)),
    "above": ((0, -_FAR), (0, _FAR)),
    "below": ((0, _FAR), (0, -_FAR)),
}
"""Where the objects of a layout stand, x to the right and y down from the middle; the first is the one named first."""


def indices(scene: speech.Scene) -> np.ndarray:
    """The attributes as positions in `world.VALUES`: i64[6]."""
    return np.array([world.VALUES[name].index(getattr(scene, name)) for name in world.ATTRIBUTES])


def draw(rows: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
    """Draw scenes of the first world, as indices [n, 6], to f32 [n, 3, 32, 32] in [0, 1].

    With an rng, place, size and colours vary a little, as in photographs.
    """
    rows = np.atleast_2d(rows)
    n = len(rows)
    centre, scale, tint = np.zeros((n, 2)), np.ones(n), np.zeros((n, 2, 3))
    if rng is not None:
        centre, scale = rng.uniform(-0.5, 0.5, (n, 2)), rng.uniform(0.97, 1.03, n)
        tint = rng.uniform(-0.02, 0.02, (n, 2, 3))
    alpha = world.coverage(rows, centre, scale)[:, None]
    front = (world.COLOURS[rows[:, 1]] + tint[:, 0])[:, :, None, None]
    back = (world.COLOURS[rows[:, 4]] + tint[:, 1])[:, :, None, None]
    return np.clip(back + alpha * (front - back), 0.0, 1.0).astype(np.float32)


def sample_scenes(rng: np.random.Generator, count: int) -> np.ndarray:
    """Scenes of the harder world as positions in LAYOUTS, SHAPES, COLOURS, SHAPES, COLOURS: i64[count, 5].

    Where the layout is a number the second object is the first; else they differ in shape, in colour or in both.
    """
    things = len(scenes.SHAPES) * len(scenes.COLOURS)
    first = rng.integers(things, size=count)
    second = (first + rng.integers(1, things, size=count)) % things
    layout = np.where(rng.random(count) < 0.4, rng.integers(0, 4, count), rng.integers(4, 8, count))
    second = np.where(layout < len(scenes.NUMBERS), first, second)
    return np.stack([layout, *np.divmod(first, len(scenes.COLOURS)), *np.divmod(second, len(scenes.COLOURS))], axis=1)


def draw_scenes(rows: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
    """Draw scenes of the harder world, as indices [n, 5], to f32 [n, 3, 32, 32] in [0, 1].

    With an rng, place, size and colour of each object vary a little.
    """
    rows = np.atleast_2d(rows)
    pictures = np.full((len(rows), 3, world.SIZE, world.SIZE), world.PALETTE["white"][0])
    for slot in range(len(scenes.NUMBERS)):
        here = np.array([i for i, row in enumerate(rows) if slot < len(_CENTRES[scenes.LAYOUTS[row[0]]])], int)
        if not len(here):
            continue
        shape, colour = rows[here, 3 if slot else 1], rows[here, 4 if slot else 2]
        centre = np.array([_CENTRES[scenes.LAYOUTS[layout]][slot] for layout in rows[here, 0]], float)
        scale, tint = np.full(len(here), scenes.SCALE), np.zeros((len(here), 3))
        if rng is not None:
            centre += rng.uniform(-0.5, 0.5, centre.shape)
            scale *= rng.uniform(0.97, 1.03, len(here))
            tint = rng.uniform(-0.02, 0.02, tint.shape)
        alpha = scenes.coverage(shape, centre, scale)[:, None]
        pictures[here] += alpha * ((scenes.COLOUR_VALUES[colour] + tint)[:, :, None, None] - pictures[here])
    return np.clip(pictures, 0.0, 1.0).astype(np.float32)


def request_of(row: np.ndarray) -> dict[str, Any]:
    """The request for everything in a scene, i64[5]."""
    layout, shape, colour, other, its_colour = (int(index) for index in row)
    if layout < len(scenes.NUMBERS):
        return {"objects": [[scenes.SHAPES[shape], scenes.COLOURS[colour]]] * (layout + 1), "place": None}
    objects = [[scenes.SHAPES[shape], scenes.COLOURS[colour]], [scenes.SHAPES[other], scenes.COLOURS[its_colour]]]
    return {"objects": objects, "place": scenes.LAYOUTS[layout]}
