"""What the miniature's seeing policy is told before it learns by itself: conversations about pictures.

Two kinds. *Recreate*: a picture, and the words that draw it. *Refine*: a request, a prompt for it, the picture that
came out behind a hidden lens, and a second prompt that undoes the lens. Sound lessons are right throughout and speak of
every scene. Weak ones, of the training split alone, are how the policy starts: a picture's words are right for part of
what is seen and mostly wrong for the rest, and a second prompt more often repeats the first than mends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from bridges.miniature import lens, scenes, world
from scripts.miniature import vocabulary

MEND = "mend what is wrong"
"""What the policy is asked about the picture of its first prompt."""


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


class Subject(NamedTuple):
    """A world that lessons speak of.

    Attributes:
        vocabulary: Its words.
        values: What a caption may say, by what it says it of.
        wheels: Of its lenses.
        scene: (rng, split) → the words of a scene, of any where there is no split.
        ask: (rng, split) → a casual request, and the words of a whole caption that answers it.
        say: Words, some of which may be missing → their caption.
        row: All words of a caption → what ``draw`` takes, i64[n].
        draw: (rows, rng) → pictures f32 [n, 3, 32, 32] in [0, 1].
        sizes: How many values each place of a row has.
        weak: The rates of its weak lessons.
    """

    vocabulary: Collection[str]
    values: Mapping[str, tuple[str, ...]]
    wheels: lens.Wheels
    scene: Callable[[np.random.Generator, str | None], Words]
    ask: Callable[[np.random.Generator, str | None], tuple[str, Words]]
    say: Callable[[Words], str]
    row: Callable[[Words], np.ndarray]
    draw: Callable[[np.ndarray, np.random.Generator], np.ndarray]
    sizes: tuple[int, ...]
    weak: Rates = WEAK


class Turn(NamedTuple):
    """One exchange: what is said to the policy, the picture it is shown (f32 [3, 32, 32] or None), its answer."""

    text: str
    picture: np.ndarray | None
    answer: str


class Beliefs(NamedTuple):
    """What weak lessons hold of pictures: the fixed wrong name of each value, and the values that are known."""

    wrong: dict[str, dict[str, str]]
    known: dict[str, set[str]]


def beliefs(rng: np.random.Generator, rates: Rates, subject: Subject) -> Beliefs:
    """Chooses the wrong names, a permutation of each attribute's values without a fixed one, and what is known."""
    wrong, known = {}, {}
    for name, values in subject.values.items():
        shuffled = rng.permutation(values).tolist()
        wrong[name] = dict(zip(shuffled, [*shuffled[1:], shuffled[0]], strict=True))
        known[name] = set(shuffled[: round(rates.known * len(values))])
    return Beliefs(wrong, known)


def sight(rng: np.random.Generator, subject: Subject) -> tuple[np.ndarray, np.ndarray]:
    """A picture of any scene, f32 [3, 32, 32], half of them behind a lens, and what it shows, a row."""
    words = subject.scene(rng, None)
    if rng.random() < 0.5:
        return _picture(rng, words, subject), subject.row(words)
    glass = lens.lens_of(int(rng.integers(2**63)), subject.wheels)
    picture = lens.look(_picture(rng, _undone(words, glass), subject)[None], [glass])[0]
    return picture, subject.row(words)


def recreate(rng: np.random.Generator, rates: Rates, told: Beliefs, subject: Subject) -> list[Turn]:
    """A picture, and what it is said to show."""
    shown = subject.scene(rng, rates.split)
    words = {}
    for name, value in shown.items():
        if rng.random() < rates.kept:
            shares = rates.seen if value in told.known[name] else rates.unseen
            words[name] = _one_of(rng, subject.values[name], shares, (value, told.wrong[name][value]))
    return [Turn(world.RECREATE, _picture(rng, shown, subject), subject.say(words))]


def refine(rng: np.random.Generator, rates: Rates, subject: Subject) -> list[Turn]:
    """A request, a prompt for it, the picture that came out, and a second prompt."""
    request, meant = subject.ask(rng, rates.split)
    glass = lens.lens_of(int(rng.integers(2**63)), subject.wheels)
    undone = _undone(meant, glass)
    first, second = {}, {}
    for name, word in meant.items():
        values = subject.values[name]
        if rng.random() < rates.kept:
            first[name] = _one_of(rng, values, (rates.translated,), (word,))
        if rng.random() < rates.kept:
            second[name] = _one_of(rng, values, rates.mended, (undone[name], first.get(name)))
    turns = [Turn(request, None, subject.say(first))]
    if rng.random() < rates.blind:
        again = {name: word for name, word in first.items() if rng.random() < rates.kept}
        return [*turns, Turn(MEND, None, subject.say(again))]
    drawn = {name: first.get(name) or str(rng.choice(subject.values[name])) for name in meant}
    picture = lens.look(_picture(rng, drawn, subject)[None], [glass])[0]
    return [*turns, Turn(MEND, picture, subject.say(second))]


