"""Tables of items and of events (TSV or CSV); the bad lines of a file are reported together."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_jax.config.files import read_text
from grpo_jax.errors import Problems, UserError

MOST_BYTES = 2**32  # limit of a table of events, which is read whole

PUBLISHED = {"user_id": "userId", "item_id": "movieId"}
"""MovieLens' names of columns; taken where a table has no column of our own name."""


def read_catalogue_file(path: str | Path, *, title_column: str = "title") -> tuple[list[str], list[str]]:
    """Read the identifiers and titles of I items; UserError for bad lines.

    ``.tsv`` (tabs, no quoting) and ``.csv`` have a header line: the first column is the identifier, `title_column` the
    title. An item without a title has an empty string, which is not similar to any query.
    """
    if Path(path).suffix.lower() not in (".tsv", ".csv"):
        raise UserError(f"{path}: a catalogue is a .tsv or .csv file with the columns id and title")
    problems = Problems()
    lines: dict[str, int] = {}
    titles: list[str] = []
    for line, row in read_table(path, problems, needs=("title",), columns={"title": title_column}):
        id_column = next(iter(row))
        identifier = row[id_column].strip()
        if id_column in ("title", ""):
            named = "is the title" if id_column else "has no name"
            raise UserError(f"{path}: the first column {named}: put the column of ids first")
        if not identifier:
            problems.add(f"line {line}: the item's id is blank")
        elif identifier in lines:
            problems.add(f"line {line}: item {identifier} occurs twice (first on line {lines[identifier]})")
        else:
            lines[identifier] = line
            titles.append(" ".join(row["title"].split()))
    problems.refuse(str(path))
    if not lines:
        raise UserError(f"{path} has no items: expected a line that names the columns id and title, and one for each")
    return list(lines), titles


def read_table(
    path: str | Path, problems: Problems, *, needs: Sequence[str], columns: Mapping[str, str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield rows of a .csv or .tsv with a header, as (line, {column: value}); bad rows are noted and skipped.

    The columns in `needs` must exist, under the name in `columns`, {name: the file's name}.
    """
    text = io.StringIO(read_text(path, MOST_BYTES), newline="")
    tabs = Path(path).suffix.lower() == ".tsv"
    reader = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(text, strict=True)
    try:
        rows = (cells for cells in reader if any(cell.strip() for cell in cells))
        header = [cell.strip() for cell in next(rows, ())]
        if not header:
            return
        if twice := [name for name in header if name and header.count(name) > 1]:
            raise UserError(f"{path}: the header names the column {twice[0]!r} twice: rename one of them")
        absent = [name for name in needs if name not in header and PUBLISHED.get(name) in header]
        columns = {name: PUBLISHED[name] for name in absent} | dict(columns)
        renamed = {old: name for name, old in columns.items()}
        names = [renamed.get(column, "" if column in columns else column) for column in header]
        for name in needs:
            if name not in names:
                raise UserError(
                    f"{path}: the header has no column {columns.get(name, name)!r}, it says {header}: rename "
                    f"it with --data.columns.{name} NAME; {'tabs' if tabs else 'commas'} separate columns"
                )
        for cells in rows:
            if len(cells) == len(names):
                yield reader.line_num, dict(zip(names, cells, strict=True))
            else:
                problems.add(f"line {reader.line_num}: expected {len(names)} fields as in the header, got {len(cells)}")
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: not {'TSV' if tabs else 'CSV'} ({error})") from error
