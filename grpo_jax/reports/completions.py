"""The completions of a run as page.js shows them: what lies in completions/, as much of it as fits into a page."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.reports.charts import number
from grpo_jax.rollout.inputs.pictures import File, png, read_rgb

MEGABYTES = 8.0
"""Of completions in a page, by default."""
_LONGEST = 20_000  # characters of one text
_SHARE = 8  # an iteration takes an eighth of the room at most
_PICTURE_SIZE = 128
_PICTURES = "pictures"
_FIRST = ("step", "episode", "turn", "prompt")  # columns

Row = dict[str, Any]


class Logged(NamedTuple):
    """What a page holds of a run's completions.

    Attributes:
        data: For page.js: `columns` of {name, kind, values}, where values of texts are places in the column's `words`,
            and `pictures` of each row, places in `images`.
        note: What is there, and what was left out.
    """

    data: Mapping[str, Any]
    note: str


def read_completions(folder: str | Path, megabytes: float = MEGABYTES) -> Logged | None:
    """Reads completions/step_*.parquet; where not all of it fits, iterations that are spread evenly over the run.

    Args:
        folder: Of the files; may be missing.
        megabytes: About how much of the page they take, with their pictures.

    Returns:
        None where there are none.
    """
    import pyarrow
    import pyarrow.parquet

    files = sorted(Path(folder).glob("step_*.parquet"))
    room, share = megabytes * 1e6, megabytes * 1e6 / max(1, min(_SHARE, len(files)))
    taken: dict[int, list[Row]] = {}
    known: set[Any] = set()  # texts and pictures that stand in the page once already
    opened: dict[Any, str] = {}
    damaged, cut = [], False
    for place in spread(len(files)):
        try:
            with pyarrow.parquet.ParquetFile(files[place]) as file:
                read = file.read()
        except (OSError, pyarrow.ArrowException):
            damaged.append(files[place].name)
            continue
        rows, size = _fitting((_cells(row, opened) for row in read.to_pylist()), share, known)
        if taken and size > room:
            break
        taken[place], room = rows, room - size
        known.update(key for row in rows for key in _stored(row))
        cut |= len(rows) < read.num_rows
    found = [row for place in sorted(taken) for row in taken[place]]
    if not found and not damaged:
        return None
    return Logged(_data(found), _note(found, len(taken), len(files) - len(damaged), cut, damaged, megabytes))


def spread(count: int) -> list[int]:
    """0 … count − 1, both ends first, so ordered that each beginning of it is spread evenly (van der Corput)."""
    bits = max(count - 1, 1).bit_length()
    turned = (int(f"{index:0{bits}b}"[::-1], 2) for index in range(1 << bits))
    return list(dict.fromkeys(place for place in (0, count - 1, *turned) if 0 <= place < count))


def _note(rows: Sequence[Row], taken: int, files: int, cut: bool, damaged: Sequence[str], megabytes: float) -> str:
    told = f"{len(rows)} completions of {taken} iteration{'' if taken == 1 else 's'}"
    if taken == files and not cut:
        told = f"{told}." if damaged else f"All {told}."
    else:
        part = ", evenly spread" if taken < files else ""
        first = "; of an iteration that has too many, those of its first prompts" if cut else ""
        told = f"{told} of {files}{part}{first}: what fits into {number(megabytes)} MB. All are in completions/."
    if any(len(cell) > _LONGEST for row in rows for cell in row.values() if isinstance(cell, str)):
        told += f" Texts are cut after {_LONGEST} characters."
    return told + (f" Could not be read: {', '.join(damaged)}." if damaged else "")


def _cells(row: Mapping[str, Any], opened: dict[Any, str]) -> Row:
    """A row as the page has it; None where there is nothing to show."""
    cells = {name: _cell(value) for name, value in row.items() if name != _PICTURES}
    written, judged = row.get("completion"), row.get("text")
    if isinstance(written, str) and isinstance(judged, str) and "".join(written.split()) == "".join(judged.split()):
        cells["text"] = None  # what was judged is what was written, but for spaces
    if row.get(_PICTURES):
        cells[_PICTURES] = [_picture(reference, opened) for reference in row[_PICTURES]]
    return cells


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.5g}")
    return None


def _picture(reference: Mapping[str, Any], opened: dict[Any, str]) -> str:
    """A data address; the name of a file that cannot be shown."""
    key = reference["bytes"] or reference["path"]
    if key not in opened:
        source = reference["bytes"] or File(Path(reference["path"]), reference["path"])
        try:
            picture = read_rgb(source)
            picture.thumbnail((_PICTURE_SIZE, _PICTURE_SIZE))
            opened[key] = f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"
        except (ImportError, ValueError, OSError):
            opened[key] = Path(reference["path"] or "a picture that cannot be read").name
    return opened[key]


def _fitting(rows: Iterator[Row], most: float, known: set[Any]) -> tuple[list[Row], float]:
    """The first rows that take so many bytes at most, the last prompt's all or none; one prompt in any case."""
    taken: list[Row] = []
    new: set[Any] = set()
    size, whole, ending = 0.0, 0, 0.0
    for row in rows:
        if taken and any(row.get(name) != taken[-1].get(name) for name in ("prompt", _PICTURES)):
            whole, ending = len(taken), size
        keys = {*_stored(row)} - known - new
        size += 8 * len(row) + sum(len(json.dumps(text, ensure_ascii=False).encode()) for _, text in keys)
        if size > most and whole:
            return taken[:whole], ending
        taken.append(row)
        new |= keys
    return taken, size


def _stored(row: Row) -> Iterator[tuple[str, str]]:
    """What stands in the page once however often it is in the rows: texts of a column, pictures."""
    yield from ((name, cell) for name, cell in row.items() if isinstance(cell, str))
    yield from ((_PICTURES, picture) for picture in row.get(_PICTURES, ()))


def _data(rows: Sequence[Row]) -> dict[str, Any]:
    names = dict.fromkeys([*_FIRST, *(name for row in rows for name in row if name != _PICTURES)])
    columns = [_column(name, [row.get(name) for row in rows]) for name in names]
    data: dict[str, Any] = {"columns": [column for column in columns if column is not None]}
    if any(_PICTURES in row for row in rows):
        shown = [row.get(_PICTURES, ()) for row in rows]
        places = _places(picture for pictures in shown for picture in pictures)
        data |= {_PICTURES: [[places[one] for one in pictures] for pictures in shown], "images": [*places]}
    return data


def _column(name: str, values: Sequence[Any]) -> dict[str, Any] | None:
    """None where it has no value."""
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
    """Each once, in the order of first appearance."""
    return {text: place for place, text in enumerate(dict.fromkeys(texts))}
