"""The catalogue: items, their titles, and where they come from (TSV, CSV or JSON)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_jax.config.files import read_bytes
from grpo_jax.errors import UserError
from grpo_jax.rollout.prompts import rename_columns

_SHOWN = 6
_MOST_BYTES = 2**32  # of a table of events, which is read whole


class Problems:
    """The bad places of one file; `check` raises one error that names them with file and line.

    Args:
        path: The file they are in.
    """

    def __init__(self, path: str | Path):
        """Starts without problems."""
        self.path = path
        self.found: list[str] = []

    def add(self, line: int | None, reason: str) -> None:
        """Notes a reason; `line` counts from 1, None is the file as a whole."""
        self.found.append(f"{self.path}: {reason}" if line is None else f"{self.path}:{line}: {reason}")

    def check(self, instead: str = "") -> None:
        """Raises a UserError with what was noted, if anything was; `instead` is the one reason for it all."""
        if self.found and instead:
            raise UserError(f"{self.path}: {instead}")
        raise_all(self.found)


def raise_all(found: Sequence[str]) -> None:
    """One UserError for all problems (the first six are shown); none for none."""
    if not found:
        return
    shown = list(found[:_SHOWN])
    if len(found) > len(shown):
        shown.append(f"… and {len(found) - len(shown)} more")
    raise UserError("\n  ".join([f"bad data ({len(found)} place{'s' if len(found) > 1 else ''}):", *shown]))


def read_text(path: str | Path, what: str) -> str:
    """A file as text, without a byte-order mark.

    Raises:
        UserError: If it is missing, unreadable or not UTF-8 (with the line of the first bad byte).
    """
    try:
        data = read_bytes(path, _MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: expected {what}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be read: {reason}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text: save it as UTF-8") from None


# ------------------------------------------------------------------------------------------------------------ catalogue


BlankTitles = Literal["error", "keep"]

PUBLISHED = {"user_id": "userId", "item_id": "movieId"}
"""MovieLens' names of columns; taken where a table has no column of our own name."""


@dataclass(frozen=True)
class Catalogue:
    """All items, in the order of their file: an item's place in it is its *row*.

    Attributes:
        ids: I identifiers, all different.
        titles: I titles, white space collapsed; "" where the file has none and that was allowed.
        rows: Row of each identifier.
        columns: Further columns of the file, I texts each (Beauty: "asin").
        names: I texts, the words of each item's own by which a policy reads and writes it; () where it uses titles.
    """

    ids: tuple[str, ...]
    titles: tuple[str, ...]
    rows: dict[str, int]
    columns: dict[str, tuple[str, ...]]
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        """I, how many items there are."""
        return len(self.ids)

    @property
    def blank(self) -> tuple[int, ...]:
        """Rows without a title."""
        return tuple(row for row, title in enumerate(self.titles) if not title)


def make_catalogue(ids: list[str], titles: list[str], columns: dict[str, list[str]] | None = None) -> Catalogue:
    """A catalogue from lists of equal length.

    Raises:
        ValueError: If lengths differ or identifiers repeat.
    """
    columns = columns or {}
    for name, values in {"titles": titles, **columns}.items():
        if len(values) != len(ids):
            raise ValueError(f"{name} must have {len(ids)} values, one for each id, got {len(values)}")
    rows = {identifier: row for row, identifier in enumerate(ids)}
    if len(rows) != len(ids):
        raise ValueError(f"ids must be different, got {len(ids) - len(rows)} repeated")
    collapsed = tuple(" ".join(title.split()) for title in titles)
    return Catalogue(tuple(ids), collapsed, rows, {name: tuple(values) for name, values in columns.items()})


def read_catalogue(
    path: str | Path, *, blank_titles: BlankTitles = "error", columns: Mapping[str, str] | None = None
) -> Catalogue:
    """Reads item identifiers and titles.

    ``.tsv`` (tabs, no quoting) and ``.csv`` (commas, quotes as usual) have a header line: the first column is the
    identifier, the one called "title" the title, others are kept. ``.json`` is an object ``{id: title}`` or
    ``{id: {"title": …, column: …}}``. Two items may share a title: no query can tell them apart, so they tie.

    Args:
        path: The file.
        blank_titles: What an item without a title is: "error", or "keep": it stays in the ranking, as an empty text
            that no query resembles (as a target it can hardly be found), and a prompt says "(no title)".
        columns: {"title": what the file calls it}, as in `data.columns`; other names in it are not looked at.

    Raises:
        UserError: If the file is missing, of another kind, empty, or has bad lines: wrong number of fields, a blank
            or repeated identifier, a blank title where that is an error. All of them are named at once.
        ValueError: If blank_titles is another word.
    """
    if blank_titles not in ("error", "keep"):
        raise ValueError(f'blank_titles must be "error" or "keep", got {blank_titles!r}')
    kind = Path(path).suffix.lower()
    if kind not in (".tsv", ".csv", ".json"):
        formats = "a catalogue is a .tsv, .csv or .json file: a table with the columns id and title, or {id: title}"
        raise UserError(f"{path}: {formats}")
    text = read_text(path, "a catalogue of item ids and titles (.tsv, .csv or .json)")
    problems = Problems(path)
    named = {"title": columns["title"]} if columns and "title" in columns else {}
    if kind == ".json":
        records = _json_records(text, problems, named)
    else:
        records = _table_records(text, kind, problems, named)
    ids: dict[str, int | None] = {}
    titles: list[str] = []
    further: dict[str, list[str]] = {}
    repeated = 0
    for line, identifier, title, others in records:
        if not identifier:
            problems.add(line, "the item's id is blank")
            continue
        if identifier in ids:
            first = f" (first on line {ids[identifier]})" if ids[identifier] is not None else ""
            problems.add(line, f"item {identifier} occurs twice{first}")
            repeated += 1
            continue
        if not title.strip() and blank_titles == "error":
            problems.add(line, f"item {identifier} has no title (blank_titles: keep allows it)")
        ids[identifier] = line
        titles.append(title)
        for name, value in others.items():
            further.setdefault(name, []).append(value)
    few = f"the first column must be the item's id, and has {len(ids)} different values in {len(ids) + repeated} lines"
    problems.check(few if repeated > len(ids) else "")
    if not ids:
        raise UserError(
            f"{path} has no items: expected a line that names the columns id and title, and one for each item"
        )
    full = {name: values for name, values in further.items() if len(values) == len(ids)}
    return make_catalogue(list(ids), titles, full)


