"""The catalogue: items and titles (TSV, CSV or JSON), and the users' sequences."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from grpo_jax.config import files
from grpo_jax.errors import UserError, one_line
from grpo_jax.models.random_init import NOT_A_WORD
from grpo_jax.rollout.prompts import rename_columns
from grpo_jax.tasks.recommendation.task import EVENT_COLUMNS

_SHOWN = 6
_MOST_BYTES = 2**32  # of a table of events, which is read whole


class Problems:
    """Bad places of one file; `check` raises one error that names them with file and line."""

    def __init__(self, path: str | Path):
        self.path = path
        self.places: list[str] = []

    def add(self, line: int | None, reason: str) -> None:
        """Note a reason; `line` counts from 1, None is the file as a whole."""
        self.places.append(f"{self.path}: {reason}" if line is None else f"{self.path}:{line}: {reason}")

    def check(self) -> None:
        """Raise a UserError with the first six places, if there are any."""
        count = len(self.places)
        if not count:
            return
        lines = [f"bad data ({count} place{'s' if count > 1 else ''}):", *self.places[:_SHOWN]]
        if count > _SHOWN:
            lines.append(f"… and {count - _SHOWN} more")
        raise UserError("\n  ".join(lines))


def read_text(path: str | Path, what: str) -> str:
    """Return a file as text, without a byte-order mark; a UserError says what was expected where there is none."""
    if not os.path.exists(path):
        raise UserError(f"{path} does not exist: expected {what}")
    return files.read_text(path, _MOST_BYTES)


BlankTitles = Literal["error", "keep"]

PUBLISHED = {"user_id": "userId", "item_id": "movieId"}
"""MovieLens' names of columns; taken where a table has no column of our own name."""


@dataclass(frozen=True)
class Catalogue:
    """All items, in the order of their file: an item's place in it is its *row*, found in `rows` by its id.

    Attributes:
        titles: I titles, white space collapsed; "" where the file has none and that was allowed.
        columns: Further columns of the file, I texts each (Beauty: "asin").
        names: I texts, the words of each item's own by which a policy reads and writes it; () where it uses titles.
    """

    ids: tuple[str, ...]
    titles: tuple[str, ...]
    rows: dict[str, int]
    columns: dict[str, tuple[str, ...]]
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of items, I."""
        return len(self.ids)

    @property
    def written(self) -> tuple[str, ...]:
        """Return the I texts by which a policy writes items: their own words, or titles."""
        return self.names or self.titles


def make_catalogue(
    ids: Sequence[str], titles: Sequence[str], columns: Mapping[str, Sequence[str]] | None = None
) -> Catalogue:
    """Make a catalogue from I different identifiers, as many titles, and further columns."""
    rows = {identifier: row for row, identifier in enumerate(ids)}
    collapsed = tuple(" ".join(title.split()) for title in titles)
    return Catalogue(tuple(ids), collapsed, rows, {name: tuple(values) for name, values in (columns or {}).items()})


def read_catalogue(
    path: str | Path, *, blank_titles: BlankTitles = "error", columns: Mapping[str, str] | None = None
) -> Catalogue:
    """Read item identifiers and titles; a UserError names all bad lines at once.

    ``.tsv`` (tabs, no quoting) and ``.csv`` have a header line: the first column is the identifier, the one called
    "title" the title, others are kept. ``.json`` is an object ``{id: title}`` or ``{id: {"title": …, column: …}}``.
    `columns` is {"title": the file's name for it}. With `blank_titles` "keep" an item without a title is an empty text,
    which no query resembles.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".tsv", ".csv", ".json"):
        formats = "a catalogue is a .tsv, .csv or .json file: a table with the columns id and title, or {id: title}"
        raise UserError(f"{path}: {formats}")
    text = read_text(path, "a catalogue of item ids and titles (.tsv, .csv or .json)")
    problems = Problems(path)
    title_column = (columns or {}).get("title", "title")
    records = _json_records(text, problems, title_column)
    if kind != ".json":
        records = _table_records(text, problems, title_column, kind)
    lines: dict[str, int | None] = {}
    titles: list[str] = []
    further: dict[str, list[str]] = {}
    for line, identifier, title, others in records:
        if not identifier:
            problems.add(line, "the item's id is blank")
        elif identifier in lines:
            first = f" (first on line {lines[identifier]})" if lines[identifier] is not None else ""
            problems.add(line, f"item {identifier} occurs twice{first}")
        else:
            if not title.strip() and blank_titles == "error":
                problems.add(line, f"item {identifier} has no title (blank_titles: keep allows it)")
            lines[identifier] = line
            titles.append(title)
            for name, value in others.items():
                further.setdefault(name, []).append(value)
    problems.check()
    if not lines:
        wanted = "a line that names the columns id and title, and one for each item"
        raise UserError(f"{path} has no items: expected {wanted}")
    further = {name: values for name, values in further.items() if len(values) == len(lines)}
    return make_catalogue(list(lines), titles, further)


