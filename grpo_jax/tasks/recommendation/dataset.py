"""The task's data, read or generated, and its held-out split."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_jax.errors import UserError
from grpo_jax.rollout.data import PromptSet, Row
from grpo_jax.tasks.recommendation import PLACES
from grpo_jax.tasks.recommendation.baselines import item_similarity, taken_counts
from grpo_jax.tasks.recommendation.catalogue import (
    Catalogue,
    Sequences,
    UserSequence,
    item_word,
    plain,
    read_catalogue,
    read_events,
    read_sequences,
)
from grpo_jax.tasks.recommendation.sections import RecommendationFields

NO_TITLE = "(no title)"
"""Stands in a prompt for a blank title."""


class Target(NamedTuple):
    """An item to predict, as a row of the catalogue, and its non-empty history, oldest first.

    The id is unique: the number of items in the file up to it.
    """

    user: str
    history: tuple[int, ...]
    item: int
    id: int


class Split(NamedTuple):
    """Each user's training history, perhaps empty, and the targets of each split."""

    known: tuple[UserSequence, ...]
    train: list[Target]
    validation: list[Target]
    test: list[Target]


def last_split(users: Sequence[UserSequence]) -> Split:
    """Split each user's items x1 … xn: xn is for testing, xn-1 (if n ≥ 3) for validation, the others for training."""
    split = Split(tuple(UserSequence(user.user, user.items[:-2]) for user in users), [], [], [])
    before = 0  # items of the file so far
    for name, items in users:
        targets = [Target(name, items[:place], items[place], before + place) for place in range(1, len(items))]
        split.train.extend(targets[:-2])
        split.validation.extend(targets[-2:-1])
        split.test.extend(targets[-1:])
        before += len(items)
    return split


def history_prompt(task: RecommendationFields, titles: Sequence[str], names: Sequence[str] = ()) -> str:
    """Return the prompt of a history, its titles and the items' own words, oldest first.

    In `task.template`, "{history}" is replaced by the titles, "{last}" by the newest title, "{items}" by the items' own
    words; other braces are plain text, also those of titles.
    """
    words = " ".join(names[-task.history_items :])
    cut = [cut_title(title, task.title_characters) or NO_TITLE for title in titles[-task.history_items :]]
    values = {"{history}": task.separator.join(cut), "{last}": cut[-1], "{items}": words}
    return re.sub("|".join(PLACES), lambda place: values[place[0]], task.template).strip()


def cut_title(title: str, characters: int) -> str:
    """Cut a title to at most so many characters, without a broken last word, unless it is the only one."""
    if not characters or len(title) <= characters:
        return title
    head = title[:characters]
    if not title[characters].isspace() and " " in head:
        head = head.rpartition(" ")[0]
    return head.rstrip(" ,;:-&(/")


def split_examples(split: Split, catalogue: Catalogue, task: RecommendationFields) -> PromptSet:
    """Return the examples of a split's targets.

    Validation and test rows are ordered by a hash of the user's name, so the first rows are a fair sample.
    """
    if not split.train:
        raise UserError("no user has four items: a history and a target to train on, and two that are held out")
    rows, validation, test = (_examples(part, catalogue, task) for part in split[1:])
    return PromptSet(rows, _shuffled(validation), _shuffled(test))


def _examples(targets: Iterable[Target], catalogue: Catalogue, task: RecommendationFields) -> tuple[Row, ...]:
    rows = []
    for target in targets:
        listed = target.history[-task.history_items :]
        names = [catalogue.names[item] for item in listed] if catalogue.names else ()
        prompt = history_prompt(task, [catalogue.titles[item] for item in listed], names)
        rows.append(Row(target.id, prompt, example_columns(target, catalogue)))
    return tuple(rows)


def example_columns(target: Target, catalogue: Catalogue) -> dict[str, object]:
    """Return an example's columns for rewards; rankings exclude the history."""
    return {
        "user": target.user,
        "target": catalogue.ids[target.item],
        "target_title": catalogue.titles[target.item],
        "last_title": catalogue.titles[target.history[-1]],
        "target_row": target.item,
        "history": tuple(target.history),
    }


