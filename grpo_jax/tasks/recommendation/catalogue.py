"""The catalogue's items and titles, and the users' sequences."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_jax.config.files import read_text
from grpo_jax.config.named import own_package
from grpo_jax.errors import Problems, UserError, one_line
from grpo_jax.models.random_init import plain_normalizer
from grpo_jax.tasks.recommendation import EVENT_COLUMNS


@dataclass(frozen=True)
class Catalogue:
    """All items, in the order of their file: an item's position is its *row*."""

    ids: tuple[str, ...]
    titles: tuple[str, ...]  # I titles, white space collapsed; "" if the file has none
    # I strings, each item's own words in prompts and completions; () if the policy uses titles
    names: tuple[str, ...] = ()

    @functools.cached_property
    def rows(self) -> dict[str, int]:
        """Return each item's row by its id."""
        return {identifier: row for row, identifier in enumerate(self.ids)}

    def __len__(self) -> int:
        """Return the number of items, I."""
        return len(self.ids)

    @property
    def written(self) -> tuple[str, ...]:
        """Return the I texts of items in completions: their own words, or titles."""
        return self.names or self.titles


def read_catalogue(path: str | Path, *, columns: Mapping[str, str] | None = None) -> Catalogue:
    """Read a catalogue (`bridges.retrieval.catalogue.read_catalogue_file`); `columns` are `data.columns`."""
    reading = own_package("bridges", "retrieval.catalogue")
    title = (columns or {}).get("title", "title")
    return Catalogue(*map(tuple, reading.read_catalogue_file(path, title_column=title)))


class Items(NamedTuple):
    """Texts of items for a policy that ranks the catalogue itself, and their rows, int [texts].

    `count` is I, the number of items in the catalogue, and the rank of an unlisted target. `by_text` maps the words of
    a text to its row.
    """

    texts: list[str]
    rows: np.ndarray
    count: int
    by_text: Mapping[str, int]

    def row_of(self, text: str) -> int:
        """Return a completion's item; -1 if there is none."""
        return self.by_text.get(plain(text), -1)


def item_word(row: int) -> str:
    """Return the item's own word."""
    return f"item_{row}"


def items_of(texts: Sequence[str]) -> Items:
    """Return the Items of I titles or items' own words; a shared text belongs to the first item."""
    by_text = {plain(text): row for row, text in reversed(list(enumerate(texts)))}
    by_text.pop("", None)
    rows = sorted(by_text.values())
    return Items([texts[row] for row in rows], np.array(rows), len(texts), by_text)


def plain(text: str) -> str:
    """Normalise a title so that all tokenizers, also those of plain words, decode it alike."""
    return " ".join(plain_normalizer().normalize_str(text).split())


class UserSequence(NamedTuple):
    """One user's items as catalogue rows, oldest first."""

    user: str
    items: tuple[int, ...]


class Sequences(NamedTuple):
    """All users, in the order of their file, and notes about users that a rule excluded."""

    users: tuple[UserSequence, ...]
    notes: tuple[str, ...] = ()


def read_sequences(path: str | Path, catalogue: Catalogue) -> Sequences:
    """Read ``sequential.txt``: a line per user, ``user_id item1 … itemN target``, separated by white space.

    Blank lines are skipped. A user's repeated item counts once, at its first position, since rankings leave out the
    history. Users with fewer than two items are skipped; ``notes`` has both numbers.
    """
    text = read_text(path, own_package("bridges", "retrieval.catalogue").MOST_BYTES)
    problems = Problems()
    lines: dict[str, int] = {}
    items: dict[str, list[str]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        user, *named = line.split()
        unknown = [item for item in named if item not in catalogue.rows]
        if user in lines:
            problems.add(f"line {number}: user {user} occurs twice (first on line {lines[user]})")
        elif unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            problems.add(f"line {number}: user {user}: item {unknown[0]}{more} not in the catalogue")
        lines.setdefault(user, number)
        items.setdefault(user, []).extend(named)
    form = "a line is user_id item1 … itemN, separated by white space"
    return _sequences(path, items, catalogue, problems, form)


def _sequences(
    path: str | Path, events: Mapping[str, Sequence[str]], catalogue: Catalogue, problems: Problems, form: str
) -> Sequences:
    """Return the users with at least two different items, or raise a file's problems as one UserError."""
    items = {user: dict.fromkeys(own) for user, own in events.items()}
    named = {item for own in items.values() for item in own}
    unknown = sorted(item for item in named if item not in catalogue.rows)
    if 2 * len(unknown) > len(named):
        here, there = (one_line(repr(ids[0]), 40) for ids in (unknown, catalogue.ids))
        raise UserError(
            f"{path}: {len(unknown)} of {len(named)} items are not in the catalogue, such as {here}; its first id is "
            f"{there}, and the first column must hold the ids"
        )
    problems.refuse(str(path))
    users = [UserSequence(user, tuple(catalogue.rows[i] for i in own)) for user, own in items.items() if len(own) > 1]
    notes = []
    if repeated := sum(map(len, events.values())) - sum(map(len, items.values())):
        notes.append(f"{repeated} events repeat an item of the same user and are left out; the first counts")
    if few := len(items) - len(users):
        notes.append(f"{few} users with fewer than 2 items are left out")
    if not users:
        raise UserError(f"{path} has no user with at least 2 items; {'; '.join([*notes, form])}")
    return Sequences(tuple(users), tuple(notes))


def read_events(path: str | Path, catalogue: Catalogue, columns: Mapping[str, str] | None = None) -> Sequences:
    """Read events, a CSV with user_id, item_id and timestamp, or ratings in MovieLens's format.

    A user's items are sorted by time, a number or ISO 8601; events of the same time keep the order of the file. Only
    a user's first event with an item counts, and users with fewer than two items are skipped; ``notes`` has both
    numbers. ``columns`` is `data.columns`. UserError for bad lines.
    """
    reading = own_package("bridges", "retrieval.catalogue")
    problems = Problems()
    events: dict[str, list[tuple[float, str]]] = {}
    for line, row in reading.read_table(path, problems, needs=EVENT_COLUMNS, columns=columns or {}):
        user, item = row["user_id"].strip(), row["item_id"].strip()
        try:
            time = _seconds(row["timestamp"])
        except (ValueError, OverflowError):
            problems.add(f"line {line}: expected a timestamp that is a number or ISO 8601, got {row['timestamp']!r}")
            time = 0.0
        if not (user and abs(time) < float("inf")):
            problems.add(f"line {line}: a blank user or a timestamp that is not finite")
        elif item not in catalogue.rows:
            problems.add(f"line {line}: user {user}: item {item} not in the catalogue")
        events.setdefault(user, []).append((time, item))
    # Sorting is stable: ties keep the order of the file.
    items = {user: [item for _, item in sorted(some, key=operator.itemgetter(0))] for user, some in events.items()}
    return _sequences(path, items, catalogue, problems, "a line is an event")


def _seconds(text: str) -> float:
    """Return a time as a number; ISO 8601 as seconds since 1970, in UTC by default."""
    try:
        return float(text)
    except ValueError:
        time = datetime.fromisoformat(text.strip())
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
