"""The miniature's harder world: one to four shapes on white, in GenEval's six kinds of requests.

Everything is NumPy and SciPy; shapes, colours, casual words and 32×32 pixels are those of `world`. A scene is a layout,
which is a number of equal shapes or the place of one shape beside another, and what stands in it. The *canonical*
grammar says all of it; it is the only language the renderer was trained on. The *casual* grammar asks for an object,
two objects, a number, a colour, a place or which object has which colour (Ghosh et al. 2023, arXiv:2310.11513), and
leaves the rest unsaid. The checker finds connected components and is no network, so that no training can exploit it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import ndimage

from bridges.miniature import world
from bridges.miniature.world import OPENINGS, SIZE, SPLITS

SHAPES = world.VALUES["shape"]
COLOURS = tuple(name for name in world.PALETTE if name not in ("white", "black"))
NUMBERS = ("one", "two", "three", "four")
PLACES = ("left", "right", "above", "below")
LAYOUTS = (*NUMBERS, *PLACES)
KINDS = ("object", "two_objects", "counting", "colour", "position", "binding")

SYNONYMS: dict[str, tuple[str, str]] = {
    **{word: world.SYNONYMS[word] for word in (*SHAPES, *COLOURS, "left", "right")},
    "one": ("single", "lone"),
    "two": ("couple", "pair"),
    "three": ("trio", "triplet"),
    "four": ("quartet", "foursome"),
    "above": ("atop", "north"),
    "below": ("beneath", "south"),
}
"""The casual words of each canonical word; the renderer has never seen any of them."""

JOINERS = ("and", "with", "beside")

SCALE = 1.12  # of the first world's small shapes
COLOUR_VALUES = np.array([world.PALETTE[name] for name in COLOURS])
_INK, _SMALLEST = 0.35, 8  # distance from white of what counts as drawn, and pixels of the smallest object
_EXPLAINED = 0.5  # an object the nearest shape explains less of than this has none


class Found(NamedTuple):
    """An object that the checker sees: its shape is "" if it has none, its place in pixels from the corner."""

    shape: str
    colour: str
    x: float
    y: float


def coverage(shape: np.ndarray, centre: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Fraction of each pixel that sharp shapes [n] cover, [n, 32, 32]."""
    rows = np.zeros((len(shape), len(world.ATTRIBUTES)), int)
    rows[:, 0] = shape
    return world.coverage(rows, centre, scale)


def _template_offsets() -> np.ndarray:
    """From each shape's centre to the middle of its pixels, [6, 2]."""
    masks = coverage(np.arange(len(SHAPES)), np.zeros((len(SHAPES), 2)), np.full(len(SHAPES), SCALE))
    middles = np.array([ndimage.center_of_mass(mask)[::-1] for mask in masks])
    return middles - (SIZE - 1) / 2


_OFFSETS = _template_offsets()


def read(image: np.ndarray) -> list[Found]:
    """Find the objects of a picture [3, 32, 32] in [0, 1] from its pixels alone.

    An object is a connected region that is not white. Its colour is the nearest to the median of its inner pixels; its
    shape the one that, drawn at the region's middle, has the smallest squared distance to it.
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
    """Whether what was found is what was requested: these objects, no others, in their places."""
    wanted, place = requested["objects"], requested["place"]
    if len(found) != len(wanted):
        return False

    def is_it(order: Sequence[Found]) -> bool:
        pairs = zip(order, wanted, strict=True)
        named = all(one.shape == shape and colour in (None, one.colour) for one, (shape, colour) in pairs)
        return named and (place is None or _stands(order[0], order[1], place))

    return any(map(is_it, itertools.permutations(found)))


def _stands(one: Found, other: Found, place: str) -> bool:
    """Whether ``one`` is left, right, above or below of ``other``, more than in any other direction."""
    right, down = one.x - other.x, one.y - other.y
    along, across = (right, down) if place in ("left", "right") else (down, right)
    return (along if place in ("right", "below") else -along) > abs(across)


def pixel_accuracy(images: np.ndarray, requested: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """1 for each picture [n, 3, 32, 32] that shows all that was requested and nothing else, 0 for others: f64[n]."""
    return np.array([shows(read(image), wanted) for image, wanted in zip(images, requested, strict=True)], float)


def canonical_caption(requested: Mapping[str, Any]) -> str:
    """The one complete caption of a request, in the renderer's language; what was left unsaid is filled in."""
    objects, place = requested["objects"], requested["place"]
    (shape, colour), (other, its_colour) = objects[0], objects[-1]
    colour = colour or "red"
    if place is None and objects.count(objects[0]) == len(objects):
        return f"{NUMBERS[len(objects) - 1]} {colour} {shape}"
    return f"a {colour} {shape} {place or 'left'} a {its_colour or 'blue'} {other}"