def _shuffled(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: hashlib.sha256(str(row.columns["user"]).encode()).digest()))


class Dataset(NamedTuple):
    """Data of the task."""

    catalogue: Catalogue
    # all sequences, including held-out items: training and statistics must not use them
    users: tuple[UserSequence, ...]
    known: tuple[UserSequence, ...]  # each user's training history (`Split`)
    prompts: PromptSet
    notes: tuple[str, ...]  # notes about rule-based changes


def sft_pairs(task: RecommendationFields, dataset: Dataset, seed: int) -> list[tuple[str, str]]:
    """Return (prompt, completion) pairs for SFT.

    The completion is the next item for a policy that ranks. For a policy that writes queries it is the title most often
    taken together with the last one; in the dummy world it teaches the form of a title.
    """
    rows, catalogue = dataset.prompts.train, dataset.catalogue
    if task.writes == "query" and task.source == "dummy":
        return lessons(rows, catalogue, seed=seed)
    if task.writes == "query":
        texts = together_titles(rows, catalogue, dataset.known)
    else:
        texts = [catalogue.written[row.columns["target_row"]] for row in rows]
    return [(row.prompt, text) for row, text in zip(rows, texts, strict=True) if text]


def together_titles(rows: Sequence[Row], catalogue: Catalogue, users: Sequence[UserSequence]) -> list[str]:
    """Return the title of the item most often taken together with each history's last item; "" if there is none.

    Items of the history are excluded. Its own user does not count, since that row includes later items. `users` are the
    training histories.
    """
    similarity = item_similarity(users, len(catalogue))
    taken = taken_counts(users, len(catalogue))
    own = {user.user: user.items for user in users}
    titles = []
    for row in rows:
        history = row.columns["history"]
        last = history[-1]
        stored = slice(*similarity.indptr[last : last + 2])
        items = similarity.indices[stored]
        both = similarity.data[stored] * np.sqrt(taken[last] * taken[items])
        users_own = own.get(row.columns["user"], ())
        mine = np.isin(items, users_own) if last in users_own else np.zeros(len(items), bool)
        score = (both - mine) / np.sqrt(np.maximum(taken[items] - mine, 1.0))  # the factor of `last` is a constant
        score[np.isin(items, history)] = 0.0
        best = np.lexsort((items, -score.round(9)))[:1].tolist()  # rounded, so that ties go to the first item
        titles += [catalogue.titles[items[place]] if score[place] > 1e-6 else "" for place in best] or [""]
    return titles


def load_dataset(task: RecommendationFields, columns: Mapping[str, str] | None = None) -> Dataset:
    """Read or generate the data of a run; `columns` are `data.columns`."""
    catalogue, sequences = _load(task, columns or {})
    if task.writes == "item":
        catalogue = dataclasses.replace(catalogue, names=tuple(map(item_word, range(len(catalogue)))))
    split = last_split(sequences.users)
    prompts = split_examples(split, catalogue, task)
    return Dataset(catalogue, sequences.users, split.known, prompts, (*sequences.notes, *_notes(catalogue)))


def _load(task: RecommendationFields, columns: Mapping[str, str]) -> tuple[Catalogue, Sequences]:
    if task.source == "dummy":
        return make_world(users=task.dummy_users, items=task.dummy_items)
    if not task.source:
        both = "--task.source sequential.txt --task.catalogue items.tsv"
        raise UserError(f"task.source: expected your sequences or events, and their catalogue: {both}; got nothing")
    kind = Path(task.source).suffix.lower()
    if kind not in (".txt", ".csv"):
        raise UserError(f"task.source: expected dummy, a .txt of sequences or a .csv of events, got {kind!r}")
    catalogue = read_catalogue(task.catalogue or "", columns=columns)
    if kind == ".txt":
        return catalogue, read_sequences(task.source, catalogue)
    return catalogue, read_events(task.source, catalogue, columns)


def _notes(catalogue: Catalogue) -> list[str]:
    texts = [*map(plain, catalogue.titles)]  # as policy and retriever read them
    blank = texts.count("")
    shared = len(texts) - blank - len({*texts} - {""})
    counts = {
        "items without a word in the title are kept; no query finds them": blank,
        "items share another's title; no query can tell them apart": shared,
    }
    return [f"{count} {note}" for note, count in counts.items() if count]


