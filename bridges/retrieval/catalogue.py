"""The catalogue's file: items and titles (TSV or CSV); all bad lines of a file are told at once."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from grpo_jax.config import files
from grpo_jax.errors import UserError

_SHOWN = 6
_MOST_BYTES = 2**32  # of a table of events, which is read whole

BlankTitles = Literal["error", "keep"]

PUBLISHED = {"user_id": "userId", "item_id": "movieId"}
"""MovieLens' names of columns; taken where a table has no column of our own name."""


class Problems:
    """Bad places of one file; `check` raises one error that names them with file and line."""

    def __init__(self, path: str | Path):
        self.path = path
        self.places: list[str] = []

    def add(self, line: int, reason: str) -> None:
        """Note a reason; `line` counts from 1."""
        self.places.append(f"{self.path}:{line}: {reason}")

    def check(self) -> None:
        """Raise a UserError with the first six places, if there are any."""
        count = len(self.places)
        if not count:
            return
        lines = [f"bad data ({count} place{'s' if count > 1 else ''}):", *self.places[:_SHOWN]]
        if count > _SHOWN:
            lines.append(f"… and {count - _SHOWN} more")
        raise UserError("\n  ".join(lines))


def read_text(path: str | Path, expected: str) -> str:
    """Return a file as text, without a byte-order mark; a UserError says what was expected if it is missing."""
    if not os.path.exists(path):
        raise UserError(f"{path} does not exist: expected {expected}")
    return files.read_text(path, _MOST_BYTES)


class CatalogueFile(NamedTuple):
    """I identifiers, as many titles, and further columns of the file (Beauty: "asin")."""

    ids: list[str]
    titles: list[str]
    columns: dict[str, list[str]]


def read_catalogue_file(
    path: str | Path, *, blank_titles: BlankTitles = "error", title_column: str = "title"
) -> CatalogueFile:
    """Read item identifiers and titles; a UserError names all bad lines at once.

    ``.tsv`` (tabs, no quoting) and ``.csv`` have a header line: the first column is the identifier, `title_column` the
    title, others are kept. With `blank_titles` "keep" an item without a title is an empty text, which no query
    resembles.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".tsv", ".csv"):
        raise UserError(f"{path}: a catalogue is a .tsv or .csv file with the columns id and title")
    text = read_text(path, "a catalogue of item ids and titles (.tsv or .csv)")
    problems = Problems(path)
    lines: dict[str, int] = {}
    titles: list[str] = []
    further: dict[str, list[str]] = {}
    columns = {} if title_column == "title" else {"title": title_column}
    for line, row in read_table(text, kind, problems, needs=("title",), columns=columns):
        id_column, *others = row
        identifier, title = row[id_column].strip(), row["title"]
        if id_column == "title":
            problems.add(1, "the first column is the title, expected the item's id: put the column of ids first")
            break
        if not identifier:
            problems.add(line, "the item's id is blank")
        elif identifier in lines:
            problems.add(line, f"item {identifier} occurs twice (first on line {lines[identifier]})")
        else:
            if not title.strip() and blank_titles == "error":
                problems.add(line, f"item {identifier} has no title (blank_titles: keep allows it)")
            lines[identifier] = line
            titles.append(" ".join(title.split()))
            for name in others:
                if name != "title":
                    further.setdefault(name, []).append(row[name])
    problems.check()
    if not lines:
        wanted = "a line that names the columns id and title, and one for each item"
        raise UserError(f"{path} has no items: expected {wanted}")
    return CatalogueFile(list(lines), titles, further)


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
            row = dict(zip(header, fields, strict=True))
            renamed = {name: row[old] for name, old in columns.items() if old in row}
            yield reader.line_num, {name: row[name] for name in row if name not in columns.values()} | renamed
    except csv.Error as error:
        problems.add(reader.line_num, f"not {kind[1:].upper()} ({error})")
