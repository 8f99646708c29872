"""A data set looked at once, record by record: mistakes named together, and of the rest what is known without it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.errors import UserError, said, shown
from grpo_jax.rollout.data import (
    RESERVED_COLUMNS,
    SPLITS,
    Facts,
    Row,
    Rows,
    as_digests,
    as_facts,
    digests,
    fact_of,
    facts_of,
    groups_of,
)
from grpo_jax.rollout.inputs.conversations import read_prompt, take_pictures
from grpo_jax.rollout.inputs.records import Records

_SHOWN_CHARACTERS = 140
_KEPT = 32  # problems that are kept; the others are counted
_NONE = -1  # in place of a split's number
_ASKING = ("question", "problem", "instruction", "query", "input", "text", "messages")
"""What data sets often call their prompts."""


class Line(NamedTuple):
    """A row as read, before it is known which part it belongs to."""

    row: Row
    split: str | None


Parse = Callable[[dict[Any, Any], int], Line | str]
"""(record, its number) → its row and part, or what is wrong with it."""


class Scanned(NamedTuple):
    """A data set without mistakes.

    Attributes:
        rows: n rows.
        keys: u64 [n, 4], digests of what makes them different.
        splits: i8 [n], the place of each one's part in `SPLITS`; -1 for none.
    """

    rows: Rows
    keys: np.ndarray
    splits: np.ndarray


class Problems:
    """What is wrong, counted, and the first of it in words."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.count, self.told = 0, list[str]()

    def add(self, tell: Callable[[], str]) -> None:
        """One more."""
        self.count += 1
        if len(self.told) < _KEPT:
            self.told.append(tell())

    def refuse(self, subject: str) -> None:
        """Raises UserError, in one line as many as fit in, where there are any."""
        if not self.count:
            return
        bad, listed = f"{subject}: {self.count} bad line{'s' if self.count > 1 else ''}", []
        for problem in self.told:
            if listed and sum(map(len, listed)) + len(problem) > _SHOWN_CHARACTERS:
                break
            listed.append(problem if len(problem) <= _SHOWN_CHARACTERS else f"{problem[:_SHOWN_CHARACTERS]}…")
        more = self.count - len(listed)
        raise UserError(f"{bad}: {'; '.join(listed)}{f'; and {more} more' if more else ''}")


def scan(records: Records, subject: str, parse: Parse, columns: Mapping[str, str]) -> Scanned:
    """Looks at every record; its rows are made again when they are drawn.

    Args:
        records: As opened.
        subject: What errors call the data set.
        parse: As `parsing` makes it.
        columns: As the config names them.

    Raises:
        UserError: There are bad ones: the first are named, all are counted.
    """
    places, numbers, facts = array("q"), array("q"), array("q")
    keys, splits = bytearray(), array("b")
    problems, seen = Problems(), dict[Any, None]()
    for place, (number, record) in enumerate(records.all()):
        if record is None:
            continue
        line = record if isinstance(record, str) else None
        if not isinstance(record, str):
            seen |= dict.fromkeys(record)
            line = parse(record, number)
        if not isinstance(line, Line):
            problems.add(lambda number=number, line=line: f"{records.unit} {number}: {line}")
            continue
        places.append(place)
        numbers.append(number)
        facts.extend(fact_of(line.row))
        keys += hashlib.sha256(line.row.key.encode()).digest()
        splits.append(_NONE if line.split is None else SPLITS.index(line.split))
    if seen:
        _check_columns([str(column) for column in seen], columns, subject)

    def make(place: int) -> Row:
        ((number, record),) = records.read(place, place + 1)
        line = parse(record, number) if isinstance(record, dict) else record
        if isinstance(line, Line):
            return line.row
        raise UserError(f"{said(subject)}: {records.unit} {number}: {line or 'gone'}; it has changed since it was read")

    known: Facts = as_facts(np.frombuffer(facts, np.int64))
    found = Scanned(
        Rows(make, np.frombuffer(places, np.int64), known), as_digests(bytes(keys)), np.frombuffer(splits, np.int8)
    )
    _check_splits(found, np.frombuffer(numbers, np.int64), records.unit, problems)
    problems.refuse(subject)
    return found