# ------------------------------------------------------------------------------------------------ a generated world

# Learnable rules determine the next title from the history. Every item is a title of four words: brand, colour,
# material and kind ("alder crimson linen lamp"). Every combination is an item. A user has a brand and a material. At
# each step the kind changes to its successor, and the colour to the next of the wheel:
#
#     brand      the user's own; an earlier item was of another brand with probability `fickle`
#     material   the user's own, always
#     colour     the successor of the last item's
#     kind       the successor of the last item's
#
# A share `noise` of all items is drawn from the whole catalogue instead, without stopping the wheels. Copying the last
# title thus gets two of four words right. The brand needs a majority over the history, and the other two words are
# never in the last title. The periods of the two wheels are coprime: no title repeats within a history, and a prompt
# never contains the target's title. The target's rank improves with every correct word. This dense reward helps a
# policy that does not know the rules yet.

COLOURS = ("crimson", "amber", "golden", "emerald", "azure", "indigo", "violet")
MATERIALS = ("linen", "walnut", "copper", "marble", "leather")
KINDS = ("lamp", "desk", "chair", "shelf", "mirror", "carpet", "basket", "clock")
BRANDS = (
    *("alder", "birch", "cedar", "dahlia", "elm", "fern", "ginkgo", "hazel"),
    *("iris", "juniper", "kelp", "lotus", "maple", "nettle", "olive", "poppy"),
)
"""Names of the first brands; beyond these, brands are numbered."""

_PER_BRAND = len(COLOURS) * len(MATERIALS) * len(KINDS)


def make_catalogue_of_words(items: int) -> Catalogue:
    """Make all combinations of words, with enough brands for at least `items` items."""
    brands = [BRANDS[i] if i < len(BRANDS) else f"brand{i}" for i in range(-(-items // _PER_BRAND))]
    titles = tuple(map(" ".join, itertools.product(brands, COLOURS, MATERIALS, KINDS)))
    return Catalogue(tuple(f"i{row}" for row in range(len(titles))), titles)


def lessons(rows: Sequence[Row], catalogue: Catalogue, *, seed: int = 0) -> list[tuple[str, str]]:
    """Return (prompt, title) pairs that teach the form of a title, but not the rules.

    Each word is the last title's with probability 0.4, else any word of its kind. Copying makes a policy distinguish
    the words of a prompt; without it, one rewarded answer would become the answer to every prompt.
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
    *, users: int = 2000, items: int = 2000, length: int = 8, fickle: float = 0.1, noise: float = 0.02, seed: int = 0
) -> tuple[Catalogue, Sequences]:
    """Draw users, whose items never repeat; `fickle` and `noise` are shares of the items."""
    catalogue = make_catalogue_of_words(items)
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = [_user(generator, len(catalogue), length, fickle, noise) for _ in range(users)]
    return catalogue, Sequences(tuple(UserSequence(f"u{user}", rows) for user, rows in enumerate(drawn)))


def _user(generator: np.random.Generator, items: int, length: int, fickle: float, noise: float) -> tuple[int, ...]:
    """Draw one user's rows."""
    brands = items // _PER_BRAND
    brand, colour, material, kind = (
        int(generator.integers(count)) for count in (brands, len(COLOURS), len(MATERIALS), len(KINDS))
    )
    # Another brand than the user's, if there are several.
    others = (brand + generator.integers(1, max(brands, 2), length)) % brands
    seen = np.where(generator.random(length) < fickle, others, brand)
    seen[-1] = brand
    steps = np.arange(length)
    looks = (seen * len(COLOURS) + (colour + steps) % len(COLOURS)) * len(MATERIALS) + material
    rows = looks * len(KINDS) + (kind + steps) % len(KINDS)  # in the order of `make_catalogue_of_words`
    taken = set(rows.tolist())
    for step in np.flatnonzero(generator.random(length) < noise):
        row = int(generator.integers(items))
        while row in taken:
            row = int(generator.integers(items))
        taken.add(row)
        rows[step] = row
    return tuple(rows.tolist())
