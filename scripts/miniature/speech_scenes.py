"""The two grammars of the harder world: canonical captions, and casual requests of six kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bridges.miniature.scenes import COLOURS, KINDS, NUMBERS, PLACES, SHAPES
from scripts.miniature import speech
from scripts.miniature.speech import OPENINGS, SPLITS

SYNONYMS: dict[str, tuple[str, str]] = {
    **{word: speech.SYNONYMS[word] for word in (*SHAPES, *COLOURS, "left", "right")},
    "one": ("single", "lone"),
    "two": ("couple", "pair"),
    "three": ("trio", "triplet"),
    "four": ("quartet", "foursome"),
    "above": ("atop", "north"),
    "below": ("beneath", "south"),
}
"""The casual words of each canonical word; the renderer has never seen any of them."""
JOINERS = ("and", "with", "beside")


def canonical_caption(requested: Mapping[str, Any]) -> str:
    """The one complete caption of a request, in the renderer's language, with unsaid parts filled in."""
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
    """Return a casual prompt of a kind, its request, and its split.

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