def plural(noun: str) -> str:
    """The casual word for several of ``noun``."""
    return noun + ("es" if noun[-1] in "sx" else "s")


def casual_prompt(rng: np.random.Generator, kind: str) -> tuple[str, dict[str, Any], str | None]:
    """Return a casual prompt of a kind, what it requests, and its split.

    Combinations are held out: a way of asking for an object, a number or a colour of a shape, a pair of shapes. A
    request with one of them belongs to its split alone, and with such of two splits to none.
    """
    s, t = (int(i) for i in rng.permutation(len(SHAPES))[:2])
    c, d = (int(i) for i in rng.permutation(len(COLOURS))[:2])
    number, place = int(rng.integers(len(NUMBERS))), str(rng.choice(PLACES))
    start, joiner = int(rng.integers(len(OPENINGS))), str(rng.choice(JOINERS))

    def say(word: str) -> str:
        return SYNONYMS[word][rng.integers(2)]

    one, other = say(SHAPES[s]), say(SHAPES[t])
    objects: list[list[str | None]] = [[SHAPES[s], None]]
    if kind == "object":
        words, held = [one], [start - s]
    elif kind == "counting":
        words, held = [say(NUMBERS[number]), plural(one) if number else one], [number - s]
        objects *= number + 1
    elif kind == "colour":
        words, held = [say(COLOURS[c]), one], [c - s]
        objects = [[SHAPES[s], COLOURS[c]]]
    elif kind == "binding":
        words, held = [say(COLOURS[c]), one, joiner, say(COLOURS[d]), other], [c - s, d - t, s + t - 1]
        objects = [[SHAPES[s], COLOURS[c]], [SHAPES[t], COLOURS[d]]]
    else:
        words, held = [one, joiner if kind == "two_objects" else say(place), other], [s + t - 1]
        objects.append([SHAPES[t], None])
    splits = {{0: "test", 3: "validation"}.get(n % len(SHAPES), "train") for n in held}
    apart = splits - {"train"} or {"train"}
    requested = {"kind": kind, "objects": objects, "place": place if kind == "position" else None}
    return " ".join([*OPENINGS[start].split(), *words]), requested, apart.pop() if len(apart) == 1 else None


def prompts(split: str, count: int, seed: int = 0) -> list[dict]:
    """The built-in data set, of the six kinds in turn; its columns travel to the rewards.

    A text may come again, with the same request: a kind has no more than its words allow.

    Returns:
        Rows ``{"prompt": text, "kind": one of KINDS, "requested": what pixel_accuracy takes, "oracle": text}``.
    """
    rng = np.random.default_rng([seed, SPLITS.index(split), 7_001])
    rows: list[dict] = []
    while len(rows) < count:
        kind = KINDS[len(rows) % len(KINDS)]
        text, requested, belongs = casual_prompt(rng, kind)
        if belongs == split:
            oracle = canonical_caption(requested)
            rows.append({"prompt": text, "kind": kind, "requested": requested, "oracle": oracle})
    return rows