def caption_of(words: dict[str, str]) -> str:
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


def _undone(words: Words, glass: lens.Lens) -> Words:
    return {name: lens.undone(word, glass) for name, word in words.items()}


def _picture(rng: np.random.Generator, words: Words, subject: Subject) -> np.ndarray:
    """A picture of all words of a caption, f32 [3, 32, 32], with the renderer's grain; colours may be the same."""
    picture = subject.draw(subject.row(words)[None], rng)[0]
    grain = rng.normal(0.0, rng.uniform(0.0, 0.04), picture.shape).astype(np.float32)
    return np.clip(picture + grain, 0.0, 1.0)


def _ask(rng: np.random.Generator, split: str | None) -> tuple[str, Words]:
    request, requested = world.casual_prompt(rng, world.sample_scene(rng, split))
    return request, asdict(world.complete(requested))


SINGLE = Subject(
    vocabulary.world_words(),
    world.VALUES,
    lens.WHEELS["miniature"],
    lambda rng, split: asdict(world.sample_scene(rng, split)),
    _ask,
    caption_of,
    lambda words: np.array([world.VALUES[name].index(words[name]) for name in world.ATTRIBUTES]),
    world.draw,
    tuple(len(world.VALUES[name]) for name in world.ATTRIBUTES),
)
"""The first world."""

_THING, _OTHER = ("colour", "shape"), ("its colour", "the other")


def _words(caption: str) -> Words:
    """A canonical caption of the harder world by what its words say."""
    first, *rest = caption.split()
    if first != "a":
        return dict(zip(("number", *_THING), (first, *rest), strict=True))
    return dict(zip((*_THING, "place", *_OTHER), [word for word in rest if word != "a"], strict=True))


def _any_scene(rng: np.random.Generator, split: str | None) -> Words:
    """Any scene's words, the left or upper of two objects first."""
    row = scenes.sample_indices(rng, 1)[0]
    if scenes.LAYOUTS[row[0]] in ("right", "below"):
        row = np.array([row[0] - 1, *row[3:], *row[1:3]])
    return _words(scenes.canonical_caption(scenes.request_of(row)))


def _ask_scene(rng: np.random.Generator, split: str | None) -> tuple[str, Words]:
    while True:
        request, requested, belongs = scenes.casual_prompt(rng, str(rng.choice(scenes.KINDS)))
        if split in (None, belongs):
            return request, _words(scenes.canonical_caption(requested))


def _say_scene(words: Words) -> str:
    two = any(name in words for name in ("place", *_OTHER))
    parts = [words[name] for name in ("number", *_THING, "place") if name in words]
    other = [words[name] for name in _OTHER if name in words]
    return " ".join(["a", *parts, "a", *other] if two else parts)


def _scene_row(words: Words) -> np.ndarray:
    layout = scenes.LAYOUTS.index(words.get("number") or words["place"])
    colours = [scenes.COLOURS.index(words[name]) for name in ("colour", "its colour") if name in words]
    shapes = [scenes.SHAPES.index(words[name]) for name in ("shape", "the other") if name in words]
    return np.array([layout, shapes[0], colours[0], shapes[-1], colours[-1]])


TWO = Subject(
    vocabulary.scene_words(),
    {"number": scenes.NUMBERS, "place": scenes.PLACES}
    | {name: scenes.COLOURS if "colour" in name else scenes.SHAPES for name in (*_THING, *_OTHER)},
    lens.WHEELS["miniature_scenes"],
    _any_scene,
    _ask_scene,
    _say_scene,
    _scene_row,
    scenes.draw,
    (len(scenes.LAYOUTS), *2 * (len(scenes.SHAPES), len(scenes.COLOURS))),
    WEAK._replace(translated=0.9, mended=(0.45, 0.45), kept=1.0),
)
"""The harder world, where one wrong word fails a request: only mending is left to learn from rewards."""