_Record = tuple[int | None, str, str, dict[str, str]]  # line, id, title, other columns


def _table_records(text: str, kind: str, problems: Problems, columns: Mapping[str, str]) -> Iterator[_Record]:
    for line, row in _table(text, kind, problems, needs=("title",), columns=columns):
        if next(iter(row)) == "title":
            problems.add(1, "the first column is the title, expected the item's id: put the column of ids first")
            return
        identifier = next(iter(row.values())).strip()
        others = {name: value for name, value in list(row.items())[1:] if name != "title"}
        yield line, identifier, row["title"], others


def read_table(
    path: str | Path,
    text: str,
    needs: tuple[str, ...],
    kind: str = ".csv",
    columns: Mapping[str, str] | None = None,
) -> tuple[list[tuple[int, dict[str, str]]], Problems]:
    """The rows of a .csv or .tsv with a header that must have the columns `needs`: (line, {column: value}) each.

    `columns` says what the file calls them, {name: the file's name for it}.
    """
    problems = Problems(path)
    return list(_table(text, kind, problems, needs=needs, columns=columns or {})), problems


def _table(
    text: str, kind: str, problems: Problems, *, needs: tuple[str, ...], columns: Mapping[str, str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a table as {column: value} with their line; bad ones are noted and left out."""
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
                    said = f"the header has no column {columns.get(missing[0], missing[0])!r}, it says {header}"
                    problems.add(reader.line_num, f"{said}: {_header_hint(header, missing, kind)}")
                    return
                continue
            if len(fields) != len(header):
                problems.add(reader.line_num, f"expected {len(header)} fields as in the header, got {len(fields)}")
                continue
            yield reader.line_num, rename_columns(dict(zip(header, fields, strict=True)), columns)
    except csv.Error as error:
        problems.add(reader.line_num, f"not {kind[1:].upper()} ({error})")


def _header_hint(header: Sequence[str], missing: Sequence[str], kind: str) -> str:
    """What to do about a header in which columns are missing."""
    marks = {".tsv": "tabs", ".csv": "commas"}
    if len(header) == 1 and any(mark in header[0] for mark in ",;\t|"):
        return f"columns of a {kind} have {marks[kind]} between them"
    near = next((name for name in header if name.lower() == missing[0].lower()), None)
    if near is not None:
        return f"call {near!r} {missing[0]!r}, or say --data.columns.{missing[0]} {near}"
    first = ", the item's id first," if missing[0] in ("title", "words") else ""
    return (
        f"the first line must name the columns{first} and data.columns what is called otherwise, "
        f"as in --data.columns.{missing[0]} {header[-1] or 'NAME'}"
    )


class _Pairs(list):
    """An object of JSON as its pairs, so that a key that stands twice is seen."""


def json_pairs(text: str, problems: Problems, expected: str) -> list[tuple[str, Any]]:
    """The members of a JSON object, repeated keys included; inner objects come as lists of pairs."""
    try:
        value = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:  # a ValueError also for a number of thousands of digits
        problems.add(getattr(error, "lineno", None), f"not JSON ({getattr(error, 'msg', error)})")
        return []
    if not isinstance(value, _Pairs):
        problems.add(None, f"expected an object {expected}, got {type(value).__name__}")
        return []
    return value


def _json_records(text: str, problems: Problems, columns: Mapping[str, str]) -> Iterator[_Record]:
    title = columns.get("title", "title")
    for identifier, value in json_pairs(text, problems, "{id: title}"):
        others: dict[str, str] = {}
        if isinstance(value, _Pairs):
            others = {name: str(item) for name, item in value if name != title}
            value = dict(value).get(title, "")
        if value is None:
            value = ""
        if not isinstance(value, str):
            problems.add(None, f"the title of item {identifier} must be text, got {type(value).__name__}")
            continue
        yield None, identifier.strip(), value, others
