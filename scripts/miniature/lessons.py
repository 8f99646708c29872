"""SFT data of the miniature's policy with pictures: conversations about pictures.

There are two kinds. *Recreate* has a picture and its words. *Refine* has a request, a prompt for it, its picture
behind a hidden lens, and a second prompt that corrects the lens. Correct conversations cover every scene. Weak
ones, of the training split only, define the policy's start: the words are right for a part of a picture and mostly
wrong for the rest, and the second prompt repeats the first more often than it corrects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from bridges.miniature import world
from scripts.miniature import drawing, speech

RECREATE = "draw this again"
"""The prompt that goes with a picture whose words are asked for."""
MEND = "mend what is wrong"
"""Request to the policy with the picture of its first prompt."""


class Rates(NamedTuple):
    """How often lessons are right.

    Attributes:
        split: The scenes that are asked for and named; None for all.
        known: Share of the values whose name in a picture is mostly told right.
        seen: Shares of the right name and of the one wrong name of a known value; the rest is any.
        unseen: The same of other values.
        translated: Chance that a request's word is translated rightly; else it is any.
        mended: Chances that a word of the second prompt undoes the lens, and that it repeats the first prompt's.
        kept: Chance that a word is said at all.
        blind: Share of second turns without a picture: nothing can be mended, and the first prompt is said again.
    """

    split: str | None
    known: float
    seen: tuple[float, float]
    unseen: tuple[float, float]
    translated: float
    mended: tuple[float, float]
    kept: float
    blind: float


SOUND = Rates(None, 1.0, (1.0, 0.0), (1.0, 0.0), 0.9, (1.0, 0.0), 1.0, 0.2)
WEAK = Rates("train", 0.3, (0.65, 0.15), (0.25, 0.50), 0.7, (0.20, 0.55), 0.9, 0.2)


Words = Mapping[str, str]
"""What a caption says, by what it says it of; in a caption's order."""


SIZES = tuple(len(world.VALUES[name]) for name in world.ATTRIBUTES)
"""Number of values of each attribute."""


class Turn(NamedTuple):
    """One exchange: what is said to the policy, the picture it is shown (f32 [3, 32, 32] or None), its answer."""

    text: str
    picture: np.ndarray | None
    answer: str


class Beliefs(NamedTuple):
    """What weak lessons hold of pictures: the fixed wrong name of each value, and the values that are known."""

    wrong: dict[str, dict[str, str]]
    known: dict[str, set[str]]


def beliefs(rng: np.random.Generator, rates: Rates) -> Beliefs:
    """Chooses the wrong names, a permutation of each attribute's values without a fixed one, and what is known."""
    wrong, known = {}, {}
    for name, values in world.VALUES.items():
        shuffled = rng.permutation(values).tolist()
        wrong[name] = dict(zip(shuffled, [*shuffled[1:], shuffled[0]], strict=True))
        known[name] = set(shuffled[: round(rates.known * len(values))])
    return Beliefs(wrong, known)


def sight(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A picture of any scene, f32 [3, 32, 32], half of them behind a lens, and what it shows, a row."""
    words = asdict(speech.sample_scene(rng))
    if rng.random() < 0.5:
        return _picture(rng, words), _row(words)
    glass = world.lens_of(int(rng.integers(2**63)))
    picture = world.look(_picture(rng, _undone(words, glass))[None], [glass])[0]
    return picture, _row(words)


def recreate(rng: np.random.Generator, rates: Rates, told: Beliefs) -> list[Turn]:
    """A picture, and what it is said to show."""
    shown = asdict(speech.sample_scene(rng, rates.split))
    words = {}
    for name, value in shown.items():
        if rng.random() < rates.kept:
            shares = rates.seen if value in told.known[name] else rates.unseen
            words[name] = _one_of(rng, world.VALUES[name], shares, (value, told.wrong[name][value]))
    return [Turn(RECREATE, _picture(rng, shown), caption_of(words))]


def refine(rng: np.random.Generator, rates: Rates) -> list[Turn]:
    """A request, a prompt for it, the picture that came out, and a second prompt."""
    request, requested = speech.casual_prompt(rng, speech.sample_scene(rng, rates.split))
    meant = asdict(speech.complete(requested))
    glass = world.lens_of(int(rng.integers(2**63)))
    undone = _undone(meant, glass)
    first, second = {}, {}
    for name, word in meant.items():
        values = world.VALUES[name]
        if rng.random() < rates.kept:
            first[name] = _one_of(rng, values, (rates.translated,), (word,))
        if rng.random() < rates.kept:
            second[name] = _one_of(rng, values, rates.mended, (undone[name], first.get(name)))
    turns = [Turn(request, None, caption_of(first))]
    if rng.random() < rates.blind:
        again = {name: word for name, word in first.items() if rng.random() < rates.kept}
        return [*turns, Turn(MEND, None, caption_of(again))]
    drawn = {name: first.get(name) or str(rng.choice(world.VALUES[name])) for name in meant}
    picture = world.look(_picture(rng, drawn)[None], [glass])[0]
    return [*turns, Turn(MEND, picture, caption_of(second))]


def caption_of(words: Words) -> str:
    """The canonical form without the attributes that are missing."""
    parts = ["a", *(words[k] for k in ("sharpness", "size", "colour", "shape") if k in words)]
    if "position" in words:
        parts.append(f"at the {words['position']}")
    if "background" in words:
        parts.append(f"on {words['background']}")
    return " ".join(parts)


def _one_of(
    rng: np.random.Generator, values: tuple[str, ...], shares: tuple[float, ...], words: tuple[str | None, ...]
) -> str:
    """A word by its share of the chances; for the rest, or where there is none, any of the values."""
    draw = rng.random()
    for share, word in zip(np.cumsum(shares), words, strict=True):
        if draw < share and word is not None:
            return word
    return str(rng.choice(values))


def _undone(words: Words, glass: world.Lens) -> Words:
    return {name: world.undone(word, glass) for name, word in words.items()}


def _picture(rng: np.random.Generator, words: Words) -> np.ndarray:
    """A picture of all words of a caption, f32 [3, 32, 32], with the renderer's grain; colours may be the same."""
    picture = drawing.draw(_row(words)[None], rng)[0]
    grain = rng.normal(0.0, rng.uniform(0.0, 0.04), picture.shape).astype(np.float32)
    return np.clip(picture + grain, 0.0, 1.0)


def _row(words: Words) -> np.ndarray:
    """Positions i64[6] of all words of a caption in `world.VALUES`."""
    return np.array([world.VALUES[name].index(words[name]) for name in world.ATTRIBUTES])