_Records = Iterator[tuple[int | None, str, str, dict[str, str]]]  # line, id, title, other columns


def _table_records(text: str, problems: Problems, title_column: str, kind: str) -> _Records:
    columns = {} if title_column == "title" else {"title": title_column}
    for line, row in read_table(text, kind, problems, needs=("title",), columns=columns):
        id_column, *others = row
        if id_column == "title":
            problems.add(1, "the first column is the title, expected the item's id: put the column of ids first")
            return
        yield line, row[id_column].strip(), row["title"], {name: row[name] for name in others if name != "title"}


def _json_records(text: str, problems: Problems, title_column: str) -> _Records:
    for identifier, value in json_pairs(text, problems, "{id: title}"):
        title = value
        others: dict[str, str] = {}
        if isinstance(value, _Pairs):
            others = {name: str(item) for name, item in value if name != title_column}
            title = dict(value).get(title_column)
        if isinstance(title, str | None):
            yield None, identifier.strip(), title or "", others
        else:
            problems.add(None, f"the title of item {identifier} must be text, got {type(title).__name__}")


def read_table(
    text: str, kind: str, problems: Problems, *, needs: Sequence[str], columns: Mapping[str, str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield rows of a .csv or .tsv with a header, as (line, {column: value}); bad ones are noted and left out.

    The columns that it `needs` must be there, under the name in `columns`, {name: the file's name}.
    """
    if kind == ".tsv":
        reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    try:
        for fields in reader:
            if not any(field.strip() for field in fields):
                continue
            if header is None:
                header = [field.strip() for field in fields]
                absent = [name for name in needs if name not in header and PUBLISHED.get(name) in header]
                columns = {name: PUBLISHED[name] for name in absent} | dict(columns)
                missing = [name for name in needs if columns.get(name, name) not in header]
                if missing:
                    reason = f"the header has no column {columns.get(missing[0], missing[0])!r}, it says {header}"
                    separator = {".tsv": "tabs", ".csv": "commas"}[kind]
                    hint = f"rename it with --data.columns.{missing[0]} NAME; a {kind} separates columns by {separator}"
                    problems.add(reader.line_num, f"{reason}: {hint}")
                    return
                continue
            if len(fields) != len(header):
                problems.add(reader.line_num, f"expected {len(header)} fields as in the header, got {len(fields)}")
                continue
            yield reader.line_num, rename_columns(dict(zip(header, fields, strict=True)), columns)
    except csv.Error as error:
        problems.add(reader.line_num, f"not {kind[1:].upper()} ({error})")


class _Pairs(list):
    """Pairs of a JSON object, so that a key that stands twice is seen."""


def json_pairs(text: str, problems: Problems, expected: str) -> Sequence[tuple[str, object]]:
    """Return the members of a JSON object, repeated keys included; inner objects come as lists of pairs."""
    try:
        value = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:  # a ValueError also for a number of thousands of digits
        problems.add(getattr(error, "lineno", None), f"not JSON ({getattr(error, 'msg', error)})")
        return []
    if not isinstance(value, _Pairs):
        problems.add(None, f"expected an object {expected}, got {type(value).__name__}")
        return []
    return value


class Items(NamedTuple):
    """Texts by which a policy that ranks the catalogue itself writes items, and their rows, int [texts].

    `count` is I, all items of the catalogue; a target that is not listed stands there. `by_text` has the row by the
    words of a text.
    """

    texts: list[str]
    rows: np.ndarray
    count: int
    by_text: Mapping[str, int]

    def row_of(self, text: str) -> int:
        """Return a completion's item; -1 if it is none."""
        return self.by_text.get(plain(text), -1)


def item_word(row: int) -> str:
    """Return the item's own word."""
    return f"item_{row}"


def items_of(texts: Sequence[str]) -> Items:
    """Return the Items of I titles or items' own words: a text that several share is the first one's."""
    by_text: dict[str, int] = {}
    for row, text in enumerate(texts):
        if plain(text):
            by_text.setdefault(plain(text), row)
    rows = sorted(by_text.values())
    return Items([texts[row] for row in rows], np.array(rows), len(texts), by_text)


def plain(text: str) -> str:
    """Return a title as a tokenizer of plain words gives it back, and as any other does."""
    return " ".join(re.sub(NOT_A_WORD, " ", text.lower()).split())


class UserSequence(NamedTuple):
    """One user's items as catalogue rows, oldest first, and the time of each, where that is known."""

    user: str
    items: tuple[int, ...]
    times: tuple[float, ...] = ()


class Sequences(NamedTuple):
    """All users, in the order of their file, and notes about those whom a rule left out."""

    users: tuple[UserSequence, ...]
    notes: tuple[str, ...] = ()


def read_sequences(path: str | Path, catalogue: Catalogue) -> Sequences:
    """Read ``sequential.txt``: a line per user, ``user_id item1 … itemN target``, separated by white space.

    Blank lines are skipped. An item may occur more than once in a line. Users with fewer than two items are left out.
    """
    text = read_text(path, "a line per user: user_id item1 … itemN target")
    problems = Problems(path)
    lines: dict[str, int] = {}
    users: list[UserSequence] = []
    named: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        user, *items = line.split()
        named.update(items)
        if user in lines:
            problems.add(number, f"user {user} occurs twice (first on line {lines[user]})")
            continue
        lines[user] = number
        unknown = [item for item in items if item not in catalogue.rows]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            problems.add(number, f"user {user}: item {unknown[0]}{more} not in the catalogue")
        elif len(items) >= 2:
            users.append(UserSequence(user, tuple(catalogue.rows[item] for item in items)))
    refuse_foreign_items(path, named, catalogue)
    problems.check()
    if not users:
        raise UserError(f"{path}: no user has two items; a line is user_id item1 … itemN, separated by white space")
    return Sequences(tuple(users), _left_out(len(lines) - len(users), 2))


def _left_out(users: int, minimum_items: int) -> tuple[str, ...]:
    return (f"{users} users with fewer than {minimum_items} items are left out",) if users else ()


def refuse_foreign_items(path: str | Path, named: Collection[str], catalogue: Catalogue) -> None:
    """Raise one UserError where more than half of a file's items are not in the catalogue."""
    unknown = sorted(item for item in named if item not in catalogue.rows)
    if 2 * len(unknown) > len(named):
        here, there = (one_line(repr(ids[0]), 40) for ids in (unknown, catalogue.ids))
        raise UserError(
            f"{path}: {len(unknown)} of {len(named)} items are not in the catalogue, such as {here}; its first id is "
            f"{there}, and the first column must hold the ids"
        )


def read_ratings(
    path: str | Path,
    catalogue: Catalogue,
    *,
    minimum_rating: float = 0.0,
    minimum_items: int = 2,
    columns: Mapping[str, str] | None = None,
) -> Sequences:
    """Read events, a CSV with user_id, item_id, timestamp and perhaps a rating, or ratings as MovieLens has them.

    A user's items are sorted by time, a number or ISO 8601; events of the same second keep the order of the file.
    Events with a rating below ``minimum_rating`` do not count, of those with the same item a user's first counts, and
    users with fewer than ``minimum_items`` items (at least 2) are left out: ``notes`` says how many of each.
    ``columns`` is `data.columns`. A UserError names all bad lines at once.
    """
    text = read_text(path, "a CSV with user_id, item_id and timestamp")
    columns = columns or {}
    rated = minimum_rating > 0 or "rating" in columns
    problems = Problems(path)
    rows = list(read_table(text, ".csv", problems, needs=EVENT_COLUMNS[: 4 if rated else 3], columns=columns))
    events: dict[str, list[tuple[float, int]]] = {}
    below = 0
    named: set[str] = set()
    forms: dict[bool, int] = {}  # the first line whose time is ISO 8601, and the first whose is not
    for line, row in rows:
        user, item = row["user_id"].strip(), row["item_id"].strip()
        named.add(item)
        try:
            rating, (time, iso) = float(row.get("rating", "inf")), _seconds(row["timestamp"])
        except (ValueError, OverflowError):
            rating_words = f", rating {row['rating']!r}" if "rating" in row else ""
            wanted = "expected a timestamp that is a number or ISO 8601, and a rating that is a number"
            problems.add(line, f"{wanted}; got timestamp {row['timestamp']!r}{rating_words}")
            continue
        forms.setdefault(iso, line)
        if not user or rating != rating or time != time:
            problems.add(line, "a blank user or a rating or timestamp that is NaN")
        elif item not in catalogue.rows:
            problems.add(line, f"user {user}: item {item} not in the catalogue")
        else:
            counted = events.setdefault(user, [])
            if rating >= minimum_rating:
                counted.append((time, catalogue.rows[item]))
            else:
                below += 1
    if len(forms) > 1:
        first, other = sorted(forms.values())
        problems.add(other, f"timestamps must be all numbers or all ISO 8601; see line {first}")
    refuse_foreign_items(path, named, catalogue)
    problems.check()
    users = []
    repeated = 0
    for user, counted in events.items():
        times: dict[int, float] = {}
        for time, row_number in sorted(counted, key=lambda event: event[0]):  # stable: file order in a tie
            times.setdefault(row_number, time)
        repeated += len(counted) - len(times)
        if len(times) >= minimum_items:
            users.append(UserSequence(user, tuple(times), tuple(times.values())))
    notes = _left_out(len(events) - len(users), minimum_items)
    if repeated:
        notes = (f"{repeated} events repeat an item of the same user and are left out; the first counts", *notes)
    if below:
        notes = (f"{below} ratings below {minimum_rating:g} do not count", *notes)
    if not users:
        raise UserError(f"{path} has no user with at least {minimum_items} items; {'; '.join(notes) or 'it is empty'}")
    return Sequences(tuple(users), notes)


def _seconds(text: str) -> tuple[float, bool]:
    """Return a time as a number, and whether it was ISO 8601: then seconds since 1970, UTC where no zone is given."""
    try:
        return float(text), False
    except ValueError:
        time = datetime.fromisoformat(text.strip())
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), True


def read_user_prompts(path: str | Path, users: Sequence[UserSequence]) -> dict[str, str]:
    """Read ``prompts.json``, ``{user_id: prompt_text}``: one prompt for each user of the sequence file."""
    text = read_text(path, 'an object {"user_id": "prompt text"}')
    problems = Problems(path)
    prompts: dict[str, object] = {}
    for user, prompt in json_pairs(text, problems, '{"user_id": "prompt text"}'):
        if user in prompts:
            problems.add(None, f"user {user} occurs twice")
        elif not isinstance(prompt, str):
            problems.add(None, f"the prompt of user {user} must be text, got {type(prompt).__name__}")
        elif not prompt.strip():
            problems.add(None, f"the prompt of user {user} is blank")
        prompts.setdefault(user, prompt)
    if not prompts and not problems.places:
        problems.add(None, "it has no prompts")
    names = dict.fromkeys(user.user for user in users)
    for user in prompts:
        if user not in names:
            problems.add(None, f"user {user} has no sequence")
    for user in names if prompts else ():
        if user not in prompts:
            problems.add(None, f"user {user} has no prompt")
    problems.check()
    return {user: str(prompt).strip() for user, prompt in prompts.items()}