def scanned_rows(rows: Sequence[Row]) -> Scanned:
    """Rows in memory that belong to no part yet."""
    made = Rows(rows.__getitem__, np.arange(len(rows)), facts_of(rows))
    return Scanned(made, digests([row.key for row in rows]), np.full(len(rows), _NONE, np.int8))


def parsing(base: Path | None, columns: Mapping[str, str]) -> Parse:
    """What makes rows of records that have `prompt` and columns; paths in them are relative to `base`."""
    return lambda record, number: parse_record(renamed(record, columns), number, base)


def parse_record(record: dict[Any, Any], identity: int, base: Path | None = None) -> Line | str:
    """A record's row and part, or what is wrong with it; its pictures' paths are relative to `base`."""
    nameless = [name for name in record if not isinstance(name, str)]
    if nameless:
        return f"a column's name must be text, got {shown(nameless[0])}"
    split = record.pop("split", None)
    if split is not None and not (isinstance(split, str) and split in SPLITS):
        return f'"split" must be one of {", ".join(SPLITS)}, got {shown(split)}'
    if "prompt" not in record:
        return f'no "prompt" (it has {", ".join(map(shown, list(record)[:3])) or "nothing"})'
    try:
        pictures = take_pictures(record, base)
        asked = read_prompt(record.pop("prompt"), pictures, base)
    except ValueError as error:
        return str(error)
    clashes = [name for name in RESERVED_COLUMNS if name in record]
    if clashes:
        return f"column {clashes[0]!r} is a name the trainer itself passes to rewards: rename it"
    return Line(Row(identity, asked.text, record, asked.pictures, asked.messages), split)


def renamed(record: dict[Any, Any], columns: Mapping[str, str]) -> dict[Any, Any]:
    """A record whose columns have the names that the config gives them."""
    if not columns:
        return record
    others = {name: value for name, value in record.items() if name not in columns.values()}
    return others | {new: record[old] for new, old in columns.items() if old in record}


def _check_columns(seen: Sequence[str], columns: Mapping[str, str], subject: str) -> None:
    """Raises UserError where no record at all has a prompt, or a column that the config names."""
    has = f"{said(subject)} has {shown(', '.join(seen), 120)}"
    for new, old in columns.items():
        if old not in seen:
            raise UserError(f"data.columns.{new}: no such column, {shown(old)}; {has}")
    if "prompt" not in columns and "prompt" not in seen:
        asks = next((name for name in _ASKING if name in seen), seen[0])
        raise UserError(f'{has}, and no "prompt": say which one asks, as in --data.columns.prompt {asks}')


def _check_splits(found: Scanned, numbers: np.ndarray, unit: str, problems: Problems) -> None:
    """Adds rows without a split among rows that have one, and prompts that stand in two parts."""
    named = np.flatnonzero(found.splits != _NONE)
    if not named.size:
        return
    ranks, first = groups_of(found.keys[named])
    before = np.arange(len(found.splits))
    before[named] = named[first][ranks]  # the first row of the same prompt
    for place in np.flatnonzero((found.splits == _NONE) | (found.splits != found.splits[before])).tolist():
        problems.add(lambda place=place: _split_problem(found.splits, place, int(before[place]), numbers, unit))


def _split_problem(splits: np.ndarray, place: int, before: int, numbers: np.ndarray, unit: str) -> str:
    if splits[place] == _NONE:
        return f'{unit} {numbers[place]}: no "split", which other {unit}s have'
    this, other = SPLITS[splits[place]], SPLITS[splits[before]]
    return f"{unit} {numbers[place]}: this {this} prompt is also a {other} prompt ({unit} {numbers[before]})"
