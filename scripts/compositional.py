"""Make the compositional prompts of the package: `python -m scripts.compositional`.

They ask for objects, numbers, colours, positions and bindings, in the manner of GenEval (Ghosh et al. 2023,
arXiv:2310.11513). A prompt has yes-or-no questions for a judge that sees pictures (`questions@NAME`), and GenEval's
metadata for a detector (`geneval`, docs/judges.md) if its objects are COCO's. Each prompt has combinations, and a
held-out combination is in no other split: a pair of objects (together or in positions), a number of an object, a colour
of an object (alone or bound beside another one; that pair may be known).
"""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parents[1] / "grpo_jax" / "tasks" / "compositional_prompts.jsonl.gz"
COUNTS = {"train": 2048, "validation": 256, "test": 256}

_PLURALS_IN_S = (
    "apple backpack banana bear bed bicycle bird book bottle bowl cake car cat chair clock cow cup dog donut elephant "
    "fork giraffe guitar hat horse kite lamp laptop motorcycle orange pizza suitcase teapot train umbrella vase"
)
OBJECTS = {name: f"{name}s" for name in _PLURALS_IN_S.split()} | {
    "bench": "benches",
    "bus": "buses",
    "couch": "couches",
    "knife": "knives",
    "sheep": "sheep",
    "watch": "watches",
}
"""Objects, and their plurals."""
UNDETECTED = ("couch", "guitar", "hat", "lamp", "motorcycle", "teapot", "watch")
"""Objects without metadata: COCO does not have them, or its detectors have two names for them."""
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
NUMBERS = {2: "two", 3: "three", 4: "four"}
PLACES = ("to the left of", "to the right of", "above", "below")
TAGS = {
    "object": "single_object",
    "objects": "two_object",
    "count": "counting",
    "colour": "colors",
    "place": "position",
    "binding": "color_attr",
}
"""Kinds of prompts, and GenEval's names of them."""
KINDS = tuple(TAGS)


class Wish(NamedTuple):
    """A prompt, the questions about its picture, the combinations that it is made of, and the objects to detect."""

    kind: str
    prompt: str
    questions: tuple[str, ...]
    combinations: tuple[tuple[str, ...], ...]
    include: tuple[dict[str, Any], ...]


def records(split: str, count: int) -> list[dict[str, Any]]:
    """Return records with `prompt`, `questions` (a list of texts), `kind` and GenEval's metadata, of all kinds in turn.

    "train", "validation" and "test" have eight, one and one of ten combinations. Objects alone, which are no
    combination, are in "train" only. Fewer than `count` where there are no more.
    """
    of_split = sorted((wish for wish in wishes() if split_of(wish) == split), key=_place)
    turns = itertools.zip_longest(*([wish for wish in of_split if wish.kind == kind] for kind in KINDS))
    chosen = itertools.islice((wish for turn in turns for wish in turn if wish is not None), count)
    return [
        {"prompt": wish.prompt, "questions": list(wish.questions), "kind": wish.kind} | metadata(wish)
        for wish in chosen
    ]


def metadata(wish: Wish) -> dict[str, Any]:
    """Return GenEval's `tag`, `include` and `exclude`; the last two are None with an object that is `UNDETECTED`."""
    if any(item["class"] in UNDETECTED for item in wish.include):
        return {"tag": TAGS[wish.kind], "include": None, "exclude": None}
    exclude = [item | {"count": item["count"] + 1} for item in wish.include if wish.kind == "count"]
    return {"tag": TAGS[wish.kind], "include": list(wish.include), "exclude": exclude}


def split_of(wish: Wish) -> str | None:
    """Return the split of all combinations of a prompt; None if they differ, and it is not used."""
    places = {_split(combination) for combination in wish.combinations}
    return "train" if not places else places.pop() if len(places) == 1 else None


def wishes() -> Iterator[Wish]:
    """Yield all prompts."""
    for name in OBJECTS:
        yield Wish("object", _a(name), (_there(name),), (), (_item(name),))
    for name, (number, word) in itertools.product(OBJECTS, NUMBERS.items()):
        prompt = f"{word} {OBJECTS[name]}"
        question = (f"Are there exactly {prompt} in the picture?",)
        yield Wish("count", prompt, question, ((str(number), name),), (_item(name, number),))
    for name, colour in itertools.product(OBJECTS, COLOURS):
        if name != colour:  # an orange orange
            question = _there(name), f"Is the {name} {colour}?"
            yield Wish("colour", _a(f"{colour} {name}"), question, ((colour, name),), (_item(name, color=colour),))
    for first, second in itertools.combinations(OBJECTS, 2):
        both, pair = (_there(first), _there(second)), ((first, second),)
        yield Wish("objects", f"{_a(first)} and {_a(second)}", both, pair, (_item(first), _item(second)))
        place = PLACES[_number(first, second) % len(PLACES)]
        question = *both, f"Is the {first} {place} the {second}?"
        placed = _item(first, position=[place.removeprefix("to the "), 0])
        yield Wish("place", f"{_a(first)} {place} {_a(second)}", question, pair, (_item(second), placed))
        yield from _bindings(first, second)


def _bindings(first: str, second: str) -> Iterator[Wish]:
    """Yield two objects of two colours, for a few of the pairs of colours."""
    number = _number(second, first)
    for step in range(4):
        one, other = COLOURS[(number + 3 * step) % 10], COLOURS[(number // 10 + 7 * step) % 10]
        if one != other and first != one and second != other:
            named = f"{one} {first}", f"{other} {second}"
            combinations = (one, first), (other, second)
            items = _item(first, color=one), _item(second, color=other)
            yield Wish("binding", " and ".join(map(_a, named)), tuple(map(_there, named)), combinations, items)


def _split(combination: Sequence[str]) -> str:
    share = _number(*combination) % 10
    return "test" if share == 0 else "validation" if share == 1 else "train"


def _place(wish: Wish) -> int:
    """Return its place in an order that mixes all objects."""
    return _number("order", wish.prompt)


def _number(*words: str) -> int:
    return zlib.crc32(" ".join(words).encode())


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _item(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    """Return an object of GenEval's metadata."""
    return {"class": name, "count": count, **more}


def _there(name: str) -> str:
    return f"Is there {_a(name)} in the picture?"


def text() -> str:
    """Return the file's text."""
    rows = [{"split": split} | record for split, count in COUNTS.items() for record in records(split, count)]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


if __name__ == "__main__":
    TARGET.write_bytes(gzip.compress(text().encode(), mtime=0))
