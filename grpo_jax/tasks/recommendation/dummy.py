"""A generated world in which the next title follows from the history by rules that can be learned.

Every item is a title of four words, brand, colour, material and kind ("alder crimson linen lamp"), and every
combination is an item. A user has a brand and a material; with each step the kind moves on to the one that goes with
it, and the colour to the next of the wheel:

    brand      the user's own; an earlier item was of another brand with probability `fickle`
    material   the user's own, always
    colour     the successor of the last item's
    kind       the successor of the last item's

A share `noise` of all items is drawn from the whole catalogue instead; the wheels turn on underneath. So copying the
last title gets two words of four right, the brand is a vote over the history, and the other two words are never in
the last title. The periods of the two wheels are coprime: no title repeats within a history, and a prompt never holds
the target's title. The rank of the target rises with every word that is right: a dense reward, which a policy without
an idea of the rules can climb.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.rollout.data import Row
from grpo_jax.tasks.recommendation.catalogue import Catalogue, Sequences, UserSequence, make_catalogue

COLOURS = ("crimson", "amber", "golden", "emerald", "azure", "indigo", "violet")
MATERIALS = ("linen", "walnut", "copper", "marble", "leather")
KINDS = ("lamp", "desk", "chair", "shelf", "mirror", "carpet", "basket", "clock")
BRANDS = (
    *("alder", "birch", "cedar", "dahlia", "elm", "fern", "ginkgo", "hazel"),
    *("iris", "juniper", "kelp", "lotus", "maple", "nettle", "olive", "poppy"),
)
"""Names of the first brands; beyond these, brands are numbered."""

_PER_BRAND = len(COLOURS) * len(MATERIALS) * len(KINDS)


class World(NamedTuple):
    """A generated data set; `expected` is each user's row by the rules: the target, but where noise struck."""

    catalogue: Catalogue
    sequences: Sequences
    expected: tuple[int, ...]


def make_catalogue_of_words(items: int) -> Catalogue:
    """Make all combinations of words, with as many brands as it takes to have at least so many items."""
    brands = [BRANDS[i] if i < len(BRANDS) else f"brand{i}" for i in range(-(-items // _PER_BRAND))]
    words = list(itertools.product(brands, COLOURS, MATERIALS, KINDS))
    names = ("brand", "colour", "material", "kind")
    columns: dict[str, Sequence[str]] = dict(zip(names, zip(*words, strict=True), strict=True))
    return make_catalogue([f"i{row}" for row in range(len(words))], [" ".join(title) for title in words], columns)


def lessons(rows: Sequence[Row], catalogue: Catalogue, *, seed: int = 0) -> list[tuple[str, str]]:
    """Return (prompt, title) pairs that teach the form of a title and nothing of the rules.

    Each word is the last title's with probability 0.4, otherwise any of its kind. Copying makes a policy tell the words
    it reads apart: without it, the first answer that earns something becomes the answer to everything.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    kinds = [tuple(dict.fromkeys(place)) for place in zip(*(title.split() for title in catalogue.titles), strict=True)]
    pairs = []
    for row in rows:
        last = row.columns["last_title"].split()
        written = []
        for place, choices in enumerate(kinds):
            copied = generator.random() < 0.4
            any_word = choices[generator.integers(len(choices))]
            written.append(last[place] if copied else any_word)
        pairs.append((row.prompt, " ".join(written)))
    return pairs


def make_world(
    *,
    users: int = 2000,
    items: int = 2000,
    length: int = 8,
    fickle: float = 0.1,
    noise: float = 0.02,
    seed: int = 0,
) -> World:
    """Draw users, whose items never repeat; `fickle` and `noise` are shares of the items."""
    catalogue = make_catalogue_of_words(items)
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = [_user(generator, len(catalogue), length, fickle, noise) for _ in range(users)]
    sequences = tuple(UserSequence(f"u{user}", rows) for user, (rows, _) in enumerate(drawn))
    return World(catalogue, Sequences(sequences), tuple(expected for _, expected in drawn))


def _user(
    generator: np.random.Generator, items: int, length: int, fickle: float, noise: float
) -> tuple[tuple[int, ...], int]:
    """Draw one user's rows, and the row that the rules lead to at the end."""
    brands = items // _PER_BRAND
    brand, colour, material, kind = (
        int(generator.integers(count)) for count in (brands, len(COLOURS), len(MATERIALS), len(KINDS))
    )
    # Of another brand: any but the user's; with one brand there is no other.
    others = (brand + generator.integers(1, max(brands, 2), length)) % brands
    seen = np.where(generator.random(length) < fickle, others, brand)
    seen[-1] = brand
    steps = np.arange(length)
    rows = _row(seen, (colour + steps) % len(COLOURS), material, (kind + steps) % len(KINDS))
    expected, taken = int(rows[-1]), set(rows.tolist())
    for step in np.flatnonzero(generator.random(length) < noise):
        row = int(generator.integers(items))
        while row in taken:
            row = int(generator.integers(items))
        taken.add(row)
        rows[step] = row
    return tuple(rows.tolist()), expected


def _row(brand: np.ndarray, colour: np.ndarray, material: int, kind: np.ndarray) -> np.ndarray:
    """Return rows in the order of `make_catalogue_of_words`."""
    return ((brand * len(COLOURS) + colour) * len(MATERIALS) + material) * len(KINDS) + kind
