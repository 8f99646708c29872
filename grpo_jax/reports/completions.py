"""The completions of a run for page.js: the rows of completions/, as many as fit into a page."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.config.files import Values
from grpo_jax.reports.charts import number
from grpo_jax.rollout.pictures import File, png, read_rgb

MEGABYTES = 8.0
"""Limit of the completions in a page, by default."""
_LONGEST = 20_000  # characters of one text
_SHARE = 8  # an iteration takes an eighth of the room at most
_PICTURE_SIZE = 128
_PICTURES = "pictures"
_FIRST = ("step", "episode", "turn", "prompt")  # columns

Row = dict[str, Any]
"""The cells of a completion as the page has them."""


class LoggedCompletions(NamedTuple):
    """The completions in a run's page.

    Attributes:
        data: For page.js: `columns` of {name, kind, values}, where values of texts are places in the column's
            `words`, and `pictures` of each row, places in `images`.
        note: Says which are there, and which were left out.
    """

    data: Values
    note: str


def read_completions(folder: str | Path, megabytes: float = MEGABYTES) -> LoggedCompletions | None:
    """Read completions/step_*.parquet; None where there are none.

    Where they take more than about `megabytes` of the page, pictures included, iterations are spread evenly over the
    run.
    """
    import pyarrow
    import pyarrow.parquet

    files = sorted(Path(folder).glob("step_*.parquet"))
    room = megabytes * 1e6
    share = room / max(1, min(_SHARE, len(files)))
    iterations: dict[int, list[Row]] = {}
    stored: set[tuple[str, str]] = set()  # texts and pictures that stand in the page once already
    pictures: dict[bytes | str, str] = {}
    damaged = []
    cut = False
    for place in spread(len(files)):
        try:
            with pyarrow.parquet.ParquetFile(files[place]) as file:
                table = file.read()
        except (OSError, pyarrow.ArrowException):
            damaged.append(files[place].name)
            continue
        rows, size = _first_rows([_cells(row, pictures) for row in table.to_pylist()], share, stored)
        if iterations and size > room:
            break
        iterations[place] = rows
        room -= size
        stored.update(key for row in rows for key in _texts(row))
        cut |= len(rows) < table.num_rows
    if not iterations and not damaged:
        return None
    rows = [row for place in sorted(iterations) for row in iterations[place]]
    note = f"{len(rows)} completions of {len(iterations)} iteration{'' if len(iterations) == 1 else 's'}"
    sound = len(files) - len(damaged)
    if len(iterations) == sound and not cut:
        note = f"{note}." if damaged else f"All {note}."
    else:
        part = ", evenly spread" if len(iterations) < sound else ""
        first = "; of an iteration that has too many, those of its first prompts" if cut else ""
        note += f" of {sound}{part}{first}: what fits into {number(megabytes)} MB. All are in completions/."
    if any(len(cell) > _LONGEST for row in rows for cell in row.values() if isinstance(cell, str)):
        note += f" Texts are cut after {_LONGEST} characters."
    if damaged:
        note += f" Could not be read: {', '.join(damaged)}."
    return LoggedCompletions(_data(rows), note)


def spread(count: int) -> list[int]:
    """Return 0 … count − 1, both ends first, so ordered that each beginning is spread evenly (van der Corput)."""
    bits = max(count - 1, 1).bit_length()
    reversed_bits = (int(f"{index:0{bits}b}"[::-1], 2) for index in range(1 << bits))
    return list(dict.fromkeys(place for place in (0, count - 1, *reversed_bits) if 0 <= place < count))


def _cells(row: Values, pictures: dict[bytes | str, str]) -> Row:
    """Convert a row for the page; None where there is nothing to show."""
    cells: Row = {name: _cell(value) for name, value in row.items() if name != _PICTURES}
    written, judged = row.get("completion"), row.get("text")
    if isinstance(written, str) and isinstance(judged, str) and "".join(written.split()) == "".join(judged.split()):
        cells["text"] = None  # what was judged is what was written, but for spaces
    if row.get(_PICTURES):
        cells[_PICTURES] = [_picture(reference, pictures) for reference in row[_PICTURES]]
    return cells


def _cell(value: object) -> str | float | None:
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.5g}")
    return None


def _picture(reference: Values, pictures: dict[bytes | str, str]) -> str:
    """Return a picture as a data address, the name of a file that cannot be shown."""
    key = reference["bytes"] or reference["path"]
    if key not in pictures:
        source = reference["bytes"] or File(Path(reference["path"]), reference["path"])
        try:
            picture = read_rgb(source)
            picture.thumbnail((_PICTURE_SIZE, _PICTURE_SIZE))
            pictures[key] = f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"
        except (ImportError, ValueError, OSError):
            pictures[key] = Path(reference["path"] or "a picture that cannot be read").name
    return pictures[key]


def _first_rows(rows: Sequence[Row], most: float, stored: set[tuple[str, str]]) -> tuple[list[Row], float]:
    """Return the rows of the first prompts that take `most` bytes, of at least one prompt, and their bytes."""
    new: set[tuple[str, str]] = set()
    size = 0.0
    whole, whole_size = 0, 0.0  # rows of the prompts before this one
    for count, row in enumerate(rows):
        if count and any(row.get(name) != rows[count - 1].get(name) for name in ("prompt", _PICTURES)):
            whole, whole_size = count, size
        added = {*_texts(row)} - stored - new
        size += 8 * len(row) + sum(len(json.dumps(text, ensure_ascii=False).encode()) for _, text in added)
        if size > most and whole:
            return list(rows[:whole]), whole_size
        new |= added
    return list(rows), size


def _texts(row: Row) -> Iterator[tuple[str, str]]:
    """Yield a row's texts by column, and pictures: they stand in the page once however often rows repeat them."""
    yield from ((name, cell) for name, cell in row.items() if isinstance(cell, str))
    yield from ((_PICTURES, picture) for picture in row.get(_PICTURES, ()))


def _data(rows: Sequence[Row]) -> Row:
    names = dict.fromkeys([*_FIRST, *(name for row in rows for name in row if name != _PICTURES)])
    columns = [_column(name, [row.get(name) for row in rows]) for name in names]
    data: Row = {"columns": [column for column in columns if column is not None]}
    if any(_PICTURES in row for row in rows):
        row_pictures = [row.get(_PICTURES, ()) for row in rows]
        places = _places(picture for pictures in row_pictures for picture in pictures)
        data |= {_PICTURES: [[places[one] for one in pictures] for pictures in row_pictures], "images": [*places]}
    return data


def _column(name: str, values: Sequence[Any]) -> Row | None:
    kinds = {bool: "flag", int: "number", float: "number", str: "text"}
    kind = next((kinds[type(value)] for value in values if value is not None), None)
    if kind is None:
        return None
    if kind != "text":
        plain = [None if isinstance(value, str) else value for value in values]
        return {"name": name, "kind": kind, "values": [int(v) if isinstance(v, bool) else v for v in plain]}
    words = _places(value for value in values if isinstance(value, str))
    return {"name": name, "kind": kind, "values": [words.get(value) for value in values], "words": [*words]}


def _places(texts: Iterable[str]) -> dict[str, int]:
    return {text: place for place, text in enumerate(dict.fromkeys(texts))}
